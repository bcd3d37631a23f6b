//! Connections between queue pairs of one adapter, and of a queue pair to itself.

use quipu_iwarp::wire::hello::{Hello, Kind};
use quipu_mem::Segment;
use quipu_mem::ring::{Channel, ChannelLayout};

use super::{Match, established, hello_of, pause};
use crate::adapter::Adapter;
use crate::channel::{ChannelPath, Other};
use crate::link::channel_config;
use crate::probe::Probe;
use crate::qp::Path;
use crate::types::{ConnId, QpId, Time};

impl<P: Probe> Adapter<P> {
    /// The peer that `Connect` asked for is this very engine.
    pub fn handle_reached_self(&mut self, now: Time, conn: ConnId) {
        self.hub.now = now;
        let Some(state) = self.hub.remove_conn(conn) else { return };
        let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) else { return };
        let id = qp.id;
        let hello = hello_of(qp, hub, Kind::Request);
        let other = match self.find_own(&hello, id) {
            Some(other) => other,
            None => {
                if let Some((qp, hub)) = self.qp_and_hub(id) {
                    pause(qp, hub);
                }
                return;
            }
        };
        let len = ChannelLayout::new(channel_config()).map_or(0, |layout| layout.total_len());
        let segment = Segment::heap(len);
        if other == id {
            self.join_own(id, id, Channel::loopback(&segment, 0, channel_config()).ok());
            return;
        }
        let channel = Channel::create(&segment, 0, channel_config()).ok();
        self.join_own(id, other, channel);
        let channel = Channel::attach(&segment, 0, channel_config()).ok();
        self.join_own(other, id, channel);
        self.serve_nudged();
    }

    /// The queue pair of this adapter that a request of `id`, itself in this adapter, is for.
    pub(super) fn find_own(&self, hello: &Hello, id: QpId) -> Option<QpId> {
        if hello.dest_qpn == hello.source_qpn {
            return Some(id);
        }
        match self.find(hello) {
            Match::Ready(other) => Some(other),
            _ => None,
        }
    }

    pub(super) fn join_own(&mut self, id: QpId, other: QpId, channel: Option<Channel>) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        match channel {
            Some(channel) => {
                let path = ChannelPath::new(channel, Other::Own(other), 0);
                qp.peer_rq_psn = None;
                established(qp, hub, Path::Channel(Box::new(path)));
            }
            None => pause(qp, hub),
        }
    }
}
