//! Connection management through the table, up to queue pairs that exchange messages.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

use libc::{c_void, sockaddr, sockaddr_in, sockaddr_storage};
use quipu_abi_types::*;

use super::bench::{Bench, Edges, Qp, Said, api, blank, done, forked, found_nothing, made, send};

/// A program: an event channel.
struct Program {
    cm: &'static EngineCmApi,
    channel: EngineCmChannel,
}

fn ipv4(port: u16, ip: [u8; 4]) -> sockaddr_in {
    sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip) },
        sin_zero: [0; 8],
    }
}

fn raw(address: &sockaddr_in) -> *const sockaddr {
    (&raw const *address).cast()
}

fn of_storage(storage: &sockaddr_storage) -> Option<SocketAddr> {
    if libc::c_int::from(storage.ss_family) != libc::AF_INET {
        return None;
    }
    // SAFETY: the family says that this is a sockaddr_in.
    let v4 = unsafe { (&raw const *storage).cast::<sockaddr_in>().read() };
    let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
    Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
}

const LOOPBACK: [u8; 4] = [127, 0, 0, 1];

impl Program {
    fn new() -> Self {
        let cm = &api().cm;
        Self { cm, channel: made(|out| unsafe { (cm.create_channel)(out) }).unwrap() }
    }

    fn create(&self, port_space: u32, qp_type: u32, cookie: u64) -> Said<CmIdHandle> {
        let init = EngineCmIdInit { channel: self.channel.channel, port_space, qp_type, cookie };
        made(|out| unsafe { (self.cm.create_id)(&init, out) })
    }

    #[track_caller]
    fn event(&self, expected: u32) -> EngineCmEvent {
        let taken = made(|out| unsafe { (self.cm.get_event)(self.channel.channel, out) });
        let event: EngineCmEvent = taken.unwrap();
        assert_eq!((event.event, event.status), (expected, 0));
        event
    }

    fn route(&self, id: CmIdHandle) -> EngineCmRoute {
        made(|out| unsafe { (self.cm.query_route)(id, out) }).unwrap()
    }

    /// A listener on loopback, and its port.
    fn listen(&self, ps: u32, qp_type: u32) -> (CmIdHandle, u16) {
        let id = self.create(ps, qp_type, 0x11).unwrap();
        done(unsafe { (self.cm.bind_addr)(id, raw(&ipv4(0, LOOPBACK))) }).unwrap();
        done(unsafe { (self.cm.listen)(id, 5) }).unwrap();
        (id, of_storage(&self.route(id).src).unwrap().port())
    }

    fn resolve(&self, ps: u32, qp_type: u32, port: u16) -> CmIdHandle {
        let id = self.create(ps, qp_type, 0x22).unwrap();
        let to = ipv4(port, LOOPBACK);
        let none = std::ptr::null();
        done(unsafe { (self.cm.resolve_addr)(id, none, raw(&to), 1000) }).unwrap();
        assert_eq!(self.event(RDMA_CM_EVENT_ADDR_RESOLVED).cookie, 0x22);
        done(unsafe { (self.cm.resolve_route)(id, 1000) }).unwrap();
        self.event(RDMA_CM_EVENT_ROUTE_RESOLVED);
        id
    }

    fn attr(&self, id: CmIdHandle, state: u32) -> Said<(ibv_qp_attr, u32)> {
        let mut attr: ibv_qp_attr = blank();
        attr.qp_state = state;
        let mask = made(|out| unsafe { (self.cm.init_qp_attr)(id, &mut attr, out) })?;
        Ok((attr, mask))
    }

    fn bring(&self, bench: &Bench, qp: Qp, id: CmIdHandle, states: &[u32]) {
        for &state in states {
            let (attr, mask) = self.attr(id, state).unwrap();
            bench.modify(qp.qp, &attr, mask).unwrap();
        }
    }
}

