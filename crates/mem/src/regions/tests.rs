use super::*;
use crate::directory::{DirectoryReader, LookupError};

const PD: u32 = 1;
const QP: u32 = 17;

/// Entries that make the table grow several times.
const MANY: usize = if cfg!(miri) { 200 } else { 5000 };

fn regions() -> Regions {
    Regions::new(RegionsConfig::new([7; 32]))
}

fn all_rights() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE | Access::MW_BIND
}

#[test]
fn local_and_remote_accesses_name_their_fault() {
    let mut regions = regions();
    let memory = Segment::heap(100);
    let key = regions.register_owned(PD, &memory, Some(0x1000), Access::REMOTE_READ).unwrap();
    let sge = |addr, len| Sge { addr, len, lkey: key };
    assert_eq!(regions.local(PD, &sge(0x1000, 100), false).unwrap().len(), 100);
    assert_eq!(regions.local(PD, &sge(0x1000, 1), true).unwrap_err(), AccessError::Denied);
    assert_eq!(regions.local(PD, &sge(0x1001, 100), false).unwrap_err(), AccessError::OutOfBounds);
    assert_eq!(regions.local(PD, &sge(0xfff, 1), false).unwrap_err(), AccessError::OutOfBounds);
    assert_eq!(regions.local(2, &sge(0x1000, 1), false).unwrap_err(), AccessError::WrongPd);
    let read = |key, iova, len| {
        regions.remote(PD, QP, key, iova, len, Access::REMOTE_READ).map(|span| span.len())
    };
    assert_eq!(read(key, 0x1000 + 99, 1), Ok(1));
    assert_eq!(read(key, 0x1000 + 100, 1), Err(AccessError::OutOfBounds));
    assert_eq!(read(key, 0x1000, u64::MAX), Err(AccessError::OutOfBounds));
    assert_eq!(read(key, u64::MAX, 2), Err(AccessError::OutOfBounds));
    assert_eq!(read(Key(key.0 ^ 1), 0x1000, 1), Err(AccessError::UnknownKey));
    assert_eq!(read(Key(0), 0, 1), Err(AccessError::UnknownKey));
    assert_eq!(read(Key(0), 0, 0), Ok(0), "the key of no bytes is not looked at");
    let write = regions.remote(PD, QP, key, 0x1000, 1, Access::REMOTE_WRITE);
    assert_eq!(write.unwrap_err(), AccessError::Denied);
}

#[test]
fn atomics_need_eight_aligned_bytes() {
    let mut regions = regions();
    let memory = Segment::heap(64);
    let key = regions.register_owned(PD, &memory, Some(0), all_rights()).unwrap();
    let atomic = |iova, len| regions.remote(PD, QP, key, iova, len, Access::REMOTE_ATOMIC);
    let word = atomic(8, 8).unwrap();
    assert_eq!(word.fetch_add(5), 0);
    assert_eq!(word.compare_swap(5, 9), 5);
    assert_eq!(word.compare_swap(5, 1), 9);
    assert_eq!(word.fetch_add(u64::MAX), 9);
    assert_eq!(word.fetch_add(0), 8);
    for (iova, len) in [(4, 8), (8, 4), (8, 0), (8, 16)] {
        assert_eq!(atomic(iova, len).unwrap_err(), AccessError::Misaligned);
    }
    let odd = memory.slice(4, 32).unwrap();
    let key = regions.register_owned(PD, &odd, Some(0), all_rights()).unwrap();
    let span = regions.remote(PD, QP, key, 0, 8, Access::REMOTE_ATOMIC);
    assert_eq!(span.unwrap_err(), AccessError::Misaligned, "the memory itself is not aligned");
}

#[test]
fn illegal_registrations_are_refused() {
    let mut regions = regions();
    let mut register = |addr: usize, len: u64, iova: u64, access| {
        // SAFETY: every one of these is refused, or has no bytes.
        unsafe { regions.register(Registration { pd: PD, addr, len, iova, access }) }
    };
    let none = Access::empty();
    assert_eq!(register(0, 1, 0, none), Err(RegisterError::Null));
    assert_eq!(register(0, u64::MAX, 0, none), Err(RegisterError::Wraps));
    assert_eq!(register(usize::MAX, 2, 0, none), Err(RegisterError::Wraps));
    assert_eq!(register(4096, 2, u64::MAX, none), Err(RegisterError::Wraps));
    let error = AccessFlagsError::NeedsLocalWrite;
    assert_eq!(register(4096, 2, 0, Access::REMOTE_WRITE), Err(RegisterError::Access(error)));
    let key = register(0, 0, 0, none).unwrap();
    let sge = Sge { addr: 0, len: 1, lkey: key };
    assert_eq!(regions.local(PD, &sge, false).unwrap_err(), AccessError::OutOfBounds);
}

