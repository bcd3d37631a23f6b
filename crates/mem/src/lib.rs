//! Registered memory: regions, keys, windows, access checks, shared segments and rings.
//!
//! This crate contains no networking code, no protocol, no clock, no file and no source of
//! randomness of its own (seeds are passed in). It is the only crate below `host` with unsafe code:
//! the one place where a key and an offset become a pointer.
//!
//! | module | what it is |
//! |---|---|
//! | [`Access`] | the access rights of regions and windows, with the values of `ibv_access_flags` |
//! | [`Regions`] | the translation and protection table of an adapter: keys, regions, windows |
//! | [`Span`] | a range of registered memory that passed its checks; copies go through it, or through its address and length ([`Span::as_raw`]) |
//! | [`Segment`] | a block of memory with several users: threads, or processes that map it |
//! | [`ring`] | single-producer single-consumer rings inside a segment, and a channel made of them |
//! | [`Arena`] | blocks of one size out of a sparse segment |
//! | [`Directory`], [`Guard`] | what same-host peers may look up for themselves, and how it is withdrawn |
//! | [`SharedPagesWriter`], [`SharedPagesReader`] | which of that they may map, instead of having the kernel copy |
//!
//! # Who owns which buffer
//!
//! "Shared" means that bytes may change under the reader at any moment: they are copied out once
//! and only then looked at.
//!
//! | buffer | before | during | after |
//! |---|---|---|---|
//! | memory given to [`Regions::register`] | the application | the application; the table's user may copy to and from it at any time | the application's alone when [`Regions::deregister`] returned and, if it was published, every link's [`Guard`] was passed |
//! | memory given to [`Regions::register_owned`] | whoever holds clones of the [`Segment`] | shared by those and the table | handed back in [`Withdrawn::owner`]; freed with the last clone |
//! | a [`Span`] | - | the borrow of the table keeps the registration alive; the bytes are shared with the application | ends with the borrow |
//! | the address and length of a [`Span`], handed to who sends and receives | - | shared with the application; whoever got them reads or writes the range itself, mostly by a system call | not used after the adapter's next call: the memory may be taken back then |
//! | the range that [`Span::as_raw`] names | as of the span | the kernel copies from or to it, for one system call with the table borrowed or locked | forgotten: who needs it again asks again |
//! | `&[u8]` and `&mut [u8]` arguments | the caller | the callee, for the call | the caller |
//! | a ring slot or byte-ring range, before its push | the producer | the producer writes it | the consumer's, once the tag is stored with release order |
//! | a ring slot or byte-ring range, after its pop | the consumer | still the consumer's until `publish` | the producer's, once it reads the counter |
//! | a control line | - | written by one side for ever ([`ring::ProducerControl`], [`ring::ConsumerControl`]), read by the other | - |
//! | a directory entry | the publisher | written by the publisher alone, read by peers under its sequence word | empty once withdrawn |
//! | an [`Arena`] block | the arena | whoever allocated it | the arena's, not zeroed ([`Block::fresh`]) |
//!
//! # Racing with the application
//!
//! RDMA lets a program look at its buffers while the adapter writes them, and a peer process may
//! scribble over a shared segment. No Rust reference to such memory is ever made, except to
//! atomics; bytes move through raw copies. What a racing copy moves is a mix of old and new bytes,
//! as RDMA itself defines, and nothing in this crate decides anything from bytes that are still in
//! shared memory. Copies of the last bytes of a message are ordered after all others (see [`Span`]).

mod access;
mod arena;
mod copy;
mod directory;
mod guard;
mod key;
mod pages;
mod regions;
pub mod ring;
mod segment;
mod span;

pub use access::{Access, AccessError, AccessFlagsError};
pub use arena::{Arena, ArenaError, Block};
pub use copy::prefetch_value as prefetch;
pub use directory::{Directory, DirectoryReader, LookupError, RemoteRange};
pub use guard::{Guard, GuardState, GuardWait};
pub use key::Key;
pub use pages::{
    MAX_SHARED, SHARED_PAGES_BYTES, SharedPages, SharedPagesReader, SharedPagesWriter,
};
pub use regions::{
    ANY_QP, Bind, BindError, DeregisterError, InvalidateError, Loan, Mappings, NULL_LEN, Nothing,
    Pieces, RegionInfo, Regions, RegionsConfig, RegisterError, Registration, ReregisterError,
    Reregistration, Sge, Vouched, WindowType, Withdrawn, list_len,
};
pub use segment::{Segment, SegmentError, Shared};
pub use span::Span;
