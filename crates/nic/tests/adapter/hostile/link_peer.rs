//! A process on this host that answers the link of an adapter by hand.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::pair::Pair;
use quipu_nic::mem::Segment;
use quipu_nic::mem::ring::{Channel, ChannelConfig, SlotHeader};
use quipu_nic::*;

/// A process on this host that answers the link of host 0 by hand.
pub struct LinkPeer {
    /// The segment of host 0, and that of this peer.
    pub(super) own: Segment,
    pub(super) own_page: Segment,
    pub memory: Arc<Everything>,
    pub(super) link: LinkId,
    pub(super) conn: u64,
    pub(super) offset: usize,
}

/// Memory of a peer that claims that every address of it is there, and that with each access pushes what it
/// was told to.
#[derive(Default)]
pub struct Everything {
    pub(super) push: Mutex<Option<(Channel, SlotHeader, u32)>>,
    /// What happens meanwhile, once.
    pub meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Whether the kernel shows none of it, so that the peer has to be asked.
    pub is_hidden: AtomicBool,
}

impl Everything {
    fn accessed(&self) {
        if let Some(happen) = self.meanwhile.lock().unwrap().take() {
            happen();
        }
        if let Some((channel, header, left)) = &mut *self.push.lock().unwrap()
            && *left > 0
        {
            *left -= 1;
            let list = [&1000u64.to_ne_bytes()[..], &8u64.to_ne_bytes()].concat();
            channel.outgoing.requests.push(header, &list).unwrap();
        }
    }
}

impl PeerMemory for Everything {
    fn read(&self, _: &[(u64, u64)], _: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        self.accessed();
        let hidden = self.is_hidden.load(Ordering::Relaxed);
        if hidden { Err(PeerMemoryFault::BadAddress) } else { Ok(()) }
    }

    fn write(&self, _: &[(usize, usize)], _: &[(u64, u64)]) -> Result<(), PeerMemoryFault> {
        self.accessed();
        Ok(())
    }
}

impl LinkPeer {
    pub(super) const TAG: u64 = 77;

    /// A queue pair of host 0 asks this peer for a channel.
    pub(super) fn asked(pair: &mut Pair, directory: Option<Segment>) -> (Self, QpId) {
        let qp = pair.hosts[0].qp();
        (Self::asked_by(pair, qp, directory), qp)
    }

    pub(super) fn asked_by(pair: &mut Pair, qp: QpId, directory: Option<Segment>) -> Self {
        Self::asked_with(pair, qp, directory, |_| {})
    }

    /// The same, of a queue pair with changed attributes.
    pub fn asked_with(
        pair: &mut Pair,
        qp: QpId,
        directory: Option<Segment>,
        change: impl Fn(&mut QpAttr),
    ) -> Self {
        let qps = [qp, pair.hosts[1].qp()];
        pair.to_rtr(0, qps, &change);
        pair.to_rts(0, qp, &change);
        let (own, peer) = (Segment::heap(4 << 20), Segment::heap(4 << 20));
        let memory = Arc::new(Everything::default());
        let adapter = &mut pair.hosts[0].adapter;
        let link = adapter
            .handle_link_up(Link {
                own: own.clone(),
                peer: peer.clone(),
                peer_gid: Some(Gid::from(IpAddr::from([10, 0, 0, 2]))),
                peer_memory: directory.is_some().then(|| memory.clone() as Arc<dyn PeerMemory>),
                peer_directory: directory,
            })
            .unwrap();
        let Some(Action::Connect { conn, .. }) = adapter.poll_action() else {
            panic!("nothing to connect");
        };
        assert!(adapter.handle_reached_link(pair.now, conn, link));
        let (conn, offset) = Self::request(adapter);
        Self { own, own_page: peer, memory, link, conn, offset }
    }

    /// The request of host 0 that comes next.
    pub(super) fn request(adapter: &mut Adapter) -> (u64, usize) {
        let Some(Action::LinkSend { message, .. }) = adapter.poll_action() else {
            panic!("nothing is asked");
        };
        let LinkMessage::Request { tag, offset, .. } = message else {
            panic!("{message:?} is no request");
        };
        (tag, offset as usize)
    }

    /// Grants the channel; its other end.
    pub fn accept(&self, pair: &mut Pair) -> Channel {
        let end = LinkEnd { bell: 0, pd: 1 };
        let accept = LinkMessage::Accept { tag: self.conn, own_tag: Self::TAG, end };
        pair.hosts[0].adapter.handle_link_message(pair.now, self.link, accept);
        Channel::attach(&self.own, self.offset, ChannelConfig::default()).unwrap()
    }

    /// Says something of the channel.
    pub fn say(&self, pair: &mut Pair, message: impl FnOnce(u64) -> LinkMessage) {
        pair.hosts[0].adapter.handle_link_message(pair.now, self.link, message(self.conn));
    }

    /// Puts another length into the slot that has this one.
    pub fn change_length(&self, from: u32, to: u32) {
        let words = (self.offset..self.own.len()).step_by(4);
        let has_it = |&at: &usize| {
            let mut word = [0; 4];
            self.own.read(at, &mut word).unwrap();
            u32::from_ne_bytes(word) == from
        };
        let found: Vec<usize> = words.filter(has_it).collect();
        let [at] = found[..] else { panic!("{found:?}") };
        self.own.write(at, &to.to_ne_bytes()).unwrap();
    }

    /// Rings for the first channel of the link, so that it is looked at by every poll from then on.
    pub(super) fn ring(&self, pair: &mut Pair) {
        const SUMMARY_AT: usize = 384;
        const BELLS_AT: usize = 512;
        for word in [BELLS_AT, SUMMARY_AT] {
            self.own_page.write(word, &1u64.to_ne_bytes()).unwrap();
        }
        assert!(pair.hosts[0].adapter.progress(pair.now));
        assert_eq!(pair.hosts[0].adapter.hot_channels(), 1);
    }
}
