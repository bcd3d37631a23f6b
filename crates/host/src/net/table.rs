//! A table of things with handles that go stale.

use super::token::Slot;

/// Values in slots that are used again with another generation.
pub(crate) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Table<T> {
    /// An empty table.
    pub(crate) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    /// Puts in what `make` gives for the slot that it will have.
    pub(crate) fn insert_with<E>(
        &mut self,
        make: impl FnOnce(Slot) -> Result<T, E>,
    ) -> Result<Slot, E> {
        let index = self.free.last().copied().unwrap_or(self.entries.len() as u32);
        let generation = self.entries.get(index as usize).map_or(0, |e| e.generation);
        let slot = Slot { index, generation };
        let value = Some(make(slot)?);
        if let Some(entry) = self.entries.get_mut(index as usize) {
            entry.value = value;
            self.free.pop();
        } else {
            self.entries.push(Entry { generation, value });
        }
        Ok(slot)
    }

    /// What is in a slot, unless it has been removed.
    #[inline]
    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        let entry = self.entries.get_mut(slot.index as usize)?;
        if entry.generation == slot.generation { entry.value.as_mut() } else { None }
    }

    /// As [`get_mut`](Self::get_mut), for looking.
    pub(crate) fn get(&self, slot: Slot) -> Option<&T> {
        let entry = self.entries.get(slot.index as usize)?;
        if entry.generation == slot.generation { entry.value.as_ref() } else { None }
    }

    /// Empties a slot.
    pub(crate) fn remove(&mut self, slot: Slot) -> Option<T> {
        let entry = self.entries.get_mut(slot.index as usize)?;
        if entry.generation != slot.generation {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = (entry.generation + 1) & 0x00ff_ffff;
        self.free.push(slot.index);
        Some(value)
    }

    /// How many values there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// The slots in use.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.entries
            .iter()
            .enumerate()
            .filter(|(_, e)| e.value.is_some())
            .map(|(index, e)| Slot { index: index as u32, generation: e.generation })
    }

    /// The values with their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, &T)> + '_ {
        self.slots().filter_map(|slot| Some((slot, self.get(slot)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_slots_find_nothing() {
        let mut table = Table::new();
        let a = table.insert_with(|_| Ok::<_, ()>('a')).unwrap();
        assert_eq!(table.insert_with(|_| Err::<char, _>("full")), Err("full"));
        let b = table.insert_with(|_| Ok::<_, ()>('b')).unwrap();
        assert_eq!(table.remove(a), Some('a'));
        assert_eq!(table.remove(a), None);
        let c = table.insert_with(|_| Ok::<_, ()>('c')).unwrap();
        assert_eq!((c.index, table.len()), (a.index, 2));
        assert_eq!(table.get_mut(a), None);
        assert_eq!(table.get(c), Some(&'c'));
        assert_eq!(table.slots().collect::<Vec<_>>(), [c, b]);
    }
}