fn param(qp: Qp, data: &'static [u8]) -> EngineCmParam {
    EngineCmParam {
        private_data: data.as_ptr().cast(),
        private_data_len: data.len() as u32,
        responder_resources: 4,
        initiator_depth: 4,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: qp.qp_num,
        qkey: 0,
        ece: ibv_ece::default(),
    }
}

#[test]
fn queue_pairs_are_connected_and_exchange_messages() {
    let bench = Bench::new();
    let [server, client] = [(); 2].map(|()| Program::new());
    let [a, b] = [(); 2].map(|()| bench.create_qp(&bench.qp_init()).unwrap());
    let (listener, port) = server.listen(RDMA_PS_TCP, IBV_QPT_RC);
    let active = client.resolve(RDMA_PS_TCP, IBV_QPT_RC, port);
    let route = client.route(active);
    let name: Vec<u8> = route.device.iter().take(6).map(|&c| c as u8).collect();
    assert_eq!((&name[..], route.port_num, route.num_paths), (&b"quipu0"[..], 1, 1));
    let to: IpAddr = Ipv4Addr::LOCALHOST.into();
    assert_eq!(of_storage(&route.dst), Some(SocketAddr::new(to, port)));

    let (_, mask) = client.attr(active, IBV_QPS_INIT).unwrap();
    assert_eq!(mask, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    assert_eq!(client.attr(active, IBV_QPS_RTR).err(), Some(EngineStatus::Invalid));
    client.bring(&bench, a, active, &[IBV_QPS_INIT]);
    done(unsafe { (client.cm.connect)(active, &param(a, b"hello")) }).unwrap();

    let request = server.event(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!((request.cookie, request.listener), (0, 0x11));
    assert_eq!((&request.private_data[..6], request.private_data_len), (&b"hello\0"[..], 56));
    assert_eq!((request.qp_num, request.flow_control, request.srq), (a.qp_num, 1, 0));
    let passive = request.id;
    done(unsafe { (server.cm.set_cookie)(passive, 0x33) }).unwrap();
    server.bring(&bench, b, passive, &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS]);
    done(unsafe { (server.cm.accept)(passive, &param(b, b"")) }).unwrap();

    let response = client.event(RDMA_CM_EVENT_CONNECT_RESPONSE);
    assert_eq!(
        (response.cookie, response.qp_num, response.private_data_len),
        (0x22, b.qp_num, 196)
    );
    let (attr, mask) = client.attr(active, IBV_QPS_RTR).unwrap();
    let rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    assert_eq!(mask, rtr | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    assert_eq!((attr.dest_qp_num, attr.ah_attr.is_global), (b.qp_num, 1));
    let (attr, mask) = client.attr(active, IBV_QPS_RTS).unwrap();
    let rts = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT;
    assert_eq!(mask, rts | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    assert_eq!((attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic), (7, 7, 4));
    client.bring(&bench, a, active, &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS]);
    done(unsafe { (client.cm.accept)(active, std::ptr::null()) }).unwrap();
    assert_eq!(server.event(RDMA_CM_EVENT_ESTABLISHED).cookie, 0x33);
    let again = unsafe { (server.cm.notify)(passive, IBV_EVENT_COMM_EST) };
    assert_eq!(done(again), Err(EngineStatus::Connected));

    bench.post_recv(b.qp, 1, &mut [bench.sge(64, 64)]).unwrap();
    bench.write(0, b"connected");
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [bench.sge(0, 9)])]).unwrap();
    for wc in bench.completions(bench.cq, 2) {
        assert_eq!(wc.status, IBV_WC_SUCCESS);
    }
    assert_eq!(&bench.read::<9>(64), b"connected");
    // Both ends let the other do all that the device offers.
    let mut flush = send(3, ENGINE_WR_FLUSH, &mut []);
    let (remote_addr, rkey) = (bench.addr(64), bench.mr.rkey);
    flush.wr.atomic = ibv_send_wr_atomic { remote_addr, compare_add: 9, swap: 1, rkey };
    for qp in [a.qp, b.qp] {
        done(unsafe { (bench.api.post_batch)(qp, &flush) }).unwrap();
        assert_eq!(bench.completion().status, IBV_WC_SUCCESS);
    }

    done(unsafe { (client.cm.disconnect)(active) }).unwrap();
    server.event(RDMA_CM_EVENT_DISCONNECTED);
    done(unsafe { (server.cm.disconnect)(passive) }).unwrap();
    client.event(RDMA_CM_EVENT_DISCONNECTED);
    let destroy = |program: &Program, id| made(|out| unsafe { (program.cm.destroy_id)(id, out) });
    assert_eq!(destroy(&client, active), Ok(4));
    assert_eq!(destroy(&server, passive), Ok(2));
    assert_eq!(destroy(&server, listener), Ok(1));
    assert_eq!(destroy(&server, listener), Err(EngineStatus::Invalid));
    for program in [client, server] {
        done(unsafe { (program.cm.destroy_channel)(program.channel.channel) }).unwrap();
    }
}

