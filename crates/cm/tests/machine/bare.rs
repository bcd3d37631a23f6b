//! Connections of QPIP: what programs are told, and what the adapter is to do. The segments are its own.

use quipu_cm::{
    Action, CallError, ChannelKey, Cm, Config, Event, EventKind, IdKey, Loss, Param, PortSpace,
    Protocol, Refusal, Unwanted, gid_of,
};

const RC: u8 = 2;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLISECOND;
const OWN: &str = "[fd00::1]:4444";
const PEER: &str = "[fd00::2]:999";

struct World {
    cm: Cm,
    channel: ChannelKey,
    listener: IdKey,
}

impl World {
    fn new() -> Self {
        let mut cm = Cm::new(Config::default());
        let channel = cm.create_channel();
        let listener = cm.create_id(channel, PortSpace::Tcp, RC, 7).unwrap();
        cm.bind(listener, OWN.parse().unwrap()).unwrap();
        cm.use_link(listener, Protocol::Qpip).unwrap();
        cm.listen(listener, 1).unwrap();
        Self { cm, channel, listener }
    }

    fn arrive(&mut self) -> Result<IdKey, Unwanted> {
        self.cm.handle_incoming(self.listener, OWN.parse().unwrap(), PEER.parse().unwrap())
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

    /// A request of a peer, accepted.
    fn accepted(&mut self) -> IdKey {
        self.arrive().unwrap();
        let id = self.event().id;
        self.cm.accept(SECOND, id, Some(&param())).unwrap();
        assert_eq!(self.actions(), [Action::Answer { id, qpn: 5 }]);
        id
    }

    /// An identifier that connects.
    fn asking(&mut self) -> IdKey {
        let id = self.cm.create_id(self.channel, PortSpace::Tcp, RC, 1).unwrap();
        let own = Ok("[fd00::1]:0".parse().unwrap());
        self.cm.resolved(id, PEER.parse().unwrap(), own).unwrap();
        self.cm.use_link(id, Protocol::Qpip).unwrap();
        self.cm.resolve_route(id).unwrap();
        self.cm.connect(SECOND, id, &param()).unwrap();
        self.kinds();
        assert_eq!(self.actions(), [reach(id)]);
        id
    }
}

fn param() -> Param {
    Param { qpn: 5, responder_resources: 1, initiator_depth: 1, ..Param::default() }
}

fn reach(id: IdKey) -> Action {
    Action::Reach { id, qpn: 5, to: PEER.parse().unwrap() }
}

#[test]
fn a_request_is_an_address() {
    let mut world = World::new();
    let id = world.arrive().unwrap();
    let event = world.event();
    assert_eq!((event.kind, event.id, event.listener), (EventKind::ConnectRequest, id, 7));
    assert_eq!((event.private_data.len(), event.peer.initiator_depth), (0, 0));
    let route = world.cm.route(id).unwrap();
    assert_eq!((route.src, route.dst), (OWN.parse().ok(), PEER.parse().ok()));
    assert_eq!((route.protocol, route.has_device), (Protocol::Qpip, true));
    assert_eq!(route.sgid, gid_of("fd00::1".parse().unwrap()), "not that of the other devices");
    assert_eq!(route.dgid, gid_of("fd00::2".parse().unwrap()));
    assert!(world.cm.init_params(id).unwrap().of_adapter);
    assert!(world.cm.connect_params(id).unwrap().of_adapter);
}

#[test]
fn a_listener_for_other_queue_pairs_has_no_peers() {
    const UC: u8 = 3;
    let mut world = World::new();
    world.listener = world.cm.create_id(world.channel, PortSpace::Tcp, UC, 7).unwrap();
    world.cm.bind(world.listener, "[fd00::1]:5555".parse().unwrap()).unwrap();
    world.cm.use_link(world.listener, Protocol::Qpip).unwrap();
    world.cm.listen(world.listener, 1).unwrap();
    assert_eq!(world.arrive(), Err(Unwanted::Refused));
}

#[test]
fn who_finds_the_queue_full_is_to_wait() {
    let mut world = World::new();
    let first = world.arrive().unwrap();
    assert_eq!(world.arrive(), Err(Unwanted::Full));
    // The peer gives up before the program has taken the event, which stays where it is.
    world.cm.handle_withdrawn(first);
    assert_eq!(world.arrive(), Err(Unwanted::Full));
    // Once the program has taken it, there is room.
    assert_eq!(world.kinds(), [(EventKind::ConnectRequest, 0)]);
    assert_eq!(world.cm.accept(SECOND, first, Some(&param())), Err(CallError::WrongState));
    assert!(world.arrive().is_ok());
    assert_eq!(world.arrive(), Err(Unwanted::Full));
    world.event();
    assert!(world.arrive().is_ok());
    world.cm.handle_device_removed();
    assert_eq!(world.arrive(), Err(Unwanted::Refused));
}

#[test]
fn a_connection_is_accepted_and_ended_from_either_end() {
    for by_peer in [false, true] {
        let mut world = World::new();
        let id = world.accepted();
        assert_eq!(
            (world.cm.establish(id), world.kinds()),
            (Ok(()), vec![]),
            "the adapter says so"
        );
        world.cm.handle_established(id);
        world.cm.handle_established(id);
        assert_eq!(world.kinds(), [(EventKind::Established, 0)]);
        if !by_peer {
            world.cm.disconnect(SECOND, id).unwrap();
            assert_eq!(world.actions(), [Action::End { id }]);
        }
        world.cm.handle_ended(id);
        world.cm.handle_ended(id);
        assert_eq!(world.kinds(), [(EventKind::Disconnected, 0)]);
        world.cm.disconnect(SECOND, id).unwrap();
        world.cm.destroy_id(id).unwrap();
        assert_eq!((world.actions(), world.cm.load().deadlines), (vec![], 0));
    }
}

#[test]
fn a_request_is_refused_by_the_program_and_with_its_identifier_or_listener() {
    let mut world = World::new();
    world.arrive().unwrap();
    let id = world.event().id;
    // There is no room for words, however many.
    world.cm.reject(id, Refusal::Consumer, &[7; 255]).unwrap();
    assert_eq!(world.actions(), [Action::Refuse { id }]);
    world.cm.destroy_id(id).unwrap();
    assert_eq!(world.actions(), []);
    world.arrive().unwrap();
    let id = world.event().id;
    world.cm.destroy_id(id).unwrap();
    assert_eq!(world.actions(), [Action::Refuse { id }]);
    let id = world.arrive().unwrap();
    world.cm.destroy_id(world.listener).unwrap();
    assert_eq!(world.actions(), [Action::Refuse { id }]);
    assert_eq!(world.cm.load().ids, 0);
    assert_eq!(world.arrive(), Err(Unwanted::Refused), "nobody listens");
}

#[test]
fn a_peer_that_gives_up_is_gone() {
    let mut world = World::new();
    world.arrive().unwrap();
    let id = world.event().id;
    world.cm.handle_withdrawn(id);
    assert_eq!(world.kinds(), []);
    assert_eq!(world.cm.accept(SECOND, id, Some(&param())), Err(CallError::WrongState));
    let id = world.accepted();
    world.cm.handle_withdrawn(id);
    assert_eq!(world.kinds(), [(EventKind::ConnectError, -104)]);
}

#[test]
fn with_the_link_everything_bound_to_it_ends() {
    let mut world = World::new();
    let (standing, accepted, over) = (world.accepted(), world.accepted(), world.accepted());
    world.cm.handle_established(standing);
    world.cm.handle_ended(over);
    let asking = world.asking();
    let elsewhere = world.cm.create_id(world.channel, PortSpace::Tcp, RC, 1).unwrap();
    world.cm.bind(elsewhere, "10.0.0.1:0".parse().unwrap()).unwrap();
    world.arrive().unwrap();
    let asked = world.event().id;
    world.kinds();
    let untaken = world.arrive().unwrap();
    world.cm.handle_link_lost();
    let taken = std::iter::from_fn(|| world.cm.take_event(world.channel).unwrap());
    let mut told: Vec<_> = taken.map(|event| (event.id, event.kind)).collect();
    told.sort_by_key(|(id, _)| id.index());
    let mut expected = [
        (world.listener, EventKind::DeviceRemoval),
        (standing, EventKind::Disconnected),
        (accepted, EventKind::ConnectError),
        (asking, EventKind::ConnectError),
        (asked, EventKind::DeviceRemoval),
    ];
    expected.sort_by_key(|(id, _)| id.index());
    assert_eq!(told, expected);
    assert!(world.cm.route(untaken).is_err(), "nobody will take it");
    for id in [world.listener, standing, accepted, over, asking, elsewhere, asked] {
        world.cm.destroy_id(id).unwrap();
    }
}

#[test]
fn without_a_device_requests_are_refused() {
    for link in [false, true] {
        let mut world = World::new();
        world.arrive().unwrap();
        let shown = world.event().id;
        let untaken = world.arrive().unwrap();
        match link {
            true => world.cm.handle_link_lost(),
            false => world.cm.handle_device_removed(),
        }
        let mut refused = [shown, untaken].map(|id| Action::Refuse { id });
        refused.sort_by_key(|action| format!("{action:?}"));
        let mut actions = world.actions();
        actions.retain(|action| *action != Action::End { id: world.listener });
        actions.sort_by_key(|action| format!("{action:?}"));
        assert_eq!(actions, refused);
        world.cm.destroy_id(shown).unwrap();
        assert_eq!(world.actions(), []);
    }
}

#[test]
fn tcp_has_no_room_for_private_data() {
    let mut world = World::new();
    let told = Param { private_data: b"who".to_vec(), ..param() };
    let refused = Err(CallError::Invalid("private data over bare TCP"));
    world.arrive().unwrap();
    let id = world.event().id;
    assert_eq!(world.cm.accept(SECOND, id, Some(&told)), refused);
    let id = world.cm.create_id(world.channel, PortSpace::Tcp, RC, 1).unwrap();
    world.cm.bind(id, OWN.parse().unwrap()).unwrap();
    world.cm.use_link(id, Protocol::Qpip).unwrap();
    world.cm.resolved(id, PEER.parse().unwrap(), OWN.parse().map_err(|_| 0)).unwrap();
    assert!(world.cm.is_on_link(id), "it stays what it was bound to");
    world.cm.resolve_route(id).unwrap();
    assert_eq!(world.cm.connect(SECOND, id, &told), refused);
    world.cm.connect(SECOND, id, &param()).unwrap();
    assert_eq!(world.cm.use_link(id, Protocol::Qpip), Err(CallError::WrongState));
}

#[test]
fn a_port_that_refuses_is_tried_for_a_moment() {
    let mut world = World::new();
    let id = world.asking();
    let mut now = SECOND;
    for pause in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
        world.cm.handle_unreached(now, id, Loss::Refused);
        assert_eq!((world.kinds(), world.actions()), (vec![], vec![]));
        now += pause * MILLISECOND;
        world.cm.handle_timeout(now - 1);
        assert_eq!(world.actions(), []);
        world.cm.handle_timeout(now);
        assert_eq!(world.actions(), [reach(id)]);
    }
    world.cm.handle_unreached(now, id, Loss::Refused);
    assert_eq!(world.kinds(), [(EventKind::Rejected, -111)]);
    assert_eq!(world.cm.load().deadlines, 0);
    let id = world.asking();
    world.cm.handle_unreached(now, id, Loss::Refused);
    world.cm.handle_timeout(now + MILLISECOND);
    world.cm.handle_established(id);
    assert_eq!(world.kinds(), [(EventKind::Established, 0)]);
}

