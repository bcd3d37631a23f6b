//! A socket in iWARP mode whose peer, and whose program, do anything. Nothing may panic, memory that is not
//! registered or posted stays as it is, and all that is posted completes once the connection is over.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_iwsock::{Access, Config, Endpoint, Memory, Operation, Piece, Role, Span};

const BASE: u64 = 0x1000;
const SIZE: usize = 4096;
/// The peer may touch these octets, and receives are there.
const OPEN: std::ops::Range<usize> = 1024..2048;

struct Ram(Vec<u8>);

impl Memory for Ram {
    fn read(&self, address: u64, into: &mut [u8]) {
        let at = (address - BASE) as usize;
        into.copy_from_slice(&self.0[at..at + into.len()]);
    }

    fn write(&mut self, address: u64, from: &[u8]) {
        let at = (address - BASE) as usize;
        assert!(OPEN.start <= at && at + from.len() <= OPEN.end);
        self.0[at..at + from.len()].copy_from_slice(from);
    }
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

fn endpoint(role: Role) -> Endpoint {
    Endpoint::new(Config { role, crc: false, names_payload: false, first_stag: 1 })
}

/// What an endpoint has to send.
fn said(end: &mut Endpoint, ram: &Ram) -> Vec<u8> {
    end.prepare(ram);
    let mut bytes = Vec::new();
    let (pieces, used) = end.outgoing();
    for piece in pieces {
        match piece {
            Piece::Bytes(some) => bytes.extend_from_slice(some),
            Piece::Memory(_) => unreachable!("payload is copied"),
        }
    }
    let bytes = bytes.split_off(used);
    end.sent(bytes.len());
    bytes
}

fn hear(end: &mut Endpoint, ram: &mut Ram, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let space = end.space();
        let len = space.len().min(bytes.len());
        if len == 0 {
            // It waits for the program, or is over.
            return;
        }
        space[..len].copy_from_slice(&bytes[..len]);
        end.received(ram, len);
        bytes = &bytes[len..];
    }
}

fuzz_target!(|data: &[u8]| {
    let (mut input, mut ram) = (Input(data), Ram(vec![0; SIZE]));
    let mut end = endpoint(Role::Responder);
    // Most often start-up is right, so that what follows is looked at.
    if input.byte().is_some_and(|first| first & 7 != 0) {
        let request = said(&mut endpoint(Role::Initiator), &ram);
        hear(&mut end, &mut ram, &request);
    }
    let open = Span { address: BASE + OPEN.start as u64, len: OPEN.len() };
    end.register(open, Access { read: true, write: true });
    let (mut posted, mut done) = (0, 0);
    while let Some(what) = input.byte() {
        let len = usize::from(input.byte().unwrap_or(0));
        let span = Span { len, ..open };
        match what % 8 {
            0..3 => {
                let bytes = input.take(len);
                hear(&mut end, &mut ram, bytes);
            }
            3 => {
                posted += u32::from(end.post_receive(&mut ram, 1, &[span]).is_ok());
            }
            4 => {
                let operation = match what / 8 % 3 {
                    0 => Operation::Send,
                    1 => Operation::Write { stag: 7, to: 0 },
                    _ => Operation::Read { stag: 7, to: 0 },
                };
                posted += u32::from(end.post(2, operation, &[span]).is_ok());
            }
            5 => drop(said(&mut end, &ram)),
            6 => drop(end.read(&mut ram, &mut [0; 64][..len.min(64)])),
            _ if what == 255 => end.ended(),
            _ => {}
        }
        while end.poll_send().or_else(|| end.poll_receive()).is_some() {
            done += 1;
        }
    }
    end.ended();
    while end.poll_send().or_else(|| end.poll_receive()).is_some() {
        done += 1;
    }
    if end.is_open().is_err() {
        assert_eq!(posted, done, "all that is posted completes");
    }
});
