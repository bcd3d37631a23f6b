//! Devices, contexts, ports and addresses.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_char, c_int};
use quipu_abi_types::*;
use quipu_host::fault::Call;
use quipu_host::{Device, HostAddress};
use quipu_nic::{Config as Limits, LinkLayer, MAX_TABLE_SIZE, MAX_TABLES, RxHashFields};

use crate::entry::{Out, entries};
use crate::identity;
use crate::instance::{self, Instance, current, for_destructor};
use crate::registry::Object;
use crate::status::{Failure, INVALID, Outcome};

/// A region may be as large as the address space of a process (47 bits).
const MAX_MR_SIZE: u64 = 1 << 47;
/// Pages of 4 KB and all larger powers of two.
const PAGE_SIZES: u64 = !0xfff;
/// The delay of an acknowledgement that the device adds, as a code (4.096 us << 15 = 134 ms): an
/// adapter made of software may have to wait for a processor.
const ACK_DELAY: u8 = 15;
/// `phys_state` LinkUp.
const LINK_UP: u8 = 5;
/// And of a link that is down.
const DISABLED: u8 = 3;

const CAPABILITIES: u32 = IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_PORT_ACTIVE_EVENT
    | IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_RC_RNR_NAK_GEN
    | IBV_DEVICE_SRQ_RESIZE
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_XRC
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_MEM_MGT_EXTENSIONS
    | IBV_DEVICE_MANAGED_FLOW_STEERING;

/// The clock that stamps completions counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

const RELIABLE_ODP: u32 = IBV_ODP_SUPPORT_SEND
    | IBV_ODP_SUPPORT_RECV
    | IBV_ODP_SUPPORT_WRITE
    | IBV_ODP_SUPPORT_READ
    | IBV_ODP_SUPPORT_ATOMIC
    | IBV_ODP_SUPPORT_SRQ_RECV
    | IBV_ODP_SUPPORT_ATOMIC_WRITE
    | IBV_ODP_SUPPORT_FLUSH;

/// All memory here is on demand, whatever the operation.
const ODP: ibv_odp_caps = ibv_odp_caps {
    general_caps: IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT,
    per_transport_caps: ibv_odp_transport_caps {
        rc_odp_caps: RELIABLE_ODP,
        uc_odp_caps: IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE,
        ud_odp_caps: IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV,
    },
};

/// How raw packet queue pairs receive by an indirection table.
const RSS: ibv_rss_caps = ibv_rss_caps {
    supported_qpts: 1 << IBV_QPT_RAW_PACKET,
    max_rwq_indirection_tables: MAX_TABLES as u32,
    max_rwq_indirection_table_size: MAX_TABLE_SIZE as u32,
    rx_hash_fields_mask: RxHashFields::all().bits() as u64,
    rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ,
};

/// The address of the device: that of the engine if there is one.
fn address() -> Option<HostAddress> {
    static COMPLAINED: AtomicBool = AtomicBool::new(false);
    if let Ok(instance) = current() {
        return Some(instance.engine.address().clone());
    }
    let address = identity::prospective_address();
    let complain = |error: &_| {
        // Programs list devices again and again.
        if !COMPLAINED.swap(true, Ordering::Relaxed) {
            instance::complain(error);
        }
    };
    address.inspect_err(complain).ok()
}

/// Writes a text and a zero, as much as fits.
pub(crate) fn put_text(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (slot, byte) in to[..room].iter_mut().zip(text.bytes()) {
        *slot = byte as c_char;
    }
}

fn device(which: Device, address: &HostAddress) -> EngineDevice {
    let (node_type, transport_type) = identity::kind(which);
    let link_layer = identity::link_layer(which);
    let mut device = EngineDevice {
        name: [0; 64],
        guid: identity::guid(which, address.ip),
        node_type,
        transport_type,
        num_comp_vectors: 1,
        // No kernel has numbered it. A number of our own might be another device's, about which programs
        // would then ask the kernel (UCX does).
        index: -1,
        gid: identity::gid_entry(which, address, 0),
        link_layer: link_layer as u8,
        lid: link_layer.lid(address.ip.into()),
    };
    put_text(&mut device.name, which.name());
    device
}

