//! Where one frame on a stream ends and the next begins, and what is in it.

use std::fmt::Write as _;

use quipu_iwarp::wire::cm::{Frame, Setup};
use quipu_iwarp::wire::hello::Hello;
use quipu_iwarp::wire::mpa::{FrameKind, LENGTH_LEN, StartFrame, fpdu_len};

/// Most bytes of a stream that wait for the rest of their frame: the longest FPDU, and what a start-up
/// frame may have.
const WAITING_MAX: usize = 70_000;

/// What the bytes of one direction of a stream are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The start-up frame is to come.
    Start(FrameKind),
    /// FPDUs.
    Fpdus,
    /// Frames of connection management, of an end that began with a REQ, or answered one.
    Management,
    /// Nothing that could be told apart: markers among the FPDUs, or no MPA at all.
    Opaque,
}

/// Cuts one direction of a stream into frames.
#[derive(Debug)]
pub(crate) struct Framer {
    phase: Phase,
    waiting: Vec<u8>,
}

/// What a frame is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    /// A start-up frame, or one of connection management.
    Told(Told),
    /// An FPDU.
    Fpdu,
    /// Some bytes.
    Opaque,
}

/// What a start-up frame told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    /// Its sender wants markers in what it receives.
    pub(crate) markers: bool,
    /// Source and destination queue pair, if its private data are a hello.
    pub(crate) qpns: Option<(u32, u32)>,
    /// Which message of connection management its private data are, if they are one.
    pub(crate) management: Option<&'static str>,
}

impl Framer {
    /// For the direction that begins with `kind`.
    pub(crate) fn new(kind: FrameKind) -> Self {
        Self { phase: Phase::Start(kind), waiting: Vec::new() }
    }

    /// There will be markers.
    pub(crate) fn give_up(&mut self) {
        self.phase = Phase::Opaque;
    }

    /// Adds bytes and takes the next frames out, each by a call of `each`.
    pub(crate) fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8], What)) {
        // Mostly the bytes are whole frames and nothing waits.
        let mut kept = std::mem::take(&mut self.waiting);
        let whole = if kept.is_empty() {
            bytes
        } else {
            kept.extend_from_slice(bytes);
            &kept[..]
        };
        let mut at = 0;
        while at < whole.len() {
            let rest = &whole[at..];
            let (length, what) = match self.phase {
                Phase::Start(kind) => match start_frame(kind, rest) {
                    Ok(Some((length, told))) => {
                        let managed = told.management.is_some();
                        self.phase = if managed { Phase::Management } else { Phase::Fpdus };
                        (length, What::Told(told))
                    }
                    Ok(None) => break,
                    Err(()) => {
                        self.phase = Phase::Opaque;
                        continue;
                    }
                },
                Phase::Fpdus => match fpdu(rest) {
                    Some(length) => (length, What::Fpdu),
                    None => break,
                },
                Phase::Management => match Frame::parse(rest) {
                    Ok(Some((frame, length))) => {
                        let management = Some(name_of(frame));
                        (length, What::Told(Told { management, ..Told::default() }))
                    }
                    Ok(None) => break,
                    Err(_) => {
                        self.phase = Phase::Opaque;
                        continue;
                    }
                },
                Phase::Opaque => (rest.len(), What::Opaque),
            };
            each(&rest[..length], what);
            if matches!(what, What::Told(Told { markers: true, .. })) {
                self.phase = Phase::Opaque;
            }
            at += length;
        }
        let rest = &whole[at..];
        self.waiting = if rest.len() <= WAITING_MAX { rest.to_vec() } else { Vec::new() };
    }

    /// The beginning of a frame whose rest did not come.
    pub(crate) fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.waiting)
    }
}

/// Length and content of the start-up frame in front; `None` if it is not whole.
fn start_frame(kind: FrameKind, bytes: &[u8]) -> Result<Option<(usize, Told)>, ()> {
    let length = match StartFrame::frame_len(kind, bytes) {
        Ok(Some(length)) if length <= bytes.len() => length,
        Ok(_) => return Ok(None),
        Err(_) => return Err(()),
    };
    let Ok(frame) = StartFrame::parse(kind, bytes) else {
        return Ok(Some((length, Told::default())));
    };
    let hello = Hello::parse(frame.private_data).ok();
    let qpns = hello.map(|hello| (hello.source_qpn, hello.dest_qpn));
    let management = Setup::parse(frame.private_data).ok().map(|message| match message {
        Setup::Request(..) => "REQ",
        Setup::Reply(..) => "REP",
        Setup::Reject(..) => "REJ",
    });
    Ok(Some((length, Told { markers: frame.markers, qpns, management })))
}

