//! Raw packets: rules as programs describe them, frames over the loopback, work queues and their tables.

use std::mem::size_of_val;

use quipu_abi_types::*;

use super::bench::{Bench, Qp, Said, blank, done, made, receive, send};

/// A group of stations for one test of this process: all adapters of the host share the segment.
fn group(test: u8) -> [u8; 6] {
    let [.., high, low] = std::process::id().to_be_bytes();
    [1, 0x50, 0x56, high, low, test]
}

/// Specifications that lie one behind the other.
#[repr(C, packed(4))]
#[derive(Clone, Copy)]
struct Specs<A, B, C>(A, B, C);

/// A rule with specifications, as a C program lays it out.
#[repr(C, packed(4))]
#[derive(Clone, Copy)]
struct Rule<T> {
    attr: ibv_flow_attr,
    specs: T,
}

fn rule<T: Copy>(count: u8, specs: T) -> Rule<T> {
    let mut attr: ibv_flow_attr = blank();
    (attr.port, attr.num_of_specs) = (1, count);
    let mut rule = Rule { attr, specs };
    rule.attr.size = size_of_val(&rule) as u16;
    rule
}

/// Frames to a station, or to a group of them.
fn ethernet(dst_mac: [u8; 6]) -> ibv_flow_spec_eth {
    let mut spec: ibv_flow_spec_eth = blank();
    (spec.r#type, spec.size) = (IBV_FLOW_SPEC_ETH, size_of::<ibv_flow_spec_eth>() as u16);
    (spec.val.dst_mac, spec.mask.dst_mac) = (dst_mac, [0xff; 6]);
    spec
}

fn create_flow<T>(bench: &Bench, qp: QpHandle, rule: &Rule<T>) -> Said<FlowHandle> {
    made(|out| unsafe { (bench.api.raw.create_flow)(qp, &rule.attr, out) })
}

fn destroy_flow(bench: &Bench, flow: FlowHandle) -> Said {
    done(unsafe { (bench.api.raw.destroy_flow)(flow) })
}

/// A raw packet queue pair in RTS.
fn raw(bench: &Bench) -> Qp {
    let qp =
        bench.create_qp(&EngineQpInit { qp_type: IBV_QPT_RAW_PACKET, ..bench.qp_init() }).unwrap();
    for (state, mask) in [(IBV_QPS_INIT, IBV_QP_PORT), (IBV_QPS_RTR, 0), (IBV_QPS_RTS, 0)] {
        let mut attr: ibv_qp_attr = blank();
        (attr.qp_state, attr.port_num) = (state, 1);
        bench.modify(qp.qp, &attr, mask | IBV_QP_STATE).unwrap();
    }
    qp
}

/// A UDP datagram from 1.1.1.`last` port 1234 to 2.2.2.2 port 5678, in a frame.
fn frame(test: u8, last: u8) -> Vec<u8> {
    let mut frame =
        [&group(test)[..], &[2; 6], &[8, 0, 0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    frame.extend([1, 1, 1, last, 2, 2, 2, 2, 0x04, 0xd2, 0x16, 0x2e, 0, 8, 0, 0]);
    frame
}

fn transmit(bench: &Bench, qp: Qp, frame: &[u8]) {
    bench.write(0, frame);
    let mut list = [bench.sge(0, frame.len() as u32)];
    bench.post_send(qp.qp, &mut [send(1, IBV_WR_SEND, &mut list)]).unwrap();
    let wc = bench.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_SEND));
}

#[test]
fn every_kind_of_specification_steers_frames() {
    let bench = Bench::new();
    let (sender, receiver) = (raw(&bench), raw(&bench));
    let mut ip: ibv_flow_spec_ipv4_ext = blank();
    (ip.r#type, ip.size) = (IBV_FLOW_SPEC_IPV4_EXT, size_of::<ibv_flow_spec_ipv4_ext>() as u16);
    (ip.val.src_ip, ip.mask.src_ip) = (u32::from_ne_bytes([1, 1, 1, 7]), !0);
    (ip.val.proto, ip.mask.proto) = (17, 0xff);
    let mut udp: ibv_flow_spec_tcp_udp = blank();
    (udp.r#type, udp.size) = (IBV_FLOW_SPEC_UDP, size_of::<ibv_flow_spec_tcp_udp>() as u16);
    (udp.val.dst_port, udp.mask.dst_port) = (5678_u16.to_be(), !0);
    let whole = rule(3, Specs(ethernet(group(1)), ip, udp));
    let flow = create_flow(&bench, receiver.qp, &whole).unwrap();
    bench.post_recv(receiver.qp, 9, &mut [bench.sge(4096, 2048)]).unwrap();
    transmit(&bench, sender, &frame(1, 8));
    transmit(&bench, sender, &frame(1, 7));
    let wc = bench.completion();
    assert_eq!((wc.wr_id, wc.status, wc.byte_len), (9, IBV_WC_SUCCESS, 42));
    assert_eq!((wc.qp_num, wc.src_qp, wc.wc_flags), (receiver.qp_num, 0, 0));
    assert_eq!(bench.read::<42>(4096)[..], frame(1, 7)[..], "not the one from 1.1.1.8");
    assert_eq!(bench.destroy_qp(receiver.qp).err(), Some(EngineStatus::Busy));
    destroy_flow(&bench, flow).unwrap();
    assert_eq!(destroy_flow(&bench, flow), Err(EngineStatus::Invalid));
    bench.destroy_qp(receiver.qp).unwrap();
}

#[test]
fn rules_that_the_device_does_not_have() {
    use EngineStatus::{Invalid, NotSupported};
    let bench = Bench::new();
    let (raw, connected) = (raw(&bench), bench.create_qp(&bench.qp_init()).unwrap());
    let good = rule(1, ethernet(group(2)));
    let refused = |rule: &Rule<ibv_flow_spec_eth>| create_flow(&bench, raw.qp, rule).err();
    let with = |change: &dyn Fn(&mut Rule<ibv_flow_spec_eth>)| {
        let mut rule = good;
        change(&mut rule);
        refused(&rule)
    };
    assert_eq!(with(&|rule| rule.attr.r#type = IBV_FLOW_ATTR_SNIFFER), Some(NotSupported));
    assert_eq!(with(&|rule| rule.attr.r#type = 9), Some(Invalid));
    assert_eq!(with(&|rule| rule.attr.r#type = IBV_FLOW_ATTR_MC_DEFAULT), Some(Invalid));
    assert_eq!(with(&|rule| rule.attr.flags = IBV_FLOW_ATTR_FLAGS_EGRESS), Some(NotSupported));
    assert_eq!(with(&|rule| rule.attr.port = 2), Some(Invalid));
    assert_eq!(with(&|rule| rule.attr.comp_mask = 1), Some(NotSupported));
    assert_eq!(with(&|rule| rule.specs.r#type = IBV_FLOW_SPEC_ACTION_TAG), Some(NotSupported));
    assert_eq!(with(&|rule| rule.specs.r#type = 0x60), Some(NotSupported));
    for size in [0, 5, 6, 37] {
        assert_eq!(with(&|rule| rule.specs.size = size), Some(Invalid), "{size}");
    }
    assert_eq!(with(&|rule| rule.attr.flags = IBV_FLOW_ATTR_FLAGS_DONT_TRAP), None);
    assert_eq!(with(&|rule| rule.specs.r#type |= IBV_FLOW_SPEC_INNER), None);
    assert_eq!(with(&|rule| (rule.attr.r#type, rule.attr.num_of_specs) = (2, 0)), None);
    assert_eq!(create_flow(&bench, connected.qp, &good).err(), Some(Invalid));
    assert_eq!(create_flow(&bench, QpHandle(7), &good).err(), Some(Invalid));
    let null = made::<FlowHandle>(|out| unsafe {
        (bench.api.raw.create_flow)(raw.qp, std::ptr::null(), out)
    });
    assert_eq!(null.err(), Some(Invalid));
    // The rules that stand go with the context.
    let iwarp = Bench::of(c"quipu_iw0");
    let init = EngineQpInit { qp_type: IBV_QPT_RAW_PACKET, ..iwarp.qp_init() };
    assert_eq!(iwarp.create_qp(&init).err(), Some(NotSupported));
    assert_eq!(create_wq(&iwarp, iwarp.cq).err(), Some(NotSupported));
}

#[test]
fn rules_count_what_they_match() {
    use EngineStatus::{Busy, Invalid, NotSupported};
    let (bench, other) = (Bench::new(), Bench::new());
    let raw_api = &bench.api.raw;
    let create = |bench: &Bench| {
        made::<CountersHandle>(|out| unsafe { (raw_api.create_counters)(bench.context, out) })
    };
    let (handle, foreign) = (create(&bench).unwrap(), create(&other).unwrap());
    let attach =
        |description, index| done(unsafe { (raw_api.attach_counter)(handle, description, index) });
    attach(IBV_COUNTER_PACKETS, 1).unwrap();
    attach(IBV_COUNTER_BYTES, 0).unwrap();
    assert_eq!((attach(2, 0), attach(IBV_COUNTER_BYTES, !0)), (Err(NotSupported), Err(Invalid)));
    let base = || ibv_counters { context: std::ptr::null_mut() };
    let mut own = EngineCounters { base: base(), handle };
    let mut theirs = EngineCounters { base: base(), handle: foreign };
    let mut action: ibv_flow_spec_counter_action = blank();
    (action.r#type, action.size) =
        (IBV_FLOW_SPEC_ACTION_COUNT, size_of::<ibv_flow_spec_counter_action>() as u16);
    let receiver = raw(&bench);
    let with = |counters: *mut EngineCounters, size| {
        let mut action = action;
        (action.counters, action.size) = (counters.cast(), size);
        create_flow(&bench, receiver.qp, &rule(2, Specs(ethernet(group(3)), action, ())))
    };
    assert_eq!(with(std::ptr::null_mut(), action.size).err(), Some(Invalid));
    assert_eq!(with(&raw mut theirs, action.size).err(), Some(Invalid));
    assert_eq!(with(&raw mut own, 8).err(), Some(Invalid));
    let flow = with(&raw mut own, action.size).unwrap();
    assert_eq!(attach(IBV_COUNTER_BYTES, 2), Err(Busy));
    let sender = raw(&bench);
    for wr_id in [7, 8] {
        bench.post_recv(receiver.qp, wr_id, &mut [bench.sge(4096, 2048)]).unwrap();
        transmit(&bench, sender, &frame(3, 1));
        assert_eq!(bench.completion().wr_id, wr_id);
    }
    let mut values = [9; 100];
    let read =
        |values: *mut u64, count| done(unsafe { (raw_api.read_counters)(handle, values, count) });
    read(values.as_mut_ptr(), 99).unwrap();
    assert_eq!((values[..3].to_vec(), values[98], values[99]), (vec![84, 2, 0], 0, 9));
    assert_eq!(read(std::ptr::null_mut(), 1), Err(Invalid));
    let destroy = || done(unsafe { (raw_api.destroy_counters)(handle) });
    assert_eq!(destroy(), Err(Busy));
    destroy_flow(&bench, flow).unwrap();
    assert_eq!((destroy(), destroy()), (Ok(()), Err(Invalid)));
    assert_eq!(read(values.as_mut_ptr(), 1), Err(Invalid));
    assert_eq!(create(&Bench::of(c"quipu_iw0")).err(), Some(NotSupported));
}

fn create_wq(bench: &Bench, cq: CqHandle) -> Said<EngineWq> {
    let init = EngineWqInit { cq, max_wr: 16, max_sge: 2 };
    made(|out| unsafe { (bench.api.raw.create_wq)(bench.pd, &init, out) })
}

fn create_table(bench: &Bench, queues: &[WqHandle]) -> Said<TableHandle> {
    made(|out| unsafe {
        let count = queues.len() as u32;
        (bench.api.raw.create_ind_table)(bench.context, queues.as_ptr(), count, out)
    })
}

fn create_hashed(bench: &Bench, table: TableHandle, hash: ibv_rx_hash_conf) -> Said<Qp> {
    let init = EngineHashedQpInit { table, hash, cookie: 5 };
    made(|out| unsafe { (bench.api.raw.create_hashed_qp)(bench.pd, &init, out) })
}

fn conf(key: &mut [u8]) -> ibv_rx_hash_conf {
    ibv_rx_hash_conf {
        rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ,
        rx_hash_key_len: key.len() as u8,
        rx_hash_key: key.as_mut_ptr(),
        rx_hash_fields_mask: 1,
    }
}

fn post_wq(bench: &Bench, wq: WqHandle, wr_id: u64) -> Said {
    let mut list = [bench.sge(4096, 2048)];
    let wr = receive(wr_id, &mut list);
    let mut bad = std::ptr::null();
    done(unsafe { (bench.api.raw.post_wq_recv)(wq, &wr, &mut bad) })
}

#[test]
fn frames_are_spread_over_work_queues() {
    let bench = Bench::new();
    let cqs = [(); 2].map(|()| bench.new_cq(64, ChannelHandle::NONE, 0).unwrap().cq);
    let queues = cqs.map(|cq| create_wq(&bench, cq).unwrap());
    assert!(queues[0].max_wr >= 16 && queues[0].max_sge >= 2);
    for wq in queues {
        assert_eq!(post_wq(&bench, wq.wq, 1), Err(EngineStatus::Invalid), "it is in RESET");
        done(unsafe { (bench.api.raw.modify_wq)(wq.wq, IBV_WQS_RESET, IBV_WQS_RDY) }).unwrap();
        for wr_id in 0..16 {
            post_wq(&bench, wq.wq, wr_id).unwrap();
        }
        assert_eq!(post_wq(&bench, wq.wq, 16), Err(EngineStatus::QueueFull));
    }
    let table = create_table(&bench, &queues.map(|wq| wq.wq)).unwrap();
    let qp = create_hashed(&bench, table, conf(&mut [0x6d; 40])).unwrap();
    assert_eq!(bench.query(qp.qp).unwrap().qp_state, IBV_QPS_RTR);
    create_flow(&bench, qp.qp, &rule(1, ethernet(group(4)))).unwrap();
    let sender = raw(&bench);
    for last in 0..16 {
        transmit(&bench, sender, &frame(4, last));
    }
    let mut counts = [0; 2];
    while counts[0] + counts[1] < 16 {
        for (count, cq) in counts.iter_mut().zip(cqs) {
            let mut wc = blank::<ibv_wc>();
            if unsafe { (bench.api.poll_cq)(cq, 1, &mut wc) } == 1 {
                assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 42));
                *count += 1;
            }
        }
    }
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
    // What is left goes with the context, in an order that is possible.
}

#[test]
fn work_queues_and_tables_that_cannot_be() {
    use EngineStatus::{Busy, Invalid, NotSupported};
    let (bench, other) = (Bench::new(), Bench::new());
    assert_eq!(create_wq(&bench, other.cq).err(), Some(Invalid), "of another context");
    let wq = create_wq(&bench, bench.cq).unwrap().wq;
    let modify_from = |curr, to| done(unsafe { (bench.api.raw.modify_wq)(wq, curr, to) });
    let modify = |state| modify_from(IBV_WQS_UNKNOWN, state);
    assert_eq!(modify(IBV_WQS_UNKNOWN), Err(Invalid));
    assert_eq!(modify_from(IBV_WQS_RDY, IBV_WQS_ERR), Err(Invalid));
    assert_eq!(modify_from(4, IBV_WQS_ERR), Err(Invalid));
    modify_from(IBV_WQS_RESET, IBV_WQS_ERR).unwrap();
    assert_eq!(modify(IBV_WQS_RDY), Err(Invalid));
    post_wq(&bench, wq, 3).unwrap();
    let wc = bench.completion();
    assert_eq!((wc.wr_id, wc.status), (3, IBV_WC_WR_FLUSH_ERR));
    assert_eq!(create_table(&bench, &[wq; 3]).err(), Some(Invalid));
    assert_eq!(create_table(&other, &[wq]).err(), Some(Invalid));
    let table = create_table(&bench, &[wq]).unwrap();
    let mut key = [1; 40];
    let refused = |change: &dyn Fn(&mut ibv_rx_hash_conf)| {
        let mut key = [1; 40];
        let mut conf = conf(&mut key);
        change(&mut conf);
        create_hashed(&bench, table, conf).err()
    };
    assert_eq!(refused(&|conf| conf.rx_hash_function = 2), Some(NotSupported));
    assert_eq!(refused(&|conf| conf.rx_hash_key_len = 39), Some(NotSupported));
    assert_eq!(refused(&|conf| conf.rx_hash_fields_mask = 1 << 8), Some(NotSupported));
    assert_eq!(refused(&|conf| conf.rx_hash_fields_mask = 1 << 32), Some(NotSupported));
    assert_eq!(refused(&|conf| conf.rx_hash_fields_mask = 1 | 1 << 2), Some(Invalid));
    assert_eq!(refused(&|conf| conf.rx_hash_key = std::ptr::null_mut()), Some(Invalid));
    assert_eq!(create_hashed(&bench, TableHandle(9), conf(&mut key)).err(), Some(Invalid));
    let qp = create_hashed(&bench, table, conf(&mut key)).unwrap();
    let destroy_wq = || done(unsafe { (bench.api.raw.destroy_wq)(wq) });
    let destroy_table = || done(unsafe { (bench.api.raw.destroy_ind_table)(table) });
    assert_eq!((destroy_wq(), destroy_table()), (Err(Busy), Err(Busy)));
    bench.destroy_qp(qp.qp).unwrap();
    assert_eq!((destroy_table(), destroy_wq()), (Ok(()), Ok(())));
    assert_eq!((destroy_table(), destroy_wq()), (Err(Invalid), Err(Invalid)));
}
