//! The one engine of a process, behind private symbols.
//!
//! The library exports one symbol, [`quipu_engine_api_v1`], which gives the table that
//! `quipu_abi_types` defines and documents. The facades (libibverbs, later librdmacm) load it from
//! their own folder, so that all of them share one engine and its objects.
//!
//! Everything here translates: C structures to the adapter's types and back, its errors to
//! statuses. What the engine does is in `quipu-host`, what the adapter does in `quipu-nic`.
//!
//! | module | is |
//! |---|---|
//! | `entry` | the panic wall around each function of the table |
//! | `instance` | the engine of this process: opened once, anew in a child of fork |
//! | `ending` | a summary where a signal ends the process |
//! | `registry` | what the engine does not know of its objects: their contexts, cookies and keys |
//! | `device`, `identity` | devices, ports, addresses |
//! | `memory`, `paging`, `completion`, `queue`, `attr` | the control path, by object |
//! | `raw` | raw packets: flow rules, receive work queues |
//! | `cm` | connection management |
//! | `post` | the data path |
//!
//! # Locks
//!
//! The registry's lock may be taken while the engine's is held (a memory window is bound by its
//! key, in the middle of a list of posts), never the other way round: who holds the registry calls
//! nothing.
mod attr;
mod cm;
mod completion;
mod device;
mod ending;
mod entry;
mod identity;
mod instance;
mod memory;
mod native;
mod paging;
mod post;
mod queue;
mod raw;
mod registry;
mod status;
mod xrc;

#[cfg(test)]
mod tests;

use quipu_abi_types::{ENGINE_API_VERSION, EngineApi};

/// The table that every facade gets.
static API: EngineApi = EngineApi {
    version: ENGINE_API_VERSION,
    size: size_of::<EngineApi>() as u32,
    list_devices: device::list_devices,
    open: device::open,
    close: device::close,
    query_device: device::query_device,
    query_port: device::query_port,
    query_gid: device::query_gid,
    get_async_event: completion::get_async_event,
    alloc_pd: memory::alloc_pd,
    dealloc_pd: memory::dealloc_pd,
    reg_mr: memory::reg_mr,
    rereg_mr: memory::rereg_mr,
    dereg_mr: memory::dereg_mr,
    alloc_mw: memory::alloc_mw,
    dealloc_mw: memory::dealloc_mw,
    create_channel: completion::create_channel,
    destroy_channel: completion::destroy_channel,
    get_comp_event: completion::get_comp_event,
    poll: completion::poll,
    create_cq: completion::create_cq,
    resize_cq: completion::resize_cq,
    destroy_cq: completion::destroy_cq,
    poll_cq: post::poll_cq,
    req_notify_cq: completion::req_notify_cq,
    create_srq: queue::create_srq,
    modify_srq: queue::modify_srq,
    query_srq: queue::query_srq,
    destroy_srq: queue::destroy_srq,
    post_srq_recv: post::post_srq_recv,
    create_qp: queue::create_qp,
    modify_qp: queue::modify_qp,
    query_qp: queue::query_qp,
    destroy_qp: queue::destroy_qp,
    post_send: post::post_send,
    post_batch: post::post_batch,
    post_recv: post::post_recv,
    alloc_null_mr: paging::alloc_null_mr,
    advise_mr: paging::advise_mr,
    moderate_cq: completion::moderate_cq,
    poll_cq_stamped: post::poll_cq_stamped,
    read_clock: device::read_clock,
    find_pd: paging::find_pd,
    find_mr: paging::find_mr,
    list_gid: device::list_gid,
    note_call: device::note_call,
    open_xrcd: xrc::open_xrcd,
    close_xrcd: xrc::close_xrcd,
    open_qp: queue::open_qp,
    create_ah: memory::create_ah,
    destroy_ah: memory::destroy_ah,
    attach_mcast: queue::attach_mcast,
    detach_mcast: queue::detach_mcast,
    raw: raw::API,
    cm: cm::API,
};

/// The table of the engine ([`quipu_abi_types::EngineApiFn`]). It lives as long as the process;
/// nothing is started.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_engine_api_v1() -> *const EngineApi {
    &raw const API
}