fn name_of(frame: Frame) -> &'static str {
    match frame {
        Frame::ReadyToUse => "RTU",
        Frame::Reject(_) => "REJ",
        Frame::Disconnect => "DREQ",
        Frame::Disconnected => "DREP",
    }
}

/// Length of the FPDU in front, if it is whole.
fn fpdu(bytes: &[u8]) -> Option<usize> {
    let ulpdu = bytes.get(..LENGTH_LEN)?;
    let length = fpdu_len(usize::from(u16::from_be_bytes([ulpdu[0], ulpdu[1]])));
    (length <= bytes.len()).then_some(length)
}

/// What an FPDU's headers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    opcode: u8,
    last: bool,
    /// MSN and offset in the message, of an untagged segment.
    place: Option<(u32, u32)>,
}

impl Summary {
    /// Reads the headers of DDP and RDMAP (RFC 5041 4, RFC 5040 4) as far as they are there.
    pub(crate) fn of(fpdu: &[u8]) -> Option<Self> {
        let header = fpdu.get(LENGTH_LEN..)?;
        let (&control, &opcode) = (header.first()?, header.get(1)?);
        let word = |at: usize| header.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let tagged = control & 0x80 != 0;
        let place = if tagged { None } else { Some((word(10)?, word(14)?)) };
        Some(Self { opcode: opcode & 0x0f, last: control & 0x40 != 0, place })
    }

    /// Whether it belongs to a work request of the sender.
    pub(crate) fn is_request(self) -> bool {
        !matches!(self.opcode, 0x2 | 0x7 | 0xb | 0xf)
    }

    /// For people.
    pub(crate) fn describe(self, out: &mut String) {
        out.push_str(match self.opcode {
            0x0 => "RDMA Write",
            0x1 => "RDMA Read Request",
            0x2 => "RDMA Read Response",
            0x3 => "Send",
            0x4 => "Send with Invalidate",
            0x5 => "Send with Solicited Event",
            0x6 => "Send with Solicited Event and Invalidate",
            0x7 => "Terminate",
            0x8 => "Immediate Data",
            0x9 => "Immediate Data with Solicited Event",
            0xa => "Atomic Request",
            0xb => "Atomic Response",
            0xc => "Send with Immediate (Quipu)",
            0xd => "Send with Immediate and Solicited Event (Quipu)",
            0xe => "Flush (Quipu)",
            0xf => "Control: Ack, RNR or Resume (Quipu)",
            _ => "unknown opcode",
        });
        if let Some((msn, offset)) = self.place {
            let _ = write!(out, ", MSN {msn}");
            if offset > 0 {
                let _ = write!(out, " at {offset}");
            }
        }
        if !self.last {
            out.push_str(", more follows");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_however_the_stream_is_cut() {
        let mut stream = b"MPA ID Req Frame".to_vec();
        stream.extend_from_slice(&[0x40, 1, 0, 3, 1, 2, 3]);
        let fpdus = [&[0u8, 2, 0x41, 0x43, 9, 9, 9, 9][..], &[0, 1, 7, 0, 9, 9, 9, 9]];
        fpdus.iter().for_each(|fpdu| stream.extend_from_slice(fpdu));
        for cut in 1..stream.len() {
            let mut framer = Framer::new(FrameKind::Request);
            let mut frames = Vec::new();
            for part in stream.chunks(cut) {
                framer.push(part, |frame, _| frames.push(frame.to_vec()));
            }
            assert_eq!(frames.len(), 3, "cut at {cut}");
            assert_eq!(frames[0].len(), 23);
            assert_eq!(frames[1..], fpdus);
            assert!(framer.take_rest().is_empty());
        }
    }

    #[test]
    fn what_is_no_mpa_passes_as_it_is() {
        let mut framer = Framer::new(FrameKind::Reply);
        let mut frames = Vec::new();
        framer.push(b"GET / HTTP/1.1", |frame, what| {
            frames.push((frame.to_vec(), matches!(what, What::Opaque)));
        });
        framer.push(b"more", |frame, what| {
            frames.push((frame.to_vec(), matches!(what, What::Opaque)));
        });
        assert_eq!(frames, [(b"GET / HTTP/1.1".to_vec(), true), (b"more".to_vec(), true)]);
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut framer = Framer::new(FrameKind::Request);
        framer.push(b"MPA ID Req Frame\x40\x01\x00\x00", |_, _| {});
        // An FPDU of the greatest length, of which all but the last byte comes.
        let mut longest = vec![0xff, 0xff];
        longest.resize(fpdu_len(0xffff) - 1, 0);
        framer.push(&longest, |_, _| panic!("it is not whole"));
        assert_eq!(framer.take_rest().len(), longest.len());
        assert!(longest.len() <= WAITING_MAX);
    }
}