/// The devices that programs see.
fn devices() -> Vec<Device> {
    match current() {
        Ok(instance) => instance.engine.devices().to_vec(),
        Err(_) => identity::prospective_devices(),
    }
}

fn device_attributes(device: Device, address: &HostAddress, limits: &Limits) -> ibv_device_attr_ex {
    // A limit that the type of the attribute cannot hold is cut.
    let int = |number: u32| c_int::try_from(number).unwrap_or(c_int::MAX);
    let per_qp = u32::from(limits.max_rd_atomic);
    // SAFETY: the structure consists of integers.
    let mut all: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    let attr = &mut all.orig_attr;
    put_text(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    attr.node_guid = identity::guid(device, address.ip);
    attr.sys_image_guid = attr.node_guid;
    attr.max_mr_size = MAX_MR_SIZE;
    attr.page_size_cap = PAGE_SIZES;
    attr.vendor_id = QUIPU_VENDOR_ID;
    attr.vendor_part_id = 1;
    attr.hw_ver = 1;
    attr.max_qp = int(limits.max_qp);
    attr.max_qp_wr = int(limits.max_qp_wr);
    attr.device_cap_flags = CAPABILITIES;
    attr.max_sge = int(limits.max_sge);
    attr.max_sge_rd = int(limits.max_sge);
    attr.max_cq = int(limits.max_cq);
    attr.max_cqe = int(limits.max_cqe);
    attr.max_mr = int(limits.max_mr);
    attr.max_pd = int(limits.max_pd);
    attr.max_qp_rd_atom = int(per_qp);
    attr.max_qp_init_rd_atom = int(per_qp);
    attr.max_res_rd_atom = int(per_qp.saturating_mul(limits.max_qp));
    // They are atomic towards the processor too, but UCX takes no other value than this one.
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.max_mw = int(limits.max_mr);
    attr.max_ah = int(limits.max_ah);
    let (groups, members) = (limits.max_multicast_groups, limits.max_multicast_members);
    attr.max_mcast_grp = int(groups);
    attr.max_mcast_qp_attach = int(members);
    attr.max_total_mcast_qp_attach = int(groups.saturating_mul(members));
    attr.max_srq = int(limits.max_srq);
    attr.max_srq_wr = int(limits.max_srq_wr);
    attr.max_srq_sge = int(limits.max_sge);
    attr.max_raw_ethy_qp = int(limits.max_qp);
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = ACK_DELAY;
    attr.phys_port_cnt = 1;
    all.device_cap_flags_ex =
        u64::from(CAPABILITIES) | IB_UVERBS_DEVICE_ATOMIC_WRITE | IB_UVERBS_DEVICE_FLUSH_GLOBAL;
    all.odp_caps = ODP;
    all.xrc_odp_caps = RELIABLE_ODP;
    all.completion_timestamp_mask = u64::MAX;
    all.hca_core_clock = CLOCK_KHZ;
    all.cq_mod_caps = ibv_cq_moderation_caps { max_cq_count: u16::MAX, max_cq_period: u16::MAX };
    all.rss_caps = RSS;
    all.max_wq_type_rq = limits.max_srq;
    all.phys_port_cnt_ex = 1;
    match device {
        Device::Quipu0 => {}
        Device::QuipuIw0 => of_rnic(&mut all),
        Device::QuipuQp0 => {
            of_rnic(&mut all);
            of_qpip(&mut all);
        }
    }
    all
}

/// What an RNIC does not do: atomics, writes of one piece, flushes, waiting for a receive, and any service
/// but the reliable one: datagrams with their address handles and groups, XRC.
fn of_rnic(all: &mut ibv_device_attr_ex) {
    let attr = &mut all.orig_attr;
    attr.vendor_part_id = 2;
    attr.atomic_cap = IBV_ATOMIC_NONE;
    attr.max_ah = 0;
    (attr.max_mcast_grp, attr.max_mcast_qp_attach, attr.max_total_mcast_qp_attach) = (0, 0, 0);
    attr.max_raw_ethy_qp = 0;
    attr.device_cap_flags &= !(IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_XRC
        | IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_MANAGED_FLOW_STEERING);
    // SAFETY: the structure consists of integers.
    all.rss_caps = unsafe { std::mem::zeroed() };
    all.max_wq_type_rq = 0;
    let caps = &mut all.odp_caps.per_transport_caps;
    caps.rc_odp_caps &=
        !(IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_ATOMIC_WRITE | IBV_ODP_SUPPORT_FLUSH);
    (caps.uc_odp_caps, caps.ud_odp_caps, all.xrc_odp_caps) = (0, 0, 0);
    all.device_cap_flags_ex = attr.device_cap_flags.into();
}

/// What QPIP does not do either: anything but sending and receiving.
fn of_qpip(all: &mut ibv_device_attr_ex) {
    let attr = &mut all.orig_attr;
    attr.vendor_part_id = 3;
    // None of them can be posted. Programs that never do give 1 to rdma_connect all the same, which would
    // refuse it, and ask for nothing else by these numbers.
    attr.max_qp_rd_atom = 1;
    attr.max_qp_init_rd_atom = 1;
    attr.max_res_rd_atom = 0;
    attr.max_sge_rd = 0;
    attr.max_mw = 0;
    (attr.max_srq, attr.max_srq_wr, attr.max_srq_sge) = (0, 0, 0);
    attr.device_cap_flags = IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID;
    all.device_cap_flags_ex = attr.device_cap_flags.into();
    let sends = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
    all.odp_caps.per_transport_caps.rc_odp_caps = sends;
}

fn port_attributes(
    device: Device,
    address: &HostAddress,
    up: bool,
    limits: &Limits,
    (qkey_violations, gid_rows): (u32, i32),
) -> ibv_port_attr {
    let (active_width, active_speed) = identity::link_speed(address);
    let link_layer = identity::link_layer(device);
    let lid = link_layer.lid(address.ip.into());
    let (addressing, flags) = match link_layer {
        LinkLayer::InfiniBand => (0, 0),
        LinkLayer::Ethernet => (IBV_PORT_IP_BASED_GIDS, IBV_QPF_GRH_REQUIRED),
    };
    ibv_port_attr {
        state: if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN },
        max_mtu: IBV_MTU_4096,
        active_mtu: identity::active_mtu(address),
        gid_tbl_len: gid_rows,
        port_cap_flags: IBV_PORT_CM_SUP | addressing,
        max_msg_sz: limits.max_message,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: qkey_violations,
        pkey_tbl_len: 1,
        lid,
        // Nobody else has given it.
        sm_lid: lid,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        active_width,
        active_speed,
        phys_state: if up { LINK_UP } else { DISABLED },
        link_layer: link_layer as u8,
        flags,
        port_cap_flags2: 0,
        active_speed_ex: active_speed.into(),
    }
}