#[test]
fn zero_based_regions_count_from_zero() {
    let mut regions = regions();
    let memory = Segment::heap(64);
    let rights = all_rights() | Access::ZERO_BASED;
    let key = regions.register_owned(PD, &memory, Some(0x5000), rights).unwrap();
    regions.remote(PD, QP, key, 3, 2, Access::REMOTE_WRITE).unwrap().write_from(0, &[8, 9]);
    let mut out = [0; 2];
    memory.read(3, &mut out).unwrap();
    assert_eq!(out, [8, 9]);
}

#[test]
fn keys_stay_valid_while_the_table_grows_to_its_bound() {
    let mut regions = Regions::new(RegionsConfig { max_entries: MANY as u32, seed: [3; 32] });
    let memory = Segment::heap(MANY);
    let mut keys = Vec::new();
    for i in 0..MANY {
        let byte = memory.slice(i, 1).unwrap();
        keys.push(regions.register_owned(PD, &byte, Some(0), Access::LOCAL_WRITE).unwrap());
    }
    let error = regions.register_owned(PD, &memory, None, Access::empty());
    assert_eq!(error, Err(RegisterError::Full));
    for (i, key) in keys.iter().enumerate() {
        let span = regions.local(PD, &Sge { addr: 0, len: 1, lkey: *key }, true).unwrap();
        assert_eq!(span.as_raw().0, memory.addr() + i);
    }
    let mut sorted = keys.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), MANY);
    for key in keys {
        assert!(regions.deregister(key).unwrap().owner.is_some());
        assert_eq!(regions.deregister(key).unwrap_err(), DeregisterError::UnknownKey);
    }
    assert!(regions.is_empty());
}

#[test]
fn keys_follow_from_the_seed_alone() {
    let draw = |seed| {
        let mut regions = Regions::new(RegionsConfig::new(seed));
        let memory = Segment::heap(1);
        [(); 4].map(|()| regions.register_owned(PD, &memory, None, Access::empty()).unwrap())
    };
    assert_eq!(draw([1; 32]), draw([1; 32]));
    assert_ne!(draw([1; 32]), draw([2; 32]));
}

#[test]
fn reregistration_changes_what_it_is_asked_to() {
    let mut regions = regions();
    let (old, new) = (Segment::heap(64), Segment::heap(128));
    let key = regions.register_owned(PD, &old, Some(0), Access::empty()).unwrap();
    let change = Reregistration { pd: Some(2), ..Default::default() };
    // SAFETY: the memory stays that of `old`, which the table holds.
    let (same, _) = unsafe { regions.reregister(key, change) }.unwrap();
    assert_eq!(same, key);
    assert_eq!(regions.info(key).unwrap().pd, 2);
    let change = Reregistration { access: Some(Access::REMOTE_WRITE), ..Default::default() };
    // SAFETY: as above; it is refused.
    let error = unsafe { regions.reregister(key, change) }.unwrap_err();
    let flags = AccessFlagsError::NeedsLocalWrite;
    assert_eq!(error, ReregisterError::Register(RegisterError::Access(flags)));
    let change =
        Reregistration { memory: Some((new.addr(), 128, 0)), access: Some(all_rights()), pd: None };
    // SAFETY: `new` lives to the end of the test and has no references to its bytes.
    let (moved, withdrawn) = unsafe { regions.reregister(key, change) }.unwrap();
    assert_ne!(moved, key);
    assert_eq!(withdrawn.owner.unwrap().addr(), old.addr());
    let sge = |lkey| Sge { addr: 0, len: 128, lkey };
    assert_eq!(regions.local(2, &sge(key), false).unwrap_err(), AccessError::UnknownKey);
    assert_eq!(regions.local(2, &sge(moved), true).unwrap().as_raw().0, new.addr());
    assert_eq!(regions.len(), 1);
}

