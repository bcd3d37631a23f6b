//! Long FPDUs that are delivered while they come.
//!
//! Without a CRC nothing has to be awaited but the header: what is there of an FPDU's payload is a segment
//! like any other, and what follows is the next one of the same message. So an FPDU that comes in pieces
//! gives what several short FPDUs would have given; and since it is known where its payload belongs, the
//! caller may have the rest put there without a buffer between.

use quipu_wire::Stag;
use quipu_wire::ddp::{self, Header};
use quipu_wire::mpa::LENGTH_LEN;
use quipu_wire::rdmap::{Opcode, TaggedOp, UntaggedOp, queue};

use crate::receiver::opcode;
use crate::{ProtocolError, Receiver, Segment};

/// An FPDU is delivered in pieces if at least so many bytes of it are missing.
const LEAST_MISSING: usize = 4096;
/// So much of an FPDU's payload is never put into its place by others: what ends a message is placed last, by
/// the adapter, so that a program which polls the last byte sees a whole message.
const LEAST_TAIL: usize = 64;

/// Length and header of an FPDU.
const HEAD_LEN: usize = LENGTH_LEN + ddp::UNTAGGED_LEN;

/// An FPDU of which a part was delivered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Within {
    /// Its header, with the address of what follows.
    header: Header,
    /// Payload bytes that are missing.
    missing: usize,
    /// Bytes behind them: padding and the field of the CRC.
    behind: usize,
    /// How it began, for a TERMINATE.
    head: [u8; HEAD_LEN],
}

/// Where the bytes that come next belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belonging {
    /// To a Write.
    Write {
        /// Names the region.
        stag: Stag,
        /// Tagged offset.
        to: u64,
    },
    /// To a Read Response.
    ReadResponse {
        /// The sink's STag of the request.
        stag: Stag,
        /// Tagged offset.
        to: u64,
    },
    /// To the Send that has begun.
    Send {
        /// Offset in the message.
        mo: u32,
    },
}

type Piece<'a> = Option<(usize, Segment<'a>)>;

impl Receiver {
    /// From now on delivers long FPDUs as they come, unless they have CRCs. Their segments are then those of
    /// several FPDUs, and of no others: the last one ends the message if the FPDU does.
    pub fn set_piecewise(&mut self) {
        self.piecewise = !self.crc;
    }

    /// How the FPDU began of which a part was delivered, if there is one: what a TERMINATE copies.
    pub fn head(&self) -> Option<[u8; HEAD_LEN]> {
        self.within.map(|within| within.head)
    }

    /// How many bytes that come next may be put into their place, and what place that is; the caller says
    /// by [`Receiver::placed`] how many were. `None` if nothing is to be put there: between FPDUs, near the
    /// end of one, and where requests are dropped.
    pub fn awaits(&self) -> Option<(usize, Belonging)> {
        let within = self.within.as_ref()?;
        let most = within.missing.checked_sub(LEAST_TAIL).filter(|&most| most > 0)?;
        let belonging = match within.header {
            Header::Tagged(header) => match opcode(header.rsvd_ulp) {
                Ok(Opcode::Tagged(TaggedOp::ReadResponse)) => {
                    Belonging::ReadResponse { stag: header.stag, to: header.to }
                }
                _ if self.discarding => return None,
                _ => Belonging::Write { stag: header.stag, to: header.to },
            },
            Header::Untagged(_) if self.discarding => return None,
            Header::Untagged(header) => Belonging::Send { mo: header.mo },
        };
        Some((most, belonging))
    }

    /// The next `count` bytes of the stream are where they belong: no more than [`Receiver::awaits`] said.
    pub fn placed(&mut self, count: usize) {
        let Some(within) = &mut self.within else { return };
        let count = count.min(within.missing.saturating_sub(LEAST_TAIL));
        within.missing -= count;
        if let Header::Untagged(header) = advance(&mut within.header, count) {
            self.due[queue::SEND as usize].mo = header.mo;
        }
    }

