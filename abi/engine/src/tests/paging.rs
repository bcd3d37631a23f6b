//! Regions that are more than memory, advice about them, time stamps, moderation, and look-ups by number.

use quipu_abi_types::*;

use super::bench::{Bench, CQ_COOKIE, MEMORY, blank, done, made, registration, send};

const ON_DEMAND: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_ON_DEMAND;

/// Two pages of which the second is unmapped again; the address of the first.
fn half_mapped() -> u64 {
    let (both, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, of which a part is given back.
    unsafe {
        let base = libc::mmap(std::ptr::null_mut(), 8192, both, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED);
        libc::munmap(base.byte_add(4096), 4096);
        base as u64
    }
}

fn register(bench: &Bench, addr: u64, length: u64, access: u32) -> Result<EngineMr, EngineStatus> {
    let init = EngineMrInit { access, ..registration(addr, length) };
    made(|out| unsafe { (bench.api.reg_mr)(bench.pd, &init, out) })
}

#[test]
fn the_whole_address_space_is_one_region_in_which_only_what_is_mapped_is_reached() {
    let bench = Bench::new();
    assert_eq!(
        register(&bench, 0, u64::MAX, ON_DEMAND & !IBV_ACCESS_ON_DEMAND).err(),
        Some(EngineStatus::BadAddress)
    );
    let space = register(&bench, 0, u64::MAX, ON_DEMAND).unwrap();
    let (a, b) = bench.pair(&bench.qp_init());
    let hole = half_mapped();
    bench.write(0, b"anywhere");
    let local =
        |offset: usize, length| [ibv_sge { addr: bench.addr(offset), length, lkey: space.lkey }];
    bench.post_recv(b.qp, 1, &mut local(100, 8)).unwrap();
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut local(0, 8))]).unwrap();
    assert!(bench.completions(bench.cq, 2).iter().all(|wc| wc.status == IBV_WC_SUCCESS));
    assert_eq!(&bench.read(100), b"anywhere");
    // A peer reaches what is mapped, and is refused the rest without harm.
    let mut list = local(0, 8);
    let mut write = send(3, IBV_WR_RDMA_WRITE, &mut list);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: hole + 4000, rkey: space.rkey };
    bench.post_send(a.qp, &mut [write]).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_SUCCESS);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: hole + 4092, rkey: space.rkey };
    bench.post_send(a.qp, &mut [write]).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_REM_ACCESS_ERR);
    done(unsafe { (bench.api.dereg_mr)(space.mr) }).unwrap();
}

#[test]
fn pages_on_demand_may_come_after_the_registration() {
    let bench = Bench::new();
    let hole = half_mapped();
    let refused = register(&bench, hole, 8192, IBV_ACCESS_LOCAL_WRITE).err();
    assert_eq!(refused, Some(EngineStatus::BadAddress));
    let region = register(&bench, hole, 8192, ON_DEMAND).unwrap();
    let (a, b) = bench.pair(&bench.qp_init());
    let mut late = [ibv_sge { addr: hole + 4090, length: 12, lkey: region.lkey }];
    let (both, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
    );
    // SAFETY: the page that this test has unmapped, if nobody else took it.
    let page = unsafe { libc::mmap((hole + 4096) as *mut _, 4096, both, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return; // Another thread's mapping is there, which will do as well for others.
    }
    bench.write(0, b"both pages..");
    bench.post_recv(b.qp, 1, &mut late).unwrap();
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [bench.sge(0, 12)])]).unwrap();
    assert!(bench.completions(bench.cq, 2).iter().all(|wc| wc.status == IBV_WC_SUCCESS));
    // SAFETY: 12 bytes of the two pages, which nobody writes now.
    let seen = unsafe { *((hole + 4090) as *const [u8; 12]) };
    assert_eq!(&seen, b"both pages..");
}