#[test]
fn what_the_peers_program_does_not_want_is_not_tried_again() {
    let mut world = World::new();
    let id = world.asking();
    world.cm.handle_unreached(SECOND, id, Loss::Declined);
    assert_eq!(world.kinds(), [(EventKind::Rejected, -111)]);
    assert_eq!((world.actions(), world.cm.load().deadlines), (vec![], 0));
}

#[test]
fn a_peer_that_does_not_agree_to_the_end_is_cut_off() {
    for by_peer in [false, true] {
        let mut world = World::new();
        let id = world.accepted();
        world.cm.handle_established(id);
        world.kinds();
        match by_peer {
            true => world.cm.handle_peer_closed(SECOND, id),
            false => world.cm.disconnect(SECOND, id).unwrap(),
        }
        let told = if by_peer { vec![(EventKind::Disconnected, 0)] } else { vec![] };
        assert_eq!(world.kinds(), told);
        world.actions();
        world.cm.handle_timeout(11 * SECOND - 1);
        assert_eq!((world.kinds(), world.actions()), (vec![], vec![]));
        world.cm.handle_timeout(11 * SECOND);
        assert_eq!(world.actions(), [Action::Abort { id }]);
        let told = if by_peer { vec![] } else { vec![(EventKind::Disconnected, 0)] };
        assert_eq!(world.kinds(), told);
        world.cm.handle_ended(id);
        assert_eq!((world.kinds(), world.cm.load().deadlines), (vec![], 0));
    }
}

