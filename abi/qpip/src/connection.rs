//! Ports, connecting, and the ends of connections.

use std::sync::Arc;

use libc::{c_int, c_uint, sockaddr, sockaddr_storage, socklen_t};
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Plain, Tagged, entry};
use quipu_host::inet::stack::ListenerId;
use quipu_host::inet::tcp::Mode;
use quipu_host::nic::TcpSettings;

use crate::adapter::{Adapter, Opaque, adapter, qpip_adapter};
use crate::address::{read, storage};
use crate::error::{Outcome, fail, no_object, refused};
use crate::qp::{qp, qpip_qp};
use crate::settings::{carriage, qpip_settings, with};

/// `qpip_listener`
pub type qpip_listener = Opaque;

struct Private {
    adapter: Arc<Adapter>,
    id: ListenerId,
    port: u16,
}

impl Tagged for Private {
    const TAG: u64 = 0x7170_6970_6c69_7374;
}

type Listener = Handle<Opaque, Private>;

/// `enum qpip_mode`
fn plain(mode: c_uint) -> Outcome<TcpSettings> {
    let mode = match mode {
        0 => Mode::Message,
        1 => Mode::Stream,
        other => {
            let words = format_args!("{other} is not a mode; use QPIP_MESSAGES or QPIP_STREAM");
            return Err(fail(Errno::EINVAL, words));
        }
    };
    Ok(TcpSettings { mode, ..TcpSettings::default() })
}

/// Watches a port.
fn listen(
    adapter: Arc<Adapter>,
    port: u16,
    settings: &TcpSettings,
    backlog: c_uint,
) -> Outcome<*mut qpip_listener> {
    let listening = adapter.engine.tcp_listen(port, settings, backlog.max(1));
    let (id, port) = listening.map_err(refused("the port cannot be watched"))?;
    Ok(Listener::create(Opaque::new(), Private { adapter, id, port }))
}

/// # Safety
///
/// As [`qp`] and [`read`].
unsafe fn connect(
    raw: *const qpip_qp,
    (peer, length): (*const sockaddr, socklen_t),
    port: u16,
    settings: &TcpSettings,
) -> Outcome<c_int> {
    // SAFETY: passed on from the caller.
    let (qp, peer) = unsafe { (qp(raw)?, read(peer, length)?) };
    let port = (port != 0).then_some(port);
    let begun = qp.adapter.engine.tcp_connect(qp.id, peer, port, settings);
    begun.map_err(refused("the queue pair cannot be connected"))?;
    Ok(0)
}

/// # Safety
///
/// As [`Handle::get`].
unsafe fn listener<'a>(raw: *const qpip_listener) -> Outcome<&'a Private> {
    // SAFETY: passed on from the caller.
    Ok(unsafe { Listener::get(raw) }.map_err(no_object("listener"))?)
}