#[test]
fn pages_on_demand_may_go() {
    let bench = Bench::new();
    let (a, _b) = bench.pair(&bench.qp_init());
    let pages = half_mapped();
    let region = register(&bench, pages, 4096, ON_DEMAND).unwrap();
    let mut list = [bench.sge(0, 8)];
    let mut write = send(1, IBV_WR_RDMA_WRITE, &mut list);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: pages, rkey: region.rkey };
    bench.post_send(a.qp, &mut [write]).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_SUCCESS);
    // SAFETY: the page that is left of the two, which nobody else knows.
    unsafe { libc::munmap(pages as *mut _, 4096) };
    bench.post_send(a.qp, &mut [write]).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_REM_ACCESS_ERR);
}

#[test]
fn a_region_on_demand_may_be_given_memory_that_is_not_there() {
    let bench = Bench::new();
    let there = register(&bench, bench.addr(0), 64, ON_DEMAND).unwrap();
    let pinned = register(&bench, bench.addr(0), 64, IBV_ACCESS_LOCAL_WRITE).unwrap();
    let move_to = |mr: MrHandle, addr, access| {
        let init = EngineMrInit { access, ..registration(addr, 4096) };
        let flags = IBV_REREG_MR_CHANGE_TRANSLATION
            | if access == 0 { 0 } else { IBV_REREG_MR_CHANGE_ACCESS };
        made::<EngineMr>(|out| unsafe {
            (bench.api.rereg_mr)(mr, flags, PdHandle::NONE, &init, out)
        })
    };
    let hole = half_mapped() + 4096;
    assert_eq!(move_to(pinned.mr, hole, 0).err(), Some(EngineStatus::BadAddress));
    let refused = move_to(there.mr, hole, IBV_ACCESS_LOCAL_WRITE).err();
    assert_eq!(refused, Some(EngineStatus::BadAddress));
    move_to(there.mr, hole, 0).unwrap();
    move_to(pinned.mr, hole, ON_DEMAND).unwrap();
}

#[test]
fn advice_is_judged_as_the_manual_page_says() {
    use EngineStatus as S;
    let bench = Bench::new();
    let advise = |advice, flags, list: &[ibv_sge]| {
        let (list, count) = (list.as_ptr(), list.len() as u32);
        done(unsafe { (bench.api.advise_mr)(bench.pd, advice, flags, list, count) })
    };
    let (read, write, look) = (
        IBV_ADVISE_MR_ADVICE_PREFETCH,
        IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    );
    let hole = half_mapped();
    let region = register(&bench, hole, 8192, ON_DEMAND).unwrap();
    let silent = register(&bench, hole, 4096, IBV_ACCESS_ON_DEMAND).unwrap();
    let sge =
        |offset, length, mr: &EngineMr| ibv_sge { addr: hole + offset, length, lkey: mr.lkey };
    let flush = IBV_ADVISE_MR_FLAG_FLUSH;
    for advice in [read, write, look] {
        assert_eq!(advise(advice, flush, &[sge(0, 4096, &region)]), Ok(()));
        assert_eq!(advise(advice, 0, &[sge(0, 8192, &region)]), Ok(()), "nobody waits for it");
    }
    assert_eq!(advise(write, 0, &[sge(0, 1, &silent)]), Err(S::NotPermitted));
    assert_eq!(advise(read, 0, &[sge(0, 1, &silent)]), Ok(()));
    assert_eq!(advise(read, 0, &[sge(4096, 1, &silent)]), Err(S::BadAddress));
    assert_eq!(advise(read, 0, &[bench.sge(0, 8)]), Err(S::NotFound), "not on demand");
    assert_eq!(advise(7, 0, &[sge(0, 1, &region)]), Err(S::NotSupported));
    assert_eq!(advise(read, 2, &[sge(0, 1, &region)]), Err(S::Invalid));
    assert_eq!(advise(read, 0, &[]), Err(S::Invalid));
    let other: PdHandle = made(|out| unsafe { (bench.api.alloc_pd)(bench.context, out) }).unwrap();
    let list = [sge(0, 1, &region)];
    let foreign = unsafe { (bench.api.advise_mr)(other, read, 0, list.as_ptr(), 1) };
    assert_eq!(done(foreign), Err(S::NotPermitted));
}

