//! A child of fork: the inherited engine is inert, and the child may open its own.

use std::fs::File;
use std::os::fd::AsRawFd;

use libc::O_CREAT;
use quipu_abi_types::*;

use super::bench::{Bench, Said, blank, done, forked, found_nothing, made, send};

/// What the child finds; its exit status is the number of the first that is not as it should be.
fn child(bench: &Bench, qp: QpHandle) -> Result<(), i32> {
    let api = bench.api;
    let expect = |number: i32, code: i32, wanted: EngineStatus| {
        if code == wanted.code() { Ok(()) } else { Err(number) }
    };
    use EngineStatus as S;
    let mut pd = PdHandle::NONE;
    let mut wc = blank();
    let mut reported = EngineEventsReported { comp: 9, r#async: 9 };
    let mut bad = std::ptr::null();
    let wr = send(1, IBV_WR_SEND, &mut []);
    expect(1, unsafe { (api.alloc_pd)(bench.context, &mut pd) }, S::NoDevice)?;
    expect(2, -unsafe { (api.poll_cq)(bench.cq, 1, &mut wc) }, S::NoDevice)?;
    expect(3, unsafe { (api.post_send)(qp, &wr, &mut bad) }, S::NoDevice)?;
    if !std::ptr::eq(bad, &wr) {
        return Err(4);
    }
    expect(5, unsafe { (api.req_notify_cq)(bench.cq, 0) }, S::NoDevice)?;
    expect(6, unsafe { (api.destroy_qp)(qp, &mut reported) }, S::Ok)?;
    if reported != EngineEventsReported::default() {
        return Err(7);
    }
    expect(8, unsafe { (api.dealloc_pd)(bench.pd) }, S::Ok)?;

    let opened = made::<EngineOpened>(|out| unsafe { (api.open)(c"quipu0".as_ptr(), out) });
    let opened = opened.map_err(|_| 9)?;
    expect(10, unsafe { (api.alloc_pd)(opened.context, &mut pd) }, S::Ok)?;
    // An inherited handle is gone already, and does not name what the child made since.
    expect(11, unsafe { (api.dealloc_pd)(bench.pd) }, S::Ok)?;
    expect(12, unsafe { (api.dealloc_pd)(pd) }, S::Ok)?;
    expect(13, unsafe { (api.close)(opened.context) }, S::Ok)?;
    expect(14, unsafe { (api.close)(bench.context) }, S::Ok)
}

#[test]
fn a_child_is_refused_until_it_opens_the_device_itself() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    found_nothing(forked(|| child(&bench, a.qp)));

    // The parent does not notice.
    bench.post_recv(b.qp, 1, &mut []).unwrap();
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [])]).unwrap();
    assert_eq!(bench.completions(bench.cq, 2).len(), 2);
    done(unsafe { (bench.api.req_notify_cq)(bench.cq, 0) }).unwrap();
}

fn address_handle(bench: &Bench, pd: PdHandle, dgid: ibv_gid) -> Said<AhHandle> {
    let mut attr = ibv_ah_attr { is_global: 1, port_num: 1, ..blank() };
    attr.grh.dgid = dgid;
    made(|out| unsafe { (bench.api.create_ah)(pd, &attr, out) })
}

/// What a child finds that has objects of its own, and destroys those that it has inherited.
fn child_that_cleans_up(
    bench: &Bench,
    (ah, dgid): (AhHandle, ibv_gid),
    xrcd: XrcdHandle,
) -> Result<(), i32> {
    let api = bench.api;
    let expect = |number: i32, result: Said, wanted: Said| {
        if result == wanted { Ok(()) } else { Err(number) }
    };
    let opened = made::<EngineOpened>(|out| unsafe { (api.open)(c"quipu0".as_ptr(), out) });
    let context = opened.map_err(|_| 1)?.context;
    let pd = made(|out| unsafe { (api.alloc_pd)(context, out) }).map_err(|_| 2)?;
    let own = address_handle(bench, pd, dgid).map_err(|_| 3)?;
    expect(4, done(unsafe { (api.destroy_ah)(ah) }), Ok(()))?;
    expect(5, done(unsafe { (api.dealloc_pd)(pd) }), Err(EngineStatus::Busy))?;
    expect(6, done(unsafe { (api.destroy_ah)(own) }), Ok(()))?;
    expect(7, done(unsafe { (api.dealloc_pd)(pd) }), Ok(()))?;

    let file = File::open("/dev/null").map_err(|_| 8)?;
    let open = |oflag| {
        made::<XrcdHandle>(|out| unsafe { (api.open_xrcd)(context, file.as_raw_fd(), oflag, out) })
    };
    let own = open(O_CREAT).map_err(|_| 9)?;
    expect(10, done(unsafe { (api.close_xrcd)(xrcd) }), Ok(()))?;
    expect(11, open(0).map(|_| ()), Ok(()))?;
    expect(12, done(unsafe { (api.close_xrcd)(own) }), Ok(()))
}

#[test]
fn an_inherited_handle_names_nothing_of_the_child() {
    let bench = Bench::new();
    let dgid = bench.gid();
    let ah = address_handle(&bench, bench.pd, dgid).unwrap();
    let xrcd = made(|out| unsafe { (bench.api.open_xrcd)(bench.context, -1, O_CREAT, out) });
    let xrcd = xrcd.unwrap();
    found_nothing(forked(|| child_that_cleans_up(&bench, (ah, dgid), xrcd)));
    done(unsafe { (bench.api.destroy_ah)(ah) }).unwrap();
    done(unsafe { (bench.api.close_xrcd)(xrcd) }).unwrap();
}

/// What a child finds whose threads open the device at once.
fn child_of_threads(bench: &Bench) -> Result<(), i32> {
    let api = bench.api;
    let together = std::sync::Barrier::new(4);
    let open = || {
        together.wait();
        made::<EngineOpened>(|out| unsafe { (api.open)(c"quipu0".as_ptr(), out) })
    };
    let opened: Vec<_> = std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(open));
        threads.into_iter().map(|thread| thread.join().ok()?.ok()).collect()
    });
    // They share one engine, which is the first after the parent's.
    let tag = |context: ContextHandle| context.0 >> 56;
    let one = |opened: &Option<EngineOpened>| {
        opened.as_ref().is_some_and(|it| tag(it.context) == tag(bench.context) + 1)
    };
    if opened.iter().all(one) { Ok(()) } else { Err(1) }
}

#[test]
fn threads_that_open_the_device_at_once_share_one_engine() {
    let bench = Bench::new();
    let children = [(); 8].map(|()| forked(|| child_of_threads(&bench)));
    children.into_iter().for_each(found_nothing);
}
