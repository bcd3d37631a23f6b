use super::super::{Bind, RegionsConfig, WindowType};
use super::*;
use crate::segment::Segment;

const PD: u32 = 1;
const QP: u32 = 17;

struct Bench {
    regions: Regions,
    memory: Segment,
    key: Key,
}

impl Bench {
    fn new() -> Bench {
        let mut regions = Regions::new(RegionsConfig::new([7; 32]));
        regions.watch_lent();
        let memory = Segment::heap(3 * MOST);
        let all = Access::LOCAL_WRITE | Access::REMOTE | Access::MW_BIND;
        let key = regions.register_owned(PD, &memory, Some(0), all).unwrap();
        Bench { regions, memory, key }
    }

    fn sge(&self, addr: u64, len: u32) -> Sge {
        Sge { addr, len, lkey: self.key }
    }

    fn lend(&mut self, addr: u64, len: u32) -> Loan {
        let sge = self.sge(addr, len);
        self.regions.lend(PD, &[sge]).unwrap()
    }

    /// As the program does.
    fn change(&self, at: usize) {
        let mut byte = [0];
        self.memory.read(at, &mut byte).unwrap();
        self.memory.write(at, &[byte[0] ^ 1]).unwrap();
    }

    /// As the adapter does.
    fn place(&mut self, addr: u64, bytes: &[u8]) {
        let sge = self.sge(addr, bytes.len() as u32);
        self.regions.scatter(PD, &[sge], 0, bytes).unwrap();
    }
}

#[test]
fn what_only_the_adapter_writes_to_is_not_changed() {
    let mut bench = Bench::new();
    let loan = bench.lend(100, 1000);
    bench.place(100, &[1; 500]);
    bench.place(600, &[2; 500]);
    bench.place(300, &[3; 400]);
    bench.regions.renew_lent();
    bench.place(90, &[4; 50]);
    assert_eq!(bench.regions.give_back(loan, 1000), None);
}

#[test]
fn a_change_is_found_before_the_message_and_behind_it() {
    for renewed in [false, true] {
        let mut bench = Bench::new();
        let loan = bench.lend(100, 1000);
        bench.change(103);
        bench.place(100, &[7; 10]);
        if renewed {
            bench.regions.renew_lent();
        }
        assert_eq!(bench.regions.give_back(loan, 10), Some(3));
        let loan = bench.lend(100, 1000);
        bench.place(100, &[8; 10]);
        bench.regions.renew_lent();
        bench.change(109);
        assert_eq!(bench.regions.give_back(loan, 10), Some(9));
    }
}

#[test]
fn bytes_that_the_message_does_not_reach_are_the_programs_affair() {
    let mut bench = Bench::new();
    let loan = bench.lend(100, 1000);
    bench.place(100, &[7; 10]);
    bench.regions.renew_lent();
    bench.change(110);
    bench.change(99);
    assert_eq!(bench.regions.give_back(loan, 10), None);
    let loan = bench.lend(100, 1000);
    bench.change(110);
    assert_eq!(bench.regions.give_back(loan, 0), None);
}

#[test]
fn whoever_the_adapter_writes_for_it_is_no_change() {
    let mut bench = Bench::new();
    let loan = bench.lend(0, 64);
    let right = Access::REMOTE_WRITE;
    bench.regions.remote(PD, QP, bench.key, 8, 8, right).unwrap().write_from(0, &[9; 8]);
    let right = Access::REMOTE_ATOMIC;
    bench.regions.remote(PD, QP, bench.key, 16, 8, right).unwrap().fetch_add(3);
    let window = bench.regions.allocate_window(PD, WindowType::Two).unwrap();
    let (region, access) = (bench.key, Access::REMOTE_WRITE);
    let bind = Bind { pd: PD, qp_num: QP, rkey: window, region, addr: 24, len: 8, access };
    let _ = bench.regions.bind(&bind).unwrap();
    bench.regions.remote(PD, QP, window, 24, 8, access).unwrap().write_from(0, &[9; 8]);
    assert!(bench.regions.remote(PD, QP, window, 24, 9, access).is_err());
    bench.regions.renew_lent();
    // Another region of the same memory.
    let other = bench.regions.register_owned(PD, &bench.memory, None, Access::LOCAL_WRITE).unwrap();
    let sge = Sge { addr: bench.memory.addr() as u64 + 32, len: 8, lkey: other };
    bench.regions.scatter(PD, &[sge], 0, &[9; 8]).unwrap();
    assert_eq!(bench.regions.give_back(loan, 64), None);
    let loan = bench.lend(0, 64);
    bench.change(24);
    bench.regions.remote(PD, QP, window, 24, 8, access).unwrap().write_from(0, &[9; 8]);
    assert_eq!(bench.regions.give_back(loan, 64), Some(24));
}

