/* Prints sizes and offsets of the installed verbs.h, in the order that tests/c_layout.rs compares. */
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdio.h>

#define SIZE(type) printf("%s %zu\n", #type, sizeof(struct type))
#define AT(type, field) printf("%s.%s %zu\n", #type, #field, offsetof(struct type, field))

int main(void)
{
	SIZE(ibv_device); SIZE(ibv_context_ops); SIZE(ibv_context); SIZE(ibv_pd); SIZE(ibv_mr);
	SIZE(ibv_mw); SIZE(ibv_ah); SIZE(ibv_td); SIZE(ibv_comp_channel); SIZE(ibv_cq); SIZE(ibv_cq_ex);
	SIZE(ibv_srq); SIZE(ibv_qp); SIZE(ibv_sge); SIZE(ibv_data_buf); SIZE(ibv_send_wr);
	SIZE(ibv_recv_wr); SIZE(ibv_mw_bind); SIZE(ibv_mw_bind_info); SIZE(ibv_wc); SIZE(ibv_grh);
	SIZE(ibv_gid_entry); SIZE(ibv_device_attr); SIZE(ibv_device_attr_ex); SIZE(ibv_global_route);
	SIZE(ibv_ah_attr); SIZE(ibv_srq_attr); SIZE(ibv_srq_init_attr); SIZE(ibv_srq_init_attr_ex);
	SIZE(ibv_qp_cap); SIZE(ibv_qp_init_attr); SIZE(ibv_qp_init_attr_ex);
	SIZE(ibv_qp_open_attr); SIZE(ibv_qp_attr);
	SIZE(ibv_cq_init_attr_ex); SIZE(ibv_modify_cq_attr); SIZE(ibv_parent_domain_init_attr);
	SIZE(ibv_values_ex); SIZE(ibv_ece); SIZE(ibv_async_event); SIZE(ibv_dm);
	SIZE(ibv_alloc_dm_attr);
	SIZE(ibv_flow); SIZE(ibv_flow_attr); SIZE(ibv_flow_spec_eth); SIZE(ibv_flow_spec_ipv4);
	SIZE(ibv_flow_spec_ipv4_ext); SIZE(ibv_flow_spec_ipv6); SIZE(ibv_flow_spec_tcp_udp);
	SIZE(ibv_flow_spec_tunnel); SIZE(ibv_flow_spec_counter_action); SIZE(ibv_counters);
	SIZE(ibv_counters_init_attr); SIZE(ibv_counter_attach_attr); SIZE(ibv_wq); SIZE(ibv_wq_init_attr); SIZE(ibv_wq_attr);
	SIZE(ibv_rwq_ind_table); SIZE(ibv_rwq_ind_table_init_attr); SIZE(ibv_rx_hash_conf);

	AT(ibv_device, transport_type); AT(ibv_device, dev_path);
	AT(ibv_context, mutex);
	AT(ibv_mr, length); AT(ibv_mr, lkey); AT(ibv_mr, rkey);
	AT(ibv_mw, rkey); AT(ibv_mw, type);
	AT(ibv_cq, cqe); AT(ibv_cq, mutex); AT(ibv_cq, comp_events_completed);
	AT(ibv_cq_ex, status); AT(ibv_cq_ex, wr_id); AT(ibv_cq_ex, start_poll);
	AT(ibv_cq_ex, read_completion_wallclock_ns);
	AT(ibv_srq, mutex); AT(ibv_srq, events_completed);
	AT(ibv_qp, mutex); AT(ibv_qp, events_completed);
	AT(ibv_qp_ex, wr_id); AT(ibv_qp_ex, wr_flags); AT(ibv_qp_ex, wr_atomic_cmp_swp);
	AT(ibv_qp_ex, wr_set_sge); AT(ibv_qp_ex, wr_complete); AT(ibv_qp_ex, wr_atomic_write);
	AT(ibv_send_wr, opcode); AT(ibv_send_wr, imm_data); AT(ibv_send_wr, wr);
	AT(ibv_send_wr, qp_type); AT(ibv_send_wr, bind_mw);
	AT(ibv_wc, imm_data); AT(ibv_wc, wc_flags); AT(ibv_wc, dlid_path_bits);
	AT(ibv_port_attr, link_layer); AT(ibv_port_attr, port_cap_flags2);
	AT(ibv_device_attr, atomic_cap); AT(ibv_device_attr, phys_port_cnt);
	AT(ibv_device_attr_ex, cq_mod_caps); AT(ibv_device_attr_ex, phys_port_cnt_ex);
	AT(ibv_qp_attr, ah_attr); AT(ibv_qp_attr, alt_timeout); AT(ibv_qp_attr, rate_limit);
	AT(ibv_qp_init_attr_ex, pd); AT(ibv_qp_init_attr_ex, send_ops_flags);
	AT(ibv_cq_init_attr_ex, wc_flags); AT(ibv_cq_init_attr_ex, parent_domain);
	AT(ibv_async_event, event_type);
	AT(ibv_dm, memcpy_from_dm); AT(ibv_dm, handle);
	AT(ibv_alloc_dm_attr, log_align_req);
	AT(ibv_flow_attr, num_of_specs); AT(ibv_flow_attr, flags);
	AT(ibv_flow_spec_eth, val); AT(ibv_flow_spec_eth, mask); AT(ibv_flow_spec_ipv4, mask);
	AT(ibv_flow_spec_ipv4_ext, mask); AT(ibv_flow_spec_ipv6, mask);
	AT(ibv_flow_spec_tcp_udp, mask); AT(ibv_flow_spec_tunnel, mask);
	AT(ibv_wq, state); AT(ibv_wq, post_recv); AT(ibv_wq, comp_mask); AT(ibv_wq_init_attr, cq);
	return 0;
}
