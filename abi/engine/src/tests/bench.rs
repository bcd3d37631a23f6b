//! The table as safe calls, and a pair of connected queue pairs.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Once;
use std::time::{Duration, Instant};

use quipu_abi_types::*;

/// What a call of the table says.
pub(super) type Said<T = ()> = Result<T, EngineStatus>;

/// The table, as every facade gets it.
pub(super) fn api() -> &'static EngineApi {
    static ADDRESS: Once = Once::new();
    ADDRESS.call_once(|| {
        // SAFETY: the tests call this before they do anything else, and no test reads or writes
        // the environment otherwise.
        unsafe { std::env::set_var("QUIPU_ADDRESS", "127.0.0.1") };
    });
    // SAFETY: "returns a table that lives as long as the process".
    unsafe { &*crate::quipu_engine_api_v1() }
}

/// The status with a number.
pub(super) fn status(code: i32) -> EngineStatus {
    use EngineStatus as S;
    let all = [
        S::Ok,
        S::Invalid,
        S::NoMemory,
        S::NotSupported,
        S::Busy,
        S::WouldBlock,
        S::Interrupted,
        S::NoDevice,
        S::NotPermitted,
        S::BadAddress,
        S::NoDescriptor,
        S::TimedOut,
        S::Unreachable,
        S::Refused,
        S::QueueFull,
        S::Internal,
        S::NotFound,
        S::AddressNotAvailable,
        S::AddressInUse,
        S::Connected,
        S::NotConnected,
        S::WaitOn,
        S::Denied,
        S::NoSuchFamily,
        S::BadDescriptor,
    ];
    all.into_iter().find(|status| status.code() == code).expect("a status of the table")
}

/// A call without an output.
pub(super) fn done(code: i32) -> Said {
    match status(code) {
        EngineStatus::Ok => Ok(()),
        status => Err(status),
    }
}

/// A call with an output, which it writes exactly if it succeeds. It may have to wait on.
pub(super) fn made<T>(mut call: impl FnMut(*mut T) -> i32) -> Said<T> {
    let mut out = MaybeUninit::uninit();
    while let Err(refused) = done(call(out.as_mut_ptr())) {
        if refused != EngineStatus::WaitOn {
            return Err(refused);
        }
    }
    // SAFETY: "outputs are written on success", which this was.
    Ok(unsafe { out.assume_init() })
}

/// A C structure with all bytes zero.
pub(super) fn blank<T: Copy>() -> T {
    // SAFETY: used with structures of integers and raw pointers only.
    unsafe { std::mem::zeroed() }
}

/// A context with a domain, a channel, a queue for completions and 64 KB of registered memory.
pub(super) struct Bench {
    pub(super) api: &'static EngineApi,
    pub(super) context: ContextHandle,
    pub(super) async_fd: i32,
    pub(super) pd: PdHandle,
    pub(super) channel: EngineChannel,
    pub(super) cq: CqHandle,
    pub(super) mr: EngineMr,
    memory: *mut u8,
}

/// Bytes of registered memory.
pub(super) const MEMORY: usize = 1 << 16;
/// A completion that takes longer will never come, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The cookie of a bench's completion queue.
pub(super) const CQ_COOKIE: u64 = 0xc0;
const ALL_RIGHTS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_FLUSH_GLOBAL
    | IBV_ACCESS_MW_BIND;

/// A queue pair and its number.
pub(super) type Qp = EngineQp;

impl Bench {
    pub(super) fn new() -> Self {
        Self::of(c"quipu0")
    }

    pub(super) fn of(device: &CStr) -> Self {
        let api = api();
        let opened: EngineOpened = made(|out| unsafe { (api.open)(device.as_ptr(), out) }).unwrap();
        let context = opened.context;
        let pd = made(|out| unsafe { (api.alloc_pd)(context, out) }).unwrap();
        let channel: EngineChannel =
            made(|out| unsafe { (api.create_channel)(context, out) }).unwrap();
        let memory = Box::leak(vec![0_u64; MEMORY / 8].into_boxed_slice()).as_mut_ptr().cast();
        let mut init = registration(memory as u64, MEMORY as u64);
        if device != c"quipu0" {
            init.access &= !IBV_ACCESS_FLUSH_GLOBAL;
        }
        let mr = made(|out| unsafe { (api.reg_mr)(pd, &init, out) }).unwrap();
        let async_fd = opened.async_fd;
        let cq = CqHandle::NONE;
        let mut bench = Self { api, context, async_fd, pd, channel, cq, mr, memory };
        bench.cq = bench.new_cq(64, channel.channel, CQ_COOKIE).unwrap().cq;
        bench
    }

