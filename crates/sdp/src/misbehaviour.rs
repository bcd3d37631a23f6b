//! What a peer can do that no peer may.

use quipu_wire::WireError;
use thiserror::Error;

/// Why a connection ends by the peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PeerMisbehaved {
    /// Bytes that are no message.
    #[error("the peer's message is malformed: {0}")]
    Malformed(#[from] WireError),
    /// A message number that is not the next one.
    #[error("the peer's message has number {got}, but {expected} is next")]
    Sequence {
        /// The number that was due.
        expected: u32,
        /// The number in the message.
        got: u32,
    },
    /// An acknowledgement of messages that were not sent, or less than before.
    #[error("the peer acknowledges message {0}, which was not sent or acknowledged before")]
    Acknowledgement(u32),
    /// Data while a buffer that it advertised is not read to its end.
    #[error("the peer sends data before its advertised buffer is read")]
    DataDuringAdvert,
    /// More advertised buffers than allowed.
    #[error("the peer advertises a second buffer")]
    TooManyAdverts,
    /// An advertised buffer without its beginning (combined mode), or with it (pipelined mode), or with
    /// nothing left to read.
    #[error("the peer advertises a buffer that its mode does not allow")]
    Advert,
    /// Reports more bytes than were advertised, or a buffer that was not.
    #[error("the peer reports {0} bytes read, more than were advertised")]
    ReadTooMuch(u32),
    /// A change to a mode that is not allowed now.
    #[error("the peer changes the mode of a direction in a way that the protocol does not allow")]
    ModeChange,
    /// Data after the end of its stream, or a second end.
    #[error("the peer sends after it has ended its stream")]
    AfterDisconnect,
    /// Receive buffers that shrink, or are too small, or change again before a change is done.
    #[error("the peer changes receive buffers to {0} bytes, which the protocol does not allow now")]
    BufferSize(u32),
    /// A message of a part of the protocol that neither end has agreed to.
    #[error("the peer sends a message of kind {0:#04x}, which was not agreed on")]
    NotAgreed(u8),
}
