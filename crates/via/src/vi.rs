//! The state of a VI, and its two work queues.

use crate::attributes::Attributes;
use crate::codes::{Code, Outcome, Reliability, State};
use crate::queue::{Done, Ending, Head, Next, Posted, WorkQueue};

/// Most descriptors of a work queue.
pub const MAX_DESCRIPTORS: usize = 16_384;

/// What changes the state of a VI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The program requests a connection.
    Request,
    /// The program accepts a connection.
    Accept,
    /// The connection that was requested stands.
    Establish,
    /// The request has failed.
    GiveUp,
    /// The connection is broken.
    Break,
    /// The program disconnects.
    Disconnect,
}

impl State {
    /// The state after an event; none where it is not allowed or does not matter.
    pub fn after(self, event: Event) -> Option<Self> {
        match (self, event) {
            (Self::Idle, Event::Request) => Some(Self::Pending),
            (Self::Idle, Event::Accept) | (Self::Pending, Event::Establish) => {
                Some(Self::Connected)
            }
            (Self::Pending, Event::GiveUp) | (_, Event::Disconnect) => Some(Self::Idle),
            (Self::Connected, Event::Break) => Some(Self::Error),
            _ => None,
        }
    }
}

/// One of the two queues of a VI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The send queue.
    Send,
    /// The receive queue.
    Receive,
}

/// Descriptors that were completed, in order, with their queues.
pub type Completed = Vec<(Side, Done)>;

/// One end of a connection.
#[derive(Debug)]
pub struct Vi {
    state: State,
    /// What the program asked for.
    pub attributes: Attributes,
    send: WorkQueue,
    receive: WorkQueue,
}

impl Vi {
    /// A VI that is not connected.
    pub fn new(attributes: Attributes) -> Self {
        let (send, receive) = (WorkQueue::default(), WorkQueue::default());
        Self { state: State::Idle, attributes, send, receive }
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// One of its queues.
    pub fn queue(&self, side: Side) -> &WorkQueue {
        match side {
            Side::Send => &self.send,
            Side::Receive => &self.receive,
        }
    }

    fn queue_mut(&mut self, side: Side) -> &mut WorkQueue {
        match side {
            Side::Send => &mut self.send,
            Side::Receive => &mut self.receive,
        }
    }

    /// Changes the state. Breaking and disconnecting flush both queues.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidState`]; nothing has changed then.
    pub fn change(&mut self, event: Event, completed: &mut Completed) -> Outcome {
        self.state = self.state.after(event).ok_or(Code::InvalidState)?;
        if matches!(event, Event::Break | Event::Disconnect) {
            completed.extend(self.send.flush().map(|done| (Side::Send, done)));
            completed.extend(self.receive.flush().map(|done| (Side::Receive, done)));
        }
        Ok(())
    }

    /// Takes a descriptor from the program. In states in which nothing can come of it, it is flushed.
    ///
    /// # Errors
    ///
    /// [`Code::ErrorResource`] if the queue is full.
    pub fn post(&mut self, side: Side, posted: Posted, completed: &mut Completed) -> Outcome {
        let is_kept = match side {
            Side::Send => self.state == State::Connected,
            Side::Receive => self.state != State::Error,
        };
        let queue = self.queue_mut(side);
        if queue.len() >= MAX_DESCRIPTORS {
            return Err(Code::ErrorResource);
        }
        if is_kept {
            queue.push(posted);
        } else {
            let done = queue.push_flushed(&posted);
            completed.push((side, done));
        }
        Ok(())
    }

    /// What to do next for a queue, where the adapter holds at most `room` of its requests.
    pub fn next(&self, side: Side, room: usize) -> Next<'_> {
        if self.state == State::Connected { self.queue(side).next(room) } else { Next::Nothing }
    }

    /// The adapter has taken what [`next`](Self::next) said.
    pub fn handed(&mut self, side: Side) {
        self.queue_mut(side).handed();
    }

    /// The adapter has executed the oldest request of a queue. A failure breaks a reliable connection, and
    /// any connection if the adapter's queue pair is in error (`is_fatal`). Returns whether it is broken now.
    pub fn complete(
        &mut self,
        side: Side,
        ending: Ending,
        is_fatal: bool,
        completed: &mut Completed,
    ) -> bool {
        let done = self.queue_mut(side).complete(ending);
        completed.extend(done.map(|done| (side, done)));
        let breaks = ending.status.is_error()
            && (is_fatal || self.attributes.reliability != Reliability::Unreliable);
        breaks && self.change(Event::Break, completed).is_ok()
    }