/// The engine, if `context` is one of its contexts, and the device that it is of.
fn engine_of(context: ContextHandle) -> Outcome<(&'static Instance, Device)> {
    let instance = current()?;
    let device = instance.registry().device(instance.context(context))?;
    Ok((instance, device))
}

/// Destroys what is left in a context that is closed.
fn destroy_left(instance: &Instance, left: Vec<Object>) {
    let engine = &instance.engine;
    for object in left {
        let mut taken = 0;
        let mut reported = |events: quipu_host::EventsReported| taken = events.asynchronous;
        let destroyed = match object {
            Object::Qp(qp) => {
                let detached = engine.detach_all(qp);
                detached.and_then(|()| engine.destroy_qp(qp)).map(&mut reported)
            }
            Object::Flow(flow) => engine.destroy_flow(flow),
            Object::Counters(counters) => engine.destroy_counters(counters),
            Object::Table(table) => engine.destroy_ind_table(table),
            Object::Wq(wq) => engine.destroy_wq(wq),
            Object::Srq(srq) => engine.destroy_srq(srq).map(&mut reported),
            Object::Cq(cq) => engine.destroy_cq(cq).map(&mut reported),
            Object::Channel(channel) => engine.destroy_channel(channel),
            Object::Mw(mw) => engine.dealloc_mw(mw),
            Object::Mr(mr) => engine.dereg_mr(mr),
            Object::Ah(ah) => engine.destroy_ah(ah),
            Object::Pd(pd) => engine.dealloc_pd(pd),
        };
        if let Err(error) = destroyed {
            tracing::warn!(?object, %error, "an object outlives its context");
        }
        instance.registry().remove(object, taken);
    }
}

