//! Connections that both ends request: `VipConnectPeerRequest`, `VipConnectPeerDone`, `VipConnectPeerWait`.
//! A thread for each request does what `VipConnectRequest` and `VipConnectAccept` do.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use libc::c_ulong;
use quipu_cabi::entry;
use quipu_via::attributes::Attributes;
use quipu_via::codes::{Code, Outcome};
use quipu_via::meeting::{Wait, only_listens};
use quipu_via::message::{End, Request};

use crate::callback::spawn;
use crate::handle::{self, Id, Kind};
use crate::nic::{Deadline, Nic};
use crate::request::addresses;
use crate::touch::give;
use crate::types::{VIP_NET_ADDRESS, VIP_PVOID, VIP_VI_ATTRIBUTES, VipReturn, code};
use crate::vi::shown;

const STACK: usize = 128 << 10;
/// Between two tries the peer may come; the pauses grow from the first to the second.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LAST_PAUSE: Duration = Duration::from_millis(50);

/// A request of a peer, until its outcome is taken.
#[derive(Default)]
pub(crate) struct PeerRequest {
    outcome: Mutex<Option<Outcome<Attributes>>>,
    changed: Condvar,
}

impl PeerRequest {
    fn set(&self, outcome: Outcome<Attributes>) {
        let mut place = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        place.get_or_insert(outcome);
        drop(place);
        self.changed.notify_all();
    }

    /// The program has disconnected.
    pub(crate) fn cancel(&self) {
        self.set(Err(Code::InvalidState));
    }

    fn is_over(&self) -> bool {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn wait(&self) -> Outcome<Attributes> {
        let mut place = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = *place {
                return outcome;
            }
            place = self.changed.wait(place).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What the thread of a request works on.
struct Task {
    nic: Arc<Nic>,
    id: Id,
    link: (u32, [u8; 24]),
    asked: Request,
    deadline: Deadline,
    peer: Arc<PeerRequest>,
    wait: Id,
}

impl Task {
    fn run(&self) {
        let outcome = self.connect();
        if let Some(late) = self.nic.control.withdraw(self.wait) {
            drop(late);
        }
        if outcome.is_err() {
            self.nic.give_up(self.id, self.link.0);
        }
        self.peer.set(outcome);
        self.nic.wake(&self.nic.lock());
    }

    fn connect(&self) -> Outcome<Attributes> {
        let own = self.asked.end.attributes;
        let listens = only_listens(&self.asked.local, &self.asked.remote);
        let mut pause = FIRST_PAUSE;
        while !self.peer.is_over() && !self.nic.is_closed() {
            if !listens {
                let goes_on = || self.nic.goes_on(self.id, self.link.0);
                match self.nic.dial(&self.asked, self.deadline, &goes_on) {
                    Ok(accepted) => {
                        return self.nic.finish(self.id, self.link.0, own, accepted);
                    }
                    Err(Code::NoMatch) => {}
                    Err(other) => return Err(other),
                }
            }
            let until = Deadline(Some(Instant::now() + pause));
            if let Some(incoming) = self.nic.control.await_request(self.wait, until) {
                let theirs = incoming.request.end.attributes;
                // The peer compares, too: it gets the attributes in any case.
                let answered = self.nic.answer(self.id, self.link, own, incoming);
                own.agree(&theirs)?;
                return answered.map(|()| theirs);
            }
            if self.deadline.is_over() {
                return Err(Code::Timeout);
            }
            pause = (pause * 2).min(LAST_PAUSE);
        }
        Err(Code::InvalidState)
    }
}

fn request(
    raw: VIP_PVOID,
    local: *const VIP_NET_ADDRESS,
    remote: *const VIP_NET_ADDRESS,
    timeout: c_ulong,
) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let (local, remote) = addresses(&nic, local, remote)?;
    let deadline = Deadline::after(timeout);
    nic.control.start(&nic)?;
    let attributes = nic.lock().vi(id)?.vi.attributes;
    let link = nic.begin(id)?;
    let nonce = RandomState::new().hash_one((std::process::id(), link.0));
    let wait = Wait::Peer { local: local.clone(), remote: remote.clone(), nonce };
    let end = End { attributes, endpoint: link.1 };
    let started = nic.control.announce(&nic, wait).and_then(|wait| {
        let peer = Arc::new(PeerRequest::default());
        let asked = Request { is_peer: true, nonce, timeout_ms: 0, local, remote, end };
        nic.lock().linked(id, link.0)?.peer = Some(peer.clone());
        let task = Task { nic: nic.clone(), id, link, asked, deadline, peer, wait };
        spawn("vipl-peer", STACK, move || task.run())
    });
    if started.is_err() {
        nic.give_up(id, link.0);
    }
    started
}

fn outcome(raw: VIP_PVOID, out: *mut VIP_VI_ATTRIBUTES, blocks: bool) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    let peer = nic.lock().vi(id)?.peer.clone().ok_or(Code::InvalidState)?;
    if !blocks && !peer.is_over() {
        return Err(Code::NotDone);
    }
    let outcome = peer.wait();
    if let Ok(entry) = nic.lock().vi(id) {
        entry.peer = None;
    }
    give(out, shown(&outcome?, std::ptr::null_mut()))
}

entry! {
    /// `VipConnectPeerRequest`
    fn VipConnectPeerRequest(
        vi: VIP_PVOID,
        local: *const VIP_NET_ADDRESS,
        remote: *const VIP_NET_ADDRESS,
        timeout: c_ulong,
    ) -> VipReturn {
        code(request(vi, local, remote, timeout))
    }

    /// `VipConnectPeerDone`
    fn VipConnectPeerDone(vi: VIP_PVOID, attributes: *mut VIP_VI_ATTRIBUTES) -> VipReturn {
        code(outcome(vi, attributes, false))
    }

    /// `VipConnectPeerWait`
    fn VipConnectPeerWait(vi: VIP_PVOID, attributes: *mut VIP_VI_ATTRIBUTES) -> VipReturn {
        code(outcome(vi, attributes, true))
    }
}
