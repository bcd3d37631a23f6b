//! From a fault to the Terminate that reports it, and from a Terminate to what it means for the
//! work request.

use quipu_wire::ddp;
use quipu_wire::mpa::LENGTH_LEN;
use quipu_wire::rdmap::{Opcode, ReadRequest, UntaggedOp};
use quipu_wire::terminate::{
    Code, HeaderCopy, Mpa, Operation, Protection, TaggedBuffer, Terminate, UntaggedBuffer,
};

use crate::{ProtocolError, SetupError};

/// A fault of the peer that only the adapter can see: it knows regions, queues and resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteFault {
    /// No such STag (RFC 5040 7.1, RFC 5041 7.1).
    InvalidStag,
    /// Outside the region.
    BaseBounds,
    /// The region does not allow the access.
    AccessRights,
    /// The STag belongs to another protection domain or connection.
    StagNotAssociated,
    /// The range wraps around the end of the address space.
    ToWrap,
    /// A Send with Invalidate named an STag that cannot be invalidated.
    CannotInvalidate,
    /// A request that this queue pair does not take, such as an atomic where none are supported, or
    /// a response that nobody asked for.
    UnexpectedOpcode,
    /// An atomic on an address that is not a multiple of eight, or a request that is otherwise not
    /// valid.
    InvalidRequest,
    /// A Send that is longer than the receive it met.
    MessageTooLong,
    /// No receive was posted, and the peer cannot be told to wait.
    NoBuffer,
    /// More reads and atomics than were agreed on (RFC 5040 5.5: the responder's resources are
    /// exhausted).
    TooManyReads,
    /// We cannot go on with this connection.
    Catastrophic,
}

/// What a Terminate that we received means for the request it is about. Each maps to one completion
/// status of verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Key, range or rights: remote access error.
    RemoteAccess,
    /// The request was not valid there, such as a Send too long: remote invalid request error.
    InvalidRequest,
    /// The responder found no receive: without negotiated RNR handling, this is how it says so.
    NoBuffer,
    /// The responder failed: remote operation error.
    RemoteOperation,
    /// The stream itself was damaged or not understood; no request is to blame.
    Transport,
}

/// The Terminate that answers `error`, found in the FPDU at the front of `fpdu` (which may be cut).
/// `None` if that FPDU is itself a Terminate, which is never answered (RFC 5040 4.8).
pub fn for_error(error: &ProtocolError, fpdu: &[u8]) -> Option<Terminate> {
    use ProtocolError as Error;
    let code = match error {
        Error::UlpduLength(_) | Error::Unfinished => {
            return Some(Terminate::bare(Code::Mpa(Mpa::MarkerLength)));
        }
        // The bytes cannot be trusted, so no header is copied.
        Error::Crc { .. } => return Some(Terminate::bare(Code::Mpa(Mpa::Crc))),
        Error::DdpVersion { tagged: true, .. } => Code::TaggedBuffer(TaggedBuffer::InvalidVersion),
        Error::DdpVersion { .. } => Code::UntaggedBuffer(UntaggedBuffer::InvalidVersion),
        Error::RdmapVersion(_) => Code::Operation(Operation::InvalidVersion),
        Error::UnexpectedOpcode(_) | Error::OperationChanged(_) | Error::UnknownAtomic(_) => {
            Code::Operation(Operation::UnexpectedOpcode)
        }
        Error::InvalidQueue { .. } => Code::UntaggedBuffer(UntaggedBuffer::InvalidQueue),
        Error::MsnRange { .. } => Code::UntaggedBuffer(UntaggedBuffer::MsnRange),
        Error::InvalidMo { .. } => Code::UntaggedBuffer(UntaggedBuffer::InvalidMo),
        Error::MessageTooLong => Code::UntaggedBuffer(UntaggedBuffer::MessageTooLong),
        Error::ToWrap(_) => Code::TaggedBuffer(TaggedBuffer::ToWrap),
        Error::PayloadLength { .. } | Error::MalformedControl | Error::UnexpectedResume => {
            Code::Operation(Operation::Unspecified)
        }
    };
    with_context(code, fpdu)
}