entry! {
    /// `qpip_listen`
    fn qpip_listen(
        raw: *mut qpip_adapter,
        port: u16,
        mode: c_uint,
        backlog: c_uint,
    ) -> Null<qpip_listener> {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        listen(adapter, port, &plain(mode)?, backlog)
    }

    /// `qpip_listen_with`
    fn qpip_listen_with(
        raw: *mut qpip_adapter,
        port: u16,
        mode: c_uint,
        backlog: c_uint,
        wanted: *const qpip_settings,
    ) -> Null<qpip_listener> {
        // SAFETY: the program passes what qpip_open gave, and null or settings of the size that they say.
        let (adapter, settings) = unsafe { (adapter(raw)?, with(plain(mode)?, wanted)?) };
        listen(adapter, port, &settings, backlog)
    }

    /// `qpip_listener_port`
    fn qpip_listener_port(raw: *const qpip_listener) -> Plain<u16> {
        // SAFETY: the program passes what qpip_listen gave.
        Ok(unsafe { listener(raw) }?.port)
    }

    /// `qpip_offer`
    fn qpip_offer(raw: *mut qpip_listener, idle: *mut qpip_qp) -> IntMinusOne {
        // SAFETY: the program passes what qpip_listen and qpip_create gave.
        let (listener, qp) = unsafe { (listener(raw)?, qp(idle)?) };
        if !Arc::ptr_eq(&listener.adapter, &qp.adapter) {
            return Err(fail(Errno::EINVAL, "the queue pair belongs to another adapter"));
        }
        let offered = qp.adapter.engine.tcp_offer(listener.id, qp.id);
        offered.map_err(refused("the queue pair cannot be offered"))?;
        Ok(0)
    }

    /// `qpip_unlisten`
    fn qpip_unlisten(raw: *mut qpip_listener) -> IntMinusOne {
        // SAFETY: the program passes what qpip_listen gave.
        let listener = unsafe { listener(raw) }?;
        let ended = listener.adapter.engine.tcp_unlisten(listener.id);
        ended.map_err(refused("the port cannot be left"))?;
        // SAFETY: as above; that nobody uses it any more is the program's to see to.
        drop(unsafe { Listener::take(raw) });
        Ok(0)
    }

    /// `qpip_connect`
    fn qpip_connect(
        raw: *mut qpip_qp,
        peer: *const sockaddr,
        length: socklen_t,
        port: u16,
        mode: c_uint,
    ) -> IntMinusOne {
        // SAFETY: the program passes what qpip_create gave, and an address.
        unsafe { connect(raw, (peer, length), port, &plain(mode)?) }
    }

    /// `qpip_connect_with`
    fn qpip_connect_with(
        raw: *mut qpip_qp,
        peer: *const sockaddr,
        length: socklen_t,
        port: u16,
        mode: c_uint,
        wanted: *const qpip_settings,
    ) -> IntMinusOne {
        // SAFETY: as above, and null or settings of the size that they say.
        unsafe { connect(raw, (peer, length), port, &with(plain(mode)?, wanted)?) }
    }

    /// `qpip_finish`
    fn qpip_finish(raw: *mut qpip_qp) -> IntMinusOne {
        // SAFETY: the program passes what qpip_create gave.
        let qp = unsafe { qp(raw) }?;
        qp.adapter.engine.tcp_close(qp.id).map_err(refused("sending cannot be finished"))?;
        Ok(0)
    }

    /// `qpip_abort`
    fn qpip_abort(raw: *mut qpip_qp) -> IntMinusOne {
        // SAFETY: as above.
        let qp = unsafe { qp(raw) }?;
        qp.adapter.engine.tcp_abort(qp.id).map_err(refused("the connection cannot be ended"))?;
        Ok(0)
    }

    /// `qpip_ends`
    fn qpip_ends(
        raw: *mut qpip_qp,
        own: *mut sockaddr_storage,
        peer: *mut sockaddr_storage,
    ) -> IntMinusOne {
        // SAFETY: as above.
        let qp = unsafe { qp(raw) }?;
        let flow = qp.adapter.engine.tcp_flow(qp.id).map_err(refused("cannot read the addresses \
            of the connection"))?;
        let Some(flow) = flow else {
            return Err(fail(Errno::ENOTCONN, "the queue pair has no connection; connect or offer it"));
        };
        for (place, address) in [(own, flow.local), (peer, flow.remote)] {
            if !place.is_null() {
                // SAFETY: it is not null, and the program passes a place for an address then.
                unsafe { place.write_unaligned(storage(address)) };
            }
        }
        Ok(0)
    }

    /// `qpip_bind`
    fn qpip_bind(raw: *mut qpip_qp, port: u16) -> IntMinusOne {
        // SAFETY: as above.
        let qp = unsafe { qp(raw) }?;
        let bound = qp.adapter.engine.udp_bind(qp.id, port);
        bound.map(c_int::from).map_err(refused("the queue pair cannot be bound"))
    }

    /// `qpip_set_carriage`
    fn qpip_set_carriage(raw: *mut qpip_qp, traffic_class: u32, hop_limit: u32) -> IntMinusOne {
        // SAFETY: as above.
        let qp = unsafe { qp(raw) }?;
        let carriage = carriage(traffic_class, hop_limit)?;
        let set = qp.adapter.engine.set_carriage(qp.id, carriage);
        set.map_err(refused("cannot change traffic class and hop limit"))?;
        Ok(0)
    }
}
