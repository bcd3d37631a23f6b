//! The same sizes and offsets as a C compiler finds in the installed headers.

use core::mem::{offset_of, size_of};
use quipu_abi_types::*;
use std::path::Path;
use std::process::Command;

#[path = "../../testing/needs.rs"]
mod needs;

/// Compiles and runs `c/<name>.c`; none where the header is not installed, or the compiler is for another
/// machine.
fn of_the_headers(name: &str, header: &str) -> Option<String> {
    let package = if header.starts_with("rdma/") { "librdmacm-dev" } else { "libibverbs-dev" };
    if !needs::met(Path::new("/usr/include").join(header).exists(), package) {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut compile = needs::compiler()?;
    assert!(compile.arg("-o").arg(&program).arg(source).status().expect("cc").success());
    let output = Command::new(program).output().expect("the program just compiled");
    Some(String::from_utf8(output.stdout).expect("text"))
}

fn text(ours: &[(&str, usize)]) -> String {
    ours.iter().map(|(name, value)| format!("{name} {value}\n")).collect()
}

#[test]
fn the_compiler_lays_the_headers_out_alike() {
    let Some(theirs) = of_the_headers("layout", "infiniband/verbs.h") else { return };
    let ours = [
        ("ibv_device", size_of::<ibv_device>()),
        ("ibv_context_ops", size_of::<ibv_context_ops>()),
        ("ibv_context", size_of::<ibv_context>()),
        ("ibv_pd", size_of::<ibv_pd>()),
        ("ibv_mr", size_of::<ibv_mr>()),
        ("ibv_mw", size_of::<ibv_mw>()),
        ("ibv_ah", size_of::<ibv_ah>()),
        ("ibv_td", size_of::<ibv_td>()),
        ("ibv_comp_channel", size_of::<ibv_comp_channel>()),
        ("ibv_cq", size_of::<ibv_cq>()),
        ("ibv_cq_ex", size_of::<ibv_cq_ex>()),
        ("ibv_srq", size_of::<ibv_srq>()),
        ("ibv_qp", size_of::<ibv_qp>()),
        ("ibv_sge", size_of::<ibv_sge>()),
        ("ibv_data_buf", size_of::<ibv_data_buf>()),
        ("ibv_send_wr", size_of::<ibv_send_wr>()),
        ("ibv_recv_wr", size_of::<ibv_recv_wr>()),
        ("ibv_mw_bind", size_of::<ibv_mw_bind>()),
        ("ibv_mw_bind_info", size_of::<ibv_mw_bind_info>()),
        ("ibv_wc", size_of::<ibv_wc>()),
        ("ibv_grh", size_of::<ibv_grh>()),
        ("ibv_gid_entry", size_of::<ibv_gid_entry>()),
        ("ibv_device_attr", size_of::<ibv_device_attr>()),
        ("ibv_device_attr_ex", size_of::<ibv_device_attr_ex>()),
        ("ibv_global_route", size_of::<ibv_global_route>()),
        ("ibv_ah_attr", size_of::<ibv_ah_attr>()),
        ("ibv_srq_attr", size_of::<ibv_srq_attr>()),
        ("ibv_srq_init_attr", size_of::<ibv_srq_init_attr>()),
        ("ibv_srq_init_attr_ex", size_of::<ibv_srq_init_attr_ex>()),
        ("ibv_qp_cap", size_of::<ibv_qp_cap>()),
        ("ibv_qp_init_attr", size_of::<ibv_qp_init_attr>()),
        ("ibv_qp_init_attr_ex", size_of::<ibv_qp_init_attr_ex>()),
        ("ibv_qp_open_attr", size_of::<ibv_qp_open_attr>()),
        ("ibv_qp_attr", size_of::<ibv_qp_attr>()),
        ("ibv_cq_init_attr_ex", size_of::<ibv_cq_init_attr_ex>()),
        ("ibv_modify_cq_attr", size_of::<ibv_modify_cq_attr>()),
        ("ibv_parent_domain_init_attr", size_of::<ibv_parent_domain_init_attr>()),
        ("ibv_values_ex", size_of::<ibv_values_ex>()),
        ("ibv_ece", size_of::<ibv_ece>()),
        ("ibv_async_event", size_of::<ibv_async_event>()),
        ("ibv_dm", size_of::<ibv_dm>()),
        ("ibv_alloc_dm_attr", size_of::<ibv_alloc_dm_attr>()),
        ("ibv_flow", size_of::<ibv_flow>()),
        ("ibv_flow_attr", size_of::<ibv_flow_attr>()),
        ("ibv_flow_spec_eth", size_of::<ibv_flow_spec_eth>()),
        ("ibv_flow_spec_ipv4", size_of::<ibv_flow_spec_ipv4>()),
        ("ibv_flow_spec_ipv4_ext", size_of::<ibv_flow_spec_ipv4_ext>()),
        ("ibv_flow_spec_ipv6", size_of::<ibv_flow_spec_ipv6>()),
        ("ibv_flow_spec_tcp_udp", size_of::<ibv_flow_spec_tcp_udp>()),
        ("ibv_flow_spec_tunnel", size_of::<ibv_flow_spec_tunnel>()),
        ("ibv_flow_spec_counter_action", size_of::<ibv_flow_spec_counter_action>()),
        ("ibv_counters", size_of::<ibv_counters>()),
        ("ibv_counters_init_attr", size_of::<ibv_counters_init_attr>()),
        ("ibv_counter_attach_attr", size_of::<ibv_counter_attach_attr>()),
        ("ibv_wq", size_of::<ibv_wq>()),
        ("ibv_wq_init_attr", size_of::<ibv_wq_init_attr>()),
        ("ibv_wq_attr", size_of::<ibv_wq_attr>()),
        ("ibv_rwq_ind_table", size_of::<ibv_rwq_ind_table>()),
        ("ibv_rwq_ind_table_init_attr", size_of::<ibv_rwq_ind_table_init_attr>()),
        ("ibv_rx_hash_conf", size_of::<ibv_rx_hash_conf>()),
        ("ibv_device.transport_type", offset_of!(ibv_device, transport_type)),
        ("ibv_device.dev_path", offset_of!(ibv_device, dev_path)),
        ("ibv_context.mutex", offset_of!(ibv_context, mutex)),
        ("ibv_mr.length", offset_of!(ibv_mr, length)),
        ("ibv_mr.lkey", offset_of!(ibv_mr, lkey)),
        ("ibv_mr.rkey", offset_of!(ibv_mr, rkey)),
        ("ibv_mw.rkey", offset_of!(ibv_mw, rkey)),
        ("ibv_mw.type", offset_of!(ibv_mw, r#type)),
        ("ibv_cq.cqe", offset_of!(ibv_cq, cqe)),
        ("ibv_cq.mutex", offset_of!(ibv_cq, mutex)),
        ("ibv_cq.comp_events_completed", offset_of!(ibv_cq, comp_events_completed)),
        ("ibv_cq_ex.status", offset_of!(ibv_cq_ex, status)),
        ("ibv_cq_ex.wr_id", offset_of!(ibv_cq_ex, wr_id)),
        ("ibv_cq_ex.start_poll", offset_of!(ibv_cq_ex, start_poll)),
        (
            "ibv_cq_ex.read_completion_wallclock_ns",
            offset_of!(ibv_cq_ex, read_completion_wallclock_ns),
        ),
        ("ibv_srq.mutex", offset_of!(ibv_srq, mutex)),
        ("ibv_srq.events_completed", offset_of!(ibv_srq, events_completed)),
        ("ibv_qp.mutex", offset_of!(ibv_qp, mutex)),
        ("ibv_qp.events_completed", offset_of!(ibv_qp, events_completed)),
        ("ibv_qp_ex.wr_id", offset_of!(ibv_qp_ex, wr_id)),
        ("ibv_qp_ex.wr_flags", offset_of!(ibv_qp_ex, wr_flags)),
        ("ibv_qp_ex.wr_atomic_cmp_swp", offset_of!(ibv_qp_ex, wr_atomic_cmp_swp)),
        ("ibv_qp_ex.wr_set_sge", offset_of!(ibv_qp_ex, wr_set_sge)),
        ("ibv_qp_ex.wr_complete", offset_of!(ibv_qp_ex, wr_complete)),
        ("ibv_qp_ex.wr_atomic_write", offset_of!(ibv_qp_ex, wr_atomic_write)),
        ("ibv_send_wr.opcode", offset_of!(ibv_send_wr, opcode)),
        ("ibv_send_wr.imm_data", offset_of!(ibv_send_wr, imm_data)),
        ("ibv_send_wr.wr", offset_of!(ibv_send_wr, wr)),
        ("ibv_send_wr.qp_type", offset_of!(ibv_send_wr, qp_type)),
        ("ibv_send_wr.bind_mw", offset_of!(ibv_send_wr, ext)),
        ("ibv_wc.imm_data", offset_of!(ibv_wc, imm_data)),
        ("ibv_wc.wc_flags", offset_of!(ibv_wc, wc_flags)),
        ("ibv_wc.dlid_path_bits", offset_of!(ibv_wc, dlid_path_bits)),
        ("ibv_port_attr.link_layer", offset_of!(ibv_port_attr, link_layer)),
        ("ibv_port_attr.port_cap_flags2", offset_of!(ibv_port_attr, port_cap_flags2)),
        ("ibv_device_attr.atomic_cap", offset_of!(ibv_device_attr, atomic_cap)),
        ("ibv_device_attr.phys_port_cnt", offset_of!(ibv_device_attr, phys_port_cnt)),
        ("ibv_device_attr_ex.cq_mod_caps", offset_of!(ibv_device_attr_ex, cq_mod_caps)),
        ("ibv_device_attr_ex.phys_port_cnt_ex", offset_of!(ibv_device_attr_ex, phys_port_cnt_ex)),
        ("ibv_qp_attr.ah_attr", offset_of!(ibv_qp_attr, ah_attr)),
        ("ibv_qp_attr.alt_timeout", offset_of!(ibv_qp_attr, alt_timeout)),
        ("ibv_qp_attr.rate_limit", offset_of!(ibv_qp_attr, rate_limit)),
        ("ibv_qp_init_attr_ex.pd", offset_of!(ibv_qp_init_attr_ex, pd)),
        ("ibv_qp_init_attr_ex.send_ops_flags", offset_of!(ibv_qp_init_attr_ex, send_ops_flags)),
        ("ibv_cq_init_attr_ex.wc_flags", offset_of!(ibv_cq_init_attr_ex, wc_flags)),
        ("ibv_cq_init_attr_ex.parent_domain", offset_of!(ibv_cq_init_attr_ex, parent_domain)),
        ("ibv_async_event.event_type", offset_of!(ibv_async_event, event_type)),
        ("ibv_dm.memcpy_from_dm", offset_of!(ibv_dm, memcpy_from_dm)),
        ("ibv_dm.handle", offset_of!(ibv_dm, handle)),
        ("ibv_alloc_dm_attr.log_align_req", offset_of!(ibv_alloc_dm_attr, log_align_req)),
        ("ibv_flow_attr.num_of_specs", offset_of!(ibv_flow_attr, num_of_specs)),
        ("ibv_flow_attr.flags", offset_of!(ibv_flow_attr, flags)),
        ("ibv_flow_spec_eth.val", offset_of!(ibv_flow_spec_eth, val)),
        ("ibv_flow_spec_eth.mask", offset_of!(ibv_flow_spec_eth, mask)),
        ("ibv_flow_spec_ipv4.mask", offset_of!(ibv_flow_spec_ipv4, mask)),
        ("ibv_flow_spec_ipv4_ext.mask", offset_of!(ibv_flow_spec_ipv4_ext, mask)),
        ("ibv_flow_spec_ipv6.mask", offset_of!(ibv_flow_spec_ipv6, mask)),
        ("ibv_flow_spec_tcp_udp.mask", offset_of!(ibv_flow_spec_tcp_udp, mask)),
        ("ibv_flow_spec_tunnel.mask", offset_of!(ibv_flow_spec_tunnel, mask)),
        ("ibv_wq.state", offset_of!(ibv_wq, state)),
        ("ibv_wq.post_recv", offset_of!(ibv_wq, post_recv)),
        ("ibv_wq.comp_mask", offset_of!(ibv_wq, comp_mask)),
        ("ibv_wq_init_attr.cq", offset_of!(ibv_wq_init_attr, cq)),
    ];
    assert_eq!(text(&ours), theirs);
}

#[test]
fn connection_management_is_laid_out_alike() {
    let Some(theirs) = of_the_headers("rdma_layout", "rdma/rdma_cma.h") else { return };
    let ours = [
        ("rdma_ib_addr", size_of::<rdma_ib_addr>()),
        ("rdma_addr", size_of::<rdma_addr>()),
        ("ibv_sa_path_rec", size_of::<ibv_sa_path_rec>()),
        ("rdma_route", size_of::<rdma_route>()),
        ("rdma_event_channel", size_of::<rdma_event_channel>()),
        ("rdma_cm_id", size_of::<rdma_cm_id>()),
        ("rdma_conn_param", size_of::<rdma_conn_param>()),
        ("rdma_ud_param", size_of::<rdma_ud_param>()),
        ("rdma_cm_event", size_of::<rdma_cm_event>()),
        ("rdma_addrinfo", size_of::<rdma_addrinfo>()),
        ("rdma_cm_join_mc_attr_ex", size_of::<rdma_cm_join_mc_attr_ex>()),
        ("rdma_addr.dst_storage", offset_of!(rdma_addr, dst_storage)),
        ("rdma_ib_addr.pkey", offset_of!(rdma_ib_addr, pkey)),
        ("ibv_sa_path_rec.flow_label", offset_of!(ibv_sa_path_rec, flow_label)),
        ("ibv_sa_path_rec.reversible", offset_of!(ibv_sa_path_rec, reversible)),
        ("ibv_sa_path_rec.pkey", offset_of!(ibv_sa_path_rec, pkey)),
        ("ibv_sa_path_rec.mtu", offset_of!(ibv_sa_path_rec, mtu)),
        ("ibv_sa_path_rec.preference", offset_of!(ibv_sa_path_rec, preference)),
        ("rdma_route.path_rec", offset_of!(rdma_route, path_rec)),
        ("rdma_route.num_paths", offset_of!(rdma_route, num_paths)),
        ("rdma_cm_id.channel", offset_of!(rdma_cm_id, channel)),
        ("rdma_cm_id.qp", offset_of!(rdma_cm_id, qp)),
        ("rdma_cm_id.route", offset_of!(rdma_cm_id, route)),
        ("rdma_cm_id.ps", offset_of!(rdma_cm_id, ps)),
        ("rdma_cm_id.port_num", offset_of!(rdma_cm_id, port_num)),
        ("rdma_cm_id.event", offset_of!(rdma_cm_id, event)),
        ("rdma_cm_id.send_cq", offset_of!(rdma_cm_id, send_cq)),
        ("rdma_cm_id.recv_cq_channel", offset_of!(rdma_cm_id, recv_cq_channel)),
        ("rdma_cm_id.srq", offset_of!(rdma_cm_id, srq)),
        ("rdma_cm_id.pd", offset_of!(rdma_cm_id, pd)),
        ("rdma_cm_id.qp_type", offset_of!(rdma_cm_id, qp_type)),
        ("rdma_conn_param.retry_count", offset_of!(rdma_conn_param, retry_count)),
        ("rdma_conn_param.srq", offset_of!(rdma_conn_param, srq)),
        ("rdma_conn_param.qp_num", offset_of!(rdma_conn_param, qp_num)),
        ("rdma_ud_param.ah_attr", offset_of!(rdma_ud_param, ah_attr)),
        ("rdma_ud_param.qp_num", offset_of!(rdma_ud_param, qp_num)),
        ("rdma_ud_param.qkey", offset_of!(rdma_ud_param, qkey)),
        ("rdma_cm_event.listen_id", offset_of!(rdma_cm_event, listen_id)),
        ("rdma_cm_event.event", offset_of!(rdma_cm_event, event)),
        ("rdma_cm_event.status", offset_of!(rdma_cm_event, status)),
        ("rdma_cm_event.param", offset_of!(rdma_cm_event, param)),
        ("rdma_addrinfo.ai_src_len", offset_of!(rdma_addrinfo, ai_src_len)),
        ("rdma_addrinfo.ai_dst_addr", offset_of!(rdma_addrinfo, ai_dst_addr)),
        ("rdma_addrinfo.ai_route_len", offset_of!(rdma_addrinfo, ai_route_len)),
        ("rdma_addrinfo.ai_connect", offset_of!(rdma_addrinfo, ai_connect)),
        ("rdma_addrinfo.ai_next", offset_of!(rdma_addrinfo, ai_next)),
        ("rdma_cm_join_mc_attr_ex.addr", offset_of!(rdma_cm_join_mc_attr_ex, addr)),
        ("sockaddr_ib", size_of::<sockaddr_ib>()),
        ("sockaddr_ib.sib_addr", offset_of!(sockaddr_ib, sib_addr)),
        ("sockaddr_ib.sib_sid", offset_of!(sockaddr_ib, sib_sid)),
        ("sockaddr_ib.sib_scope_id", offset_of!(sockaddr_ib, sib_scope_id)),
    ];
    assert_eq!(text(&ours), theirs);
}