#[test]
fn nothing_is_cut_off_that_has_ended() {
    let mut world = World::new();
    let id = world.accepted();
    world.cm.handle_established(id);
    world.cm.handle_peer_closed(SECOND, id);
    world.cm.handle_ended(id);
    assert_eq!(world.cm.load().deadlines, 0);
    world.cm.handle_peer_closed(SECOND, world.listener);
    assert_eq!(world.cm.load().deadlines, 0);
}

#[test]
fn a_listener_has_the_peers_of_its_address() {
    let cases = [
        ("[fd00::1]:1", [true, false, false]),
        ("10.0.0.1:1", [false, false, true]),
        ("0.0.0.0:1", [true, true, true]),
        ("[::]:1", [true, true, true]),
    ];
    for (bound, expected) in cases {
        let mut world = World::new();
        let listener = world.cm.create_id(world.channel, PortSpace::Tcp, RC, 8).unwrap();
        world.cm.bind(listener, bound.parse().unwrap()).unwrap();
        world.cm.listen(listener, 0).unwrap();
        let taken = ["[fd00::1]:1", "[fd00::3]:1", "10.0.0.1:1"].map(|local| {
            let (local, peer) = (local.parse().unwrap(), PEER.parse().unwrap());
            world.cm.handle_incoming(listener, local, peer)
        });
        assert_eq!(taken.map(|it| it.is_ok()), expected, "{bound}: {taken:?}");
    }
    for (bound, other) in [("[::]:1", "10.0.0.1:1"), ("0.0.0.0:1", "[fd00::1]:1")] {
        let mut world = World::new();
        let listener = world.cm.create_id(world.channel, PortSpace::Tcp, RC, 8).unwrap();
        world.cm.options(listener).unwrap().v6_only = Some(true);
        world.cm.bind(listener, bound.parse().unwrap()).unwrap();
        world.cm.listen(listener, 0).unwrap();
        let (local, peer) = (other.parse().unwrap(), PEER.parse().unwrap());
        assert_eq!(world.cm.handle_incoming(listener, local, peer), Err(Unwanted::Refused));
    }
}