#[test]
fn datagram_services_and_groups() {
    let [server, client] = [(); 2].map(|()| Program::new());
    let (_, port) = server.listen(RDMA_PS_UDP, IBV_QPT_UD);
    let active = client.resolve(RDMA_PS_UDP, IBV_QPT_UD, port);
    let (attr, mask) = client.attr(active, IBV_QPS_INIT).unwrap();
    assert_eq!(mask, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    assert_eq!((attr.qkey, attr.port_num), (RDMA_UDP_QKEY, 1));
    assert_eq!(client.attr(active, IBV_QPS_RTR).unwrap().1, IBV_QP_STATE);
    assert_eq!(client.attr(active, IBV_QPS_RTS).unwrap().1, IBV_QP_STATE | IBV_QP_SQ_PSN);
    let nobody = EngineQp { qp: QpHandle::NONE, qp_num: 0x77, cap: blank() };
    done(unsafe { (client.cm.connect)(active, &param(nobody, b"?")) }).unwrap();
    let request = server.event(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.private_data_len, 180);
    done(unsafe { (server.cm.accept)(request.id, &param(nobody, b"!")) }).unwrap();
    let found = client.event(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!((found.qp_num, found.qkey, found.private_data_len), (0x77, RDMA_UDP_QKEY, 136));
    assert_eq!((found.ah_attr.is_global, found.ah_attr.port_num), (1, 1));

    let group = ipv4(0, [239, 1, 2, 3]);
    let join = |address: &sockaddr_in, flags| {
        done(unsafe { (client.cm.join)(active, raw(address), flags, 0x44) })
    };
    assert_eq!(join(&ipv4(0, [0; 4]), 0), Err(EngineStatus::Invalid));
    assert_eq!(join(&group, 2), Err(EngineStatus::Invalid));
    join(&group, 0).unwrap();
    let joined = client.event(RDMA_CM_EVENT_MULTICAST_JOIN);
    assert_eq!((joined.cookie, joined.multicast, joined.qp_num), (0x22, 0x44, 0x00ff_ffff));
    // SAFETY: every bit pattern is a GID.
    assert_eq!(unsafe { joined.ah_attr.grh.dgid.raw }[10..], [0xff, 0xff, 239, 1, 2, 3]);
    let leave = || made(|out| unsafe { (client.cm.leave)(active, 0x44, out) });
    assert_eq!((leave(), leave()), (Ok(1), Err(EngineStatus::Invalid)));
}

#[test]
fn arguments_and_states_that_are_not_valid() {
    use EngineStatus as S;
    let program = Program::new();
    let cm = program.cm;
    assert_eq!(program.create(0x1234, IBV_QPT_RC, 0), Err(S::Invalid));
    assert_eq!(program.create(RDMA_PS_TCP, 1 << 8, 0), Err(S::Invalid));
    let id = program.create(RDMA_PS_TCP, IBV_QPT_RC, 0).unwrap();
    let none = CmIdHandle::NONE;
    let stale = CmIdHandle(id.0 ^ 1 << 40);
    for wrong in [none, stale] {
        assert_eq!(done(unsafe { (cm.listen)(wrong, 1) }), Err(S::Invalid));
        assert_eq!(done(unsafe { (cm.disconnect)(wrong) }), Err(S::Invalid));
        assert_eq!(done(unsafe { (cm.set_cookie)(wrong, 1) }), Err(S::Invalid));
    }
    assert_eq!(done(unsafe { (cm.bind_addr)(id, std::ptr::null()) }), Err(S::Invalid));
    let mut local = ipv4(0, LOOPBACK);
    local.sin_family = libc::AF_UNIX as libc::sa_family_t;
    assert_eq!(done(unsafe { (cm.bind_addr)(id, raw(&local)) }), Err(S::NotSupported));
    let mut infiniband: sockaddr_ib = unsafe { std::mem::zeroed() };
    infiniband.sib_family = AF_IB as libc::sa_family_t;
    let at: *const libc::sockaddr = (&raw const infiniband).cast();
    assert_eq!(done(unsafe { (cm.bind_addr)(id, at) }), Err(S::NoDevice), "a port of Ethernet");
    assert_eq!(done(unsafe { (cm.join)(id, at, 0, 1) }), Err(S::NotSupported));
    let stranger = unsafe { (cm.bind_addr)(id, raw(&ipv4(0, [192, 0, 2, 1]))) };
    assert_eq!(done(stranger), Err(S::AddressNotAvailable));
    assert_eq!(done(unsafe { (cm.connect)(id, std::ptr::null()) }), Err(S::Invalid));
    assert_eq!(done(unsafe { (cm.accept)(id, std::ptr::null()) }), Err(S::Invalid));
    assert_eq!(done(unsafe { (cm.notify)(id, IBV_EVENT_QP_FATAL) }), Err(S::Invalid));
    assert_eq!(program.attr(id, IBV_QPS_INIT).err(), Some(S::Invalid), "no device yet");
    assert_eq!(program.attr(id, IBV_QPS_SQD).err(), Some(S::Invalid));
    let channel = program.channel.channel;
    assert_eq!(done(unsafe { (cm.destroy_channel)(channel) }), Err(S::Busy));

    done(unsafe { (cm.bind_addr)(id, raw(&ipv4(0, LOOPBACK))) }).unwrap();
    assert_eq!(done(unsafe { (cm.bind_addr)(id, raw(&ipv4(0, LOOPBACK))) }), Err(S::Invalid));
    let port = of_storage(&program.route(id).src).unwrap().port();
    let other = program.create(RDMA_PS_TCP, IBV_QPT_RC, 0).unwrap();
    let taken = unsafe { (cm.bind_addr)(other, raw(&ipv4(port, LOOPBACK))) };
    assert_eq!(done(taken), Err(S::AddressInUse));

    // SAFETY: takes integers.
    unsafe { libc::fcntl(program.channel.fd, libc::F_SETFL, libc::O_NONBLOCK) };
    let event: Said<EngineCmEvent> = made(|out| unsafe { (cm.get_event)(channel, out) });
    assert_eq!(event.err(), Some(S::WouldBlock));
}

#[test]
fn each_event_is_an_edge_though_earlier_ones_were_not_taken() {
    let program = Program::new();
    let edges = Edges::of(program.channel.fd);
    let to = ipv4(1, LOOPBACK);
    for cookie in 0..3 {
        assert!(!edges.any(), "{cookie}");
        let id = program.create(RDMA_PS_TCP, IBV_QPT_RC, cookie).unwrap();
        let none = std::ptr::null();
        done(unsafe { (program.cm.resolve_addr)(id, none, raw(&to), 1000) }).unwrap();
        assert!(edges.any(), "{cookie}");
    }
    for cookie in 0..3 {
        assert_eq!(program.event(RDMA_CM_EVENT_ADDR_RESOLVED).cookie, cookie);
    }
    assert!(!edges.any());
}

#[test]
fn options_have_exact_sizes() {
    let program = Program::new();
    let id = program.create(RDMA_PS_TCP, IBV_QPT_RC, 0).unwrap();
    let set = |level, name, bytes: &[u8]| {
        let value = bytes.as_ptr().cast::<c_void>();
        done(unsafe { (program.cm.set_option)(id, level, name, value, bytes.len()) })
    };
    set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &[0x68]).unwrap();
    assert_eq!(program.route(id).tos, 0x68);
    set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &[14]).unwrap();
    for name in [RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_AFONLY] {
        set(RDMA_OPTION_ID, name, &1_i32.to_ne_bytes()).unwrap();
        assert_eq!(set(RDMA_OPTION_ID, name, &[1]), Err(EngineStatus::Invalid));
    }
    assert_eq!(set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &[1, 2]), Err(EngineStatus::Invalid));
    assert_eq!(set(7, 7, &[1]), Err(EngineStatus::NotSupported));
    // A path that the program knows stands for a route that was resolved.
    let path = [0_u8; 16];
    let early = set(RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &path);
    assert_eq!(early, Err(EngineStatus::Invalid), "there is no address yet");
    let to = ipv4(9, LOOPBACK);
    let resolved = unsafe { (program.cm.resolve_addr)(id, std::ptr::null(), raw(&to), 1000) };
    done(resolved).unwrap();
    program.event(RDMA_CM_EVENT_ADDR_RESOLVED);
    set(RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &path).unwrap();
    program.event(RDMA_CM_EVENT_ROUTE_RESOLVED);
    assert_eq!(program.route(id).num_paths, 1);
}