#[test]
fn a_null_region_is_local_and_empty() {
    let bench = Bench::new();
    let null: EngineMr = made(|out| unsafe { (bench.api.alloc_null_mr)(bench.pd, out) }).unwrap();
    assert_eq!(null.rkey, 0);
    let (a, b) = bench.pair(&bench.qp_init());
    bench.write(0, &[7; 300]);
    let void = |length| ibv_sge { addr: 1 << 60, length, lkey: null.lkey };
    bench.post_recv(b.qp, 1, &mut [void(100), bench.sge(1000, 200)]).unwrap();
    let list = &mut [bench.sge(0, 150), void(150)];
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, list)]).unwrap();
    assert!(bench.completions(bench.cq, 2).iter().all(|wc| wc.status == IBV_WC_SUCCESS));
    assert_eq!(bench.read::<50>(1000), [7; 50]);
    assert_eq!(bench.read::<150>(1050), [0; 150]);
    done(unsafe { (bench.api.dereg_mr)(null.mr) }).unwrap();
}

#[test]
fn completions_are_stamped_by_the_clock_of_the_device() {
    let bench = Bench::new();
    let init = EngineCqInit {
        cqe: 8,
        comp_vector: 0,
        flags: IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
        stamps: 1,
        channel: ChannelHandle::NONE,
        cookie: 1,
    };
    let cq: EngineCq =
        made(|out| unsafe { (bench.api.create_cq)(bench.context, &init, out) }).unwrap();
    let clock =
        || -> u64 { made(|out| unsafe { (bench.api.read_clock)(bench.context, out) }).unwrap() };
    let (mut wc, mut stamp) = (blank::<ibv_wc>(), 0);
    let poll =
        |wc: &mut ibv_wc, stamp: &mut u64| unsafe { (bench.api.poll_cq_stamped)(cq.cq, wc, stamp) };
    assert_eq!(poll(&mut wc, &mut stamp), 0);
    let (a, _) = bench.pair(&EngineQpInit { send_cq: cq.cq, ..bench.qp_init() });
    let before = clock();
    let mut write = send(5, IBV_WR_RDMA_WRITE, &mut []);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: 0, rkey: 0 };
    bench.post_send(a.qp, &mut [write]).unwrap();
    while poll(&mut wc, &mut stamp) == 0 {}
    assert_eq!((wc.wr_id, wc.status), (5, IBV_WC_SUCCESS));
    assert!(stamp >= before && stamp <= clock(), "{stamp} after {before}");
    let moderate = |count, period| done(unsafe { (bench.api.moderate_cq)(cq.cq, count, period) });
    assert_eq!(moderate(10, 1000), Ok(()));
    assert_eq!(moderate(1 << 16, 1), Err(EngineStatus::Invalid));
    assert_eq!(moderate(0, 0), Ok(()));
}

#[test]
fn an_event_that_is_held_back_comes_though_nobody_polls() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    done(unsafe { (bench.api.moderate_cq)(bench.cq, 100, 20_000) }).unwrap();
    done(unsafe { (bench.api.req_notify_cq)(bench.cq, 0) }).unwrap();
    bench.post_recv(b.qp, 1, &mut [bench.sge(100, 8)]).unwrap();
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [bench.sge(0, 8)])]).unwrap();
    // Two completions of a hundred: the event waits for the period, and then somebody must see to it.
    let cookie: u64 =
        made(|out| unsafe { (bench.api.get_comp_event)(bench.channel.channel, out) }).unwrap();
    assert_eq!(cookie, CQ_COOKIE);
    assert_eq!(bench.completions(bench.cq, 2).len(), 2);
}

