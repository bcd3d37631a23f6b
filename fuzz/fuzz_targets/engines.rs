//! What engines of one host say to each other: on the socket between them, and, carried there, between
//! their adapters.
#![no_main]

/// Taken as it stands, since a host's handshake is nobody's interface.
#[path = "../../crates/host/src/link/handshake.rs"]
#[allow(dead_code)]
mod handshake;

/// What `handshake` needs of its neighbours.
mod probe {
    pub(crate) type Number = [u8; 16];
}

use handshake::Message;
use libfuzzer_sys::fuzz_target;
use quipu_nic::LinkMessage;

fuzz_target!(|input: &[u8]| {
    if let Some(message) = Message::decode(input) {
        assert_eq!(message.encode(), input, "one form for each message");
        if let Message::Carried(bytes) = message {
            carried(bytes);
        }
    }
    carried(input);
});

fn carried(bytes: &[u8]) {
    if let Some(message) = LinkMessage::decode(bytes) {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(LinkMessage::decode(&again), Some(message));
    }
}
