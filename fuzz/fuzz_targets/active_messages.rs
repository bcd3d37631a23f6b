//! Messages of Active Messages: what is accepted survives being written and read again.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_am::message::{MAX_HEAD, Message};
use quipu_am::{Hello, MAX_ARGS, Name, Welcome};
use shares::Shares;

static SHARES: Shares<4> = Shares::new(["message", "hello", "welcome", "name"]);

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    // The length of the message is that of its head and of a payload, which need not be there.
    let split = data.split_first();
    let (more, head) = split.map_or((0, data), |(more, head)| (usize::from(*more), head));
    let head = &head[..head.len().min(MAX_HEAD)];
    let len = if head.len() == MAX_HEAD { head.len() + more } else { head.len() };
    let mut bytes = [0; MAX_HEAD];
    bytes[..head.len()].copy_from_slice(head);
    let mut args = [0; MAX_ARGS];
    if let Some((message, at)) = Message::parse(&bytes, len, &mut args) {
        SHARES.reach("message");
        assert!(at <= len && at <= MAX_HEAD);
        let mut again = [0; MAX_HEAD];
        let args = &args[..message.nargs.into()];
        let written = message.encode(args, &mut again);
        assert_eq!(written, at);
        let mut read = [0; MAX_ARGS];
        let parsed = Message::parse(&again, len, &mut read);
        assert_eq!((parsed, &read[..args.len()]), (Some((message, at)), args));
    }
    if let Some(hello) = Hello::parse(data) {
        SHARES.reach("hello");
        assert_eq!(Hello::parse(&hello.to_bytes()), Some(hello));
    }
    if let Some(welcome) = Welcome::parse(data) {
        SHARES.reach("welcome");
        assert_eq!(Welcome::parse(&welcome.to_bytes()), Some(welcome));
    }
    if let Some(name) = data.first_chunk().and_then(Name::from_bytes) {
        SHARES.reach("name");
        assert_eq!(Name::from_bytes(&name.to_bytes()), Some(name));
    }
});
