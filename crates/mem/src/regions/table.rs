//! The direct-mapped table behind [`Regions`](super::Regions).

use rand_chacha::ChaCha20Rng;
use rand_core::RngCore;

use super::backing::Backing;
use super::windows::WindowType;
use crate::access::Access;
use crate::key::Key;
use crate::segment::Segment;

/// Stands for every queue pair: queue pair numbers have 24 bits.
pub const ANY_QP: u32 = u32::MAX;

/// A right beside those of [`Access`]: the key may be used as an lkey. Windows never have it.
pub(crate) const LOCAL: u32 = 1 << 31;

/// The most slots: the index of a key has 24 bits.
const MAX_SLOTS: usize = 1 << 24;

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Free,
    Region {
        /// Windows bound to the region.
        bound: u32,
    },
    Window {
        kind: WindowType,
        /// The region that the window is bound to.
        region: Option<Key>,
    },
}

/// A slot. What the check of an access reads comes first and shares a cache line.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Entry {
    /// The key that opens the slot; zero if none does (free, or a window that is not bound).
    pub key: u32,
    pub pd: u32,
    /// [`Access`] bits, and [`LOCAL`] for a region.
    pub access: u32,
    /// The queue pair that a type 2 window is bound to, else [`ANY_QP`].
    pub qp_num: u32,
    pub iova: u64,
    pub len: u64,
    pub addr: usize,
    /// The upper 24 bits of the key of whatever uses the slot, also while `key` is zero.
    pub index: u32,
    pub role: Role,
    pub published: bool,
    pub backing: Backing,
    pub owner: Option<Segment>,
}

// One slot is two cache lines, of which an access reads one.
const _: () = assert!(size_of::<Entry>() == 128);

impl Entry {
    pub(crate) const FREE: Entry = Entry {
        key: 0,
        pd: 0,
        access: 0,
        qp_num: ANY_QP,
        iova: 0,
        len: 0,
        addr: 0,
        index: 0,
        role: Role::Free,
        published: false,
        backing: Backing::Memory,
        owner: None,
    };

    pub(crate) fn rights(&self) -> Access {
        Access::from_bits_truncate(self.access)
    }

    pub(crate) fn bound_windows(&self) -> u32 {
        if let Role::Region { bound } = self.role { bound } else { 0 }
    }

    pub(crate) fn window_type(&self) -> Option<WindowType> {
        if let Role::Window { kind, .. } = self.role { Some(kind) } else { None }
    }
}

/// As many regions and windows as the table may hold.
#[derive(Debug)]
pub(crate) struct Full;

#[derive(Debug)]
pub(crate) struct Table {
    /// A power of two of slots, never more than half of them used.
    slots: Vec<Entry>,
    used: usize,
    max: usize,
    rng: ChaCha20Rng,
}

impl Table {
    pub(crate) fn new(rng: ChaCha20Rng, max_entries: u32) -> Table {
        let max = (max_entries as usize).min(MAX_SLOTS / 2);
        let mut table = Table { slots: Vec::new(), used: 0, max, rng };
        table.slots.resize_with(64, || Entry::FREE);
        table
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// The slot that a key would be in, whatever is there.
    #[inline(always)]
    pub(crate) fn at(&self, key: Key) -> &Entry {
        let slot = self.slot_of(key);
        // The mask keeps the index inside; the compiler sees it too, as len - 1 is the mask.
        &self.slots[slot]
    }

    /// The region whose whole key this is.
    pub(crate) fn region(&self, key: Key) -> Option<&Entry> {
        let entry = self.at(key);
        let is_region = matches!(entry.role, Role::Region { .. });
        (is_region && entry.key == key.0).then_some(entry)
    }

    /// The window that the upper 24 bits of the key name.
    pub(crate) fn window(&self, key: Key) -> Option<&Entry> {
        let entry = self.at(key);
        let is_window = matches!(entry.role, Role::Window { .. });
        (is_window && entry.index == key.index()).then_some(entry)
    }

    /// The used slot that the upper 24 bits of the key name.
    pub(crate) fn slot_mut(&mut self, key: Key) -> Option<&mut Entry> {
        let slot = self.slot_of(key);
        let entry = &mut self.slots[slot];
        (entry.role != Role::Free && entry.index == key.index()).then_some(entry)
    }

    /// The used slots.
    pub(crate) fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.slots.iter_mut().filter(|entry| entry.role != Role::Free)
    }

    /// Puts an entry under a new key. A window's entry stays shut: its `key` is zero.
    pub(crate) fn insert(&mut self, entry: Entry) -> Result<Key, Full> {
        if self.used >= self.max {
            return Err(Full);
        }
        if (self.used + 1) * 2 > self.slots.len() {
            self.grow();
        }
        let key = self.draw();
        self.used += 1;
        Ok(self.place(key, entry))
    }

    /// Puts back what [`remove`](Table::remove) took from under `key`.
    pub(crate) fn put_back(&mut self, key: Key, entry: Entry) -> Key {
        self.used += 1;
        self.place(key, entry)
    }

    /// Empties the slot of a key that is in use.
    pub(crate) fn remove(&mut self, key: Key) -> Entry {
        let slot = self.slot_of(key);
        self.used -= 1;
        core::mem::replace(&mut self.slots[slot], Entry::FREE)
    }

    fn place(&mut self, key: Key, entry: Entry) -> Key {
        let slot = self.slot_of(key);
        let is_window = matches!(entry.role, Role::Window { .. });
        let open = if is_window { 0 } else { key.0 };
        self.slots[slot] = Entry { key: open, index: key.index(), ..entry };
        key
    }

    /// A random key whose slot is free. At most half the slots are used, so that a draw fails at
    /// most every second time.
    fn draw(&mut self) -> Key {
        loop {
            let key = Key(self.rng.next_u32());
            if key.index() != 0 && self.at(key).role == Role::Free {
                return key;
            }
        }
    }

    /// Doubles the table. Entries stay under their keys: two that differ in the low bits of their
    /// index differ in more of them too.
    fn grow(&mut self) {
        let wider = (self.slots.len() * 2).min(MAX_SLOTS);
        let mut slots = Vec::new();
        slots.resize_with(wider, || Entry::FREE);
        for entry in core::mem::take(&mut self.slots) {
            if entry.role != Role::Free {
                let slot = entry.index as usize & (wider - 1);
                slots[slot] = entry;
            }
        }
        self.slots = slots;
    }

    #[inline(always)]
    fn slot_of(&self, key: Key) -> usize {
        key.index() as usize & (self.slots.len() - 1)
    }
}
