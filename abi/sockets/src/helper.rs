//! The helper thread of a process: it meets the other ends of connections, and sends octets over TCP
//! that a receiver leaves in a ring.
//!
//! It has a table of descriptors of its own (unshare(2), CLONE_FILES), so that the program's numbers
//! and limits are as without it, and the program cannot close what it does not know. Where the helper
//! needs a socket of the program, it takes a copy by pidfd_getfd(2), for a moment.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use libc::c_int;
use quipu_sockets::greeting::Pair;
use quipu_sockets::report::Reason;

use crate::conn::{self, Conn, Mode};
use crate::diag::{self, Other};
use crate::map::Map;
use crate::meet::{self, Fd, Message};
use crate::send_lock::SendLock;
use crate::{process, report, send, sys};

/// Time between two looks at rings while something is sent through them.
const TICK: Duration = Duration::from_millis(5);
/// Time between two looks while the other ends of connections are being asked.
const QUICK_TICK: Duration = Duration::from_millis(1);
/// Ticks without any activity after which the helper sleeps until it is woken.
const IDLE_TICKS: u32 = 40;
/// Time between a change that only the report shows, and the report.
const REPORT_TIME: Duration = Duration::from_millis(200);
/// When the connecting process tries, in milliseconds after the first time.
const ATTEMPTS_MS: [u64; 9] = [0, 1, 3, 6, 15, 40, 100, 300, 1000];
/// For how long the listening process waits.
const LISTENS_NS: u64 = 2_000_000_000;
const MS: u64 = 1_000_000;

static QUEUE: Mutex<Vec<(&'static Conn, u32)>> = Mutex::new(Vec::new());
static STARTED: AtomicBool = AtomicBool::new(false);
/// The helper sleeps here.
static BELL: AtomicU32 = AtomicU32::new(0);
/// The helper sleeps without a limit.
static ASLEEP: AtomicBool = AtomicBool::new(false);
/// The report is to be written although nothing else is to be done.
static REPORTS: AtomicBool = AtomicBool::new(false);
/// Set by every send into a ring.
static ACTIVE: AtomicBool = AtomicBool::new(false);

fn lock() -> MutexGuard<'static, Vec<(&'static Conn, u32)>> {
    QUEUE.lock().unwrap_or_else(|error| error.into_inner())
}

/// The queue's lock, for fork(2).
pub(crate) fn hold_queue() -> MutexGuard<'static, Vec<(&'static Conn, u32)>> {
    lock()
}

/// In a child of fork(2): the helper is not there.
pub(crate) fn forget() {
    lock().clear();
    STARTED.store(false, Ordering::SeqCst);
    ASLEEP.store(false, Ordering::SeqCst);
    ACTIVE.store(false, Ordering::SeqCst);
    REPORTS.store(false, Ordering::SeqCst);
}

/// Has the other end of a connection asked whether it runs Quipu.
pub(crate) fn ask(conn: &'static Conn) {
    if diag::is_on_another_host(conn.fd()) {
        conn.give_up(Mode::Asking, Reason::OtherHost);
        return report_soon();
    }
    sys::quietly(|| {
        lock().push((conn, conn.life.load(Ordering::Relaxed)));
        if start() {
            wake();
        } else {
            conn.give_up(Mode::Asking, Reason::Resources);
        }
    });
}

fn wake() {
    BELL.fetch_add(1, Ordering::SeqCst);
    sys::futex_wake(BELL.as_ptr());
}

/// A connection is known to stay plain: the helper writes the report within some time.
pub(crate) fn report_soon() {
    let is_known = REPORTS.swap(true, Ordering::SeqCst);
    if !is_known && (ASLEEP.load(Ordering::SeqCst) || !STARTED.load(Ordering::Relaxed)) {
        sys::quietly(|| {
            start();
            wake();
        });
    }
}

/// Something was sent into a ring: the helper looks now and then whether it is read.
#[inline]
pub(crate) fn note_activity() {
    if !ACTIVE.load(Ordering::Relaxed) {
        ACTIVE.store(true, Ordering::SeqCst);
        if ASLEEP.load(Ordering::SeqCst) || !STARTED.load(Ordering::Relaxed) {
            sys::quietly(|| {
                start();
                wake();
            });
        }
    }
}

