//! A program that writes garbage, or names what is not its own, harms nobody else.

use std::net::SocketAddr;
use std::time::Duration;

use quipu_mem::{Access, Segment};
use quipu_nic::*;

use super::{CAP, Numbers, Shared};
use crate::EngineError;
use crate::link::socket;
use crate::share::connect;
use crate::share::folders::own_place;
use crate::share::words::{Call, HELLO, Writer};

#[test]
fn garbage_in_the_rings_and_on_the_socket_harms_nobody_else() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (honest, peer) = (shared.attach(), elsewhere.attach());
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for round in 0..60 {
        let (calls, memory, bell) = shared.raw();
        let ask =
            |call: &Call| calls.ask(call, &|| true, |answer| Some(answer.word().unwrap_or(0)));
        let cap = QpCap { max_inline_data: 1024, ..CAP };
        // Some of them have objects, that garbage may happen to name.
        if round % 2 == 0 {
            let pd = ask(&Call::AllocPd).unwrap();
            let qp = ask(&Call::CreateQp { pd, udp: true, cap }).unwrap();
            ask(&Call::ModifyQp { qp, state: QpState::Init as u8 }).unwrap();
            let _ = ask(&Call::Bind { qp, port: 0 });
        }
        for _ in 0..200 {
            // The first slots and the control blocks above all.
            let at =
                numbers.next() as usize % (if round % 3 == 0 { 8192 } else { memory.len() - 8 });
            memory.write(at, &numbers.odd().to_ne_bytes()).unwrap();
            // Slots that look whole: the tag of the first lap, an operation, a queue pair.
            let slot = 4096 + 128 * (numbers.next() as usize % 4);
            let kind = 1 | (numbers.next() % 4) << 32 | (numbers.next() % 16) << 40;
            let words = [kind, numbers.odd(), (numbers.next() % 3) << 32, numbers.odd()];
            for (index, word) in words.into_iter().enumerate().rev() {
                memory.write(slot + 8 * index, &word.to_ne_bytes()).unwrap();
            }
            crate::share::ring(&bell);
        }
        honest.talks_to(&peer, elsewhere.address);
    }
    for _ in 0..300 {
        let Ok(socket) = connect(&own_place(&shared.name, false).unwrap()) else {
            // More wait than it cares to know of.
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let hello = Writer::default().word(HELLO).word(numbers.odd() % (1 << 21));
        let greeted = numbers.next() & 3 != 0;
        if greeted {
            socket::send(&socket, &hello.bytes(), &[]).unwrap();
        }
        for _ in 0..8 {
            let mut message = Writer::default().word(numbers.next() % 17);
            for _ in 0..numbers.next() % 12 {
                message = message.word(numbers.odd());
            }
            let _ = socket::send(&socket, &message.bytes(), &[]);
        }
    }
    honest.talks_to(&peer, elsewhere.address);
    peer.talks_to(&honest, shared.address);
    // There is still room for those who behave.
    shared.attach().talks_to(&peer, elsewhere.address);
}

#[test]
fn programs_reach_their_own_objects_only() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (one, two, peer) = (shared.attach(), shared.attach(), elsewhere.attach());
    let to = SocketAddr::new(elsewhere.address.ip(), peer.port);
    // By a key that is another program's.
    two.memory.write(0, b"secret").unwrap();
    two.send(to, Payload::Sges(&[Sge { lkey: one.region.key, ..one.sge(6) }])).unwrap();
    assert_eq!(two.next().status, WcStatus::LocProtErr);
    // Beyond its own memory.
    let beyond = Sge { addr: one.memory.addr() as u64 + 4090, ..one.sge(7) };
    one.send(to, Payload::Sges(&[beyond])).unwrap();
    assert_eq!(one.next().status, WcStatus::LocProtErr);
    // By numbers of objects that it has not made.
    let (calls, _memory, _bell) = shared.raw();
    for call in [
        Call::DestroyQp { qp: one.qp.0 },
        Call::Deregister { region: one.region.id.0 },
        Call::DeallocPd { pd: one.pd.0 },
        Call::Flow { qp: 1 },
        Call::Unlisten { listener: 1 },
    ] {
        let refused = calls.ask(&call, &|| true, |_| Some(()));
        assert!(
            matches!(refused, Err(EngineError::Fault(quipu_nic::Fault::NoSuchObject))),
            "{call:?}"
        );
    }
    let elsewhere_memory = Segment::heap(64);
    let refused = one.engine.reg_segment(one.pd, &elsewhere_memory, None, Access::LOCAL_WRITE);
    assert!(matches!(refused, Err(EngineError::NotInArena)));
    assert!(matches!(one.engine.allocate(1 << 30), Err(EngineError::ArenaFull { .. })));
}
