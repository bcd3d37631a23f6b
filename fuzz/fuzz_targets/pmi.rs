//! Text of PMI from ranks, to the launcher's server, and the messages between launchers of two hosts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_launch::pmi::{Effect, Frame, Line, Server};
use quipu_launch::spmd::{Message, MessageBuffer};

/// Lines of which some of the input's are made.
const LINES: [&str; 10] = [
    "cmd=init pmi_version=1 pmi_subversion=1\n",
    "cmd=barrier_in\n",
    "cmd=get_maxes\n",
    "cmd=put kvsname=k key=a value=b\n",
    "cmd=get kvsname=k key=a\n",
    "cmd=get kvsname=k key=PMI_process_mapping\n",
    "cmd=publish_name service=s port=p\n",
    "cmd=lookup_name service=s\n",
    "cmd=abort exitcode=3 error_msg=no_more\n",
    "cmd=finalize\n",
];

/// Every message that a launcher takes from these bytes is one that it would have sent.
fn read_messages(bytes: &[u8], step: usize) {
    let mut buffer = MessageBuffer::default();
    for piece in bytes.chunks(step) {
        buffer.push(piece);
        while let Ok(Some(message)) = buffer.next_message() {
            let bytes = message.emit();
            assert_eq!(Message::parse(&bytes[4..]).as_ref(), Ok(&message));
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let [step, mode, bytes @ ..] = input else { return };
    let step = usize::from(*step).max(1);
    let _ = Line::parse(bytes).map(|line| (line.command().len(), line.number("rc")));
    let _ = Frame::length(bytes);
    if let Ok(frame) = Frame::parse(bytes) {
        let emitted = Frame::emit(frame.command(), &[]);
        assert_eq!(Frame::length(&emitted).map(|len| len + 6), Ok(emitted.len()));
    }
    read_messages(bytes, step);

    let (mut server, mut effects) = (Server::new("k", &[1, 2]), Vec::new());
    for piece in bytes.chunks(step) {
        let rank = u32::from(piece[0] & 3);
        match LINES.get(usize::from(piece[0] >> 2)) {
            Some(line) if mode & 1 == 0 => server.handle(rank, line.as_bytes(), &mut effects),
            _ => server.handle(rank, piece, &mut effects),
        }
        if piece[0] == 255 {
            server.handle_exit(rank, &mut effects);
        }
    }
    // Whatever ranks send, each answer is a line to a rank that there is, and a barrier opens for all.
    let mut opened = 0;
    for effect in effects {
        let Effect::Send { rank, bytes } = effect else { continue };
        assert!(rank < 3 && bytes.ends_with(b"\n"));
        opened += usize::from(bytes.starts_with(b"cmd=barrier_out"));
    }
    assert_eq!(opened % 3, 0);
});
