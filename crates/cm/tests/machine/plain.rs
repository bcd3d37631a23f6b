//! Connections with plain iWARP adapters: what programs are told, and what becomes of streams. The bytes
//! behind the start-up are the adapter's.

use quipu_cm::{
    Action, CallError, ChannelKey, Cm, Config, Event, EventKind, HandOver, IdKey, Loss, Param,
    PortSpace, Protocol, Refusal, StreamKey,
};

const RC: u8 = 2;
const SECOND: u64 = 1_000_000_000;
/// IRD 4, ORD 2, peer-to-peer mode by a Write; private data `abc`.
const REQUEST: &[u8] = b"MPA ID Req Frame\x50\x02\0\x07\x80\x04\x80\x02abc";

struct World {
    cm: Cm,
    channel: ChannelKey,
    listener: IdKey,
}

impl World {
    fn new(config: Config) -> Self {
        let mut cm = Cm::new(config);
        let channel = cm.create_channel();
        let listener = cm.create_id(channel, PortSpace::Tcp, RC, 7).unwrap();
        cm.bind(listener, "10.0.0.1:4444".parse().unwrap()).unwrap();
        cm.listen(listener, 1).unwrap();
        Self { cm, channel, listener }
    }

    fn arrive(&mut self, bytes: &[u8]) -> StreamKey {
        let (own, peer) = ("10.0.0.1:4444".parse().unwrap(), "10.0.0.9:999".parse().unwrap());
        let stream = self.cm.handle_accepted(SECOND, self.listener, own, peer).unwrap();
        self.cm.handle_bytes(SECOND, stream, bytes);
        stream
    }

    fn event(&mut self) -> Event {
        self.cm.take_event(self.channel).unwrap().expect("an event")
    }