entries! {
    /// [`EngineApi::list_devices`]
    fn list_devices(out: *mut EngineDevice, max: u32, count: *mut u32) {
        // SAFETY: the table demands a valid pointer.
        let count = unsafe { Out::new(count) }?;
        let Some(address) = address() else {
            count.fill(0);
            return Ok(());
        };
        let devices = devices();
        for (place, which) in devices.iter().take(max as usize).enumerate() {
            // SAFETY: the table demands room for `max`, and `place` is below that.
            unsafe { Out::new(out.wrapping_add(place)) }?.fill(device(*which, &address));
        }
        count.fill(devices.len() as u32);
        Ok(())
    }

    /// [`EngineApi::open`]
    fn open(name: *const c_char, out: *mut EngineOpened) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        if name.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the table demands a zero-terminated string.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| INVALID)?;
        let device = Device::named(name).ok_or(Failure(EngineStatus::NotFound))?;
        let instance = instance::open()?;
        if !instance.engine.devices().contains(&device) {
            return Err(EngineStatus::NotFound.into());
        }
        let (id, async_fd) = instance.engine.open_context_of(device)?;
        let number = instance.registry().add_context(id, device);
        out.fill(EngineOpened { context: instance.context_handle(number), async_fd });
        Ok(())
    }

    /// [`EngineApi::close`]
    fn close(context: ContextHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        let removed = instance.registry().remove_context(instance.context(context));
        instance.destroyed(removed.and_then(|(id, left)| {
            destroy_left(instance, left);
            crate::xrc::close_left(instance, instance.context(context));
            instance.engine.close_context(id).map_err(Failure::from)
        }))
    }

    /// [`EngineApi::query_device`]
    fn query_device(context: ContextHandle, out: *mut ibv_device_attr_ex) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let (instance, device) = engine_of(context)?;
        let engine = &instance.engine;
        out.fill(device_attributes(device, engine.address(), &engine.limits()?));
        Ok(())
    }

    /// [`EngineApi::read_clock`]
    fn read_clock(context: ContextHandle, out: *mut u64) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        out.fill(engine_of(context)?.0.engine.now()?.0);
        Ok(())
    }

    /// [`EngineApi::query_port`]
    fn query_port(context: ContextHandle, port: u32, out: *mut ibv_port_attr) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let (instance, device) = engine_of(context)?;
        let engine = &instance.engine;
        engine.note_call(Call::QueryPort)?;
        if port != 1 {
            return Err(INVALID);
        }
        let qkey_violations = engine.datagram_drops()?.qkey_violation as u32;
        let (address, up) = (engine.address(), engine.port_is_up(device));
        let rows = identity::gid_rows(device, engine.gid_table()?.len());
        out.fill(port_attributes(device, address, up, &engine.limits()?, (qkey_violations, rows)));
        Ok(())
    }

    /// [`EngineApi::note_call`]
    fn note_call(call: u32) {
        let call = match call {
            call if call == EngineCall::AllocDm as u32 => Call::AllocDm,
            call if call == EngineCall::AllocTd as u32 => Call::AllocTd,
            call if call == EngineCall::AllocParentDomain as u32 => Call::AllocParentDomain,
            call if call == EngineCall::SetEce as u32 => Call::SetEce,
            call if call == EngineCall::LeaveMulticast as u32 => Call::LeaveMulticast,
            call if call == EngineCall::FreeDm as u32 => Call::FreeDm,
            call if call == EngineCall::DeallocTd as u32 => Call::DeallocTd,
            call if call == EngineCall::GetRequest as u32 => Call::GetRequest,
            call if call == EngineCall::GetCmEvent as u32 => Call::GetCmEvent,
            _ => return Err(INVALID),
        };
        let Some(instance) = for_destructor()? else { return Ok(()) };
        Ok(instance.engine.note_call(call)?)
    }

    /// [`EngineApi::query_gid`]
    fn query_gid(context: ContextHandle, port: u32, index: u32, out: *mut ibv_gid_entry) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let (instance, device) = engine_of(context)?;
        instance.engine.note_call(Call::QueryGid)?;
        let address = match device {
            Device::Quipu0 => identity::row_address(index),
            _ => (index == 0).then(|| instance.engine.address().clone()),
        };
        let address = address.filter(|_| port == 1).ok_or(INVALID)?;
        out.fill(identity::gid_entry(device, &address, index));
        Ok(())
    }

    /// [`EngineApi::list_gid`]
    fn list_gid(index: u32, out: *mut ibv_gid_entry) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let address = identity::row_address(index).ok_or(INVALID)?;
        out.fill(identity::gid_entry(Device::Quipu0, &address, index));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback() -> HostAddress {
        HostAddress {
            ip: "127.0.0.1".parse().unwrap(),
            interface: "lo".into(),
            index: 1,
            up: true,
            running: true,
            loopback: true,
        }
    }

    #[test]
    fn writes_of_one_piece_and_flushes_are_offered_by_the_device_that_has_them() {
        let device_bits = IB_UVERBS_DEVICE_ATOMIC_WRITE | IB_UVERBS_DEVICE_FLUSH_GLOBAL;
        let odp_bits = IBV_ODP_SUPPORT_ATOMIC_WRITE | IBV_ODP_SUPPORT_FLUSH;
        let offered = |which| {
            let all = device_attributes(which, &loopback(), &Limits::default());
            let caps = all.odp_caps.per_transport_caps.rc_odp_caps;
            let odp = [caps, all.xrc_odp_caps].map(|caps| caps & odp_bits);
            (all.device_cap_flags_ex & device_bits, odp)
        };
        assert_eq!(offered(Device::Quipu0), (device_bits, [odp_bits; 2]));
        assert_eq!(offered(Device::QuipuIw0), (0, [0; 2]));
        assert_eq!(offered(Device::QuipuQp0), (0, [0; 2]));
    }

    #[test]
    fn an_rnic_offers_nothing_of_services_that_it_does_not_have() {
        let all = device_attributes(Device::QuipuIw0, &loopback(), &Limits::default());
        let (attr, caps) = (&all.orig_attr, &all.odp_caps.per_transport_caps);
        assert_eq!((caps.uc_odp_caps, caps.ud_odp_caps, all.xrc_odp_caps), (0, 0, 0));
        assert_eq!(caps.rc_odp_caps & IBV_ODP_SUPPORT_ATOMIC, 0);
        assert_ne!(caps.rc_odp_caps & IBV_ODP_SUPPORT_SRQ_RECV, 0);
        assert_eq!(attr.device_cap_flags & IBV_DEVICE_XRC, 0);
        assert_eq!((attr.max_ah, attr.max_mcast_grp, attr.max_total_mcast_qp_attach), (0, 0, 0));
    }

    #[test]
    fn no_device_has_a_number_of_the_kernels() {
        for which in [Device::Quipu0, Device::QuipuIw0, Device::QuipuQp0] {
            assert_eq!(device(which, &loopback()).index, -1, "{which:?}");
        }
    }

    #[test]
    fn the_device_of_qpip_sends_and_receives_and_nothing_else() {
        let address = loopback();
        let all = device_attributes(Device::QuipuQp0, &address, &Limits::default());
        let attr = &all.orig_attr;
        assert_eq!((attr.max_srq, attr.max_mw, attr.max_ah, attr.max_mcast_grp), (0, 0, 0, 0));
        assert_eq!((attr.atomic_cap, attr.max_res_rd_atom), (IBV_ATOMIC_NONE, 0));
        // perftest and rping give 1 to rdma_connect, which refuses what is beyond.
        assert_eq!((attr.max_qp_rd_atom, attr.max_qp_init_rd_atom), (1, 1));
        let sends = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
        assert_eq!(all.odp_caps.per_transport_caps.rc_odp_caps, sends);
        assert!(attr.max_qp > 0 && attr.max_qp_wr > 0 && attr.max_sge > 0 && attr.max_cqe > 0);
        let kind = identity::kind(Device::QuipuQp0);
        assert_eq!(kind, (IBV_NODE_UNSPECIFIED, IBV_TRANSPORT_UNSPECIFIED));
    }
}
