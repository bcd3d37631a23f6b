//! A NIC: the adapter of this process under a name, and all objects that hang on it.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_char, c_int, c_ulong};
use quipu::{Config, Device, ProtectionDomain};
use quipu_cabi::entry;
use quipu_via::address::{self, MAX_DISCRIMINATOR};
use quipu_via::attributes::MAX_TRANSFER;
use quipu_via::codes::{Code, Outcome};
use quipu_via::cq::MAX_ENTRIES;
use quipu_via::descriptor::MAX_SEGMENTS;
use quipu_via::vi::MAX_DESCRIPTORS;

use crate::accept::Incoming;
use crate::bell::Bell;
use crate::callback::Callbacks;
use crate::control::Control;
use crate::cq::Cq;
use crate::handle::{self, Id, Kind};
use crate::memory::{Ptag, Region};
use crate::ring::Ring;
use crate::touch::give;
use crate::types::{VIP_NIC_ATTRIBUTES, VIP_PVOID, VipReturn, code};
use crate::vi::Entry;

/// Largest transfer of UNRELIABLE programs that ask for what the wire takes at once.
const NATIVE_MTU: c_ulong = 65_536;
pub(crate) const MAX_VIS: usize = 65_536;
pub(crate) const MAX_CQS: usize = 65_536;
pub(crate) const MAX_PTAGS: usize = 16_384;
pub(crate) const MAX_REGIONS: usize = 1 << 19;
/// How long a waiting thread polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
const POLLS_PER_READING: u32 = 64;

/// An open NIC.
pub(crate) struct Nic {
    pub(crate) number: Id,
    /// The process that opened it.
    pid: u32,
    name: Vec<u8>,
    pub(crate) device: Device,
    /// The domain of the first tag, and of what has none.
    pub(crate) base: ProtectionDomain,
    /// The bytes of its address, of which programs get a pointer.
    pub(crate) address: Box<[u8]>,
    /// Whether addresses of every interface are its own.
    pub(crate) has_all_addresses: bool,
    pub(crate) strict: bool,
    pub(crate) holds_back: bool,
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the thread that sleeps in `poll`.
    bell: Bell,
    pub(crate) control: Control,
    pub(crate) callbacks: Callbacks,
    closed: AtomicBool,
}

/// All objects of a NIC. One lock guards them.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) vis: HashMap<Id, Entry>,
    pub(crate) cqs: HashMap<Id, Cq>,
    pub(crate) ptags: HashMap<Id, Ptag>,
    pub(crate) regions: HashMap<u32, Region>,
    pub(crate) connections: HashMap<Id, Incoming>,
    pub(crate) rings: Vec<Ring>,
    pub(crate) name_service: bool,
    pub(crate) discovered: crate::names::Discovered,
    sleepers: u32,
    has_leader: bool,
}

/// When a call gives up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(pub(crate) Option<Instant>);

impl Deadline {
    /// In so many milliseconds, or never.
    pub(crate) fn after(timeout: c_ulong) -> Self {
        let is_infinite = timeout == c_ulong::MAX || timeout == 0xffff_ffff;
        let at = (!is_infinite).then(|| Instant::now().checked_add(Duration::from_millis(timeout)));
        Self(at.flatten())
    }