    /// Completes descriptors at the front of a queue that cannot be processed. Returns whether the
    /// connection is broken now.
    pub fn fail_malformed(&mut self, side: Side, completed: &mut Completed) -> bool {
        while let Next::Fail(status) = self.next(side, 0) {
            if self.complete(side, Ending::failed(status), false, completed) {
                return true;
            }
        }
        false
    }

    /// Takes the oldest descriptor of a queue if it is done.
    pub fn take(&mut self, side: Side) -> Head {
        self.queue_mut(side).take()
    }

    /// Whether both queues are empty.
    pub fn is_drained(&self) -> bool {
        self.send.is_empty() && self.receive.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::Status;
    use crate::descriptor::{Operation, Request};

    fn flushed() -> Status {
        Status::DONE | Status::FLUSHED
    }

    fn vi(reliability: Reliability) -> Vi {
        Vi::new(Attributes {
            reliability,
            max_transfer: 1000,
            qos: 0,
            rdma_write: false,
            rdma_read: false,
        })
    }

    fn connected(reliability: Reliability) -> Vi {
        let mut vi = vi(reliability);
        vi.change(Event::Accept, &mut Vec::new()).unwrap();
        vi
    }

    fn posted(descriptor: u64, operation: Operation) -> Posted {
        let request = Request {
            operation,
            immediate: None,
            fence: false,
            local: Vec::new(),
            len: 0,
            is_inline: false,
            inline: Vec::new(),
        };
        Posted { descriptor, handle: 1, operation: operation.status(), request: Ok(request) }
    }

    fn malformed(descriptor: u64) -> Posted {
        Posted { request: Err(Status::FORMAT_ERROR), ..posted(descriptor, Operation::Send) }
    }

    fn hand_all(vi: &mut Vi, side: Side) -> usize {
        let mut count = 0;
        while let Next::Hand(_) = vi.next(side, 100) {
            vi.handed(side);
            count += 1;
        }
        count
    }

    #[test]
    fn states_follow_the_table_of_the_specification() {
        use Event::*;
        let states = [State::Idle, State::Connected, State::Pending, State::Error];
        let expected = [
            (Request, [Some(State::Pending), None, None, None]),
            (Accept, [Some(State::Connected), None, None, None]),
            (Establish, [None, None, Some(State::Connected), None]),
            (GiveUp, [None, None, Some(State::Idle), None]),
            (Break, [None, Some(State::Error), None, None]),
            (Disconnect, [Some(State::Idle); 4]),
        ];
        for (event, after) in expected {
            assert_eq!(states.map(|state| state.after(event)), after, "{event:?}");
        }
    }

    #[test]
    fn sends_are_flushed_and_receives_kept_until_the_vi_is_connected() {
        let (mut vi, mut out) = (vi(Reliability::Delivery), Vec::new());
        vi.post(Side::Send, posted(1, Operation::Send), &mut out).unwrap();
        vi.post(Side::Receive, posted(2, Operation::Receive), &mut out).unwrap();
        assert_eq!(out.len(), 1);
        assert_eq!((out[0].0, out[0].1.status), (Side::Send, flushed()));
        assert_eq!(vi.take(Side::Send), Head::Failed(1));
        assert_eq!(vi.take(Side::Send), Head::Empty);
        assert_eq!(vi.take(Side::Receive), Head::NotDone);
        assert_eq!(hand_all(&mut vi, Side::Receive), 0);
        vi.change(Event::Accept, &mut out).unwrap();
        assert_eq!(hand_all(&mut vi, Side::Receive), 1);
    }

    #[test]
    fn a_failure_of_a_reliable_vi_flushes_what_comes_after_it() {
        let (mut vi, mut out) = (connected(Reliability::Reception), Vec::new());
        for descriptor in 1..=3 {
            vi.post(Side::Send, posted(descriptor, Operation::Send), &mut out).unwrap();
        }
        vi.post(Side::Receive, posted(9, Operation::Receive), &mut out).unwrap();
        assert_eq!(hand_all(&mut vi, Side::Send), 3);
        assert!(!vi.complete(Side::Send, Ending::default(), false, &mut out));
        assert!(vi.complete(Side::Send, Ending::failed(Status::REMOTE_DESC_ERROR), true, &mut out));
        let statuses: Vec<_> = out.iter().map(|(_, done)| (done.descriptor, done.status)).collect();
        let failed = Status::DONE | Status::REMOTE_DESC_ERROR;
        let receive = flushed() | Status::OP_RECEIVE;
        assert_eq!(statuses, [(1, Status::DONE), (2, failed), (3, flushed()), (9, receive)]);
        assert_eq!(vi.state(), State::Error);
        vi.post(Side::Receive, posted(10, Operation::Receive), &mut out).unwrap();
        assert_eq!(out[4].1.status, receive);
        assert!(!vi.is_drained());
        let heads: Vec<_> = std::iter::from_fn(|| match vi.take(Side::Send) {
            Head::Empty => None,
            head => Some(head),
        })
        .collect();
        assert_eq!(heads, [Head::Succeeded(1), Head::Failed(2), Head::Failed(3)]);
    }

    #[test]
    fn a_malformed_descriptor_fails_in_its_turn_and_breaks_only_reliable_vis() {
        for (reliability, state) in
            [(Reliability::Unreliable, State::Connected), (Reliability::Delivery, State::Error)]
        {
            let (mut vi, mut out) = (connected(reliability), Vec::new());
            vi.post(Side::Send, posted(1, Operation::Send), &mut out).unwrap();
            vi.post(Side::Send, malformed(2), &mut out).unwrap();
            vi.post(Side::Send, posted(3, Operation::Send), &mut out).unwrap();
            assert_eq!(hand_all(&mut vi, Side::Send), 1, "the malformed one stops the queue");
            assert!(!vi.fail_malformed(Side::Send, &mut out) && out.is_empty());
            vi.complete(Side::Send, Ending::default(), false, &mut out);
            vi.fail_malformed(Side::Send, &mut out);
            assert_eq!(out[1].1.status, Status::DONE | Status::FORMAT_ERROR);
            assert_eq!(vi.state(), state);
            let left = if state == State::Connected { 1 } else { 0 };
            assert_eq!(hand_all(&mut vi, Side::Send), left);
        }
    }

    #[test]
    fn the_adapter_gets_no_more_than_it_has_room_for() {
        let (mut vi, mut out) = (connected(Reliability::Delivery), Vec::new());
        for descriptor in 0..4 {
            vi.post(Side::Send, posted(descriptor, Operation::Send), &mut out).unwrap();
        }
        for _ in 0..2 {
            assert!(matches!(vi.next(Side::Send, 2), Next::Hand(_)));
            vi.handed(Side::Send);
        }
        assert!(matches!(vi.next(Side::Send, 2), Next::Nothing));
        vi.complete(Side::Send, Ending::default(), false, &mut out);
        assert!(matches!(vi.next(Side::Send, 2), Next::Hand(_)));
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let (mut vi, mut out) = (vi(Reliability::Delivery), Vec::new());
        for descriptor in 0..MAX_DESCRIPTORS as u64 {
            vi.post(Side::Receive, posted(descriptor, Operation::Receive), &mut out).unwrap();
        }
        let more = vi.post(Side::Receive, posted(0, Operation::Receive), &mut out);
        assert_eq!(more, Err(Code::ErrorResource));
        vi.change(Event::Disconnect, &mut out).unwrap();
        assert_eq!(out.len(), MAX_DESCRIPTORS);
    }

    #[test]
    fn immediate_data_show_in_the_status() {
        let (mut vi, mut out) = (connected(Reliability::Delivery), Vec::new());
        vi.post(Side::Receive, posted(1, Operation::Receive), &mut out).unwrap();
        let ending =
            Ending { status: Status::OP_REMOTE_RDMA_WRITE, len: 12, immediate: Some(0xabcd) };
        vi.complete(Side::Receive, ending, false, &mut out);
        let status = Status::DONE | Status::OP_REMOTE_RDMA_WRITE | Status::IMMEDIATE;
        assert_eq!((out[0].1.status, out[0].1.len), (status, 12));
    }
}
