//! A table whose entries have numbers that are never valid again once an entry is gone.

use std::fmt;
use std::marker::PhantomData;

/// The number of an entry: its place, and how often that place was used before.
pub struct Id<T> {
    index: u32,
    generation: u32,
    of: PhantomData<fn() -> T>,
}

impl<T> Id<T> {
    /// The place in the table, which another entry may take later.
    #[must_use]
    #[inline]
    pub fn index(self) -> u32 {
        self.index
    }

    /// The number as one value, for the cookie of an object elsewhere.
    #[must_use]
    pub fn to_u64(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The number that [`to_u64`](Self::to_u64) gave.
    #[must_use]
    pub fn from_u64(value: u64) -> Self {
        Self { index: value as u32, generation: (value >> 32) as u32, of: PhantomData }
    }
}

impl<T> Clone for Id<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Id<T> {}

impl<T> PartialEq for Id<T> {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        (self.index, self.generation) == (other.index, other.generation)
    }
}

impl<T> Eq for Id<T> {}

impl<T> std::hash::Hash for Id<T> {
    fn hash<S: std::hash::Hasher>(&self, state: &mut S) {
        self.to_u64().hash(state);
    }
}

impl<T> fmt::Debug for Id<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    value: Option<T>,
}

/// The table.
#[derive(Debug)]
pub struct Slab<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an entry.
    pub fn insert(&mut self, value: T) -> Id<T> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, value: None });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.value = Some(value);
        Id { index, generation: place.generation, of: PhantomData }
    }

    /// Takes an entry out; none if it is gone.
    pub fn remove(&mut self, id: Id<T>) -> Option<T> {
        let place = self.places.get_mut(id.index as usize)?;
        if place.generation != id.generation {
            return None;
        }
        let value = place.value.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(id.index);
        Some(value)
    }

    /// An entry.
    #[inline]
    #[must_use]
    pub fn get(&self, id: Id<T>) -> Option<&T> {
        let place = self.places.get(id.index as usize)?;
        if place.generation == id.generation { place.value.as_ref() } else { None }
    }

    /// An entry, to be changed.
    #[inline]
    pub fn get_mut(&mut self, id: Id<T>) -> Option<&mut T> {
        let place = self.places.get_mut(id.index as usize)?;
        if place.generation == id.generation { place.value.as_mut() } else { None }
    }

    /// The entry at a place, whatever its number is.
    #[must_use]
    pub fn at(&self, index: u32) -> Option<(Id<T>, &T)> {
        let place = self.places.get(index as usize)?;
        let id = Id { index, generation: place.generation, of: PhantomData };
        place.value.as_ref().map(|value| (id, value))
    }

    /// All entries, in the order of their places.
    pub fn iter(&self) -> impl Iterator<Item = (Id<T>, &T)> {
        (0..self.places.len() as u32).filter_map(|index| self.at(index))
    }

    /// The numbers of all entries.
    #[must_use]
    pub fn ids(&self) -> Vec<Id<T>> {
        self.iter().map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_never_valid_again() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!(slab.remove(a), Some('a'));
        assert_eq!(slab.remove(a), None);
        let c = slab.insert('c');
        assert_eq!((c.index(), c == a), (a.index(), false));
        assert_eq!((slab.get(a), slab.get(b), slab.get(c)), (None, Some(&'b'), Some(&'c')));
        assert_eq!(Id::<char>::from_u64(c.to_u64()), c);
        assert_eq!(slab.len(), 2);
    }
}
