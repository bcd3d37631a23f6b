//! Raw packets: flow rules, receive work queues, and what spreads frames over them.

use std::mem::offset_of;
use std::{ptr, slice};

use quipu_abi_types::*;
use quipu_host::Device;
use quipu_host::fault::Call;
use quipu_nic::{
    CounterKind, FlowKind, FlowLayer, FlowRule, FlowSpec, MAX_COUNTERS, RX_HASH_KEY, RxHash,
    RxHashFields, WqState,
};

use crate::entry::{Out, entries};
use crate::instance::{current, for_destructor};
use crate::post;
use crate::registry::Object;
use crate::status::{Failure, INVALID, Outcome};

pub(crate) const API: EngineRawApi = EngineRawApi {
    create_flow,
    destroy_flow,
    create_counters,
    destroy_counters,
    attach_counter,
    read_counters,
    create_wq,
    modify_wq,
    destroy_wq,
    post_wq_recv: post::post_wq_recv,
    create_ind_table,
    destroy_ind_table,
    create_hashed_qp,
};

const UNSUPPORTED: Failure = Failure(EngineStatus::NotSupported);

/// Where value and mask of a specification stand, and how many bytes of fields each has.
struct Place {
    layer: FlowLayer,
    value: usize,
    mask: usize,
    len: usize,
}

macro_rules! place {
    ($layer:ident: $spec:ident, $len:expr) => {
        Place {
            layer: FlowLayer::$layer,
            value: offset_of!($spec, val),
            mask: offset_of!($spec, mask),
            len: $len,
        }
    };
}

/// What a type of specification looks like. All fields are in the order of the layer's, without gaps.
fn place_of(kind: u32) -> Outcome<Place> {
    Ok(match kind {
        IBV_FLOW_SPEC_ETH => place!(Ethernet: ibv_flow_spec_eth, 16),
        IBV_FLOW_SPEC_IPV4 => place!(Ipv4: ibv_flow_spec_ipv4, 8),
        IBV_FLOW_SPEC_IPV4_EXT => place!(Ipv4: ibv_flow_spec_ipv4_ext, 12),
        IBV_FLOW_SPEC_IPV6 => place!(Ipv6: ibv_flow_spec_ipv6, 39),
        IBV_FLOW_SPEC_TCP => place!(Tcp: ibv_flow_spec_tcp_udp, 4),
        IBV_FLOW_SPEC_UDP => place!(Udp: ibv_flow_spec_tcp_udp, 4),
        IBV_FLOW_SPEC_VXLAN_TUNNEL => place!(Tunnel: ibv_flow_spec_tunnel, 4),
        _ => return Err(UNSUPPORTED),
    })
}

/// Adds a specification, as it stands in memory, to a rule.
fn add_spec(rule: &mut FlowRule, kind: u32, bytes: &[u8]) -> Outcome {
    if kind == IBV_FLOW_SPEC_ACTION_DROP {
        rule.drops = true;
        return Ok(());
    }
    let place = place_of(kind & !IBV_FLOW_SPEC_INNER)?;
    let fields = |at: usize| bytes.get(at..at + place.len).ok_or(INVALID);
    let inner = kind & IBV_FLOW_SPEC_INNER != 0;
    let spec = FlowSpec::new(place.layer, inner, fields(place.value)?, fields(place.mask)?);
    rule.specs.push(spec.map_err(|fault| Failure::from(&fault))?);
    Ok(())
}

/// The counters that the action at `spec` names.
///
/// # Safety
///
/// It is valid for reads of `size` bytes, and its pointer is null or to counters of a facade.
unsafe fn counters_of(spec: *const u8, size: usize) -> Outcome<CountersHandle> {
    if size < size_of::<ibv_flow_spec_counter_action>() {
        return Err(INVALID);
    }
    let action = spec.cast::<ibv_flow_spec_counter_action>();
    // SAFETY: it is long enough; a facade made the counters, with the handle behind what programs know.
    unsafe {
        let counters = ptr::read_unaligned(&raw const (*action).counters);
        Ok(counters.cast::<EngineCounters>().as_ref().ok_or(INVALID)?.handle)
    }
}