struct Windows {
    regions: Regions,
    memory: Segment,
    region: Key,
}

fn windows() -> Windows {
    let mut regions = regions();
    let memory = Segment::heap(64);
    let rights = Access::LOCAL_WRITE | Access::MW_BIND;
    let region = regions.register_owned(PD, &memory, Some(0x100), rights).unwrap();
    Windows { regions, memory, region }
}

impl Windows {
    fn bind(&self, rkey: Key) -> Bind {
        let access = Access::REMOTE_WRITE;
        Bind { pd: PD, qp_num: QP, rkey, region: self.region, addr: 0x110, len: 16, access }
    }

    fn write(&self, qp_num: u32, rkey: Key, iova: u64) -> Result<usize, AccessError> {
        let span = self.regions.remote(PD, qp_num, rkey, iova, 1, Access::REMOTE_WRITE)?;
        Ok(span.as_raw().0 - self.memory.addr())
    }
}

#[test]
fn a_type_1_window_is_bound_again_and_again_under_new_keys() {
    let mut w = windows();
    let key = w.regions.allocate_window(PD, WindowType::One).unwrap();
    assert_eq!(w.write(QP, key, 0x110), Err(AccessError::UnknownKey));
    let first = key.next_tag();
    let _ = w.regions.bind(&w.bind(first)).unwrap();
    assert_eq!(w.write(QP, first, 0x11f), Ok(31));
    assert_eq!(w.write(QP + 1, first, 0x110), Ok(16), "type 1 serves every queue pair");
    assert_eq!(w.write(QP, first, 0x120), Err(AccessError::OutOfBounds));
    assert_eq!(w.write(QP, first, 0x10f), Err(AccessError::OutOfBounds));
    let lkey = Sge { addr: 0x110, len: 1, lkey: first };
    assert_eq!(w.regions.local(PD, &lkey, false).unwrap_err(), AccessError::Denied);
    assert_eq!(w.regions.bind(&w.bind(first)).unwrap_err(), BindError::SameKey);
    assert_eq!(w.regions.deregister(w.region).unwrap_err(), DeregisterError::Busy);
    let second = first.next_tag();
    let _ = w.regions.bind(&w.bind(second)).unwrap();
    assert_eq!(w.write(QP, first, 0x110), Err(AccessError::UnknownKey));
    assert_eq!(w.write(QP, second, 0x110), Ok(16));
    assert_eq!(
        w.regions.invalidate(PD, QP, second).unwrap_err(),
        InvalidateError::NotInvalidatable
    );
    let zero_based = Bind { access: Access::ZERO_BASED, ..w.bind(second.next_tag()) };
    assert_eq!(w.regions.bind(&zero_based).unwrap_err(), BindError::ZeroBasedWindow);
    let none = Bind { len: 0, region: Key(0), ..w.bind(second.next_tag()) };
    let _ = w.regions.bind(&none).unwrap();
    assert_eq!(w.write(QP, second, 0x110), Err(AccessError::UnknownKey));
    let _ = w.regions.deregister(w.region).unwrap();
    let _ = w.regions.deallocate_window(key).unwrap();
    assert!(w.regions.is_empty());
}

#[test]
fn a_type_2_window_belongs_to_its_queue_pair_until_invalidated() {
    let mut w = windows();
    let key = w.regions.allocate_window(PD, WindowType::Two).unwrap().with_tag(0xab);
    let _ = w.regions.bind(&w.bind(key)).unwrap();
    assert_eq!(w.write(QP, key, 0x110), Ok(16));
    assert_eq!(w.write(QP + 1, key, 0x110), Err(AccessError::WrongQp));
    let again = w.bind(key.next_tag());
    assert_eq!(w.regions.bind(&again).unwrap_err(), BindError::StillBound);
    let refused = |w: &mut Windows, pd, qp, key| w.regions.invalidate(pd, qp, key).unwrap_err();
    assert_eq!(refused(&mut w, PD, QP, key.next_tag()), InvalidateError::UnknownKey);
    assert_eq!(refused(&mut w, 2, QP, key), InvalidateError::WrongPd);
    assert_eq!(refused(&mut w, PD, QP + 1, key), InvalidateError::WrongQp);
    let region = w.region;
    assert_eq!(refused(&mut w, PD, QP, region), InvalidateError::NotInvalidatable);
    assert_eq!(refused(&mut w, PD, QP, Key(0)), InvalidateError::UnknownKey);
    let _ = w.regions.invalidate(PD, QP, key).unwrap();
    assert_eq!(w.write(QP, key, 0x110), Err(AccessError::UnknownKey));
    assert_eq!(refused(&mut w, PD, QP, key), InvalidateError::UnknownKey);
    let zero = Bind { access: Access::REMOTE_WRITE | Access::ZERO_BASED, ..again };
    let _ = w.regions.bind(&zero).unwrap();
    assert_eq!(w.write(QP, again.rkey, 15), Ok(31));
    assert_eq!(w.write(QP, again.rkey, 16), Err(AccessError::OutOfBounds));
    let _ = w.regions.unbind_qp(QP);
    assert_eq!(w.write(QP, again.rkey, 0), Err(AccessError::UnknownKey));
    let _ = w.regions.deregister(w.region).unwrap();
}