fn start() -> bool {
    if STARTED.swap(true, Ordering::SeqCst) {
        return true;
    }
    if !process::is_own() {
        STARTED.store(false, Ordering::SeqCst);
        return false;
    }
    let _signals = sys::NoSignals::new();
    let builder = std::thread::Builder::new().name("quipu-sockets".into()).stack_size(256 * 1024);
    let is_started = builder.spawn(run).is_ok();
    STARTED.store(is_started, Ordering::SeqCst);
    is_started
}

/// One connection whose other end is being asked.
struct Meeting {
    conn: &'static Conn,
    life: u32,
    pair: Pair,
    other: Other,
    begun: u64,
    attempts: usize,
    stage: Stage,
}

/// How far a meeting has come.
enum Stage {
    /// This process listens.
    Listens(Fd),
    /// This process has offered memory, and waits for the answer.
    Offers(Fd, Option<Map>),
    /// This process tries to connect.
    Connects,
    /// This process has connected, and waits for the offer.
    Waits(Fd),
}

/// What became of a meeting.
enum Outcome {
    Later,
    Raised(Map),
    Failed(Reason),
}

fn run() {
    let last = c_int::MAX as u32;
    if sys::call!(SYS_close_range, 0, last, libc::CLOSE_RANGE_UNSHARE) != 0 {
        // An older kernel: without a table of its own the helper would disturb the program.
        process::disable();
        return;
    }
    let own = sys::call!(SYS_pidfd_open, sys::process(), 0) as c_int;
    if own < 0 {
        process::disable();
        return;
    }
    let own = Fd(own);
    let mut meetings: Vec<Meeting> = Vec::new();
    let mut report = report::Report::default();
    let mut idle = IDLE_TICKS;
    loop {
        let bell = BELL.load(Ordering::SeqCst);
        let fresh = std::mem::take(&mut *lock());
        meetings.extend(fresh.into_iter().filter_map(|(conn, life)| begin(&own, conn, life)));
        meetings.retain_mut(|meeting| !go_on(meeting));
        look_at_rings(&own);
        report.write(&own);
        idle =
            if ACTIVE.swap(false, Ordering::SeqCst) || !meetings.is_empty() { 0 } else { idle + 1 };
        if idle < IDLE_TICKS {
            let tick = if meetings.is_empty() { TICK } else { QUICK_TICK };
            sys::futex_wait(BELL.as_ptr(), bell, Some(tick));
            continue;
        }
        ASLEEP.store(true, Ordering::SeqCst);
        let time = REPORTS.swap(false, Ordering::SeqCst).then_some(REPORT_TIME);
        if !ACTIVE.load(Ordering::SeqCst) {
            sys::futex_wait(BELL.as_ptr(), bell, time);
        }
        ASLEEP.store(false, Ordering::SeqCst);
        idle = if time.is_some() { IDLE_TICKS } else { 0 };
    }
}

/// A copy of a descriptor of the program.
pub(crate) fn copy(own: &Fd, fd: c_int) -> Option<Fd> {
    let copy = sys::call!(SYS_pidfd_getfd, own.0, fd, 0) as c_int;
    (copy >= 0).then_some(Fd(copy))
}

fn begin(own: &Fd, conn: &'static Conn, life: u32) -> Option<Meeting> {
    let failed = |reason| {
        conn.give_up(Mode::Asking, reason);
        REPORTS.store(true, Ordering::SeqCst);
        None
    };
    if !conn.enter() {
        return None;
    }
    let found = (conn.life.load(Ordering::Relaxed) == life).then(|| copy(own, conn.fd())).flatten();
    conn.leave();
    let Some(socket) = found else { return failed(Reason::Resources) };
    let (Some(cookie), Some((local, remote))) = (sys::cookie(socket.0), diag::addresses(socket.0))
    else {
        return failed(Reason::Resources);
    };
    drop(socket);
    let Some(other) = diag::other_end(local, remote) else { return failed(Reason::OtherHost) };
    let pair = Pair { own: cookie, peer: other.cookie };
    let Some(listens) = pair.listens() else { return failed(Reason::Feature) };
    let stage =
        if listens { meet::listen(pair).map(Stage::Listens) } else { Some(Stage::Connects) };
    let Some(stage) = stage else { return failed(Reason::Resources) };
    Some(Meeting { conn, life, pair, other, begun: sys::now_ns(), attempts: 0, stage })
}

