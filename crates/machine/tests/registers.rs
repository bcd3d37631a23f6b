//! NICs without software: registers hold what they should, loads are held, and rules are kept.

use quipu_machine::{Attach, Bench, NicKind, Plan, RunError};

const US: u64 = 1_000_000;
const MS: u64 = 1_000 * US;

/// Registers of SINIC.
mod sinic {
    pub const CONFIG: u32 = 0x00;
    pub const COMMAND: u32 = 0x04;
    pub const INTR_STATUS: u32 = 0x08;
    pub const INTR_MASK: u32 = 0x0c;
    pub const RX_MAX_COPY: u32 = 0x10;
    pub const VIRTUAL_COUNT: u32 = 0x20;
    pub const RX_FIFO_SIZE: u32 = 0x28;
    pub const RX_DATA: u32 = 0x40;
    pub const RX_DONE: u32 = 0x48;
    pub const RX_WAIT: u32 = 0x50;
    pub const TX_DATA: u32 = 0x58;
    pub const TX_DONE: u32 = 0x60;
    pub const ON: u64 = 0b111;
    pub const ZERO_COPY: u64 = 1 << 12;
    pub const BUSY: u64 = 1 << 31;
    pub const COMPLETE: u64 = 1 << 30;
    pub const MORE: u64 = 1 << 29;
    pub const TX_MORE: u64 = 1 << 63;

    pub fn data(at: u64, len: u64) -> u64 {
        len << 40 | at
    }

    pub fn packets(done: u64) -> u64 {
        done >> 32 & 0xffff
    }

    pub fn len(done: u64) -> u64 {
        done & 0xf_ffff
    }
}

fn bench(kind: NicKind, banks: u32) -> Bench {
    let mut plan = Plan::default();
    plan.nic.kind = kind;
    plan.nic.attach = Attach::Cache;
    plan.nic.virtual_count = banks;
    let mut bench = Bench::new(&plan);
    if kind != NicKind::Descriptor {
        bench.store(sinic::CONFIG, sinic::ON);
        bench.advance(US);
    }
    bench
}

/// The rule that was broken, as it is shown.
fn rule(bench: &Bench) -> String {
    match bench.failure() {
        Some(error @ RunError::Driver { .. }) => error.to_string(),
        other => panic!("no rule was broken: {other:?}"),
    }
}

#[test]
fn registers_that_never_change() {
    let mut bench = bench(NicKind::Vsinic, 256);
    for (register, value) in
        [(sinic::RX_MAX_COPY, 1514), (sinic::VIRTUAL_COUNT, 256), (sinic::RX_FIFO_SIZE, 512 << 10)]
    {
        assert_eq!(bench.load(register, MS), Some(value), "{register:#x}");
    }
    assert_eq!(bench.load(sinic::CONFIG, MS), Some(sinic::ON));
}

#[test]
fn a_packet_is_copied_out_of_the_fifo() {
    let mut bench = bench(NicKind::Sinic, 1);
    bench.receive(1460);
    bench.receive(100);
    bench.advance(US);
    let done = bench.load(sinic::RX_DONE, MS).unwrap();
    assert_eq!((sinic::packets(done), done & sinic::BUSY), (2, 0));
    bench.store(sinic::RX_DATA, sinic::data(8192, 2048));
    let done = bench.load(sinic::RX_WAIT, MS).unwrap();
    assert_eq!((done & sinic::COMPLETE, done & sinic::MORE), (sinic::COMPLETE, 0));
    assert_eq!((sinic::len(done), sinic::packets(done)), (1514, 1));
    assert_ne!(bench.word(8192), 0, "the frame is in memory");
}

#[test]
fn a_load_of_rx_wait_is_held_until_there_is_a_packet() {
    let mut bench = bench(NicKind::Sinic, 1);
    bench.store(sinic::RX_DATA, sinic::data(8192, 2048));
    assert_eq!(bench.load(sinic::RX_WAIT, MS), None, "held");
    bench.receive(1460);
    bench.advance(MS);
    let done = bench.load(sinic::RX_DONE, MS).expect("the load that was held is answered");
    assert_eq!((done & sinic::COMPLETE, sinic::len(done)), (sinic::COMPLETE, 1514));
}

#[test]
fn headers_are_split_until_the_fifo_is_high() {
    let mut bench = bench(NicKind::Vsinic, 4);
    bench.store(sinic::CONFIG, sinic::ON | sinic::ZERO_COPY);
    bench.advance(US);
    bench.receive(1460);
    bench.store(sinic::RX_DATA, sinic::data(8192, 2048));
    let done = bench.load(sinic::RX_WAIT, MS).unwrap();
    assert_eq!(
        (done & sinic::MORE, sinic::len(done)),
        (sinic::MORE, 1514 - 64),
        "bytes that remain"
    );
    // The rest of the same packet, by the same bank.
    bench.store(sinic::RX_DATA, sinic::data(16_384, 2048));
    let done = bench.load(sinic::RX_WAIT, MS).unwrap();
    assert_eq!((done & sinic::MORE, sinic::len(done)), (0, 1514));
    // Above the high mark the NIC copies everything at once, and goes on so until it is low again.
    (0..300).for_each(|_| bench.receive(1460));
    bench.advance(US);
    bench.store(sinic::RX_DATA, sinic::data(8192, 2048));
    let done = bench.load(sinic::RX_WAIT, MS).unwrap();
    assert_eq!((done & sinic::MORE, sinic::len(done)), (0, 1514));
}