/// What a child of fork finds; its exit status is the number of the first that is not as it should be.
fn child(parent: &Program, listener: CmIdHandle) -> Result<(), i32> {
    use EngineStatus as S;
    let expect = |number: i32, code: i32, wanted: S| {
        if code == wanted.code() { Ok(()) } else { Err(number) }
    };
    let mut count = 9;
    expect(1, unsafe { (parent.cm.listen)(listener, 1) }, S::NoDevice)?;
    expect(2, unsafe { (parent.cm.destroy_id)(listener, &mut count) }, S::Ok)?;
    expect(3, unsafe { (parent.cm.destroy_channel)(parent.channel.channel) }, S::Ok)?;
    // An engine of its own, which does not know the parent's.
    let own = made(|out| unsafe { (parent.cm.create_channel)(out) }).map_err(|_| 4)?;
    let own = Program { cm: parent.cm, channel: own };
    let id = own.create(RDMA_PS_TCP, IBV_QPT_RC, 1).map_err(|_| 5)?;
    expect(6, unsafe { (own.cm.bind_addr)(id, raw(&ipv4(0, LOOPBACK))) }, S::Ok)?;
    expect(7, unsafe { (own.cm.listen)(listener, 1) }, S::Invalid)?;
    expect(8, unsafe { (own.cm.listen)(id, 1) }, S::Ok)?;
    expect(9, unsafe { (own.cm.destroy_id)(id, &mut count) }, S::Ok)?;
    if count == 0 { Ok(()) } else { Err(10) }
}

#[test]
fn a_child_of_fork_has_none_of_it_and_may_have_its_own() {
    let [server, client] = [(); 2].map(|()| Program::new());
    let (listener, port) = server.listen(RDMA_PS_TCP, IBV_QPT_RC);
    found_nothing(forked(|| child(&server, listener)));
    // The parent does not notice.
    let active = client.resolve(RDMA_PS_TCP, IBV_QPT_RC, port);
    let nobody = EngineQp { qp: QpHandle::NONE, qp_num: 1, cap: blank() };
    done(unsafe { (client.cm.connect)(active, &param(nobody, b"")) }).unwrap();
    server.event(RDMA_CM_EVENT_CONNECT_REQUEST);
}