/// Takes a meeting further. Whether it is over.
fn go_on(meeting: &mut Meeting) -> bool {
    let conn = meeting.conn;
    if !conn.enter() {
        return true;
    }
    let is_current =
        conn.life.load(Ordering::Relaxed) == meeting.life && conn.mode() == Mode::Asking;
    let outcome = if is_current { try_to_meet(meeting) } else { Outcome::Failed(Reason::Shared) };
    let is_over = match outcome {
        Outcome::Later => false,
        Outcome::Raised(map) => {
            conn.raise(map, meeting.pair.own);
            true
        }
        Outcome::Failed(reason) => {
            if is_current && reason == Reason::NoPeer {
                conn.not_found();
            } else if is_current {
                conn.give_up(Mode::Asking, reason);
            }
            true
        }
    };
    conn.leave();
    is_over
}

fn try_to_meet(meeting: &mut Meeting) -> Outcome {
    let (pair, other) = (meeting.pair, meeting.other);
    let elapsed = sys::now_ns() - meeting.begun;
    let no_peer = || Outcome::Failed(Reason::NoPeer);
    match &mut meeting.stage {
        _ if elapsed > LISTENS_NS => no_peer(),
        Stage::Listens(listener) => {
            let Some(peer) = meet::accept(listener) else { return Outcome::Later };
            let Some(map) = meet::offer(&peer, pair, other) else { return no_peer() };
            meeting.stage = Stage::Offers(peer, Some(map));
            Outcome::Later
        }
        Stage::Offers(peer, map) => match meet::answer(peer) {
            Message::None => Outcome::Later,
            Message::Expected(()) => map.take().map_or_else(no_peer, Outcome::Raised),
            Message::Wrong => no_peer(),
        },
        Stage::Connects => match ATTEMPTS_MS.get(meeting.attempts) {
            None => no_peer(),
            Some(due) if elapsed < due * MS => Outcome::Later,
            Some(_) => {
                meeting.attempts += 1;
                if let Some(peer) = meet::connect(pair) {
                    meeting.stage = Stage::Waits(peer);
                }
                Outcome::Later
            }
        },
        Stage::Waits(peer) => match meet::take_offer(peer, pair, other) {
            Message::None => Outcome::Later,
            Message::Expected(map) => Outcome::Raised(map),
            Message::Wrong => no_peer(),
        },
    }
}

/// Sends octets over TCP that have been in a ring since the last look: the receiver sleeps, by a call that
/// Quipu does not see, or has become another program.
fn look_at_rings(own: &Fd) {
    conn::for_all(|conn| {
        if conn.mode() != Mode::Raised || !conn.enter() {
            return;
        }
        if let Some(map) = conn.map() {
            let stuck = match map.sender().unread() {
                Some((unread, read)) if unread > 0 && !conn.is_shut() => {
                    conn.stuck_at.swap(read + 1, Ordering::Relaxed) == read + 1
                }
                _ => {
                    conn.stuck_at.store(0, Ordering::Relaxed);
                    false
                }
            };
            if stuck {
                take_back(own, conn, map);
                // What is left is looked at again.
                ACTIVE.store(true, Ordering::SeqCst);
            } else {
                conn.trim_idle_ring(map);
            }
        }
        conn.leave();
    });
}

fn take_back(own: &Fd, conn: &Conn, map: &Map) {
    if let Some(socket) = copy(own, conn.fd())
        && sys::cookie(socket.0) == Some(conn.cookie.load(Ordering::Relaxed))
        && let Some(_lock) = SendLock::take(conn)
    {
        send::take_back_by(conn, map, socket.0);
    }
}
