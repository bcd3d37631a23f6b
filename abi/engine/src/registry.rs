//! What the engine does not know of its objects: which context they belong to, what the facade
//! calls them, and by which keys work requests name regions and windows.

use std::collections::HashMap;

use quipu_host::{ContextId, Device};
use quipu_nic::{
    AhId, ChannelId, CountersId, CqId, FlowId, MrId, MwId, PdId, QpId, SrqId, TableId,
};

use crate::status::{INVALID, Outcome};

/// An object of the engine, in the order in which a context that is closed destroys them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Object {
    Flow(FlowId),
    Counters(CountersId),
    Qp(QpId),
    Table(TableId),
    Wq(SrqId),
    Srq(SrqId),
    Cq(CqId),
    Channel(ChannelId),
    Mw(MwId),
    Mr(MrId),
    Ah(AhId),
    Pd(PdId),
}

/// A context, by the number in its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ContextNumber(pub(crate) u64);

/// What is known of an object.
#[derive(Clone, Copy, Debug)]
struct Record {
    context: ContextNumber,
    /// What the facade calls it.
    cookie: u64,
    /// A region's key, or a window's.
    key: u32,
    /// Asynchronous events that were handed out with its cookie.
    told: u32,
    /// The object is gone, but so many events of it were taken in all: whoever took them and has
    /// not asked for the cookie yet still will.
    owed: Option<u32>,
}

/// All objects that the facades created.
#[derive(Default)]
pub(crate) struct Registry {
    contexts: HashMap<ContextNumber, (ContextId, Device)>,
    objects: HashMap<Object, Record>,
    /// Regions by lkey.
    regions: HashMap<u32, MrId>,
    /// Windows by the upper 24 bits of their keys.
    windows: HashMap<u32, MwId>,
    /// XRC domains.
    pub(crate) xrc: crate::xrc::Domains,
    last_context: u64,
}

impl Registry {
    /// Notes a context of a device.
    pub(crate) fn add_context(&mut self, id: ContextId, device: Device) -> ContextNumber {
        self.last_context += 1;
        let number = ContextNumber(self.last_context);
        self.contexts.insert(number, (id, device));
        number
    }

    /// The engine's name of a context.
    pub(crate) fn context(&self, number: ContextNumber) -> Outcome<ContextId> {
        self.contexts.get(&number).map(|&(id, _)| id).ok_or(INVALID)
    }

    /// The device that a context is of.
    pub(crate) fn device(&self, number: ContextNumber) -> Outcome<Device> {
        self.contexts.get(&number).map(|&(_, device)| device).ok_or(INVALID)
    }

    /// Forgets a context, and tells what is left in it, in the order in which to destroy it.
    pub(crate) fn remove_context(
        &mut self,
        number: ContextNumber,
    ) -> Outcome<(ContextId, Vec<Object>)> {
        let (id, _) = self.contexts.remove(&number).ok_or(INVALID)?;
        let left = self.objects.iter().filter(|(_, record)| record.context == number);
        let mut left: Vec<Object> =
            left.filter(|(_, record)| record.owed.is_none()).map(|(object, _)| *object).collect();
        left.sort_unstable();
        Ok((id, left))
    }

    /// Notes an object.
    pub(crate) fn add(&mut self, object: Object, context: ContextNumber, cookie: u64) {
        let record = Record { context, cookie, key: 0, told: 0, owed: None };
        self.objects.insert(object, record);
    }

    /// The context of an object.
    pub(crate) fn context_of(&self, object: Object) -> Outcome<ContextNumber> {
        let record = self.objects.get(&object).filter(|record| record.owed.is_none());
        record.map(|record| record.context).ok_or(INVALID)
    }

    /// The first object of a context that `pick` picks. Looks at all there are.
    pub(crate) fn find<T>(
        &self,
        context: ContextNumber,
        pick: impl Fn(Object) -> Option<T>,
    ) -> Option<T> {
        let own = self.objects.iter().filter(|(_, record)| record.context == context);
        own.filter(|(_, record)| record.owed.is_none()).find_map(|(object, _)| pick(*object))
    }