/// The Terminate that reports `fault`, found in the segment whose FPDU is at the front of `fpdu`.
/// `None` if that is itself a Terminate.
///
/// The same fault belongs to DDP if the segment is tagged, and to RDMAP if a request names the
/// buffer in its payload (RFC 5041 7.1, RFC 5040 7.1).
pub fn for_fault(fault: RemoteFault, fpdu: &[u8]) -> Option<Terminate> {
    let tagged = fpdu.get(LENGTH_LEN).is_some_and(|&ctrl| ddp::header_len(ctrl) == ddp::TAGGED_LEN);
    let either = |buffer: TaggedBuffer, protection: Protection| {
        if tagged { Code::TaggedBuffer(buffer) } else { Code::Protection(protection) }
    };
    let code = match fault {
        RemoteFault::InvalidStag => either(TaggedBuffer::InvalidStag, Protection::InvalidStag),
        RemoteFault::BaseBounds => either(TaggedBuffer::BaseBounds, Protection::BaseBounds),
        RemoteFault::StagNotAssociated => {
            either(TaggedBuffer::StagNotAssociated, Protection::StagNotAssociated)
        }
        RemoteFault::ToWrap => either(TaggedBuffer::ToWrap, Protection::ToWrap),
        RemoteFault::AccessRights => Code::Protection(Protection::AccessRights),
        RemoteFault::CannotInvalidate => Code::Protection(Protection::CannotInvalidate),
        RemoteFault::UnexpectedOpcode => Code::Operation(Operation::UnexpectedOpcode),
        RemoteFault::InvalidRequest => Code::Operation(Operation::Unspecified),
        RemoteFault::MessageTooLong => Code::UntaggedBuffer(UntaggedBuffer::MessageTooLong),
        RemoteFault::NoBuffer => Code::UntaggedBuffer(UntaggedBuffer::NoBuffer),
        RemoteFault::TooManyReads | RemoteFault::Catastrophic => {
            Code::Operation(Operation::CatastrophicStream)
        }
    };
    with_context(code, fpdu)
}

/// The Terminate that an initiator may send when the reply cannot be accepted (RFC 6581 10); `None`
/// where the connection is just closed.
pub fn for_setup_error(error: &SetupError) -> Option<Terminate> {
    match error {
        SetupError::InsufficientIrd { .. } => {
            Some(Terminate::bare(Code::Mpa(Mpa::InsufficientIrd)))
        }
        SetupError::NoMatchingRtr => Some(Terminate::bare(Code::Mpa(Mpa::NoMatchingRtr))),
        _ => None,
    }
}

/// What `code`, received in a Terminate, means for the request it is about.
pub fn verdict(code: Code) -> Verdict {
    match code {
        Code::Protection(_) => Verdict::RemoteAccess,
        Code::TaggedBuffer(TaggedBuffer::InvalidVersion) => Verdict::Transport,
        Code::TaggedBuffer(_) => Verdict::RemoteAccess,
        Code::Operation(Operation::CannotInvalidate) => Verdict::RemoteAccess,
        Code::Operation(Operation::UnexpectedOpcode | Operation::Unspecified) => {
            Verdict::InvalidRequest
        }
        Code::Operation(Operation::InvalidVersion) => Verdict::Transport,
        Code::Operation(_) | Code::RdmapCatastrophic | Code::DdpCatastrophic => {
            Verdict::RemoteOperation
        }
        Code::UntaggedBuffer(UntaggedBuffer::NoBuffer) => Verdict::NoBuffer,
        Code::UntaggedBuffer(UntaggedBuffer::MessageTooLong) => Verdict::InvalidRequest,
        Code::UntaggedBuffer(_) | Code::Mpa(_) => Verdict::Transport,
        Code::Other { .. } => Verdict::RemoteOperation,
    }
}

/// Adds copies of the headers of the FPDU at fault, as far as its bytes go.
fn with_context(code: Code, fpdu: &[u8]) -> Option<Terminate> {
    let mut terminate = Terminate::bare(code);
    let [high, low, ulpdu @ ..] = fpdu else {
        return Some(terminate);
    };
    let length = u16::from_be_bytes([*high, *low]);
    let ulpdu = &ulpdu[..ulpdu.len().min(usize::from(length))];
    let Some(header) = HeaderCopy::from_ulpdu(ulpdu) else {
        return Some(terminate);
    };
    let op = Opcode::parse(header.as_bytes()[1]).ok();
    if op == Some(Opcode::Untagged(UntaggedOp::Terminate)) {
        return None;
    }
    terminate.segment = Some((length, header));
    if op == Some(Opcode::Untagged(UntaggedOp::ReadRequest)) {
        let payload = &ulpdu[header.as_bytes().len()..];
        terminate.read_request = ReadRequest::parse(payload).ok();
    }
    Some(terminate)
}
