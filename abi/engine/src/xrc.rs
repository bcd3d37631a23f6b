//! XRC domains: which call opened which, and which belongs to an inode. They are shared within the
//! process only.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;

use libc::{O_CREAT, O_EXCL, O_PATH, c_int};
use quipu_abi_types::*;
use quipu_cabi::descriptors::move_file_up;
use quipu_host::Device;
use quipu_host::fault::Call;
use quipu_nic::XrcdId;

use crate::entry::{Out, entries};
use crate::instance::{Instance, current, for_destructor};
use crate::registry::ContextNumber;
use crate::status::{Failure, INVALID, Outcome, unsupported};

/// An inode, which stays while this lives: the number of one that is gone is another file's soon.
struct Inode {
    device: u64,
    number: u64,
    /// A descriptor of the inode alone. A copy of the program's would keep locks of flock(2), and closing it
    /// would give up those of fcntl(2).
    _kept: File,
}

impl Inode {
    /// That behind a descriptor of the program.
    fn of(fd: c_int) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{fd}");
        let kept = move_file_up(OpenOptions::new().read(true).custom_flags(O_PATH).open(path)?)?;
        let found = kept.metadata()?;
        Ok(Self { device: found.st_dev(), number: found.st_ino(), _kept: kept })
    }

    fn is(&self, other: &Self) -> bool {
        (self.device, self.number) == (other.device, other.number)
    }
}

/// What one call opened.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct XrcdNumber(pub(crate) u64);

/// The XRC domains of all contexts.
#[derive(Default)]
pub(crate) struct Domains {
    opened: HashMap<XrcdNumber, Opened>,
    last: u64,
}

/// A domain as one call opened it.
struct Opened {
    domain: XrcdId,
    context: ContextNumber,
    inode: Option<Inode>,
}

impl Domains {
    /// The domain of an inode.
    fn of_inode(&self, inode: &Inode) -> Option<XrcdId> {
        let is = |opened: &&Opened| opened.inode.as_ref().is_some_and(|known| known.is(inode));
        self.opened.values().find(is).map(|opened| opened.domain)
    }

    fn add(&mut self, opened: Opened) -> XrcdNumber {
        self.last += 1;
        let number = XrcdNumber(self.last);
        self.opened.insert(number, opened);
        number
    }

    /// The domain that a call opened, and the context that it did so for.
    pub(crate) fn find(&self, number: XrcdNumber) -> Outcome<(XrcdId, ContextNumber)> {
        let opened = self.opened.get(&number).ok_or(INVALID)?;
        Ok((opened.domain, opened.context))
    }

    /// What a context has open.
    fn of_context(&self, context: ContextNumber) -> Vec<XrcdNumber> {
        let own = self.opened.iter().filter(|(_, opened)| opened.context == context);
        own.map(|(number, _)| *number).collect()
    }
}

/// Why the inode of a descriptor cannot be had.
fn no_inode(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound => EngineStatus::BadDescriptor.into(),
        _ => INVALID,
    }
}

fn open(
    instance: &Instance,
    context: ContextNumber,
    fd: c_int,
    oflag: c_int,
) -> Outcome<XrcdNumber> {
    let inode = if fd == -1 { None } else { Some(Inode::of(fd).map_err(|e| no_inode(&e))?) };
    // What is looked for below stays there, or away.
    let _turn = instance.xrcd_turn();
    let existing = {
        let registry = instance.registry();
        registry.context(context)?;
        inode.as_ref().and_then(|inode| registry.xrc.of_inode(inode))
    };
    let domain = match existing {
        Some(_) if oflag & O_EXCL != 0 => return Err(INVALID),
        Some(domain) => domain,
        // Without an inode it is a new one, whatever the flags say.
        None if inode.is_some() && oflag & O_CREAT == 0 => {
            return Err(EngineStatus::WouldBlock.into());
        }
        // Not under the registry's lock, which is taken under the engine's.
        None => instance.engine.alloc_xrcd()?,
    };
    Ok(instance.registry().xrc.add(Opened { domain, context, inode }))
}

fn close(instance: &Instance, number: XrcdNumber) -> Outcome {
    let _turn = instance.xrcd_turn();
    let (opened, last) = {
        let domains = &mut instance.registry().xrc;
        let opened = domains.opened.remove(&number).ok_or(INVALID)?;
        let shared = domains.opened.values().any(|other| other.domain == opened.domain);
        (opened, !shared)
    };
    if !last {
        return Ok(());
    }
    instance.engine.dealloc_xrcd(opened.domain).map_err(|error| {
        instance.registry().xrc.opened.insert(number, opened);
        error.into()
    })
}

/// Closes what a context has left open.
pub(crate) fn close_left(instance: &Instance, context: ContextNumber) {
    let left = instance.registry().xrc.of_context(context);
    for number in left {
        if close(instance, number).is_err() {
            tracing::warn!("an XRC domain outlives its context");
        }
    }
}

entries! {
    /// [`EngineApi::open_xrcd`]
    fn open_xrcd(context: ContextHandle, fd: c_int, oflag: c_int, out: *mut XrcdHandle) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        if instance.registry().device(instance.context(context))? != Device::Quipu0 {
            return Err(unsupported("XRC domains of this device"));
        }
        instance.engine.note_call(Call::OpenXrcd)?;
        let opened = open(instance, instance.context(context), fd, oflag)?;
        out.fill(instance.xrcd_handle(opened));
        Ok(())
    }

    /// [`EngineApi::close_xrcd`]
    fn close_xrcd(xrcd: XrcdHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::CloseXrcd)?;
        instance.destroyed(close(instance, instance.xrcd(xrcd)))
    }
}
