//! An adapter that is shared with other users; here all programs are of one. `quipu/tests/share` has others.

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::{PATIENCE, Shared};
use crate::accounts::own_user;
use crate::link::socket::{self, MAX_MESSAGE};
use crate::share::folders::{own_place, own_places};
use crate::share::guests::Guests;
use crate::share::words::{Call, HELLO, Writer};
use crate::share::{Sharer, connect};
use crate::sys;

fn with_guests() -> Guests {
    let mut guests = Guests::default();
    guests.add_user("61001").unwrap();
    guests.add_group("61002").unwrap();
    guests
}

#[test]
fn it_lies_where_others_can_find_it_and_its_own_user_attaches_as_ever() {
    let guests = with_guests();
    let (shared, elsewhere) = (Shared::with(&guests), Shared::new());
    let [place, private] = [true, false].map(|it| own_place(&shared.name, it).unwrap());
    assert!(place.exists() && !private.exists());
    shared.attach().talks_to(&elsewhere.attach(), elsewhere.address);
    let user = if own_user() == 0 { String::new() } else { format!(",user={}", own_user()) };
    let sharer = shared.sharer.as_ref().unwrap();
    let link = sharer.guest_link().unwrap().to_string();
    assert_eq!(link, format!("share:{}{user}", shared.name));
    assert!(elsewhere.sharer.as_ref().unwrap().guest_link().is_none());
    // The name is taken in all places.
    assert_eq!(own_places(&shared.name).filter(|it| *it == place || *it == private).count(), 2);
    for (name, guests) in [(&shared.name, Guests::default()), (&elsewhere.name, guests)] {
        let taken = Sharer::start(&shared.engine, name, &guests).err().unwrap().to_string();
        assert!(taken.contains("another process"), "{taken}");
    }
}

/// A caller that has said how much memory it wants, and was answered.
fn answered(shared: &Shared) -> OwnedFd {
    let place = own_places(&shared.name).find(|place| place.exists()).unwrap();
    let socket = connect(&place).unwrap();
    let hello = Writer::default().word(HELLO).word(1u64 << 20);
    socket::send(&socket, &hello.bytes(), &[]).unwrap();
    assert!(sys::wait_readable_within(&socket, PATIENCE), "no answer");
    socket
}

/// One that was given it.
fn greeted(shared: &Shared) -> OwnedFd {
    let socket = answered(shared);
    assert_eq!(socket::receive(&socket, &mut [0; MAX_MESSAGE]).unwrap().fds.len(), 2);
    socket
}

/// What lies there unread is charged to the user who shares, who could pass no descriptors any more.
#[test]
fn whoever_does_not_read_what_it_was_given_keeps_its_place() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    // One says nonsense, and one that it has mapped what it has not read.
    let mapped = HELLO.to_ne_bytes();
    let all_said = [&b"nonsense"[..], &mapped].into_iter().cycle();
    let mut kept = Vec::new();
    for said in all_said.take(64) {
        let socket = answered(&shared);
        socket::send(&socket, said, &[]).unwrap();
        kept.push(socket);
    }
    // To shut it down is not to have read it.
    kept.iter().for_each(socket::shut_down);
    let mut refusal = [0; MAX_MESSAGE];
    let len = sys::receive(&answered(&shared), &mut refusal).unwrap();
    let refusal = String::from_utf8_lossy(&refusal[..len]);
    assert!(refusal.contains("64 programs are attached"), "{refusal}");
    // Who reads it is told that it was let go.
    let last = kept.pop().unwrap();
    assert_eq!(socket::receive(&last, &mut [0; MAX_MESSAGE]).unwrap().fds.len(), 2);
    assert_eq!(sys::receive(&last, &mut [0; 8]).unwrap(), 0);
    drop(greeted(&shared));
    drop(kept);
    shared.attach().talks_to(&elsewhere.attach(), elsewhere.address);
}

#[test]
fn whoever_does_not_say_that_it_has_mapped_its_memory_is_not_attached() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let silent = greeted(&shared);
    for said in [&b"I have it not"[..], &Writer::default().word(1u64).bytes()] {
        let other = greeted(&shared);
        socket::send(&other, said, &[]).unwrap();
        assert!(sys::wait_readable_within(&other, PATIENCE), "it is still listened to");
        assert_eq!(sys::receive(&other, &mut [0; 8]).unwrap(), 0);
    }
    shared.attach().talks_to(&elsewhere.attach(), elsewhere.address);
    assert!(!sys::wait_readable_within(&silent, std::time::Duration::ZERO));
}

/// The kernel would hold up the adapter, and all others, for as long as that takes.
#[test]
fn a_program_that_is_attached_takes_no_pages_out_of_its_memory() {
    let shared = Shared::new();
    let (calls, memory, _bell) = shared.raw();
    // With an answer it is attached.
    let begun = Instant::now();
    calls.ask(&Call::AllocPd, &|| true, |answer| answer.word()).unwrap();
    assert!(begun.elapsed() < PATIENCE);
    // SAFETY: the range is all of a mapping, in which nobody has references.
    let taken = unsafe {
        let base = std::ptr::with_exposed_provenance_mut(memory.addr());
        libc::madvise(base, memory.len(), libc::MADV_REMOVE)
    };
    assert_eq!((taken, sys_errno()), (-1, Some(libc::EPERM)));
    calls.ask(&Call::AllocPd, &|| true, |answer| answer.word()).unwrap();
}

fn sys_errno() -> Option<i32> {
    std::io::Error::last_os_error().raw_os_error()
}
