//! The last words of a stream, which its queue pair has let go of: written at once, since nothing is read
//! from memory of the program once that is so.

use quipu_iwarp::wire::Stag;
use quipu_iwarp::wire::rdmap::{AtomicResponse, ReadRequest, UntaggedOp};
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::{Verdict, terminate};
use quipu_mem::Regions;

use super::ROOM_BYTES;
use super::stream::{Step, answer_piece, say};
use crate::stream::{Answer, StreamPath, Turn};

/// Answers of so many bytes in all are given yet: a card has given what was asked before. A peer that asked
/// for more repeats its request, and nobody answers.
const ANSWER_BYTES: u32 = 64 << 10;

/// Bytes that are still to be sent on a stream.
#[derive(Debug, Default)]
pub(crate) struct LastWords {
    bytes: Vec<u8>,
    sent: usize,
}

impl LastWords {
    /// Those of the stream of queue pair `num`, which has executed so many requests: the last
    /// acknowledgement, answers, then why it ends. So the peer finds the right request at fault.
    pub(crate) fn of(
        stream: &mut StreamPath,
        regions: &Regions,
        executed: u32,
        num: u32,
    ) -> Box<Self> {
        let mut words = Box::<Self>::default();
        let mut said = true;
        while said {
            said = words.write(ROOM_BYTES, |out| match say(stream, executed, out) {
                Some(Step::Wrote(bytes)) => Some(bytes),
                _ => None,
            });
        }
        if !stream.gate.may_end() {
            // The initiator has said nothing yet, so that it cannot be told either.
            return words;
        }
        // Nor may an answer cut a Write that will never end.
        if stream.must_go_on() != Some(Turn::Request) {
            words.answer(stream, regions, num);
        }
        if let Some(terminate) = stream.terminate.take()
            && finds_its_request(&terminate, stream.answers.front())
        {
            let mut msg = stream.tx.begin_untagged(UntaggedOp::Terminate, 0);
            words.write(ROOM_BYTES, |out| stream.tx.whole(&mut msg, out, &terminate));
        }
        words
    }

    /// Gives the answers owed, oldest first, as far as they are short enough.
    fn answer(&mut self, stream: &mut StreamPath, regions: &Regions, num: u32) {
        let mut left = ANSWER_BYTES;
        while let Some(answer) = stream.answers.front() {
            let rest = match answer {
                Answer::Read { size, msg, .. } => size - msg.map_or(0, |msg| msg.offset()),
                Answer::Atomic { .. } => AtomicResponse::LEN as u32,
            };
            if rest > left {
                return;
            }
            let room = stream.tx.fpdu_bound(rest as usize);
            let written = self.write(room, |out| {
                let piece = answer_piece(stream, regions, num, out, None).ok()??;
                left -= piece.payload;
                Some(piece.bytes)
            });
            if !written {
                return;
            }
        }
    }

    /// Adds what `fill` writes into `room` bytes; `false` if that is nothing.
    fn write(&mut self, room: usize, fill: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let used = self.bytes.len();
        self.bytes.resize(used + room, 0);
        let written = fill(&mut self.bytes[used..]);
        self.bytes.truncate(used + written.unwrap_or(0));
        written.is_some()
    }

    /// Fills `out` with what is left; how many bytes.
    pub(crate) fn transmit(&mut self, out: &mut [u8]) -> usize {
        let rest = &self.bytes[self.sent..];
        let count = rest.len().min(out.len());
        out[..count].copy_from_slice(&rest[..count]);
        self.sent += count;
        count
    }
}

/// Whether the peer finds the request that `terminate` refuses: it takes the oldest one without an answer. So
/// no answer may be `owed`, but that of the read which is refused.
fn finds_its_request(terminate: &Terminate, owed: Option<&Answer>) -> bool {
    if terminate::verdict(terminate.code) == Verdict::Transport {
        return true;
    }
    match owed {
        None => true,
        Some(&Answer::Read { sink_stag, sink_to, size, rkey, addr, .. }) => {
            let (sink_stag, source_stag) = (Stag(sink_stag), Stag(rkey));
            let read = ReadRequest { sink_stag, sink_to, size, source_stag, source_to: addr };
            terminate.read_request == Some(read)
        }
        Some(Answer::Atomic { .. }) => false,
    }
}