#[test]
fn bytes_that_are_lent_twice_are_left_alone() {
    let mut bench = Bench::new();
    let loans = [(0, 64), (0, 64), (200, 64), (263, 1)].map(|(at, len)| bench.lend(at, len));
    let (next, twice) = (bench.lend(64, 8), [bench.sge(400, 8), bench.sge(407, 8)]);
    let within = bench.regions.lend(PD, &twice).unwrap();
    for at in [0, 200, 263, 64, 400] {
        bench.change(at);
    }
    let found = loans.map(|loan| bench.regions.give_back(loan, 64));
    assert_eq!(found, [None; 4]);
    assert_eq!(bench.regions.give_back(next, 8), Some(0), "beside another");
    assert_eq!(bench.regions.give_back(within, 16), None);
    let loan = bench.lend(0, 64);
    bench.change(1);
    assert_eq!(bench.regions.give_back(loan, 64), Some(1), "those are over");
}

#[test]
fn a_list_counts_through_its_elements() {
    let mut bench = Bench::new();
    let list = [bench.sge(10, 5), bench.sge(0, 0), bench.sge(100, 5)];
    let loan = bench.regions.lend(PD, &list).unwrap();
    bench.change(102);
    bench.regions.scatter(PD, &list, 0, &[1; 8]).unwrap();
    assert_eq!(bench.regions.give_back(loan, 8), Some(7));
}

#[test]
fn a_loan_ends_with_its_region_or_when_nobody_has_it() {
    let mut bench = Bench::new();
    let loan = bench.lend(0, 64);
    let _ = bench.regions.deregister(bench.key).unwrap();
    bench.change(0);
    assert_eq!(bench.regions.give_back(loan, 64), None);
    let mut bench = Bench::new();
    drop(bench.lend(0, 64));
    let loan = bench.lend(0, 64);
    bench.change(0);
    assert_eq!(bench.regions.give_back(loan, 64), Some(0), "it is not lent twice");
    bench.regions.renew_lent();
    let ledger = bench.regions.lent.as_ref().unwrap().borrow();
    assert!(ledger.parts.is_empty() && ledger.loans.is_empty());
    assert_eq!(ledger.bytes, 0);
}

#[test]
fn what_is_looked_at_is_bounded() {
    let mut bench = Bench::new();
    let loan = bench.lend(0, 3 * MOST as u32);
    bench.change(MOST);
    bench.place(MOST as u64 - 1, &[1; 2]);
    assert_eq!(bench.regions.give_back(loan, 3 * MOST as u64), None);
    bench.regions.renew_lent();
    bench.regions.lent.as_mut().unwrap().get_mut().bytes = MOST_TOGETHER - 10;
    let loan = bench.lend(0, 64);
    bench.change(10);
    assert_eq!(bench.regions.give_back(loan, 64), None);
    let loan = bench.lend(0, 64);
    bench.change(9);
    assert_eq!(bench.regions.give_back(loan, 64), Some(9));
}

#[test]
fn accesses_are_checked_as_ever() {
    let mut bench = Bench::new();
    let size = 3 * MOST as u64;
    for (addr, len, fits) in
        [(0, size, true), (1, size, false), (size, 1, false), (u64::MAX, 2, false)]
    {
        let right = Access::REMOTE_READ;
        let read = bench.regions.remote(PD, QP, bench.key, addr, len, right);
        assert_eq!(read.is_ok(), fits, "{len} bytes at {addr}");
    }
    assert_eq!(bench.regions.info(bench.key).unwrap().len, size);
    let change =
        super::super::Reregistration { access: Some(Access::empty()), ..Default::default() };
    // SAFETY: the same memory, of which the table has a share.
    let (key, _) = unsafe { bench.regions.reregister(bench.key, change) }.unwrap();
    assert!(bench.regions.local(PD, &bench.sge(0, 8), false).is_ok());
    assert!(bench.regions.local(PD, &bench.sge(0, 8), true).is_err());
    assert_eq!((key, bench.regions.info(key).unwrap().on_demand), (bench.key, false));
    assert!(bench.regions.lend(PD, &[bench.sge(0, 8)]).is_none(), "nothing may be written");
    assert!(Regions::new(RegionsConfig::new([1; 32])).lend(PD, &[bench.sge(0, 8)]).is_none());
}
