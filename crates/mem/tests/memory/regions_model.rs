//! The table of regions and its directory against a naive model, under random operations.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use quipu_mem::{
    Access, AccessError, Bind, Directory, DirectoryReader, Key, LookupError, Regions,
    RegionsConfig, Segment, Sge, WindowType,
};

const MEMORY: u64 = 256;

#[derive(Clone, Debug)]
enum Op {
    Register {
        pd: u32,
        offset: u64,
        len: u64,
        iova: u64,
        access: u32,
    },
    Deregister {
        pick: usize,
    },
    Allocate {
        pd: u32,
        two: bool,
    },
    Deallocate {
        pick: usize,
    },
    Bind {
        pd: u32,
        qp: u32,
        window: usize,
        tag: u8,
        region: usize,
        addr: u64,
        len: u64,
        access: u32,
    },
    Invalidate {
        pd: u32,
        qp: u32,
        pick: usize,
    },
    UnbindQp {
        qp: u32,
    },
    Remote {
        pd: u32,
        qp: u32,
        pick: usize,
        addr: u64,
        len: u64,
        access: u32,
    },
    Local {
        pd: u32,
        pick: usize,
        addr: u64,
        len: u32,
        write: bool,
    },
}

fn op() -> impl Strategy<Value = Op> {
    // Mostly one protection domain and queue pair, so that much is allowed.
    let few = || prop_oneof![5 => Just(0u32), 1 => Just(1)];
    let (pd, qp, pick) = (few(), few(), 0..64usize);
    let addr = prop_oneof![4 => 0..24u64, 2 => 0..300u64, 1 => any::<u64>()];
    let len = prop_oneof![6 => 0..24u64, 3 => Just(8), 3 => 0..64u64, 1 => any::<u64>()];
    let iova = prop_oneof![8 => 0..64u64, 1 => Just(u64::MAX - 20)];
    // All rights that matter, most of them present most of the time.
    let access = prop_oneof![3 => Just(0x1fu32), 2 => Just(0x0e), 1 => 0..0x40u32];
    let need = prop_oneof![3 => Just(2u32), 3 => Just(4), 2 => Just(8), 1 => 0..0x40u32];
    prop_oneof![
        3 => (pd.clone(), 0..200u64, 0..56u64, iova, access.clone()).prop_map(
            |(pd, offset, len, iova, access)| Op::Register { pd, offset, len, iova, access }
        ),
        1 => pick.clone().prop_map(|pick| Op::Deregister { pick }),
        2 => (pd.clone(), any::<bool>()).prop_map(|(pd, two)| Op::Allocate { pd, two }),
        1 => pick.clone().prop_map(|pick| Op::Deallocate { pick }),
        5 => (pd.clone(), qp.clone(), pick.clone(), 0..3u8, pick.clone(), addr.clone(), len.clone(),
            access.clone())
            .prop_map(|(pd, qp, window, tag, region, addr, len, access)| Op::Bind {
                pd, qp, window, tag, region, addr, len, access
            }),
        2 => (pd.clone(), qp.clone(), pick.clone())
            .prop_map(|(pd, qp, pick)| Op::Invalidate { pd, qp, pick }),
        1 => qp.clone().prop_map(|qp| Op::UnbindQp { qp }),
        8 => (pd.clone(), qp, pick.clone(), addr.clone(), len, need).prop_map(
            |(pd, qp, pick, addr, len, access)| Op::Remote { pd, qp, pick, addr, len, access }
        ),
        5 => (pd, pick, addr, 0..64u32, any::<bool>())
            .prop_map(|(pd, pick, addr, len, write)| Op::Local { pd, pick, addr, len, write }),
    ]
}

/// A key that opens memory: a region's, or that of a window that is bound.
#[derive(Clone, Debug)]
struct Open {
    key: Key,
    pd: u32,
    qp: Option<u32>,
    start: u128,
    len: u128,
    iova: u128,
    access: Access,
    /// For a window, its index and the key of its region.
    window: Option<(u32, Key)>,
}

struct Model {
    regions: Regions,
    reader: DirectoryReader,
    memory: Segment,
    open: Vec<Open>,
    windows: Vec<(Key, u32, WindowType)>,
    /// Every key that ever was, so that stale ones are tried too.
    keys: Vec<Key>,
}

impl Model {
    fn new() -> Model {
        let shown = Segment::heap(8 * 64);
        let mut regions = Regions::new(RegionsConfig { max_entries: 12, seed: [5; 32] });
        regions.publish_in(Directory::create(&shown).unwrap());
        Model {
            regions,
            reader: DirectoryReader::new(&shown).unwrap(),
            memory: Segment::heap(MEMORY as usize),
            open: Vec::new(),
            windows: Vec::new(),
            keys: vec![Key::NONE],
        }
    }

    /// Mostly a key of the given ones, else any key that ever was, the newest first.
    fn pick(&self, pick: usize, likely: &[Key]) -> Key {
        let nth = pick / 4;
        if pick % 4 != 3 && !likely.is_empty() {
            likely[nth % likely.len()]
        } else {
            self.keys[self.keys.len() - 1 - nth % self.keys.len()]
        }
    }

