//! Requests that are under way: all that is needed to return them to the program.

use crate::conn::ConnId;
use crate::message::Message;
use crate::types::Operation;

/// What a record stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A request or a get of the program.
    Program(Operation),
    /// The exchange of segments.
    Segment,
    /// A reply that was refused.
    Refusal,
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) conn: ConnId,
    pub(crate) purpose: Purpose,
    /// The message; its arguments come back to the program if it is refused.
    pub(crate) message: Message,
    /// Differs for each use of the place.
    pub(crate) serial: u32,
    /// The memory that was to be sent may be used again.
    pub(crate) is_source_free: bool,
    /// The reply waits for its handler.
    pub(crate) is_answered: bool,
}

/// A fixed number of places.
#[derive(Debug)]
pub(crate) struct Records {
    places: Vec<Option<Record>>,
    free: Vec<u16>,
    serial: u32,
}

impl Records {
    pub(crate) fn new(count: u16) -> Self {
        let free = (0..count).rev().collect();
        Self { places: vec![None; usize::from(count)], free, serial: 0 }
    }

    /// Takes a place; none if all are taken.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        conn: ConnId,
        purpose: Purpose,
        message: &Message,
    ) -> Option<u16> {
        let id = self.free.pop()?;
        self.serial = self.serial.wrapping_add(1);
        let (serial, is_source_free, is_answered) = (self.serial, false, false);
        let record =
            Record { conn, purpose, message: *message, serial, is_source_free, is_answered };
        self.places[usize::from(id)] = Some(record);
        Some(id)
    }

    /// How many places are free.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// The record, if it is of this connection: peers may say any number.
    #[inline]
    pub(crate) fn of(&mut self, id: u16, conn: ConnId) -> Option<&mut Record> {
        self.places.get_mut(usize::from(id))?.as_mut().filter(|record| record.conn == conn)
    }

    /// Gives a place back.
    #[inline]
    pub(crate) fn remove(&mut self, id: u16) -> Option<Record> {
        let record = self.places.get_mut(usize::from(id))?.take()?;
        self.free.push(id);
        Some(record)
    }

    /// Whether the use of a place with that serial number goes on, and its source is not free.
    pub(crate) fn holds_source(&self, id: u16, serial: u32) -> bool {
        let record = self.places.get(usize::from(id)).and_then(Option::as_ref);
        record.is_some_and(|record| record.serial == serial && !record.is_source_free)
    }

    /// The connections of all records.
    pub(crate) fn conns(&self) -> impl Iterator<Item = ConnId> {
        self.places.iter().flatten().map(|record| record.conn)
    }

    /// The numbers of the records of a connection, oldest first.
    pub(crate) fn all_of(&self, conn: ConnId) -> Vec<u16> {
        let mut all: Vec<(u32, u16)> = (0u16..)
            .zip(&self.places)
            .filter_map(|(id, place)| place.as_ref().map(|record| (id, record)))
            .filter(|(_, record)| record.conn == conn)
            .map(|(id, record)| (record.serial, id))
            .collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }
}
