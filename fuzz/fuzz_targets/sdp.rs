//! An SDP connection whose peer, and whose program, do anything. Nothing may panic, read beyond what was
//! advertised, post a buffer twice or keep a deadline in the past.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_sdp::{Config, Connection, Readable, Received, RemoteMemory};
use quipu_wire::Stag;
use quipu_wire::sdp::{HEADER_LEN, Hello, HelloAck, MAX_HEADERS_LEN, Message};

const BUFFERS: u16 = 6;
/// Messages without payload that it may have to send after one event: one of each kind, and a credit update.
const MOST_AT_ONCE: u32 = 8;

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

/// A message with the numbers that are next, so that more than its header is looked at.
fn numbered(bytes: &[u8], mseq: u32, acked: u32) -> Vec<u8> {
    let mut message = bytes.to_vec();
    if message.len() >= HEADER_LEN {
        let len = (message.len() as u32).to_be_bytes();
        message[4..8].copy_from_slice(&len);
        message[8..12].copy_from_slice(&mseq.to_be_bytes());
        message[12..16].copy_from_slice(&acked.to_be_bytes());
    }
    message
}

fuzz_target!(|data: &[u8]| {
    let _ = (Hello::parse(data), HelloAck::parse(data), Message::parse(data));
    let config = Config { buffers: BUFFERS, buffer_size: 256, ..Config::default() };
    let Ok(mut end) = Connection::connect(config, &Connection::hello_ack(&config)) else { return };
    let (mut input, mut now, mut mseq, mut sent) = (Input(data), 0u64, 0u32, 0u32);
    let mut posted: Vec<u16> = (0..BUFFERS).collect();
    let mut headers = [0; MAX_HEADERS_LEN];
    while let Some(what) = input.byte() {
        match what % 10 {
            0..3 if !posted.is_empty() => {
                let len = usize::from(input.byte().unwrap_or(0));
                let slot = posted.remove(0);
                mseq += 1;
                let acked = if what & 64 == 0 { sent } else { 0 };
                let bytes = input.take(len);
                let bytes = if what & 128 == 0 { &numbered(bytes, mseq, acked) } else { bytes };
                if end.handle_message(slot, Received::whole(bytes)).is_err() {
                    assert!(end.reset().is_some());
                }
            }
            3 if end.data_room() > 0 => {
                let mut header = [0; HEADER_LEN];
                end.send_data(1, what & 64 != 0, &mut header);
                sent += 1;
            }
            4 if end.may_advertise() => {
                let memory = RemoteMemory { addr: 1, len: 100, rkey: Stag(1) };
                end.advertise(now, memory, 1, &mut headers);
                sent += 1;
            }
            5 => match end.readable() {
                Readable::Buffered(segment) => {
                    assert!(segment.at + segment.len <= 256);
                    end.consume(segment.len);
                }
                Readable::Remote(rest) => {
                    let read = end.begin_read(7).expect("something to read");
                    assert!(read.len <= rest.len && read.addr == rest.addr);
                }
                Readable::Nothing | Readable::End => {}
            },
            6 => end.finish_read(),
            7 => match what / 10 % 7 {
                0 => end.refuse_sink(),
                1 => end.cancel_source(),
                2 => drop(end.send_buffered()),
                3 => drop(end.ask_for_combined()),
                4 => end.ask_for_buffers(500),
                5 => end.shut_write(),
                _ => end.close(now),
            },
            8 => {
                now += u64::from(what) << 26;
                end.handle_timeout(now);
                assert!(end.poll_timeout().is_none_or(|at| at > now));
            }
            _ => drop(end.take_source_end()),
        }
        while let Some((slot, _)) = end.next_receive() {
            assert!(!posted.contains(&slot));
            posted.push(slot);
        }
        let before = sent;
        while end.poll_control(now, &mut headers).is_some() {
            sent += 1;
            assert!(sent - before <= MOST_AT_ONCE, "it sends without end");
        }
    }
});