/// The rule that a program describes, and the counters that it names.
///
/// # Safety
///
/// `attr` is null, or stands in front of `num_of_specs` specifications that are valid for reads of as many
/// bytes as they say.
unsafe fn rule(attr: *const ibv_flow_attr) -> Outcome<(FlowRule, CountersHandle)> {
    // SAFETY: passed on from the caller.
    let head = unsafe { attr.as_ref() }.ok_or(INVALID)?;
    if head.port != 1 {
        return Err(INVALID);
    }
    if head.comp_mask != 0 || head.flags & !IBV_FLOW_ATTR_FLAGS_DONT_TRAP != 0 {
        return Err(UNSUPPORTED);
    }
    let kind = match head.r#type {
        IBV_FLOW_ATTR_NORMAL => FlowKind::Normal,
        IBV_FLOW_ATTR_ALL_DEFAULT => FlowKind::AllDefault,
        IBV_FLOW_ATTR_MC_DEFAULT => FlowKind::GroupDefault,
        IBV_FLOW_ATTR_SNIFFER => return Err(UNSUPPORTED),
        _ => return Err(INVALID),
    };
    let passes_on = head.flags & IBV_FLOW_ATTR_FLAGS_DONT_TRAP != 0;
    let priority = head.priority;
    let mut rule = FlowRule { kind, priority, passes_on, ..FlowRule::default() };
    let mut counters = CountersHandle::NONE;
    let mut next = attr.wrapping_add(1).cast::<u8>();
    for _ in 0..head.num_of_specs {
        // SAFETY: a specification stands there, which begins with type and size; its place need not be
        // aligned.
        let (kind, size) = unsafe {
            let header = next.cast::<ibv_flow_spec_header>();
            let kind = ptr::read_unaligned(&raw const (*header).r#type);
            (kind, usize::from(ptr::read_unaligned(&raw const (*header).size)))
        };
        // What is shorter than its own beginning is none.
        if size < offset_of!(ibv_flow_spec_header, size) + size_of::<u16>() {
            return Err(INVALID);
        }
        // SAFETY: it is valid for reads of `size` bytes.
        unsafe {
            match kind {
                IBV_FLOW_SPEC_ACTION_COUNT => counters = counters_of(next, size)?,
                _ => add_spec(&mut rule, kind, slice::from_raw_parts(next, size))?,
            }
        }
        next = next.wrapping_add(size);
    }
    Ok((rule, counters))
}

/// The hash that a program describes.
///
/// # Safety
///
/// The key is null, or valid for reads of its length.
unsafe fn hash(conf: &ibv_rx_hash_conf) -> Outcome<RxHash> {
    let known = u32::try_from(conf.rx_hash_fields_mask).ok().and_then(RxHashFields::from_bits);
    let length = usize::from(conf.rx_hash_key_len);
    if conf.rx_hash_function != IBV_RX_HASH_FUNC_TOEPLITZ || length != RX_HASH_KEY {
        return Err(UNSUPPORTED);
    }
    let fields = known.ok_or(UNSUPPORTED)?;
    if conf.rx_hash_key.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null, so "valid for reads of its length", which is that of the array.
    let key = unsafe { ptr::read(conf.rx_hash_key.cast::<[u8; RX_HASH_KEY]>()) };
    RxHash::new(key, fields).map_err(|fault| Failure::from(&fault))
}

fn wq_state(state: u32) -> Outcome<WqState> {
    match state {
        IBV_WQS_RESET => Ok(WqState::Reset),
        IBV_WQS_RDY => Ok(WqState::Ready),
        IBV_WQS_ERR => Ok(WqState::Err),
        _ => Err(INVALID),
    }
}