    /// Begins an FPDU of `len` bytes, which is not whole, if it is one that is delivered in pieces.
    pub(crate) fn begin_pieces<'a>(
        &mut self,
        bytes: &'a [u8],
        len: usize,
    ) -> Result<Piece<'a>, ProtocolError> {
        if !self.piecewise || len - bytes.len() < LEAST_MISSING {
            return Ok(None);
        }
        let Ok(header) = Header::parse(&bytes[LENGTH_LEN..]) else { return Ok(None) };
        let ulpdu = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        let Some(all) = payload_len(&header, ulpdu) else { return Ok(None) };
        let start = LENGTH_LEN + ulpdu - all;
        let mut head = [0; HEAD_LEN];
        let known = bytes.len().min(head.len());
        head[..known].copy_from_slice(&bytes[..known]);
        let behind = len - start - all;
        let within = Within { header, missing: all, behind, head };
        let (used, segment) = self.deliver_piece(within, &bytes[start..])?;
        Ok(Some((start + used, segment)))
    }

    /// Goes on with an FPDU of which a part was delivered.
    pub(crate) fn next_piece<'a>(
        &mut self,
        within: Within,
        bytes: &'a [u8],
    ) -> Result<Piece<'a>, ProtocolError> {
        let Within { header, missing, behind, .. } = within;
        if missing + behind > bytes.len() {
            // A short rest is awaited, so that the last piece is never empty.
            let long = missing.saturating_sub(bytes.len()) >= LEAST_MISSING && !bytes.is_empty();
            return if long { self.deliver_piece(within, bytes).map(Some) } else { Ok(None) };
        }
        let segment = self.deliver_as(header, &bytes[..missing])?;
        self.within = None;
        Ok(Some((missing + behind, segment)))
    }

    /// Delivers all of `bytes` as a segment that does not end its message.
    fn deliver_piece<'a>(
        &mut self,
        mut within: Within,
        bytes: &'a [u8],
    ) -> Result<(usize, Segment<'a>), ProtocolError> {
        let segment = self.deliver_as(with_last(within.header, false), bytes)?;
        within.missing -= bytes.len();
        advance(&mut within.header, bytes.len());
        self.within = Some(within);
        Ok((bytes.len(), segment))
    }

    fn deliver_as<'a>(
        &mut self,
        header: Header,
        payload: &'a [u8],
    ) -> Result<Segment<'a>, ProtocolError> {
        match header {
            Header::Tagged(header) => self.tagged(header, payload),
            Header::Untagged(header) => self.untagged(header, payload),
        }
    }
}

/// The payload of an FPDU that may be delivered in pieces; `None` of others, and of those that are refused
/// as a whole: they are awaited, and judged by the rules for whole ones.
fn payload_len(header: &Header, ulpdu: usize) -> Option<usize> {
    match header {
        Header::Tagged(header) => {
            let len = ulpdu.checked_sub(ddp::TAGGED_LEN)?;
            header.to.checked_add((len as u64).checked_sub(1)?)?;
            matches!(opcode(header.rsvd_ulp), Ok(Opcode::Tagged(_))).then_some(len)
        }
        Header::Untagged(header) => {
            let len = ulpdu.checked_sub(ddp::UNTAGGED_LEN)?;
            header.mo.checked_add(len as u32)?;
            matches!(
                opcode(header.rsvd_ulp),
                Ok(Opcode::Untagged(
                    UntaggedOp::Send
                        | UntaggedOp::SendSe
                        | UntaggedOp::SendInvalidate
                        | UntaggedOp::SendSeInvalidate
                        | UntaggedOp::SendImm
                        | UntaggedOp::SendImmSe
                ))
            )
            .then_some(len)
        }
    }
}

fn with_last(mut header: Header, last: bool) -> Header {
    match &mut header {
        Header::Tagged(header) => header.last = last,
        Header::Untagged(header) => header.last = last,
    }
    header
}

/// Moves the address of a header `count` bytes on.
fn advance(header: &mut Header, count: usize) -> Header {
    match header {
        // Neither wraps: the whole FPDU was checked, of which at least a byte follows.
        Header::Tagged(header) => header.to = header.to.wrapping_add(count as u64),
        Header::Untagged(header) => header.mo = header.mo.wrapping_add(count as u32),
    }
    *header
}
