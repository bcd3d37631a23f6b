//! Programs that attach, that cannot, and that end.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use quipu_nic::TcpSettings;

use super::{PATIENCE, Shared, engine};
use crate::link::socket;
use crate::packet::LinkSpec;
use crate::share::calls::Calls;
use crate::share::folders::own_place;
use crate::share::guests::Guests;
use crate::share::words::{HELLO, Reader, Writer};
use crate::share::{Sharer, connect};
use crate::testing::{is_alone, limit_descriptors};
use crate::{Config, Engine, QpipConfig, sys};

#[test]
fn silent_callers_keep_nobody_away() {
    let shared = Shared::new();
    let place = own_place(&shared.name, false).unwrap();
    let silent: Vec<_> = (0..40).filter_map(|_| connect(&place).ok()).collect();
    assert!(silent.len() > 16);
    let begun = Instant::now();
    drop(shared.attach());
    assert!(begun.elapsed() < crate::share::server::PATIENCE / 2, "they were waited for");
}

#[test]
fn one_program_too_many_is_told_so() {
    let shared = Shared::new();
    let mut programs: Vec<_> = (0..64).map(|_| shared.raw()).collect();
    let link: LinkSpec = format!("share:{}", shared.name).parse().unwrap();
    let qpip = Some(QpipConfig::new(link));
    let config = Config { counters: false, qpip, ..Config::default() };
    let said = Engine::open(config).err().expect("it is full").to_string();
    assert!(said.contains("64 programs") && said.contains("end a program"), "{said}");
    // It goes by who is there.
    programs.pop();
    let begun = Instant::now();
    let link = format!("share:{}", shared.name).parse().unwrap();
    while Calls::attach(&link, 1 << 20).is_err() {
        assert!(begun.elapsed() < PATIENCE, "no place is free again");
    }
}

#[test]
fn a_child_leaves_its_parents_place_alone() {
    if !is_alone("share::tests::arrivals::a_child_leaves_its_parents_place_alone") {
        return;
    }
    let mut shared = Shared::new();
    let program = shared.attach();
    // SAFETY: the child drops what it inherited, which neither waits nor takes a lock, and ends without any
    // handlers of exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(shared.sharer.take());
        let refused = program.engine.check_allocated().is_err();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: waits for a child of this process, and writes to a live variable.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!((waited, status), (pid, 0));
    program.engine.check_allocated().unwrap();
    drop((program, shared.attach()));
    drop(shared.sharer.take());
    assert!(!own_place(&shared.name, false).unwrap().exists());
}

/// What the adapter says to one who greets it so, and hangs up.
fn answer(shared: &Shared, hello: &[u8]) -> (u64, u64, String) {
    let socket = connect(&own_place(&shared.name, false).unwrap()).unwrap();
    socket::send(&socket, hello, &[]).unwrap();
    let receive = |buffer: &mut [u8]| {
        assert!(sys::wait_readable_within(&socket, PATIENCE), "no answer");
        sys::receive(&socket, buffer).unwrap()
    };
    let mut buffer = [0; 4096];
    let len = receive(&mut buffer);
    let mut answer = Reader::new(&buffer[..len]);
    let said = (answer.word().unwrap(), answer.word().unwrap(), answer.text().unwrap());
    assert_eq!(receive(&mut [0; 8]), 0);
    said
}

#[test]
fn whoever_cannot_attach_is_told_why_and_so_is_who_shares_the_adapter() {
    let shared = Shared::new();
    let sharer = shared.sharer.as_ref().unwrap();
    let other = Writer::default().word(HELLO - 1).word(1u64 << 20).bytes();
    let (first, none, why) = answer(&shared, &other);
    assert!(first == HELLO && none == 0 && why.contains("another version"), "{why}");
    assert_eq!(sharer.take_refusal(), Some(why));
    let (_, _, why) = answer(&shared, b"hello, who is there?");
    assert!(why.contains("another protocol"), "{why}");
    assert_eq!((sharer.take_refusal(), sharer.take_refusal()), (Some(why), None));
    // One who only looks whether somebody is there is none.
    drop(connect(&own_place(&shared.name, false).unwrap()).unwrap());
    drop(shared.attach());
    assert_eq!(sharer.take_refusal(), None);
}