#[test]
fn a_full_fifo_drops() {
    let mut bench = bench(NicKind::Sinic, 1);
    (0..1000).for_each(|_| bench.receive(1460));
    bench.advance(US);
    let done = bench.load(sinic::RX_DONE, MS).unwrap();
    assert_eq!(sinic::packets(done), (512 << 10) / 1514);
}

#[test]
fn parts_of_a_packet_stay_together() {
    let mut bench = bench(NicKind::Vsinic, 2);
    let (first, second) = (bench.make_frame(1000, false), bench.make_frame(1000, false));
    bench.set_word(8192, first);
    bench.set_word(12_288, second);
    let tx = |bank: u32| bank << 8 | sinic::TX_DATA;
    bench.store(tx(0), sinic::data(8192, 54) | sinic::TX_MORE);
    bench.store(tx(1), sinic::data(12_288, 54));
    bench.advance(100 * US);
    assert_eq!(bench.counted().0, 0, "bank 1 waits for the packet of bank 0");
    bench.store(tx(0), sinic::data(16_384, 1000));
    bench.advance(100 * US);
    assert_eq!(bench.counted().0, 2);
    let done = bench.load(sinic::TX_DONE, MS).unwrap();
    assert_eq!((done & sinic::BUSY, sinic::len(done)), (0, 1000));
}

#[test]
fn interrupts_wait_and_urgent_ones_do_not() {
    let mut bench = bench(NicKind::Sinic, 1);
    bench.store(sinic::INTR_MASK, 0x1ff);
    bench.receive(1460);
    bench.advance(9 * US);
    assert_eq!(bench.counted().1, 0, "10 us from the cause");
    bench.advance(2 * US);
    assert_eq!(bench.counted().1, 1);
    assert_eq!(bench.load(sinic::INTR_STATUS, MS), Some(1));
    assert_eq!(bench.load(sinic::INTR_STATUS, MS), Some(0), "a load clears");
    bench.store(sinic::COMMAND, 2);
    bench.advance(US);
    assert_eq!(bench.counted().1, 2, "a soft interrupt comes at once");
}

#[test]
fn broken_rules_are_named_with_register_and_cycle() {
    let busy = |bench: &mut Bench| {
        bench.store(sinic::RX_DATA, sinic::data(8192, 2048));
        bench.store(sinic::RX_DATA, sinic::data(8192, 2048));
    };
    type Case<'a> = (&'a str, &'a dyn Fn(&mut Bench));
    let cases: [Case<'_>; 5] = [
        ("busy bank", &busy),
        ("1 to TxMaxCopy bytes", &|bench| bench.store(sinic::TX_DATA, sinic::data(8192, 0))),
        ("lies in memory", &|bench| bench.store(sinic::TX_DATA, sinic::data(0xff_ffff_0000, 64))),
        ("begins with its headers", &|bench| bench.store(sinic::TX_DATA, sinic::data(8192, 64))),
        ("can only be read", &|bench| bench.store(sinic::RX_DONE, 1)),
    ];
    for (what, deed) in cases {
        let mut bench = bench(NicKind::Sinic, 1);
        deed(&mut bench);
        bench.advance(MS);
        let rule = rule(&bench);
        assert!(rule.contains(what) && rule.contains("cycle"), "{what}: {rule}");
    }
}

#[test]
fn a_ring_is_not_overrun() {
    const TX_BASE: u32 = 0x40;
    const TX_SIZE: u32 = 0x48;
    const TX_TAIL: u32 = 0x50;
    let mut bench = bench(NicKind::Descriptor, 1);
    bench.store(TX_TAIL, 1);
    bench.advance(US);
    assert!(rule(&bench).contains("base and size"), "{}", rule(&bench));
    let mut bench = self::bench(NicKind::Descriptor, 1);
    bench.store(TX_BASE, 8192);
    bench.store(TX_SIZE, 4);
    bench.store(TX_TAIL, 5);
    bench.advance(US);
    assert!(rule(&bench).contains("ring overrun"), "{}", rule(&bench));
}

#[test]
fn a_register_of_the_bus_takes_its_time() {
    // V1: the time of a load is twice the way, and the plan decides the way.
    for (attach, low, high) in [(Attach::Cache, 20, 21), (Attach::Pcie, 600, 800)] {
        let mut plan = Plan::default();
        plan.nic.attach = attach;
        let mut bench = Bench::new(&plan);
        let begun = bench.now();
        assert!(bench.load(0x08, MS).is_some());
        let took = (bench.now() - begun) / 1000;
        assert!((low..=high).contains(&took), "{attach:?}: {took} ns");
    }
}
