//! Requests that are under way: all that is needed to return them to the program.

use crate::conn::ConnId;
use crate::message::{Kind, Message};
use crate::types::{Arg, Category, MAX_ARGS, Operation};

/// What a record stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A request or a get of the program.
    Program(Operation),
    /// The exchange of segments.
    Segment,
    /// The exchange of lanes.
    Lane,
    /// A reply that was refused.
    Refusal,
}

/// A request under way. Its arguments come back to the program if it is refused.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Record {
    pub(crate) conn: ConnId,
    pub(crate) message: Message,
    /// Differs for each use of the place.
    pub(crate) serial: u32,
    pub(crate) purpose: Purpose,
    is_used: bool,
    /// The memory that was to be sent may be used again.
    pub(crate) is_source_free: bool,
    /// The reply waits for its handler.
    pub(crate) is_answered: bool,
    /// As many as the message has; the others are of earlier messages.
    args: [Arg; MAX_ARGS],
}

impl Record {
    #[inline(always)]
    fn keep_args(&mut self, args: &[Arg]) {
        let mut left = args;
        for kept in &mut self.args {
            let [arg, rest @ ..] = left else { return };
            (*kept, left) = (*arg, rest);
        }
    }

    /// The arguments of the message; 0 where it has none.
    pub(crate) fn args(&self) -> [Arg; MAX_ARGS] {
        let mut args = [0; MAX_ARGS];
        let nargs = usize::from(self.message.nargs).min(MAX_ARGS);
        args[..nargs].copy_from_slice(&self.args[..nargs]);
        args
    }
}

/// A fixed number of places.
#[derive(Debug)]
pub(crate) struct Records {
    places: Vec<Record>,
    free: Vec<u16>,
    serial: u32,
}

impl Records {
    pub(crate) fn new(count: u16) -> Self {
        let free = (0..count).rev().collect();
        let unused = Record {
            conn: ConnId::from_u64(u64::MAX),
            message: Message::new(Kind::Request, 0),
            serial: 0,
            purpose: Purpose::Segment,
            is_used: false,
            is_source_free: false,
            is_answered: false,
            args: [0; MAX_ARGS],
        };
        Self { places: vec![unused; usize::from(count)], free, serial: 0 }
    }

    /// Takes a place; none if all are taken. Its number becomes that of the message.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        conn: ConnId,
        purpose: Purpose,
        message: &mut Message,
        args: &[Arg],
    ) -> Option<u16> {
        let id = self.free.pop()?;
        self.serial = self.serial.wrapping_add(1);
        message.id = id;
        let place = self.places.get_mut(usize::from(id))?;
        (place.conn, place.purpose, place.serial) = (conn, purpose, self.serial);
        (place.is_used, place.is_source_free, place.is_answered) = (true, false, false);
        place.message = *message;
        place.keep_args(args);
        Some(id)
    }

    /// The place that [`begin_request`](Self::begin_request) takes next; none if all are taken.
    #[inline]
    pub(crate) fn next(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Takes the next place for a short request of the program, whose number is that of the place.
    #[inline]
    pub(crate) fn begin_request(&mut self, conn: ConnId, message: &Message, args: &[Arg]) {
        debug_assert_eq!(self.next(), Some(message.id));
        self.free.pop();
        self.serial = self.serial.wrapping_add(1);
        let Some(place) = self.places.get_mut(usize::from(message.id)) else { return };
        let purpose = Purpose::Program(Operation::Request(Category::Short));
        (place.conn, place.purpose, place.serial) = (conn, purpose, self.serial);
        (place.is_used, place.is_source_free, place.is_answered) = (true, false, false);
        place.message = *message;
        place.keep_args(args);
    }

    /// Gives the place of a request of the program back that waits for its reply, if it is one of this
    /// connection; whether it was.
    #[inline]
    pub(crate) fn end_request(&mut self, id: u16, conn: ConnId) -> bool {
        let Some(record) = self.of(id, conn) else { return false };
        let is_request = matches!(record.purpose, Purpose::Program(Operation::Request(_)));
        if !is_request || record.is_answered {
            return false;
        }
        record.is_used = false;
        self.free.push(id);
        true
    }

    /// How many places are free.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// The record, if it is of this connection: peers may say any number.
    #[inline]
    pub(crate) fn of(&mut self, id: u16, conn: ConnId) -> Option<&mut Record> {
        let place = self.places.get_mut(usize::from(id))?;
        (place.is_used && place.conn == conn).then_some(place)
    }

    /// Gives a place back, if it is taken by this connection; whether it was.
    #[inline]
    pub(crate) fn remove(&mut self, id: u16, conn: ConnId) -> bool {
        let Some(record) = self.of(id, conn) else { return false };
        record.is_used = false;
        self.free.push(id);
        true
    }

    fn used(&self) -> impl Iterator<Item = (u16, &Record)> {
        (0u16..).zip(&self.places).filter(|(_, place)| place.is_used)
    }

    /// Whether the use of a place with that serial number goes on, and its source is not free.
    pub(crate) fn holds_source(&self, id: u16, serial: u32) -> bool {
        let place = self.places.get(usize::from(id)).filter(|place| place.is_used);
        place.is_some_and(|record| record.serial == serial && !record.is_source_free)
    }

    /// The serial number of the youngest record so far.
    pub(crate) fn youngest(&self) -> u32 {
        self.serial
    }

    /// Whether any place is taken.
    pub(crate) fn is_any_used(&self) -> bool {
        self.free.len() < self.places.len()
    }

    /// The connections of records that are not younger than the one with that serial number, each
    /// once or more.
    pub(crate) fn conns_up_to(&self, serial: u32) -> Vec<ConnId> {
        let is_old = |record: &Record| serial.wrapping_sub(record.serial) <= u32::MAX / 2;
        self.used().filter(|(_, record)| is_old(record)).map(|(_, record)| record.conn).collect()
    }

    /// The connections of all records.
    pub(crate) fn conns(&self) -> impl Iterator<Item = ConnId> {
        self.used().map(|(_, record)| record.conn)
    }

    /// The numbers of the records of a connection, oldest first.
    pub(crate) fn all_of(&self, conn: ConnId) -> Vec<u16> {
        let of_it = self.used().filter(|(_, record)| record.conn == conn);
        let mut all: Vec<(u32, u16)> = of_it.map(|(id, record)| (record.serial, id)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }
}