#[test]
fn atomic_writes_are_posted_with_or_without_a_key() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    bench.write(0, &77_u64.to_ne_bytes());
    let mut list = [bench.sge(0, 8)];
    let mut write = send(1, IBV_WR_ATOMIC_WRITE, &mut list);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(64), rkey: bench.mr.rkey };
    bench.post_send(a.qp, &mut [write]).unwrap();
    let done = bench.completion();
    assert_eq!((done.status, done.opcode), (IBV_WC_SUCCESS, IBV_WC_ATOMIC_WRITE));
    assert_eq!(bench.read(64), 77_u64.to_ne_bytes());
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(68), rkey: bench.mr.rkey };
    assert!(bench.post_send(b.qp, &mut [write]).is_err(), "not aligned");
}

#[test]
fn flushes_are_posted_call_by_call_alone() {
    let bench = Bench::new();
    let (a, _) = bench.pair(&bench.qp_init());
    let flush = |wr_id, compare_add, how| {
        let mut flush = send(wr_id, ENGINE_WR_FLUSH, &mut []);
        let (remote_addr, rkey) = (bench.addr(0), bench.mr.rkey);
        flush.wr.atomic = ibv_send_wr_atomic { remote_addr, compare_add, swap: how, rkey };
        flush
    };
    let post = |wr: &ibv_send_wr| done(unsafe { (bench.api.post_batch)(a.qp, wr) });
    // What its list says does not matter.
    let mut good = flush(1, 64, 1);
    (good.sg_list, good.num_sge) = (std::ptr::dangling_mut(), 7);
    post(&good).unwrap();
    let wc = bench.completion();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_FLUSH));
    for how in [0, 4, 0x201] {
        assert_eq!(post(&flush(2, 64, how)).err(), Some(EngineStatus::Invalid), "{how:#x}");
    }
    let plain = send(3, IBV_WR_FLUSH, &mut []);
    assert_eq!(bench.post_send(a.qp, &mut [plain]).err(), Some((3, EngineStatus::Invalid)));
    // All of the region, whatever the range.
    post(&flush(4, u64::MAX, 0x101)).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_SUCCESS);
    // No memory is persistent: neither is it registered as such, nor flushed to be.
    for right in
        [IBV_ACCESS_FLUSH_PERSISTENT, IBV_ACCESS_FLUSH_PERSISTENT | IBV_ACCESS_FLUSH_GLOBAL]
    {
        let refused = register(&bench, bench.addr(0), 64, IBV_ACCESS_LOCAL_WRITE | right);
        assert_eq!(refused.err(), Some(EngineStatus::NotSupported));
    }
    post(&flush(5, 64, 2)).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_REM_ACCESS_ERR);
}

#[test]
fn domains_and_regions_are_found_by_their_numbers_in_their_context() {
    let (bench, other) = (Bench::new(), Bench::new());
    let pd: PdHandle =
        made(|out| unsafe { (bench.api.find_pd)(bench.context, bench.pd.0 as u32, out) }).unwrap();
    assert_eq!(pd, bench.pd);
    let mr: EngineFoundMr =
        made(|out| unsafe { (bench.api.find_mr)(bench.context, bench.mr.mr.0 as u32, out) })
            .unwrap();
    assert_eq!((mr.found.mr, mr.found.lkey), (bench.mr.mr, bench.mr.lkey));
    assert_eq!(mr.length, MEMORY as u64);
    let foreign = made::<PdHandle>(|out| unsafe {
        (bench.api.find_pd)(bench.context, other.pd.0 as u32, out)
    });
    assert_eq!(foreign.err(), Some(EngineStatus::Invalid));
    let none = made::<EngineFoundMr>(|out| unsafe { (bench.api.find_mr)(bench.context, !0, out) });
    assert_eq!(none.err(), Some(EngineStatus::Invalid));
}