entries! {
    /// [`EngineRawApi::create_flow`]
    fn create_flow(qp: QpHandle, attr: *const ibv_flow_attr, out: *mut FlowHandle) {
        // SAFETY: the table demands valid pointers, and specifications behind `attr`.
        let (out, (mut rule, counters)) = unsafe { (Out::new(out)?, rule(attr)?) };
        let instance = current()?;
        instance.engine.note_call(Call::CreateFlow)?;
        let qp = instance.qp(qp);
        let context = instance.registry().context_of(Object::Qp(qp))?;
        if counters != CountersHandle::NONE {
            let counters = instance.counters(counters);
            instance.registry().expect(Object::Counters(counters), context)?;
            rule.counts = Some(counters);
        }
        let flow = instance.engine.create_flow(qp, rule)?;
        instance.registry().add(Object::Flow(flow), context, 0);
        out.fill(instance.flow_handle(flow));
        Ok(())
    }

    /// [`EngineRawApi::destroy_flow`]
    fn destroy_flow(flow: FlowHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::DestroyFlow)?;
        let flow = instance.flow(flow);
        instance.destroyed(instance.engine.destroy_flow(flow).map_err(Failure::from))?;
        instance.registry().remove(Object::Flow(flow), 0);
        Ok(())
    }

    /// [`EngineRawApi::create_counters`]
    fn create_counters(context: ContextHandle, out: *mut CountersHandle) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let context = instance.context(context);
        if instance.registry().device(context)? != Device::Quipu0 {
            return Err(UNSUPPORTED);
        }
        let counters = instance.engine.create_counters()?;
        instance.registry().add(Object::Counters(counters), context, 0);
        out.fill(instance.counters_handle(counters));
        Ok(())
    }

    /// [`EngineRawApi::destroy_counters`]
    fn destroy_counters(counters: CountersHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::DestroyCounters)?;
        let counters = instance.counters(counters);
        instance.destroyed(instance.engine.destroy_counters(counters).map_err(Failure::from))?;
        instance.registry().remove(Object::Counters(counters), 0);
        Ok(())
    }

    /// [`EngineRawApi::attach_counter`]
    fn attach_counter(counters: CountersHandle, description: u32, index: u32) {
        let kind = match description {
            IBV_COUNTER_PACKETS => CounterKind::Packets,
            IBV_COUNTER_BYTES => CounterKind::Bytes,
            _ => return Err(UNSUPPORTED),
        };
        let instance = current()?;
        let counters = instance.counters(counters);
        Ok(instance.engine.attach_counter(counters, kind, index as usize)?)
    }

    /// [`EngineRawApi::read_counters`]
    fn read_counters(counters: CountersHandle, values: *mut u64, count: u32) {
        if values.is_null() {
            return Err(INVALID);
        }
        let instance = current()?;
        instance.engine.note_call(Call::ReadCounters)?;
        let mut read = vec![0; (count as usize).min(MAX_COUNTERS)];
        instance.engine.read_counters(instance.counters(counters), &mut read)?;
        let rest = count as usize - read.len();
        // SAFETY: the table demands that it is valid for writes of `count` numbers.
        unsafe {
            ptr::copy_nonoverlapping(read.as_ptr(), values, read.len());
            ptr::write_bytes(values.add(read.len()), 0, rest);
        }
        Ok(())
    }

    /// [`EngineRawApi::create_wq`]
    fn create_wq(pd: PdHandle, init: *const EngineWqInit, out: *mut EngineWq) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        let instance = current()?;
        instance.engine.note_call(Call::CreateWq)?;
        let (pd, cq) = (instance.pd(pd), instance.cq(init.cq));
        let context = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Pd(pd))?;
            registry.expect(Object::Cq(cq), context)?;
            if registry.device(context)? != Device::Quipu0 {
                return Err(UNSUPPORTED);
            }
            context
        };
        let (wq, max_wr, max_sge) =
            instance.engine.create_wq(pd, cq, init.max_wr, init.max_sge)?;
        instance.registry().add(Object::Wq(wq), context, 0);
        out.fill(EngineWq { wq: instance.wq_handle(wq), wq_num: wq.0 as u32, max_wr, max_sge });
        Ok(())
    }

    /// [`EngineRawApi::modify_wq`]
    fn modify_wq(wq: WqHandle, curr: u32, state: u32) {
        let curr = if curr == IBV_WQS_UNKNOWN { None } else { Some(wq_state(curr)?) };
        let state = wq_state(state)?;
        let instance = current()?;
        Ok(instance.engine.modify_wq(instance.wq(wq), curr, state)?)
    }

    /// [`EngineRawApi::destroy_wq`]
    fn destroy_wq(wq: WqHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::DestroyWq)?;
        let wq = instance.wq(wq);
        instance.destroyed(instance.engine.destroy_wq(wq).map_err(Failure::from))?;
        instance.registry().remove(Object::Wq(wq), 0);
        Ok(())
    }

    /// [`EngineRawApi::create_ind_table`]
    fn create_ind_table(
        context: ContextHandle,
        queues: *const WqHandle,
        count: u32,
        out: *mut TableHandle,
    ) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        if queues.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the table demands that it is valid for reads of `count` handles.
        let queues = unsafe { slice::from_raw_parts(queues, count as usize) };
        let instance = current()?;
        let context = instance.context(context);
        let queues: Vec<_> = queues.iter().map(|&wq| instance.wq(wq)).collect();
        {
            let registry = instance.registry();
            for &wq in &queues {
                registry.expect(Object::Wq(wq), context)?;
            }
        }
        let table = instance.engine.create_ind_table(&queues)?;
        instance.registry().add(Object::Table(table), context, 0);
        out.fill(instance.table_handle(table));
        Ok(())
    }

    /// [`EngineRawApi::destroy_ind_table`]
    fn destroy_ind_table(table: TableHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::DestroyRwqIndTable)?;
        let table = instance.table(table);
        instance.destroyed(instance.engine.destroy_ind_table(table).map_err(Failure::from))?;
        instance.registry().remove(Object::Table(table), 0);
        Ok(())
    }

    /// [`EngineRawApi::create_hashed_qp`]
    fn create_hashed_qp(pd: PdHandle, init: *const EngineHashedQpInit, out: *mut EngineQp) {
        // SAFETY: the table demands valid pointers, that to the key among them.
        let (out, init, hash) = unsafe {
            let init = init.as_ref().ok_or(INVALID)?;
            (Out::new(out)?, init, hash(&init.hash)?)
        };
        let instance = current()?;
        let (pd, table) = (instance.pd(pd), instance.table(init.table));
        let (context, id) = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Pd(pd))?;
            registry.expect(Object::Table(table), context)?;
            (context, registry.context(context)?)
        };
        let (qp, number) = instance.engine.create_hashed_qp(id, pd, table, hash)?;
        instance.registry().add(Object::Qp(qp), context, init.cookie);
        let cap = ibv_qp_cap::default();
        out.fill(EngineQp { qp: instance.qp_handle(qp), qp_num: number.0, cap });
        Ok(())
    }
}