#[test]
fn binds_are_checked_against_the_region() {
    let mut w = windows();
    let key = w.regions.allocate_window(PD, WindowType::Two).unwrap();
    let good = w.bind(key);
    let memory = Segment::heap(64);
    let mut region =
        |pd, access| w.regions.register_owned(pd, &memory, Some(0x100), access).unwrap();
    let plain = region(PD, Access::LOCAL_WRITE);
    let foreign = region(2, Access::LOCAL_WRITE | Access::MW_BIND);
    let read_only = region(PD, Access::MW_BIND);
    let zero_based = region(PD, Access::MW_BIND | Access::ZERO_BASED | Access::LOCAL_WRITE);
    let cases = [
        (Bind { rkey: w.region, ..good }, BindError::UnknownWindow),
        (Bind { region: key, ..good }, BindError::UnknownRegion),
        (Bind { region: Key(0), ..good }, BindError::UnknownRegion),
        (Bind { pd: 2, ..good }, BindError::WrongPd),
        (Bind { region: foreign, ..good }, BindError::WrongPd),
        (Bind { region: plain, ..good }, BindError::NotBindable),
        (Bind { region: read_only, ..good }, BindError::NeedsLocalWrite),
        (Bind { region: zero_based, ..good }, BindError::ZeroBasedRegion),
        (Bind { len: 0, ..good }, BindError::ZeroLength),
        (Bind { addr: 0xff, ..good }, BindError::OutOfBounds),
        (Bind { addr: 0x131, ..good }, BindError::OutOfBounds),
        (Bind { len: u64::MAX, ..good }, BindError::OutOfBounds),
        (
            Bind { access: Access::MW_BIND, ..good },
            BindError::Access(AccessFlagsError::NotForWindow(Access::MW_BIND)),
        ),
    ];
    for (bind, error) in cases {
        assert_eq!(w.regions.bind(&bind).unwrap_err(), error, "{bind:?}");
    }
    let read = Bind { region: read_only, access: Access::REMOTE_READ, ..good };
    let _ = w.regions.bind(&read).unwrap();
    let span = w.regions.remote(PD, QP, key, 0x110, 1, Access::REMOTE_READ).unwrap();
    assert!(!span.is_writable(), "remote read through a window needs no right of the region");
}