#[test]
fn without_descriptors_a_program_is_told_so() {
    if !is_alone("share::tests::arrivals::without_descriptors_a_program_is_told_so") {
        return;
    }
    let shared = Shared::new();
    // Both processes' are here, and the hard limit is as low.
    limit_descriptors(60);
    let mut programs = Vec::new();
    let link: LinkSpec = format!("share:{}", shared.name).parse().unwrap();
    let why = loop {
        match Calls::attach(&link, 1 << 20) {
            Ok(welcome) => programs.push(welcome),
            Err(error) => break error,
        }
    };
    let said = shared.sharer.as_ref().unwrap().take_refusal();
    // Who was out of them first is not known.
    assert!(why.to_string().contains("open files") && programs.len() > 2, "{why}, {said:?}");
    drop(programs);
    let begun = Instant::now();
    while Calls::attach(&link, 1 << 20).is_err() {
        assert!(begun.elapsed() < PATIENCE, "it has ended");
    }
}

#[test]
fn a_shared_adapter_is_not_shared_again_nor_by_the_name_of_a_lock() {
    let shared = Shared::new();
    let refused = |link: &str, name: &str| {
        Sharer::start(&engine(link), name, &Guests::default()).err().unwrap()
    };
    let elsewhere = refused(&format!("share:{}", shared.name), "test-again").to_string();
    assert!(elsewhere.contains(&format!("share:{}", shared.name)), "{elsewhere}");
    let lock = refused("udp:127.0.0.1:0", &format!("{}.lock", shared.name)).to_string();
    assert!(lock.contains("is not a valid name"), "{lock}");
    drop(shared.attach());
}

/// A program that listens, has forked a child that keeps all it has, and is killed.
fn listen_and_fork(name: &str) {
    let engine = engine(&format!("share:{name}"));
    let _listener = engine.tcp_listen(7799, &TcpSettings::default(), 4).unwrap();
    // SAFETY: the child calls nothing but read(2) and _exit(2).
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let mut byte = 0u8;
        // SAFETY: the kernel writes at most one byte to a live variable. It is the end of the file when the
        // test is over.
        unsafe {
            libc::read(0, (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    println!("it listens");
    std::thread::sleep(2 * PATIENCE);
}

#[test]
fn a_program_has_ended_when_its_process_has_whoever_else_has_its_socket() {
    const NAME: &str = "SHARED_ADAPTER_OF_TEST";
    if let Ok(name) = std::env::var(NAME) {
        return listen_and_fork(&name);
    }
    let shared = Shared::new();
    let test = "share::tests::arrivals::\
                a_program_has_ended_when_its_process_has_whoever_else_has_its_socket";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(NAME, &shared.name);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let _kept = child.stdin.take();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let listens = said.any(|line| line.is_ok_and(|line| line.contains("it listens")));
    let program = shared.attach();
    let listen = || program.engine.tcp_listen(7799, &TcpSettings::default(), 4);
    let taken = listen().is_err();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(listens && taken);
    let begun = Instant::now();
    while listen().is_err() {
        assert!(begun.elapsed() < PATIENCE, "its port is still taken");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What it had goes in parts, and all of it.
#[test]
fn a_program_with_much_leaves_nothing() {
    use super::{Bare, CAP};
    use crate::share::words::Call;
    use quipu_nic::QpCap;
    let shared = Shared::new();
    let settings = TcpSettings::default();
    let all = |bare: &Bare| {
        let cap = QpCap { max_send_wr: 1, max_recv_wr: 1, ..CAP };
        let pair = Call::CreateQp { pd: bare.pd, udp: true, cap };
        let pairs = (0..200).take_while(|_| bare.ask(&pair).is_ok()).count();
        let register = Call::Register { pd: bare.pd, offset: 0, len: 64, iova: 0, access: 1 };
        (0..300).for_each(|_| assert!(bare.ask(&register).is_ok()));
        let listen = |port| bare.ask(&Call::Listen { port, backlog: 1, settings }).is_ok();
        (pairs, (2000..2200).filter(|port| listen(*port)).count())
    };
    let first = all(&Bare::new(&shared));
    assert_eq!(first, (128, 128));
    let begun = Instant::now();
    loop {
        // The ports are free again when all is.
        let next = Bare::new(&shared);
        if next.ask(&Call::Listen { port: 2127, backlog: 1, settings }).is_ok() {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "its ports are still taken");
    }
    assert_eq!(all(&Bare::new(&shared)).0, 128);
}