    pub(super) fn new_cq(&self, cqe: u32, channel: ChannelHandle, cookie: u64) -> Said<EngineCq> {
        let init = EngineCqInit { cqe, comp_vector: 0, flags: 0, stamps: 0, channel, cookie };
        made(|out| unsafe { (self.api.create_cq)(self.context, &init, out) })
    }

    /// What a queue pair of this bench is asked to be.
    pub(super) fn qp_init(&self) -> EngineQpInit {
        EngineQpInit {
            send_cq: self.cq,
            recv_cq: self.cq,
            xrcd: XrcdHandle::NONE,
            srq: SrqHandle::NONE,
            cap: ibv_qp_cap {
                max_send_wr: 8,
                max_recv_wr: 8,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 128,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
            create_flags: 0,
            send_ops: 0,
            cookie: 0,
        }
    }

    pub(super) fn create_qp(&self, init: &EngineQpInit) -> Said<Qp> {
        made(|out| unsafe { (self.api.create_qp)(self.pd, init, out) })
    }

    pub(super) fn modify(&self, qp: QpHandle, attr: &ibv_qp_attr, mask: u32) -> Said {
        done(unsafe { (self.api.modify_qp)(qp, attr, mask) })
    }

    pub(super) fn query(&self, qp: QpHandle) -> Said<ibv_qp_attr> {
        made(|out| unsafe { (self.api.query_qp)(qp, 0, out) })
    }

    pub(super) fn gid(&self) -> ibv_gid {
        let row: ibv_gid_entry =
            made(|out| unsafe { (self.api.query_gid)(self.context, 1, 0, out) }).unwrap();
        row.gid
    }

    /// RESET to INIT.
    pub(super) fn to_init(&self, qp: QpHandle) -> Said {
        let mut attr: ibv_qp_attr = blank();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = ALL_RIGHTS & !IBV_ACCESS_MW_BIND;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(qp, &attr, mask)
    }

    /// The attributes for INIT to RTR, and their mask.
    pub(super) fn rtr(&self, peer: u32) -> (ibv_qp_attr, u32) {
        let mut attr: ibv_qp_attr = blank();
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = peer;
        attr.max_dest_rd_atomic = 4;
        attr.min_rnr_timer = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = self.gid();
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        (attr, mask)
    }

    /// RTR to RTS.
    pub(super) fn to_rts(&self, qp: QpHandle) -> Said {
        self.to_rts_without(qp, 0)
    }

    /// The same for a service that lacks some of the attributes.
    pub(super) fn to_rts_without(&self, qp: QpHandle, lacks: u32) -> Said {
        let mut attr: ibv_qp_attr = blank();
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = 7;
        attr.rnr_retry = 0;
        attr.max_rd_atomic = 4;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(qp, &attr, mask & !lacks)
    }

    /// Two queue pairs in RTS that are each other's peers.
    pub(super) fn pair(&self, init: &EngineQpInit) -> (Qp, Qp) {
        let (a, b) = (self.create_qp(init).unwrap(), self.create_qp(init).unwrap());
        for (own, peer) in [(a, b), (b, a)] {
            self.to_init(own.qp).unwrap();
            let (attr, mask) = self.rtr(peer.qp_num);
            self.modify(own.qp, &attr, mask).unwrap();
        }
        self.to_rts(a.qp).unwrap();
        self.to_rts(b.qp).unwrap();
        (a, b)
    }

    /// An element that names `length` bytes of the registered memory from `offset`.
    pub(super) fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        ibv_sge { addr: self.addr(offset), length, lkey: self.mr.lkey }
    }

