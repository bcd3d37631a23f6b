//! Names of things that go stale when the thing is gone.

/// Set in every key, so that none is 0.
const VALID: u64 = 1 << 63;
const GENERATION_MASK: u32 = 0x00ff_ffff;

macro_rules! keys {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// Its place among those of its kind.
            pub const fn index(self) -> u32 {
                self.0 as u32
            }

            /// Which of those that were ever there; 24 bits.
            pub const fn generation(self) -> u32 {
                (self.0 >> 32) as u32 & GENERATION_MASK
            }

            /// The key with this place and generation.
            pub const fn new(index: u32, generation: u32) -> Self {
                Self(VALID | ((generation & GENERATION_MASK) as u64) << 32 | index as u64)
            }
        }

        impl Key for $name {
            fn make(index: u32, generation: u32) -> Self {
                Self::new(index, generation)
            }
            fn bits(self) -> u64 {
                self.0
            }
        }
    )*};
}

/// A key of a [`Slab`].
pub(crate) trait Key: Copy {
    fn make(index: u32, generation: u32) -> Self;
    fn bits(self) -> u64;
}

keys! {
    /// An event channel.
    ChannelKey,
    /// An identifier.
    IdKey,
    /// A TCP stream.
    StreamKey,
}

struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

/// Values in places that are used again under another key.
pub(crate) struct Slab<K, T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    kind: std::marker::PhantomData<K>,
}

impl<K: Key, T> Slab<K, T> {
    pub(crate) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), kind: std::marker::PhantomData }
    }

    pub(crate) fn insert(&mut self, value: T) -> K {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, value: None });
            self.entries.len() as u32 - 1
        });
        let entry = &mut self.entries[index as usize];
        entry.value = Some(value);
        K::make(index, entry.generation)
    }

    fn entry(&self, key: K) -> Option<usize> {
        let index = key.bits() as u32;
        let entry = self.entries.get(index as usize)?;
        (K::make(index, entry.generation).bits() == key.bits()).then_some(index as usize)
    }

    pub(crate) fn get(&self, key: K) -> Option<&T> {
        self.entries[self.entry(key)?].value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let index = self.entry(key)?;
        self.entries[index].value.as_mut()
    }

    pub(crate) fn remove(&mut self, key: K) -> Option<T> {
        let index = self.entry(key)?;
        let entry = &mut self.entries[index];
        let value = entry.value.take()?;
        entry.generation = (entry.generation + 1) & GENERATION_MASK;
        self.free.push(index as u32);
        Some(value)
    }

    /// The keys of all values.
    pub(crate) fn keys(&self) -> impl Iterator<Item = K> {
        let used = self.entries.iter().enumerate().filter(|(_, entry)| entry.value.is_some());
        used.map(|(index, entry)| K::make(index as u32, entry.generation))
    }

    /// How many values there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_forged_keys_find_nothing() {
        let mut slab = Slab::<IdKey, char>::new();
        let a = slab.insert('a');
        assert_eq!(slab.get(a), Some(&'a'));
        assert_eq!(slab.remove(a), Some('a'));
        assert!(slab.get(a).is_none() && slab.remove(a).is_none());
        let b = slab.insert('b');
        assert_eq!((a.index(), a.generation() + 1), (b.index(), b.generation()));
        for forged in [0, 1, b.0 ^ 1 << 63, b.0 | 1 << 60, u64::MAX] {
            assert!(slab.get(IdKey(forged)).is_none());
        }
        assert_eq!(slab.len(), 1);
    }
}