    /// Checks that an object belongs to a context.
    pub(crate) fn expect(&self, object: Object, context: ContextNumber) -> Outcome {
        if self.context_of(object)? == context { Ok(()) } else { Err(INVALID) }
    }

    /// Forgets an object, of which `taken` asynchronous events were taken.
    pub(crate) fn remove(&mut self, object: Object, taken: u32) {
        let Some(record) = self.objects.get_mut(&object) else { return };
        let key = record.key;
        if record.told < taken {
            record.owed = Some(taken);
        } else {
            self.objects.remove(&object);
        }
        self.forget_key(object, key);
    }

    /// The cookie for an event that was taken.
    pub(crate) fn tell(&mut self, object: Object) -> Option<u64> {
        let record = self.objects.get_mut(&object)?;
        record.told = record.told.wrapping_add(1);
        let cookie = record.cookie;
        if record.owed == Some(record.told) {
            self.objects.remove(&object);
        }
        Some(cookie)
    }

    /// Notes the key of a region, or any key of a window, in place of an earlier one.
    pub(crate) fn set_key(&mut self, object: Object, key: u32) {
        let Some(record) = self.objects.get_mut(&object) else { return };
        let old = std::mem::replace(&mut record.key, key);
        self.forget_key(object, old);
        match object {
            Object::Mr(mr) => drop(self.regions.insert(key, mr)),
            Object::Mw(mw) => drop(self.windows.insert(key >> 8, mw)),
            _ => {}
        }
    }

    /// Forgets a key, unless it was given to somebody else in the meantime.
    fn forget_key(&mut self, object: Object, key: u32) {
        match object {
            Object::Mr(mr) if self.regions.get(&key) == Some(&mr) => {
                self.regions.remove(&key);
            }
            Object::Mw(mw) if self.windows.get(&(key >> 8)) == Some(&mw) => {
                self.windows.remove(&(key >> 8));
            }
            _ => {}
        }
    }

    /// The region with an lkey.
    pub(crate) fn region(&self, lkey: u32) -> Outcome<MrId> {
        self.regions.get(&lkey).copied().ok_or(INVALID)
    }

    /// The window that a key belongs to.
    pub(crate) fn window(&self, rkey: u32) -> Outcome<MwId> {
        self.windows.get(&(rkey >> 8)).copied().ok_or(INVALID)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: ContextNumber = ContextNumber(1);

    #[test]
    fn an_event_that_was_taken_finds_its_cookie_after_the_object_is_gone() {
        let mut registry = Registry::default();
        let qp = Object::Qp(QpId(1 << 32));
        registry.add(qp, HERE, 99);
        assert_eq!(registry.tell(qp), Some(99));
        // Two were taken, of which one asked for its cookie so far.
        registry.remove(qp, 2);
        assert!(registry.context_of(qp).is_err());
        assert_eq!(registry.tell(qp), Some(99));
        assert_eq!(registry.tell(qp), None);
        assert!(registry.objects.is_empty());
    }

    #[test]
    fn a_key_that_found_a_new_owner_is_left_to_it() {
        let mut registry = Registry::default();
        let (old, new) = (MrId(1 << 32), MrId(2 << 32));
        registry.add(Object::Mr(old), HERE, 0);
        registry.set_key(Object::Mr(old), 0x4201);
        registry.add(Object::Mr(new), HERE, 0);
        registry.set_key(Object::Mr(new), 0x4201);
        registry.remove(Object::Mr(old), 0);
        assert_eq!(registry.region(0x4201), Ok(new));
        registry.set_key(Object::Mr(new), 0x4302);
        assert_eq!(registry.region(0x4201), Err(INVALID));
        registry.remove(Object::Mr(new), 0);
        assert!(registry.regions.is_empty());
    }

    #[test]
    fn windows_are_found_by_any_of_their_keys() {
        let mut registry = Registry::default();
        let mw = MwId(1 << 32);
        registry.add(Object::Mw(mw), HERE, 0);
        registry.set_key(Object::Mw(mw), 0x1234_5600);
        assert_eq!(registry.window(0x1234_56ff), Ok(mw));
        assert_eq!(registry.window(0x1234_5700), Err(INVALID));
    }
}
