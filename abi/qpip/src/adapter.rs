//! Adapters: an engine each, with a packet link.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, OsString};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::{c_char, c_uint, sockaddr_storage};
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Tagged, entry};
use quipu_host::nic::{PdId, QpId};
use quipu_host::packet::LinkSpec;
use quipu_host::{Config, ContextId, Engine, OpenError, parse_address};
use quipu_mem::Segment;

use crate::address::storage;
use crate::error::{Outcome, fail, no_object, not_opened, refused};
use crate::exit::Listed;

/// What C knows of an object: its address, and nothing of what is there.
#[repr(C)]
pub struct Opaque(u64);

impl Opaque {
    pub(crate) const fn new() -> Self {
        Self(0)
    }
}

/// `qpip_adapter`
pub type qpip_adapter = Opaque;

/// An engine, and what is known of its objects.
pub(crate) struct Adapter {
    pub(crate) engine: Arc<Engine>,
    pub(crate) context: ContextId,
    pub(crate) pd: PdId,
    /// Readable while there are events.
    pub(crate) events_fd: i32,
    /// Addresses and contexts of queue pairs, for events.
    pub(crate) qps: Mutex<HashMap<QpId, Known>>,
    /// Memory that the program has from it, by address.
    pub(crate) allocated: Mutex<BTreeMap<usize, Segment>>,
    /// Its peers are told when the process exits.
    _listed: Listed,
}

/// What a program knows a queue pair by: addresses, kept as numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) qp: usize,
    pub(crate) context: usize,
}

impl Drop for Adapter {
    fn drop(&mut self) {
        let _ = self.engine.dealloc_pd(self.pd);
        let _ = self.engine.close_context(self.context);
    }
}

pub(crate) struct Private(Arc<Adapter>);

impl Tagged for Private {
    const TAG: u64 = 0x7170_6970_6164_6170;
}

/// Locks, whatever a thread that panicked has left: each of these values is whole at any time.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The adapter behind a pointer.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn adapter(raw: *const qpip_adapter) -> Outcome<Arc<Adapter>> {
    // SAFETY: passed on from the caller.
    let handle = unsafe { Handle::<Opaque, Private>::get(raw) };
    Ok(Arc::clone(&handle.map_err(no_object("adapter"))?.0))
}

/// A text of the program, if it gives one.
///
/// # Safety
///
/// It is null, or closed by a zero.
unsafe fn text<'a>(raw: *const c_char, what: &str) -> Outcome<Option<&'a str>> {
    if raw.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on from the caller.
    let text = unsafe { CStr::from_ptr(raw) }.to_str();
    text.map(Some).map_err(|_| fail(Errno::EINVAL, format_args!("the {what} is not UTF-8 text")))
}

/// What the program gives goes before what the environment says.
pub(crate) fn config(
    link: Option<&str>,
    addresses: Option<&str>,
    environment: impl Fn(&str) -> Option<OsString>,
) -> Outcome<Config> {
    let wrong = |error: &dyn fmt::Display| {
        fail(Errno::EINVAL, format_args!("cannot open the adapter: {error}"))
    };
    // It says of itself what is wrong with it, and not of a variable.
    if let Some(link) = link {
        link.parse::<LinkSpec>().map_err(|error| wrong(&error))?;
    }
    let config = Config::from_lookup(|name| match name {
        "QUIPU_QPIP_LINK" if link.is_some() => link.map(OsString::from),
        "QUIPU_QPIP_ADDRESS" if addresses.is_some() => None,
        _ => environment(name),
    });
    let mut config = config.map_err(|error| wrong(&error))?;
    let Some(qpip) = &mut config.qpip else {
        let missing = "no link was given; give one, such as \"tap:qp0\", or set QUIPU_QPIP_LINK";
        return Err(wrong(&missing));
    };
    if let Some(list) = addresses {
        let named = list.split(',').filter(|_| !list.trim().is_empty());
        let read: Option<Vec<(IpAddr, u8)>> = named.map(parse_address).collect();
        qpip.addresses = read.ok_or_else(|| {
            wrong(&format_args!(
                "\"{list}\" is not a list of addresses with prefix lengths; give one such as \
                 \"10.9.0.2/24,fd09::2/64\""
            ))
        })?;
    }
    Ok(config)
}

fn open(config: Config) -> Outcome<Arc<Adapter>> {
    let engine = Engine::open(config).map_err(|error: OpenError| not_opened(&error))?;
    let (context, _) = engine.open_context().map_err(refused("the adapter cannot be opened"))?;
    let made = engine.alloc_pd().and_then(|pd| Ok((pd, engine.tcp_events(context)?)));
    let (pd, events_fd) = made.map_err(refused("the adapter cannot be opened"))?;
    let (qps, allocated) = Default::default();
    let _listed = Listed::new(&engine);
    Ok(Arc::new(Adapter { engine, context, pd, events_fd, qps, allocated, _listed }))
}

entry! {
    /// `qpip_open`
    fn qpip_open(link: *const c_char, addresses: *const c_char) -> Null<qpip_adapter> {
        // SAFETY: the program passes null or texts.
        let (link, addresses) = unsafe { (text(link, "link")?, text(addresses, "list of addresses")?) };
        let config = config(link, addresses, |name| std::env::var_os(name))?;
        Ok(Handle::create(Opaque::new(), Private(open(config)?)))
    }

    /// `qpip_close`
    fn qpip_close(raw: *mut qpip_adapter) -> IntMinusOne {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        // One is the handle's, one is here.
        if Arc::strong_count(&adapter) > 2 || !lock(&adapter.allocated).is_empty() {
            return Err(fail(
                Errno::EBUSY,
                "the adapter still has objects; destroy queue pairs, listeners and queues, deregister and free \
                 memory first",
            ));
        }
        // SAFETY: as above; that nobody uses it any more is the program's to see to.
        drop(unsafe { Handle::<Opaque, Private>::take(raw) }.map_err(no_object("adapter"))?);
        Ok(0)
    }

    /// `qpip_address`
    fn qpip_address(
        raw: *mut qpip_adapter,
        index: c_uint,
        out: *mut sockaddr_storage,
    ) -> IntMinusOne {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        let info = adapter.engine.qpip_info().map_err(refused("cannot list the addresses"))?;
        let Some(&ip) = info.addresses.get(index as usize) else {
            return Err(fail(Errno::ENOENT, "the adapter has no further address"));
        };
        if out.is_null() {
            return Err(fail(Errno::EINVAL, "the pointer for the address is NULL"));
        }
        // SAFETY: it is not null, and the program passes a place for an address then.
        unsafe { out.write_unaligned(storage(SocketAddr::new(ip, 0))) };
        Ok(0)
    }
}