    fn kinds(&mut self) -> Vec<(EventKind, i32)> {
        let taken = std::iter::from_fn(|| self.cm.take_event(self.channel).unwrap());
        taken.map(|event| (event.kind, event.status)).collect()
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.cm.poll_action()).collect()
    }

    /// A request, accepted; the stream that was handed over.
    fn accepted(&mut self) -> HandOver {
        self.arrive(REQUEST);
        let id = self.event().id;
        let param =
            Param { qpn: 5, responder_resources: 2, initiator_depth: 9, ..Param::default() };
        self.cm.accept(SECOND, id, Some(&param)).unwrap();
        match &self.actions()[..] {
            [Action::Send { bytes, .. }, Action::HandOver(given)] => {
                assert_eq!(bytes[..], b"MPA ID Rep Frame\x50\x02\0\x04\x80\x02\x80\x04"[..]);
                (**given).clone()
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A stream that asks, with everything before its request done.
fn asking() -> (World, IdKey, StreamKey) {
    let mut world = World::new(Config { asks_plain: true, ..Config::default() });
    let (id, stream) = ask(&mut world);
    (world, id, stream)
}

/// One more, of the same program to the same port.
fn ask(world: &mut World) -> (IdKey, StreamKey) {
    let id = world.cm.create_id(world.channel, PortSpace::Tcp, RC, 1).unwrap();
    let own = Ok("10.0.0.1:888".parse().unwrap());
    world.cm.resolved(id, "10.0.0.9:4444".parse().unwrap(), own).unwrap();
    world.cm.resolve_route(id).unwrap();
    assert!(
        world.cm.route(id).unwrap().protocol == Protocol::Iwarp
            && world.cm.init_params(id).unwrap().remote_write
    );
    let param =
        Param { private_data: b"who".to_vec(), qpn: 5, initiator_depth: 3, ..Param::default() };
    world.cm.connect(SECOND, id, &param).unwrap();
    world.kinds();
    let actions = world.actions();
    let [Action::Connect { stream, first, .. }] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(first[..], b"MPA ID Req Frame\x50\x02\0\x07\xc0\0\xc0\x03who"[..]);
    (id, *stream)
}

#[test]
fn a_request_has_its_private_data_and_depths() {
    let mut world = World::new(Config::default());
    world.arrive(REQUEST);
    let event = world.event();
    assert_eq!(
        (event.kind, event.listener, &*event.private_data),
        (EventKind::ConnectRequest, 7, &b"abc"[..])
    );
    assert_eq!((event.peer.responder_resources, event.peer.initiator_depth), (2, 4));
    let route = world.cm.route(event.id).unwrap();
    assert_eq!((route.protocol, route.path_mtu), (Protocol::Iwarp, 5));
    // Of revision 1: the depths are not said.
    world.arrive(b"MPA ID Req Frame\x40\x01\0\0");
    let event = world.event();
    assert_eq!((event.peer.responder_resources, event.peer.initiator_depth), (128, 128));
    // FPDUs before the reply: the stream is of no use.
    world.arrive(b"MPA ID Req Frame\x40\x01\0\0\0");
    assert!(world.actions().iter().any(|a| matches!(a, Action::Close { reset: true, .. })));
}

#[test]
fn a_full_queue_and_a_device_that_is_not_shown_refuse() {
    let mut world = World::new(Config::default());
    world.arrive(REQUEST);
    world.arrive(REQUEST);
    let refused = |world: &mut World| {
        let actions = world.actions();
        let [Action::Send { bytes, .. }, Action::Close { reset: false, .. }] = &actions[..] else {
            panic!("{actions:?}")
        };
        assert_eq!(bytes[16] & 0x20, 0x20);
    };
    refused(&mut world);
    assert_eq!(world.kinds(), [(EventKind::ConnectRequest, 0)]);
    let mut world = World::new(Config { takes_plain: false, ..Config::default() });
    world.arrive(REQUEST);
    refused(&mut world);
    assert_eq!(world.kinds(), []);
}

#[test]
fn a_connection_lives_as_long_as_its_stream() {
    let mut world = World::new(Config::default());
    let given = world.accepted();
    assert_eq!((given.qpn, given.ird, given.ord, given.initiator), (5, 2, 9, false));
    assert_eq!(world.cm.establish(given.id), Ok(()));
    assert_eq!(world.kinds(), [], "the adapter says so");
    world.cm.handle_established(given.id);
    world.cm.handle_established(given.id);
    assert_eq!(world.kinds(), [(EventKind::Established, 0)]);
    assert_eq!(world.cm.establish(given.id), Ok(()));
    assert_eq!(world.cm.establish(world.listener), Err(CallError::WrongState));
    world.cm.disconnect(SECOND, given.id).unwrap();
    world.cm.disconnect(SECOND, given.id).unwrap();
    assert_eq!(world.actions(), [Action::End { id: given.id }]);
    world.cm.handle_ended(given.id);
    world.cm.handle_ended(given.id);
    assert_eq!(world.kinds(), [(EventKind::Disconnected, 0)]);
    world.cm.disconnect(SECOND, given.id).unwrap();
    world.cm.destroy_id(given.id).unwrap();
    assert_eq!(world.actions(), []);
    assert_eq!(world.cm.load().deadlines, 0);
}

#[test]
fn an_identifier_takes_its_stream_with_it() {
    for established in [false, true] {
        let mut world = World::new(Config::default());
        let given = world.accepted();
        if established {
            world.cm.handle_established(given.id);
        }
        world.cm.destroy_id(given.id).unwrap();
        assert_eq!(world.actions(), [Action::End { id: given.id }]);
        world.cm.handle_ended(given.id);
    }
}

#[test]
fn a_stream_that_the_adapter_does_not_want_or_that_never_opens_is_an_error() {
    let mut world = World::new(Config::default());
    let given = world.accepted();
    world.cm.handle_not_taken(given.id);
    assert_eq!(world.kinds(), [(EventKind::ConnectError, -104)]);
    world.cm.handle_not_taken(given.id);
    world.cm.handle_ended(given.id);
    assert_eq!(world.kinds(), []);
    let given = world.accepted();
    world.cm.handle_timeout(100 * SECOND);
    assert_eq!(world.kinds(), [(EventKind::Unreachable, -110)]);
    assert_eq!(world.actions(), [Action::End { id: given.id }]);
}

/// `rping -s -P` ends at a connect error, so one client that leaves early would end it for all.
#[test]
fn a_client_that_leaves_after_the_reply_was_connected() {
    let mut world = World::new(Config::default());
    let given = world.accepted();
    world.cm.handle_ended(given.id);
    let kinds = [(EventKind::Established, 0), (EventKind::Disconnected, 0)];
    assert_eq!(world.kinds(), kinds);
    world.cm.disconnect(SECOND, given.id).unwrap();
    world.cm.destroy_id(given.id).unwrap();
    assert_eq!(world.actions(), []);
    assert_eq!(world.cm.load().deadlines, 0);
}

#[test]
fn a_reply_hands_the_stream_over_with_what_follows() {
    let (mut world, id, stream) = asking();
    world.cm.handle_reached(SECOND, stream);
    world.cm.handle_bytes(SECOND, stream, b"MPA ID Rep Fr");
    world.cm.handle_bytes(SECOND, stream, b"ame\x50\x02\0\x06\x80\0\x80\0mexyz");
    let actions = world.actions();
    let [Action::HandOver(given)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!((given.id, &given.rest[..], given.initiator), (id, &b"xyz"[..], true));
    world.cm.handle_established(id);
    let event = world.event();
    assert_eq!((event.kind, &*event.private_data), (EventKind::Established, &b"me"[..]));
    assert_eq!(world.cm.load().streams, 0);
}

#[test]
fn replies_that_refuse_or_cannot_be_accepted() {
    let (mut world, _, stream) = asking();
    world.cm.handle_bytes(SECOND, stream, b"MPA ID Rep Frame\x60\x02\0\x02no");
    let event = world.event();
    assert_eq!(
        (event.kind, event.status, &*event.private_data),
        (EventKind::Rejected, -111, &b"no"[..])
    );
    // Nothing that this side answers is asked for, but one Read is (RFC 6581 9.1): it says so.
    let (mut world, _, stream) = asking();
    world.cm.handle_bytes(SECOND, stream, b"MPA ID Rep Frame\x50\x02\0\x04\x80\0\x80\x01");
    assert_eq!(world.kinds(), [(EventKind::ConnectError, -71)]);
    let actions = world.actions();
    let [Action::Send { bytes, .. }, Action::Close { reset: false, .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(bytes[20..22], [0x20, 0x06]);
    // What is no reply at all.
    let (mut world, _, stream) = asking();
    world.cm.handle_bytes(SECOND, stream, b"HTTP/1.1 400 Bad Request");
    assert_eq!(world.kinds(), [(EventKind::ConnectError, -71)]);
}

/// The same as where an adapter refuses, and at once, as with hardware and siw. There is no message, and so
/// no private data.
#[test]
fn a_port_that_nobody_listens_on_refuses_at_once() {
    let (mut world, _, stream) = asking();
    world.cm.handle_lost(SECOND, stream, Loss::Refused);
    assert_eq!(world.actions(), []);
    let event = world.event();
    assert_eq!((event.kind, event.status), (EventKind::Rejected, -111));
    assert_eq!(event.private_data.len(), 0);
}

/// perftest connects twice: its server closes the listener after the first connection, and opens the
/// next one.
#[test]
fn a_port_that_has_accepted_a_connection_may_have_its_next_listener_soon() {
    let (mut world, _, stream) = asking();
    world.cm.handle_bytes(SECOND, stream, b"MPA ID Rep Frame\x50\x02\0\x04\x80\0\x80\0");
    world.actions();
    let (id, mut stream) = ask(&mut world);
    let mut now = SECOND;
    for _ in 1..10 {
        world.cm.handle_lost(now, stream, Loss::Refused);
        assert_eq!((world.kinds(), world.actions()), (vec![], vec![Action::Hold { id }]));
        now = world.cm.poll_timeout().unwrap();
        world.cm.handle_timeout(now);
        let actions = world.actions();
        let [Action::Connect { stream: next, .. }] = &actions[..] else { panic!("{actions:?}") };
        stream = *next;
    }
    world.cm.handle_lost(now, stream, Loss::Refused);
    assert_eq!(world.kinds(), [(EventKind::Rejected, -111)]);
    assert!(now < 2 * SECOND, "half a second in all");
    // Ten seconds after the first connection, it is a port like any other.
    let (_, stream) = ask(&mut world);
    world.cm.handle_lost(11 * SECOND, stream, Loss::Refused);
    assert_eq!((world.kinds(), world.actions()), (vec![(EventKind::Rejected, -111)], vec![]));
}

/// An adapter that knows revision 1 only does not take a request of revision 2: it is asked once more, by
/// revision 1 (RFC 6581 revises RFC 5044, whose responders need not answer another revision than theirs).
#[test]
fn an_adapter_that_knows_revision_1_only_is_asked_by_it() {
    // It refuses, closes, or answers as if it had been asked by its own.
    for reply in [&b"MPA ID Rep Frame\x60\x01\0\0"[..], b"", b"MPA ID Rep Frame\x40\x01\0\x02me"] {
        let (mut world, id, stream) = asking();
        world.cm.handle_reached(SECOND, stream);
        world.cm.handle_bytes(SECOND, stream, reply);
        if reply.is_empty() {
            world.cm.handle_lost(SECOND, stream, Loss::Closed);
        }
        let actions = world.actions();
        let (Action::Connect { stream, id: who, first, .. }, before) =
            actions.split_last().unwrap()
        else {
            panic!("{actions:?}")
        };
        assert!(before.iter().all(|action| matches!(action, Action::Close { reset: true, .. })));
        assert_eq!((before.len(), *who), (usize::from(!reply.is_empty()), id));
        assert_eq!(first[..], b"MPA ID Req Frame\x40\x01\0\x03who"[..]);
        assert_eq!(world.kinds(), []);
        world.cm.handle_reached(SECOND, *stream);
        world.cm.handle_bytes(SECOND, *stream, b"MPA ID Rep Frame\x40\x01\0\x02me");
        let actions = world.actions();
        let [Action::HandOver(given)] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((given.id, given.initiator, given.negotiated.revision), (id, true, 1));
        assert_eq!(given.negotiated.rtr, None);
        // No depth is stated: that of the program stands.
        assert_eq!((given.negotiated.ord, given.ord), (None, 3));
        world.cm.handle_established(id);
        assert_eq!(world.kinds(), [(EventKind::Established, 0)]);
    }
}

/// Once: whoever does not take revision 1 either refuses.
#[test]
fn revision_1_is_tried_once() {
    for closes in [false, true] {
        let (mut world, _, stream) = asking();
        world.cm.handle_lost(SECOND, stream, Loss::Closed);
        let actions = world.actions();
        let [Action::Connect { stream, .. }] = &actions[..] else { panic!("{actions:?}") };
        if closes {
            world.cm.handle_lost(SECOND, *stream, Loss::Closed);
            assert_eq!(world.kinds(), [(EventKind::Rejected, -104)]);
        } else {
            world.cm.handle_bytes(SECOND, *stream, b"MPA ID Rep Frame\x60\x01\0\x02no");
            assert_eq!(world.kinds(), [(EventKind::Rejected, -111)]);
        }
        assert!(!world.actions().iter().any(|action| matches!(action, Action::Connect { .. })));
        assert_eq!((world.cm.load().streams, world.cm.load().deadlines), (0, 0));
    }
    // A reply that is cut off came from somebody who knows the revision.
    let (mut world, _, stream) = asking();
    world.cm.handle_bytes(SECOND, stream, b"MPA ID Rep Fr");
    world.cm.handle_lost(SECOND, stream, Loss::Closed);
    assert_eq!(world.kinds(), [(EventKind::Rejected, -104)]);
}

/// RFC 5044 7.1.1: 512 bytes, of which RFC 6581 takes four.
#[test]
fn private_data_may_be_as_long_as_a_frame_allows() {
    let mut world = World::new(Config { asks_plain: true, ..Config::default() });
    let id = world.cm.create_id(world.channel, PortSpace::Tcp, RC, 1).unwrap();
    let own = Ok("10.0.0.1:888".parse().unwrap());
    world.cm.resolved(id, "10.0.0.9:4444".parse().unwrap(), own).unwrap();
    world.cm.resolve_route(id).unwrap();
    let with = |len: usize| Param { private_data: vec![7; len], qpn: 5, ..Param::default() };
    let refused = world.cm.connect(SECOND, id, &with(509));
    assert!(matches!(refused, Err(CallError::Invalid(_))));
    world.cm.connect(SECOND, id, &with(508)).unwrap();
    let actions = world.actions();
    let [Action::Connect { first, .. }] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(first.len(), 20 + 4 + 508);
    // The peer's program gets all of them.
    let mut there = World::new(Config::default());
    there.arrive(first);
    let request = there.event();
    assert_eq!(request.private_data.len(), 508);
    // So are the words that come with a refusal.
    let refused = there.cm.reject(request.id, Refusal::Consumer, &[9; 509]);
    assert!(matches!(refused, Err(CallError::Invalid(_))));
    there.cm.reject(request.id, Refusal::Consumer, &[9; 508]).unwrap();
    let actions = there.actions();
    let [Action::Send { bytes, .. }, Action::Close { .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(bytes.ends_with(&[9; 508]));
}