#[test]
fn a_queue_pair_that_is_none_is_the_programs_own_mistake() {
    let mut world = World::new();
    let id = world.asking();
    world.cm.handle_unusable(id, 22);
    world.cm.handle_unusable(id, 22);
    assert_eq!(world.kinds(), [(EventKind::ConnectError, -22)]);
    let id = world.accepted();
    world.cm.handle_unusable(id, 22);
    assert_eq!(world.kinds(), [(EventKind::ConnectError, -22)]);
    world.cm.handle_unusable(world.listener, 22);
    assert_eq!(world.kinds(), []);
}

#[test]
fn a_peer_that_cannot_be_reached() {
    let cases = [
        (Loss::TimedOut, EventKind::Unreachable, -110),
        (Loss::Failed(113), EventKind::Unreachable, -113),
        (Loss::Closed, EventKind::ConnectError, -104),
    ];
    for (loss, kind, status) in cases {
        let mut world = World::new();
        let id = world.asking();
        world.cm.handle_unreached(SECOND, id, loss);
        world.cm.handle_unreached(SECOND, id, loss);
        assert_eq!(world.kinds(), [(kind, status)]);
        assert_eq!(world.cm.load().deadlines, 0);
    }
}

#[test]
fn an_identifier_takes_its_attempt_with_it() {
    let mut world = World::new();
    let id = world.asking();
    world.cm.handle_timeout(100 * SECOND);
    assert_eq!(world.kinds(), [(EventKind::Unreachable, -110)]);
    assert_eq!(world.actions(), [Action::End { id }]);
    let id = world.asking();
    world.cm.destroy_id(id).unwrap();
    assert_eq!(world.actions(), [Action::End { id }]);
    let id = world.accepted();
    world.cm.destroy_id(id).unwrap();
    assert_eq!(world.actions(), [Action::End { id }]);
}

#[test]
fn datagrams_are_not_carried() {
    let mut world = World::new();
    let id = world.cm.create_id(world.channel, PortSpace::Udp, 4, 1).unwrap();
    assert_eq!(world.cm.use_link(id, Protocol::Qpip), Err(CallError::WrongState));
    world.cm.set_port(world.listener, 99);
    assert_eq!(world.cm.route(world.listener).unwrap().src.unwrap().port(), 99);
}