    /// The address of a byte of the registered memory.
    pub(super) fn addr(&self, offset: usize) -> u64 {
        assert!(offset < MEMORY);
        self.memory as u64 + offset as u64
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= MEMORY);
        // SAFETY: within the memory of the bench, to which no reference exists.
        unsafe { self.memory.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(super) fn read<const N: usize>(&self, offset: usize) -> [u8; N] {
        assert!(offset + N <= MEMORY);
        // SAFETY: within the memory of the bench, which was initialised.
        unsafe { self.memory.add(offset).cast::<[u8; N]>().read() }
    }

    /// Posts a list; on failure, also the `wr_id` of the request that could not be posted.
    pub(super) fn post_send(
        &self,
        qp: QpHandle,
        list: &mut [ibv_send_wr],
    ) -> Result<(), (u64, EngineStatus)> {
        for index in 1..list.len() {
            list[index - 1].next = &raw mut list[index];
        }
        let mut bad = std::ptr::null();
        let code = unsafe { (self.api.post_send)(qp, list.as_ptr(), &mut bad) };
        // SAFETY: `bad` is an element of the list if the call fails.
        done(code).map_err(|status| (unsafe { (*bad).wr_id }, status))
    }

    pub(super) fn post_recv(&self, qp: QpHandle, wr_id: u64, list: &mut [ibv_sge]) -> Said {
        let wr = receive(wr_id, list);
        let mut bad = std::ptr::null();
        let said = done(unsafe { (self.api.post_recv)(qp, &wr, &mut bad) });
        assert!(said.is_ok() || std::ptr::eq(bad, &wr));
        said
    }

    /// Polls until `count` completions are there.
    pub(super) fn completions(&self, cq: CqHandle, count: usize) -> Vec<ibv_wc> {
        let mut all = Vec::new();
        let late = Instant::now() + PATIENCE;
        while all.len() < count {
            assert!(Instant::now() < late, "{count} completions do not come; so far {all:?}");
            let mut some = [blank::<ibv_wc>(); 16];
            let found = unsafe { (self.api.poll_cq)(cq, 16, some.as_mut_ptr()) };
            assert!(found >= 0, "poll_cq: {:?}", status(-found));
            all.extend_from_slice(&some[..found as usize]);
        }
        assert_eq!(all.len(), count, "{all:?}");
        all
    }

    /// Polls for exactly one completion, by one.
    pub(super) fn completion(&self) -> ibv_wc {
        let mut wc = blank::<ibv_wc>();
        let late = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < late, "no completion comes");
            match unsafe { (self.api.poll_cq)(self.cq, 1, &mut wc) } {
                0 => {}
                1 => return wc,
                other => panic!("poll_cq: {other}"),
            }
        }
    }

    pub(super) fn destroy_qp(&self, qp: QpHandle) -> Said<EngineEventsReported> {
        made(|out| unsafe { (self.api.destroy_qp)(qp, out) })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What tests leave behind goes with the context.
        let closed = done(unsafe { (self.api.close)(self.context) });
        if !std::thread::panicking() {
            closed.unwrap();
        }
    }
}

/// A registration of memory under its own address, with all rights.
pub(super) fn registration(addr: u64, length: u64) -> EngineMrInit {
    EngineMrInit { addr, length, iova: addr, access: ALL_RIGHTS }
}

/// How a basic shared receive queue is wanted.
pub(super) fn srq_init(attr: ibv_srq_attr, cookie: u64) -> EngineSrqInit {
    EngineSrqInit { attr, xrcd: XrcdHandle::NONE, cq: CqHandle::NONE, cookie }
}

/// A signalled send request.
pub(super) fn send(wr_id: u64, opcode: u32, list: &mut [ibv_sge]) -> ibv_send_wr {
    let mut wr: ibv_send_wr = blank();
    wr.wr_id = wr_id;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = list.as_mut_ptr();
    wr.num_sge = list.len() as i32;
    wr
}

/// A receive request.
pub(super) fn receive(wr_id: u64, list: &mut [ibv_sge]) -> ibv_recv_wr {
    let (sg_list, num_sge) = (list.as_mut_ptr(), list.len() as i32);
    ibv_recv_wr { wr_id, next: std::ptr::null_mut(), sg_list, num_sge }
}

/// A program that waits for edges of a descriptor (`EPOLLET`), as Rust's tokio does.
pub(super) struct Edges(OwnedFd);

impl Edges {
    pub(super) fn of(fd: i32) -> Self {
        let mut wish = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        // SAFETY: a flag; the descriptor is new, and ours.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        // SAFETY: descriptors, and one live structure.
        let added =
            unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut wish) };
        assert_eq!(added, 0);
        Self(epoll)
    }

    /// Whether there was one since it was last asked.
    pub(super) fn any(&self) -> bool {
        let mut ready = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        unsafe { libc::epoll_wait(self.0.as_raw_fd(), &raw mut ready, 1, 0) == 1 }
    }
}

/// The status of a child that has panicked, and the seconds after which one that hangs is ended by a signal.
const PANICKED: i32 = 101;
const CHILD_SECONDS: u32 = 100;

/// A child of fork, which ends with the number of the first thing that `child` finds not as it should be.
pub(super) fn forked(child: impl FnOnce() -> Result<(), i32>) -> libc::pid_t {
    // SAFETY: the child calls the table, which is what is tested, and leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // No other thread is left to take note of a panic, which may wait for a lock that one of them had.
        // SAFETY: asks for a signal.
        unsafe { libc::alarm(CHILD_SECONDS) };
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        let status = ended.map_or(PANICKED, |found| found.err().unwrap_or(0));
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(status) };
    }
    pid
}

/// Waits for a child, which is to have found nothing.
#[track_caller]
pub(super) fn found_nothing(pid: libc::pid_t) {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
}