#[test]
fn lists_are_gathered_and_scattered_in_order() {
    let mut regions = regions();
    let memory = Segment::heap(64);
    let key = regions.register_owned(PD, &memory, Some(0), all_rights()).unwrap();
    let sge = |addr, len| Sge { addr, len, lkey: key };
    let list = [sge(40, 4), Sge::default(), sge(0, 3), sge(8, 5)];
    assert_eq!(list_len(&list), 12);
    regions.scatter(PD, &list, 0, b"abcdefghijkl").unwrap();
    let mut all = [0; 64];
    memory.read(0, &mut all).unwrap();
    assert_eq!((&all[40..44], &all[..3], &all[8..13]), (&b"abcd"[..], &b"efg"[..], &b"hijkl"[..]));
    let mut out = [0; 6];
    regions.gather(PD, &list, 3, &mut out).unwrap();
    assert_eq!(&out, b"defghi");
    assert_eq!(regions.gather(PD, &list, 7, &mut out), Err(AccessError::BeyondList));
    assert_eq!(regions.check_list(PD, &list, 12, 0, true), Ok(()));
    assert_eq!(regions.check_list(PD, &list, 12, 1, true), Err(AccessError::BeyondList));
    let broken = [sge(0, 4), sge(62, 4)];
    assert_eq!(regions.check_list(PD, &broken, 0, 6, false), Ok(()));
    assert_eq!(regions.check_list(PD, &broken, 0, 7, false), Err(AccessError::OutOfBounds));
    let wraps = [Sge { addr: u64::MAX, len: 8, lkey: key }];
    assert_eq!(regions.check_list(PD, &wraps, 4, 1, false), Err(AccessError::OutOfBounds));
    let to = Segment::heap(6);
    regions.gather_to(PD, &list, 3, &to.span(0, 6).unwrap()).unwrap();
    regions.scatter_from(PD, &list, 6, &to.span(0, 6).unwrap()).unwrap();
    to.read(0, &mut out).unwrap();
    assert_eq!(&out, b"defghi");
    regions.gather(PD, &list, 6, &mut out).unwrap();
    assert_eq!(&out, b"defghi");
}

/// Pages that a test says are there.
#[derive(Debug)]
struct Pages(std::sync::Mutex<Vec<(std::ops::Range<usize>, bool)>>);

impl Mappings for Pages {
    fn allow(&self, addr: usize, len: u64, write: bool) -> bool {
        let end = addr + len as usize;
        let pages = self.0.lock().unwrap();
        pages.iter().any(|(range, w)| range.start <= addr && end <= range.end && (*w || !write))
    }
}

#[test]
fn the_whole_address_space_is_reached_only_where_something_is_mapped() {
    let mut regions = regions();
    let memory = Segment::heap(128);
    let base = memory.addr();
    let access = all_rights() | Access::ON_DEMAND;
    // SAFETY: only what the test says is mapped is ever reached.
    let space = unsafe { Vouched::new(0, u64::MAX, 0, access) }.on_demand();
    let key = regions.register_vouched(PD, space).unwrap();
    let write = |regions: &Regions, addr: usize, len| {
        let need = Access::REMOTE_WRITE;
        regions.remote(PD, QP, key, addr as u64, len, need).map(|span| span.write_from(0, &[9]))
    };
    assert_eq!(write(&regions, base, 1), Err(AccessError::OutOfBounds), "nobody to ask");
    let pages = std::sync::Arc::new(Pages(vec![(base..base + 64, true)].into()));
    regions.ask(pages.clone());
    assert_eq!(write(&regions, base + 63, 1), Ok(()));
    for (addr, len) in [(base + 64, 1), (base + 63, 2), (0, 1), (usize::MAX, 1), (base, u64::MAX)] {
        assert_eq!(write(&regions, addr, len), Err(AccessError::OutOfBounds), "{len} at {addr}");
    }
    // Rights and domain are judged before.
    assert_eq!(
        regions.remote(2, QP, key, base as u64, 1, Access::REMOTE_WRITE).unwrap_err(),
        AccessError::WrongPd
    );
    pages.0.lock().unwrap()[0].1 = false;
    let sge = Sge { addr: base as u64 + 63, len: 1, lkey: key };
    assert_eq!(regions.local(PD, &sge, true).unwrap_err(), AccessError::OutOfBounds);
    let mut byte = [0];
    regions.local(PD, &sge, false).unwrap().read_into(0, &mut byte);
    assert_eq!(byte, [9]);
    assert_eq!(regions.info(key).map(|info| info.len), Some(u64::MAX));
    // It stays what it is when its rights change.
    let change = Reregistration { access: Some(Access::REMOTE_READ), ..Default::default() };
    let (same, _) = regions.reregister_vouched(key, change, None).unwrap();
    assert_eq!(same, key);
    assert_eq!(write(&regions, base, 1), Err(AccessError::Denied));
    assert!(regions.remote(PD, QP, key, base as u64, 1, Access::REMOTE_READ).is_ok());
    let _ = regions.deregister(key).unwrap();
}

