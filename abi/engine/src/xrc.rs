//! XRC domains: which call opened which, and which belongs to an inode. They are shared within the
//! process only.

use std::collections::HashMap;
use std::fs;
use std::os::linux::fs::MetadataExt;

use libc::{O_CREAT, O_EXCL, c_int};
use quipu_abi_types::*;
use quipu_host::fault::Call;
use quipu_nic::XrcdId;

use crate::entry::{Out, entries};
use crate::instance::{Instance, current, for_destructor};
use crate::registry::ContextNumber;
use crate::status::{INVALID, Outcome};

/// Device and number of an inode.
type Inode = (u64, u64);

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
#[derive(Clone, Copy)]
struct Opened {
    domain: XrcdId,
    context: ContextNumber,
    inode: Option<Inode>,
}

impl Domains {
    /// The domain of an inode.
    fn of_inode(&self, inode: Inode) -> Option<XrcdId> {
        self.opened.values().find(|opened| opened.inode == Some(inode)).map(|opened| opened.domain)
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

/// The inode behind a descriptor of the program.
fn inode_of(fd: c_int) -> Outcome<Inode> {
    let found = fs::metadata(format!("/proc/self/fd/{fd}")).map_err(|_| INVALID)?;
    Ok((found.st_dev(), found.st_ino()))
}

fn open(
    instance: &Instance,
    context: ContextNumber,
    fd: c_int,
    oflag: c_int,
) -> Outcome<XrcdNumber> {
    let inode = if fd == -1 { None } else { Some(inode_of(fd)?) };
    let known = |registry: &crate::registry::Registry| {
        registry.context(context)?;
        match inode.and_then(|inode| registry.xrc.of_inode(inode)) {
            Some(_) if oflag & O_EXCL != 0 => Err(INVALID),
            known => Ok(known),
        }
    };
    let existing = known(&instance.registry())?;
    if let Some(domain) = existing {
        return Ok(instance.registry().xrc.add(Opened { domain, context, inode }));
    }
    if oflag & O_CREAT == 0 {
        return Err(EngineStatus::WouldBlock.into());
    }
    // Not under the registry's lock, which is taken under the engine's.
    let domain = instance.engine.alloc_xrcd()?;
    Ok(instance.registry().xrc.add(Opened { domain, context, inode }))
}

fn close(instance: &Instance, number: XrcdNumber) -> Outcome {
    let (opened, last) = {
        let domains = &mut instance.registry().xrc;
        let opened = domains.opened.remove(&number).ok_or(INVALID)?;
        (opened, !domains.opened.values().any(|other| other.domain == opened.domain))
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
        instance.engine.note_call(Call::OpenXrcd)?;
        let opened = open(instance, instance.context(context), fd, oflag)?;
        out.fill(instance.xrcd_handle(opened));
        Ok(())
    }

    /// [`EngineApi::close_xrcd`]
    fn close_xrcd(xrcd: XrcdHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.destroyed(close(instance, instance.xrcd(xrcd)))
    }
}
