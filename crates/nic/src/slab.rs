//! A table of objects by generational handle: a stale handle finds nothing rather than a stranger.

use std::marker::PhantomData;

/// A handle made of bits: slot index in the low half, generation in the high half, never 0.
pub(crate) trait Key: Copy {
    /// The highest generation that it has room for.
    const GENERATIONS: u32 = u32::MAX;
    fn from_bits(bits: u64) -> Self;
    fn bits(self) -> u64;
}

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Objects of one kind.
pub(crate) struct Slab<K, T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    limit: usize,
    key: PhantomData<K>,
}

impl<K: Key, T> Slab<K, T> {
    /// An empty table of at most `limit` objects.
    pub(crate) fn new(limit: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), limit, key: PhantomData }
    }

    /// Stores what `make` builds from its own handle, or `None` if the table is full.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(K) -> T) -> Option<K> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < self.limit => {
                self.slots.push(Slot { generation: 1, value: None });
                (self.slots.len() - 1) as u32
            }
            None => return None,
        };
        let slot = &mut self.slots[index as usize];
        let key = K::from_bits(u64::from(slot.generation) << 32 | u64::from(index));
        slot.value = Some(make(key));
        Some(key)
    }

    pub(crate) fn insert(&mut self, value: T) -> Option<K> {
        self.insert_with(|_| value)
    }

    #[inline]
    pub(crate) fn get(&self, key: K) -> Option<&T> {
        let slot = self.slots.get(key.bits() as u32 as usize)?;
        if slot.generation == (key.bits() >> 32) as u32 { slot.value.as_ref() } else { None }
    }

    /// Whether there are more objects than a processor's caches hold, so that [`prefetch`](Self::prefetch)
    /// gains something.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        const FEW: usize = 64;
        self.slots.len() > FEW
    }

    /// Has the processor fetch an object that is needed soon.
    #[inline]
    pub(crate) fn prefetch(&self, key: K) {
        if let Some(slot) = self.slots.get(key.bits() as u32 as usize) {
            quipu_mem::prefetch(slot);
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.bits() as u32 as usize)?;
        if slot.generation == (key.bits() >> 32) as u32 { slot.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, key: K) -> Option<T> {
        self.get(key)?;
        let index = key.bits() as u32;
        let slot = &mut self.slots[index as usize];
        slot.generation = (slot.generation.wrapping_add(1) & K::GENERATIONS).max(1);
        self.free.push(index);
        slot.value.take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let key = K::from_bits(u64::from(slot.generation) << 32 | index as u64);
            slot.value.as_ref().map(|value| (key, value))
        })
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
            let key = K::from_bits(u64::from(slot.generation) << 32 | index as u64);
            slot.value.as_mut().map(|value| (key, value))
        })
    }

    pub(crate) fn keys(&self) -> Vec<K> {
        self.iter().map(|(key, _)| key).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::PdId;

    #[test]
    fn a_stale_handle_finds_nothing() {
        let mut slab: Slab<PdId, &str> = Slab::new(2);
        let a = slab.insert("a").unwrap();
        let b = slab.insert("b").unwrap();
        assert_eq!(slab.insert("c"), None);
        assert_eq!(slab.remove(a), Some("a"));
        let c = slab.insert("c").unwrap();
        assert_ne!(a, c);
        assert_eq!(slab.get(a), None);
        assert_eq!((slab.get(b), slab.get(c)), (Some(&"b"), Some(&"c")));
        assert_eq!(slab.len(), 2);
    }
}
