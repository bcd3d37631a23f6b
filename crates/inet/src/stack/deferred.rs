//! Peers about whom the user is to decide ([`Config::deferred`](crate::tcp::Config::deferred)).
//!
//! Nobody has proved the address of such a peer, so many of them may be made up. Those that wait longest give
//! way to new ones, without a word: one that exists repeats its SYN.

use super::connections::Connections;
use super::{Stack, TcpId};

/// Entries of `undecided` that may be out of date, besides as many as there are others.
const SLACK: usize = 64;

impl Stack {
    /// See [`Connection::answer`](crate::tcp::Connection::answer).
    pub fn answer(&mut self, now: u64, id: TcpId) {
        let Some(connection) = self.open(id) else { return };
        connection.answer(now);
        self.connections.touch(id.index);
    }

    /// The user keeps nothing of a peer that waits for its decision, and forgets `id`; the peer gets no
    /// answer. See [`Connection::forgo`](crate::tcp::Connection::forgo).
    pub fn forgo(&mut self, id: TcpId) {
        let Some(connection) = self.open(id).filter(|it| it.is_undecided()) else { return };
        connection.forgo();
        self.connections.unlist(id.index);
        self.forget(id.index);
    }

    /// The peer that has waited longest gives way, if there is one; the user is told.
    pub(super) fn forgo_oldest(&mut self, listener: u32, family: usize) {
        let Some(watched) = self.listeners.at(listener) else { return };
        let undecided = &mut watched.undecided[family];
        while let Some(oldest) = undecided.pop_front() {
            if !is_undecided(&self.connections, oldest) {
                continue;
            }
            if let Some(connection) = self.open(oldest) {
                connection.forgo();
            }
            self.after(oldest.index);
            // Its next SYN is a new one.
            self.connections.unlist(oldest.index);
            self.counters.tcp_forgone += 1;
            return;
        }
    }

    /// A peer has come about whom the user may have to decide.
    pub(super) fn note_undecided(&mut self, index: u32, family: usize) {
        let id = self.connections.id(index);
        if !is_undecided(&self.connections, id) {
            return;
        }
        let listener = self.connections.slot(index).listener;
        let Some(watched) = self.listeners.at(listener) else { return };
        let undecided = &mut watched.undecided[family];
        undecided.push_back(id);
        if undecided.len() > 2 * watched.families[family].half_open() as usize + SLACK {
            undecided.retain(|&id| is_undecided(&self.connections, id));
        }
    }
}

fn is_undecided(connections: &Connections, id: TcpId) -> bool {
    let connection = connections.get(id).and_then(|slot| slot.connection.as_ref());
    connection.is_some_and(|it| it.is_undecided())
}