    /// The keys that open something: regions, windows, or both.
    fn open_keys(&self, regions: bool, windows: bool) -> Vec<Key> {
        let wanted = |o: &&Open| if o.window.is_some() { windows } else { regions };
        self.open.iter().filter(wanted).map(|o| o.key).collect()
    }

    /// An address given as the distance from where the key's memory starts.
    fn addr(&self, key: Key, distance: u64) -> u64 {
        let open = self.open.iter().find(|o| o.key == key);
        open.map_or(0, |o| o.iova as u64).wrapping_add(distance)
    }

    fn full(&self) -> bool {
        self.open.iter().filter(|o| o.window.is_none()).count() + self.windows.len() >= 12
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Register { pd, offset, len, iova, access } => {
                self.register(pd, offset, len, iova, access)
            }
            Op::Deregister { pick } => {
                let key = self.pick(pick, &self.open_keys(true, false));
                let region = self.open.iter().any(|o| o.key == key && o.window.is_none());
                let busy = self.open.iter().any(|o| o.window.is_some_and(|w| w.1 == key));
                assert_eq!(self.regions.deregister(key).is_ok(), region && !busy);
                if region && !busy {
                    self.open.retain(|o| o.key != key);
                }
            }
            Op::Allocate { pd, two } => {
                let kind = if two { WindowType::Two } else { WindowType::One };
                let full = self.full();
                let key = self.regions.allocate_window(pd, kind);
                assert_eq!(key.is_err(), full);
                if let Ok(key) = key {
                    self.windows.push((key, pd, kind));
                    self.keys.push(key);
                }
            }
            Op::Deallocate { pick } => {
                let key = self.pick(pick, &self.windows.iter().map(|w| w.0).collect::<Vec<_>>());
                let index = key.index();
                let known = self.windows.iter().any(|w| w.0.index() == index);
                assert_eq!(self.regions.deallocate_window(key).is_ok(), known);
                self.windows.retain(|w| w.0.index() != index);
                self.open.retain(|o| o.window.is_none_or(|w| w.0 != index));
            }
            Op::Bind { pd, qp, window, tag, region, addr, len, access } => {
                let windows: Vec<Key> = self.windows.iter().map(|w| w.0).collect();
                let rkey = self.pick(window, &windows).with_tag(tag);
                let access = Access::from_bits_retain(access) - Access::MW_BIND;
                let region = self.pick(region, &self.open_keys(true, false));
                let addr = self.addr(region, addr);
                self.bind(Bind { pd, qp_num: qp, rkey, region, addr, len, access });
            }
            Op::Invalidate { pd, qp, pick } => {
                let key = self.pick(pick, &self.open_keys(false, true));
                let fits = |o: &Open| o.key == key && o.pd == pd && o.qp == Some(qp);
                let expect = self.open.iter().any(fits);
                assert_eq!(self.regions.invalidate(pd, qp, key).is_ok(), expect);
                self.open.retain(|o| !fits(o));
            }
            Op::UnbindQp { qp } => {
                let _ = self.regions.unbind_qp(qp);
                self.open.retain(|o| o.qp != Some(qp));
            }
            Op::Remote { pd, qp, pick, addr, len, access } => {
                let key = self.pick(pick, &self.open_keys(true, true));
                self.remote(pd, qp, key, self.addr(key, addr), len, access)
            }
            Op::Local { pd, pick, addr, len, write } => {
                let key = self.pick(pick, &self.open_keys(true, false));
                let addr = self.addr(key, addr);
                let need = if write { Access::LOCAL_WRITE } else { Access::empty() };
                let expect = self.expect(pd, None, key, addr, u64::from(len), need);
                let sge = Sge { addr, len, lkey: key };
                let got = self.regions.local(pd, &sge, write).map(|span| span.as_raw().0);
                self.compare(got, len == 0, expect);
            }
        }
    }

    fn register(&mut self, pd: u32, offset: u64, len: u64, iova: u64, access: u32) {
        let access = Access::from_bits_retain(access);
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let zero_based = access.contains(Access::ZERO_BASED);
        let iova_fits = zero_based || u128::from(iova) + u128::from(len) <= u128::from(u64::MAX);
        let legal = iova_fits && (!writes || access.contains(Access::LOCAL_WRITE));
        let expect = legal && !self.full();
        let part = self.memory.slice(offset as usize, len as usize).unwrap();
        let key = self.regions.register_owned(pd, &part, Some(iova), access);
        assert_eq!(key.is_ok(), expect);
        let Ok(key) = key else { return };
        self.keys.push(key);
        self.open.push(Open {
            key,
            pd,
            qp: None,
            start: part.addr() as u128,
            len: len.into(),
            iova: if zero_based { 0 } else { iova.into() },
            access,
            window: None,
        });
    }

    fn bind(&mut self, bind: Bind) {
        let window = self.windows.iter().find(|w| w.0.index() == bind.rkey.index()).copied();
        let region = self.open.iter().find(|o| o.key == bind.region && o.window.is_none());
        let expect = self.may_bind(&bind, window, region);
        let start = region.map_or(0, |r| r.start + u128::from(bind.addr).saturating_sub(r.iova));
        assert_eq!(self.regions.bind(&bind).is_ok(), expect, "{bind:?}");
        let (true, Some((key, pd, kind))) = (expect, window) else {
            return;
        };
        self.keys.push(bind.rkey);
        self.open.retain(|o| o.window.is_none_or(|w| w.0 != key.index()));
        if bind.len > 0 {
            self.open.push(Open {
                key: bind.rkey,
                pd,
                qp: (kind == WindowType::Two).then_some(bind.qp_num),
                start,
                len: bind.len.into(),
                iova: if bind.access.contains(Access::ZERO_BASED) { 0 } else { bind.addr.into() },
                access: bind.access,
                window: Some((key.index(), bind.region)),
            });
        }
    }

    fn may_bind(
        &self,
        bind: &Bind,
        window: Option<(Key, u32, WindowType)>,
        region: Option<&Open>,
    ) -> bool {
        let Some((key, pd, kind)) = window else {
            return false;
        };
        let bound = self.open.iter().find(|o| o.window.is_some_and(|w| w.0 == key.index()));
        let access = bind.access;
        let fresh = match kind {
            WindowType::One => {
                bound.is_none_or(|o| o.key != bind.rkey) && !access.contains(Access::ZERO_BASED)
            }
            WindowType::Two => bound.is_none() && bind.len > 0,
        };
        if pd != bind.pd || !fresh || !(Access::REMOTE | Access::ZERO_BASED).contains(access) {
            return false;
        }
        if bind.len == 0 {
            return true;
        }
        let Some(region) = region else { return false };
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        region.pd == pd
            && region.access.contains(Access::MW_BIND)
            && !region.access.contains(Access::ZERO_BASED)
            && (!writes || region.access.contains(Access::LOCAL_WRITE))
            && u128::from(bind.addr) >= region.iova
            && u128::from(bind.addr) + u128::from(bind.len) <= region.iova + region.len
    }

    fn remote(&self, pd: u32, qp: u32, key: Key, addr: u64, len: u64, access: u32) {
        let need = Access::from_bits_retain(access) & Access::REMOTE;
        let atomic = need.contains(Access::REMOTE_ATOMIC);
        let expect = if atomic && (len != 8 || !addr.is_multiple_of(8)) {
            Err(AccessError::Misaligned)
        } else {
            self.expect(pd, Some(qp), key, addr, len, need)
        };
        let expect = expect.and_then(|start| {
            let misaligned = atomic && !start.is_multiple_of(8);
            if misaligned { Err(AccessError::Misaligned) } else { Ok(start) }
        });
        let got = self.regions.remote(pd, qp, key, addr, len, need);
        self.compare(got.map(|span| span.as_raw().0), len == 0 && !atomic, expect);
        match self.reader.lookup(pd, qp, key, addr, len, need) {
            Err(LookupError::NotPublished) => {}
            Err(LookupError::Busy) => panic!("nobody is writing"),
            Err(LookupError::Refused(error)) => assert_eq!(Err(error), expect.map(drop)),
            Ok(_) if len == 0 => {}
            Ok(range) => assert_eq!(Ok((range.addr as usize, range.len)), expect.map(|s| (s, len))),
        }
    }

    fn compare(
        &self,
        got: Result<usize, AccessError>,
        empty: bool,
        expect: Result<usize, AccessError>,
    ) {
        if empty {
            assert!(got.is_ok());
        } else {
            assert_eq!(got, expect);
        }
    }

    /// The address that an access reaches, or the fault that it names.
    fn expect(
        &self,
        pd: u32,
        qp: Option<u32>,
        key: Key,
        addr: u64,
        len: u64,
        need: Access,
    ) -> Result<usize, AccessError> {
        let open = self.open.iter().find(|o| o.key == key).ok_or(AccessError::UnknownKey)?;
        let local = qp.is_none();
        if open.pd != pd {
            return Err(AccessError::WrongPd);
        }
        if open.qp.is_some() && open.qp != qp {
            return Err(AccessError::WrongQp);
        }
        if !open.access.contains(need) || (local && open.window.is_some()) {
            return Err(AccessError::Denied);
        }
        let (addr, len) = (u128::from(addr), u128::from(len));
        if addr < open.iova || addr + len > open.iova + open.len {
            return Err(AccessError::OutOfBounds);
        }
        Ok((open.start + addr - open.iova) as usize)
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 500 },
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0x9151),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_table_agrees_with_the_model(ops in prop::collection::vec(op(), 1..120)) {
        let mut model = Model::new();
        for op in ops {
            model.apply(op);
        }
        let regions = model.open.iter().filter(|o| o.window.is_none()).count();
        assert_eq!(model.regions.len(), regions + model.windows.len());
    }
}