#[test]
fn regions_with_absent_pages_have_bounds_and_are_not_published() {
    let mut regions = regions();
    let memory = Segment::heap(64);
    let shown = Segment::heap(64 * 64);
    regions.publish_in(Directory::create(&shown).unwrap());
    let base = memory.addr();
    regions.ask(std::sync::Arc::new(Pages(vec![(base..base + 64, true)].into())));
    // SAFETY: the segment lives to the end of the test; nothing behind it is called mapped.
    let space = unsafe { Vouched::new(base, 16, 0x100, all_rights()) }.on_demand();
    let key = regions.register_vouched(PD, space).unwrap();
    let read = |iova, len| {
        regions.remote(PD, QP, key, iova, len, Access::REMOTE_READ).map(|span| span.len())
    };
    assert_eq!(read(0x100, 16), Ok(16));
    assert_eq!(read(0x108, 9), Err(AccessError::OutOfBounds));
    assert_eq!(read(0xff, 1), Err(AccessError::OutOfBounds));
    let reader = DirectoryReader::new(&shown).unwrap();
    let found = reader.lookup(PD, QP, key, 0x100, 1, Access::REMOTE_READ);
    assert_eq!(found, Err(LookupError::NotPublished));
    // SAFETY: refused.
    let wraps = unsafe { Vouched::new(base, u64::MAX, 0, all_rights()) }.on_demand();
    assert_eq!(regions.register_vouched(PD, wraps), Err(RegisterError::Wraps));
}

#[test]
fn a_window_of_a_region_with_absent_pages_asks_too() {
    let mut regions = regions();
    let memory = Segment::heap(64);
    let base = memory.addr();
    let pages = std::sync::Arc::new(Pages(vec![(base..base + 64, true)].into()));
    regions.ask(pages.clone());
    // SAFETY: the segment lives to the end of the test.
    let space = unsafe { Vouched::new(base, 64, 0x100, all_rights()) }.on_demand();
    let region = regions.register_vouched(PD, space).unwrap();
    let window = regions.allocate_window(PD, WindowType::One).unwrap();
    let rkey = window.next_tag();
    let access = Access::REMOTE_READ;
    let bind = |addr, len| Bind { pd: PD, qp_num: QP, rkey, region, addr, len, access };
    assert_eq!(regions.bind(&bind(0x120, 33)).unwrap_err(), BindError::OutOfBounds);
    let _ = regions.bind(&bind(0x110, 16)).unwrap();
    let read = |regions: &Regions, iova, len| {
        regions.remote(PD, QP, rkey, iova, len, access).map(|span| span.len())
    };
    assert_eq!(read(&regions, 0x110, 16), Ok(16));
    assert_eq!(read(&regions, 0x110, 17), Err(AccessError::OutOfBounds));
    pages.0.lock().unwrap()[0].0 = base..base + 24;
    assert_eq!(read(&regions, 0x110, 8), Ok(8));
    assert_eq!(read(&regions, 0x110, 9), Err(AccessError::OutOfBounds));
}

#[test]
fn a_null_region_reads_as_zeros_and_forgets() {
    let mut regions = regions();
    let (zeros, sink) = (Segment::heap(64), Segment::heap(64));
    // SAFETY: the test accesses 64 bytes at most.
    let nothing = unsafe { Nothing::new(zeros.addr(), sink.addr()) };
    let key = regions.register_null(PD, nothing).unwrap();
    for addr in [0, 0xffff_ffff_ffff_0000, 77] {
        let list = [Sge { addr, len: 32, lkey: key }];
        regions.scatter(PD, &list, 0, &[7; 32]).unwrap();
        let mut out = [1; 32];
        regions.gather(PD, &list, 0, &mut out).unwrap();
        assert_eq!(out, [0; 32]);
    }
    let remote = regions.remote(PD, QP, key, 0, 1, Access::REMOTE_READ);
    assert_eq!(remote.unwrap_err(), AccessError::Denied, "its key is no rkey");
    let sge = Sge { addr: 0, len: 1, lkey: key };
    assert_eq!(regions.local(2, &sge, false).unwrap_err(), AccessError::WrongPd);
    let change = Reregistration { pd: Some(2), ..Default::default() };
    let changed = regions.reregister_vouched(key, change, None).unwrap_err();
    assert_eq!(changed, ReregisterError::UnknownKey);
    let _ = regions.deregister(key).unwrap();
    assert_eq!(regions.local(PD, &sge, false).unwrap_err(), AccessError::UnknownKey);
}