    /// What is left; none if there is no end. Zero if it is over.
    pub(crate) fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

impl Nic {
    fn open(number: Id, name: &[u8]) -> Result<Self, quipu::Error> {
        let mut config = Config::from_env().map_err(|error| quipu::Error::Open(error.into()))?;
        // A name that is an address binds to it.
        if let Some(wanted) = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok()) {
            config.address = Some(wanted);
        }
        let has_all_addresses = config.address.is_none();
        let device = Device::open(config)?;
        let base = device.protection_domain()?;
        let address = address::bytes_of(device.address()).into_boxed_slice();
        let bell = Bell::new().map_err(quipu::Error::Exchange)?;
        let control = Control::new().map_err(quipu::Error::Exchange)?;
        let is_set = |name, value: &str| std::env::var_os(name).is_some_and(|set| set == *value);
        Ok(Self {
            number,
            pid: std::process::id(),
            name: name.to_vec(),
            device,
            base,
            address,
            has_all_addresses,
            strict: is_set("QUIPU_VIPL_STRICT", "1"),
            holds_back: !is_set("QUIPU_VIPL_RNR", "0"),
            state: Mutex::default(),
            changed: Condvar::new(),
            bell,
            control,
            callbacks: Callbacks::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// The same NIC, unless this is a child of fork, which opens one of its own under the same handle.
    pub(crate) fn here(self: Arc<Self>) -> Outcome<Arc<Self>> {
        if self.pid == std::process::id() {
            return Ok(self);
        }
        let opened = Arc::new(Self::open(self.number, &self.name).map_err(report)?);
        handle::add(opened.clone());
        // The parent's engine is not this process's to close.
        std::mem::forget(self);
        Ok(opened)
    }

    pub(crate) fn handle(&self) -> VIP_PVOID {
        handle::handle(Kind::Nic, self.number, 0)
    }

    pub(crate) fn handle_of(&self, kind: Kind, id: Id) -> VIP_PVOID {
        handle::handle(kind, self.number, id)
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Wakes threads that wait for what may have changed.
    #[inline]
    pub(crate) fn wake(&self, state: &State) {
        if state.sleepers > 0 {
            self.changed.notify_all();
            if state.has_leader {
                self.bell.ring();
            }
        }
    }

    /// Calls `look` until it finds something: polling at first, asleep soon. None if the time is over.
    pub(crate) fn wait_until<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let spin_end = Instant::now() + SPIN;
        loop {
            for _ in 0..POLLS_PER_READING {
                let mut state = self.lock();
                self.pump(&mut state);
                if let Some(found) = look(&mut state) {
                    return Some(found);
                }
                drop(state);
                std::hint::spin_loop();
            }
            if deadline.is_over() {
                return None;
            }
            if Instant::now() >= spin_end {
                break;
            }
        }
        let mut state = self.lock();
        state.sleepers += 1;
        let found = loop {
            // Armed first, so that what comes after the look wakes this thread.
            let fds = self.arm(&state);
            self.pump(&mut state);
            if let Some(found) = look(&mut state) {
                break Some(found);
            }
            if deadline.is_over() || self.is_closed() {
                break None;
            }
            state = self.sleep(state, &fds, deadline);
        };
        state.sleepers -= 1;
        // Another one may have to lead.
        self.changed.notify_all();
        found
    }

    /// Sleeps until something may have changed: one thread in `poll`, others until that one wakes them.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        fds: &[RawFd],
        deadline: Deadline,
    ) -> MutexGuard<'a, State> {
        if state.has_leader {
            let left = deadline.left().unwrap_or(Duration::from_secs(3600));
            let waited = self.changed.wait_timeout(state, left);
            return waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.has_leader = true;
        drop(state);
        let mut polled: Vec<libc::pollfd> = fds.iter().map(|fd| readable(*fd)).collect();
        polled.push(readable(self.bell.as_raw_fd()));
        poll(&mut polled, deadline.left());
        self.bell.clear();
        let mut state = self.lock();
        state.has_leader = false;
        for ring in &state.rings {
            ring.clear();
        }
        self.changed.notify_all();
        state
    }

    /// Ends the work of the NIC: connections, threads.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let mut state = self.lock();
        let ids: Vec<Id> = state.vis.keys().copied().collect();
        for id in ids {
            self.disconnect(&mut state, id);
        }
        state.vis.clear();
        state.cqs.clear();
        state.regions.clear();
        state.ptags.clear();
        state.connections.clear();
        self.wake(&state);
        self.changed.notify_all();
        drop(state);
        self.bell.ring();
        self.control.stop();
        self.callbacks.stop();
    }
}

/// What `poll` is to wait for.
pub(crate) fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Waits until one of the descriptors is readable, or for so long.
pub(crate) fn poll(fds: &mut [libc::pollfd], most: Option<Duration>) {
    let most = most
        .map_or(-1, |most| c_int::try_from(most.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX));
    // SAFETY: the list is as long as it says.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, most) };
}

/// Says why something of the adapter failed; the code that the program gets.
#[cold]
pub(crate) fn report(error: quipu::Error) -> Code {
    say(&format!("{error}"));
    Code::ErrorResource
}

/// Writes a line for the user of the program.
#[cold]
pub(crate) fn say(text: &str) {
    use std::io::Write;
    // `eprintln!` would panic where standard error is closed.
    let _ = writeln!(std::io::stderr(), "quipu: vipl: {text}");
}

fn open(name: *const c_char, out: *mut VIP_PVOID) -> Outcome {
    if name.is_null() || out.is_null() {
        return Err(Code::InvalidParameter);
    }
    // SAFETY: the program passes a string.
    let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_bytes();
    let number = handle::fresh() & 0xff_ffff;
    let nic = Arc::new(Nic::open(number, name).map_err(report)?);
    handle::add(nic.clone());
    give(out, nic.handle())
}

fn query(nic: &Nic, out: *mut VIP_NIC_ATTRIBUTES) -> Outcome {
    let mut name = [0; 64];
    for (to, from) in name.iter_mut().zip(nic.name.iter().take(63)) {
        *to = *from as c_char;
    }
    let attributes = VIP_NIC_ATTRIBUTES {
        name,
        hardware_version: 1,
        provider_version: 1,
        nic_address_len: nic.address.len() as u16,
        local_nic_address: nic.address.as_ptr(),
        thread_safe: 1,
        max_discriminator_len: MAX_DISCRIMINATOR as u16,
        max_register_bytes: c_ulong::MAX >> 1,
        max_register_regions: MAX_REGIONS as c_ulong,
        max_register_block_bytes: c_ulong::MAX >> 1,
        max_vi: MAX_VIS as c_ulong,
        max_descriptors_per_queue: MAX_DESCRIPTORS as c_ulong,
        max_segments_per_desc: c_ulong::from(MAX_SEGMENTS),
        max_cq: MAX_CQS as c_ulong,
        max_cq_entries: MAX_ENTRIES as c_ulong,
        max_transfer_size: MAX_TRANSFER,
        native_mtu: NATIVE_MTU,
        max_ptags: MAX_PTAGS as c_ulong,
        reliability_level_support: 7,
        rdma_read_support: 6,
    };
    give(out, attributes)
}

/// What peers still wait for goes out when the process exits.
extern "C" fn at_exit() {
    quipu_cabi::wall::<quipu_cabi::Void>("exit", || {
        let pid = std::process::id();
        for nic in handle::try_all() {
            if nic.pid == pid {
                nic.device.shut_down();
            }
            // Its destructor would destroy what other threads may still use.
            std::mem::forget(nic);
        }
        Ok(())
    });
}

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static AT_EXIT: extern "C" fn() = at_exit;

entry! {
    /// `VipOpenNic`
    fn VipOpenNic(name: *const c_char, out: *mut VIP_PVOID) -> VipReturn {
        code(open(name, out))
    }

    /// `VipCloseNic`
    fn VipCloseNic(raw: VIP_PVOID) -> VipReturn {
        code(handle::nic(raw).and_then(|nic| handle::remove(&nic)).map(|nic| nic.close()))
    }

    /// `VipQueryNic`
    fn VipQueryNic(raw: VIP_PVOID, out: *mut VIP_NIC_ATTRIBUTES) -> VipReturn {
        code(handle::nic(raw).and_then(|nic| query(&nic, out)))
    }
}
