//! Counters of what flow rules match (`ibv_create_counters(3)`).

use crate::adapter::Adapter;
use crate::error::Fault;
use crate::probe::Probe;
use crate::slab::Slab;
use crate::types::CountersId;

/// Values that one object has at most.
pub const MAX_COUNTERS: usize = 64;
/// Objects that an adapter has at most.
const MAX_OBJECTS: usize = 1 << 12;

/// What a counter counts, with the values of `ibv_counter_description`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// Frames.
    Packets,
    /// Their bytes.
    Bytes,
}

/// An object with values that only grow.
#[derive(Default)]
pub(crate) struct Counters {
    /// What adds to which value.
    points: Vec<(CounterKind, usize)>,
    values: Vec<u64>,
    /// Rules that count here.
    users: u32,
}

/// A table of them.
pub(crate) fn table() -> Slab<CountersId, Counters> {
    Slab::new(MAX_OBJECTS)
}

impl Counters {
    /// Counts a frame of `len` bytes.
    pub(super) fn count(&mut self, len: usize) {
        for &(kind, index) in &self.points {
            self.values[index] += match kind {
                CounterKind::Packets => 1,
                CounterKind::Bytes => len as u64,
            };
        }
    }
}

impl<P: Probe> Adapter<P> {
    /// Creates an object without values.
    ///
    /// # Errors
    /// [`Fault::Exhausted`].
    pub fn create_counters(&mut self) -> Result<CountersId, Fault> {
        self.hub.flow_counters.insert(Counters::default()).ok_or(Fault::Exhausted("counters"))
    }

    /// Has the value at `index` grow by what is counted. Several may add to one.
    ///
    /// # Errors
    /// [`Fault::Busy`] while rules count here; no such object, an index of [`MAX_COUNTERS`] or more, or as
    /// many points already.
    pub fn attach_counter(
        &mut self,
        id: CountersId,
        kind: CounterKind,
        index: usize,
    ) -> Result<(), Fault> {
        let counters = self.hub.flow_counters.get_mut(id).ok_or(Fault::NoSuchObject)?;
        if counters.users > 0 {
            return Err(Fault::Busy);
        }
        if index >= MAX_COUNTERS || counters.points.len() >= MAX_COUNTERS {
            return Err(Fault::Invalid("too many counters"));
        }
        counters.points.push((kind, index));
        let len = counters.values.len().max(index + 1);
        counters.values.resize(len, 0);
        Ok(())
    }

    /// The values of an object; 0 where there is none.
    ///
    /// # Errors
    /// No such object.
    pub fn read_counters(&self, id: CountersId, values: &mut [u64]) -> Result<(), Fault> {
        let counters = self.hub.flow_counters.get(id).ok_or(Fault::NoSuchObject)?;
        for (index, value) in values.iter_mut().enumerate() {
            *value = counters.values.get(index).copied().unwrap_or(0);
        }
        Ok(())
    }

    /// Destroys an object.
    ///
    /// # Errors
    /// [`Fault::Busy`] while rules count here.
    pub fn destroy_counters(&mut self, id: CountersId) -> Result<(), Fault> {
        let counters = self.hub.flow_counters.get(id).ok_or(Fault::NoSuchObject)?;
        if counters.users > 0 {
            return Err(Fault::Busy);
        }
        self.hub.flow_counters.remove(id);
        Ok(())
    }

    /// Counts a rule among the users of an object, or no more.
    ///
    /// # Errors
    /// No such object.
    pub(super) fn use_counters(&mut self, id: CountersId, by: i32) -> Result<(), Fault> {
        let counters = self.hub.flow_counters.get_mut(id).ok_or(Fault::NoSuchObject)?;
        counters.users = counters.users.wrapping_add_signed(by);
        Ok(())
    }
}
