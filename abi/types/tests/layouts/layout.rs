//! Sizes and offsets, as the C compiler of x86-64 lays the headers of rdma-core 44 out (and, where
//! a structure has grown since, the newer ones). `c_layout.rs` compares with the
//! installed headers, where there are any.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use core::mem::{offset_of, size_of};
use quipu_abi_types::*;

#[test]
fn sizes_are_those_of_the_c_interface() {
    let sizes = [
        ("ibv_context_ops", size_of::<ibv_context_ops>(), 256),
        ("ibv_context", size_of::<ibv_context>(), 328),
        ("ibv_device", size_of::<ibv_device>(), 664),
        ("ibv_qp", size_of::<ibv_qp>(), 160),
        ("ibv_cq", size_of::<ibv_cq>(), 128),
        ("ibv_cq_ex", size_of::<ibv_cq_ex>(), 288),
        ("ibv_srq", size_of::<ibv_srq>(), 128),
        ("ibv_mr", size_of::<ibv_mr>(), 48),
        ("ibv_pd", size_of::<ibv_pd>(), 16),
        ("ibv_ah", size_of::<ibv_ah>(), 24),
        ("ibv_comp_channel", size_of::<ibv_comp_channel>(), 16),
        ("ibv_wc", size_of::<ibv_wc>(), 48),
        ("ibv_send_wr", size_of::<ibv_send_wr>(), 128),
        ("ibv_recv_wr", size_of::<ibv_recv_wr>(), 32),
        ("ibv_device_attr", size_of::<ibv_device_attr>(), 232),
        ("ibv_device_attr_ex", size_of::<ibv_device_attr_ex>(), 400),
        ("ibv_qp_attr", size_of::<ibv_qp_attr>(), 144),
        ("ibv_gid_entry", size_of::<ibv_gid_entry>(), 32),
        ("ibv_async_event", size_of::<ibv_async_event>(), 16),
        // Grown since rdma-core 44: 52, 352 and 648 bytes there.
        ("ibv_port_attr", size_of::<ibv_port_attr>(), 56),
        ("ibv_qp_ex", size_of::<ibv_qp_ex>(), 360),
        ("verbs_context", size_of::<verbs_context>(), 648 + 6 * 8),
    ];
    for (name, ours, theirs) in sizes {
        assert_eq!(ours, theirs, "size of {name}");
    }
}

#[test]
fn fields_that_programs_reach_lie_where_they_look() {
    let offsets = [
        ("ibv_device.node_type", offset_of!(ibv_device, node_type), 16),
        ("ibv_device.name", offset_of!(ibv_device, name), 24),
        ("ibv_device.dev_name", offset_of!(ibv_device, dev_name), 88),
        ("ibv_device.ibdev_path", offset_of!(ibv_device, ibdev_path), 408),
        ("verbs_device.ops", offset_of!(verbs_device, ops), 664),
        ("ops.poll_cq", offset_of!(ibv_context_ops, poll_cq), 88),
        ("ops.req_notify_cq", offset_of!(ibv_context_ops, req_notify_cq), 96),
        ("ops.post_srq_recv", offset_of!(ibv_context_ops, post_srq_recv), 160),
        ("ops.post_send", offset_of!(ibv_context_ops, post_send), 200),
        ("ops.post_recv", offset_of!(ibv_context_ops, post_recv), 208),
        ("ops.alloc_mw", offset_of!(ibv_context_ops, alloc_mw), 56),
        ("ibv_context.ops", offset_of!(ibv_context, ops), 8),
        ("ibv_context.cmd_fd", offset_of!(ibv_context, cmd_fd), 264),
        ("ibv_context.async_fd", offset_of!(ibv_context, async_fd), 268),
        ("ibv_context.num_comp_vectors", offset_of!(ibv_context, num_comp_vectors), 272),
        ("ibv_context.abi_compat", offset_of!(ibv_context, abi_compat), 320),
        ("ibv_qp.qp_num", offset_of!(ibv_qp, qp_num), 52),
        ("ibv_qp.state", offset_of!(ibv_qp, state), 56),
        ("ibv_qp_ex.wr_flush", offset_of!(ibv_qp_ex, wr_flush), 352),
        ("ibv_port_attr.active_speed_ex", offset_of!(ibv_port_attr, active_speed_ex), 52),
    ];
    for (name, ours, theirs) in offsets {
        assert_eq!(ours, theirs, "offset of {name}");
    }
}

#[test]
fn the_extended_context_is_counted_from_its_end() {
    // Offsets of rdma-core 44, where the structure began with query_port. Programs find a field by
    // its distance from the `context` at the end, which is the same in every release.
    let end = offset_of!(verbs_context, context);
    let from_end = [
        ("query_port", end - offset_of!(verbs_context, query_port), 320),
        ("create_cq_ex", end - offset_of!(verbs_context, create_cq_ex), 320 - 200),
        ("priv", end - offset_of!(verbs_context, r#priv), 320 - 208),
        ("query_device_ex", end - offset_of!(verbs_context, query_device_ex), 320 - 216),
        ("create_qp_ex", end - offset_of!(verbs_context, create_qp_ex), 320 - 264),
        ("sz", end - offset_of!(verbs_context, sz), 320 - 312),
    ];
    for (name, ours, theirs) in from_end {
        assert_eq!(ours, theirs, "distance of {name} from the end");
    }
}

#[test]
fn connection_management_is_laid_out_as_rdma_cma_h() {
    let numbers = [
        ("rdma_cm_id", size_of::<rdma_cm_id>(), 416),
        ("rdma_cm_event", size_of::<rdma_cm_event>(), 80),
        ("rdma_event_channel", size_of::<rdma_event_channel>(), 4),
        ("rdma_conn_param", size_of::<rdma_conn_param>(), 24),
        ("rdma_addrinfo", size_of::<rdma_addrinfo>(), 96),
        ("rdma_cm_id.route", offset_of!(rdma_cm_id, route), 32),
        ("rdma_cm_event.param", offset_of!(rdma_cm_event, param), 24),
    ];
    for (name, ours, theirs) in numbers {
        assert_eq!(ours, theirs, "{name}");
    }
}
