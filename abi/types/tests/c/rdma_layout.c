/* Prints sizes and offsets of the installed rdma_cma.h, in the order that tests/c_layout.rs compares. */
#include <infiniband/ib.h>
#include <rdma/rdma_cma.h>
#include <stddef.h>
#include <stdio.h>

#define SIZE(type) printf("%s %zu\n", #type, sizeof(struct type))
#define AT(type, field) printf("%s.%s %zu\n", #type, #field, offsetof(struct type, field))

int main(void)
{
	SIZE(rdma_ib_addr); SIZE(rdma_addr); SIZE(ibv_sa_path_rec); SIZE(rdma_route);
	SIZE(rdma_event_channel); SIZE(rdma_cm_id); SIZE(rdma_conn_param); SIZE(rdma_ud_param);
	SIZE(rdma_cm_event); SIZE(rdma_addrinfo); SIZE(rdma_cm_join_mc_attr_ex);

	AT(rdma_addr, dst_storage); AT(rdma_ib_addr, pkey);
	AT(ibv_sa_path_rec, flow_label); AT(ibv_sa_path_rec, reversible); AT(ibv_sa_path_rec, pkey);
	AT(ibv_sa_path_rec, mtu); AT(ibv_sa_path_rec, preference);
	AT(rdma_route, path_rec); AT(rdma_route, num_paths);
	AT(rdma_cm_id, channel); AT(rdma_cm_id, qp); AT(rdma_cm_id, route); AT(rdma_cm_id, ps);
	AT(rdma_cm_id, port_num); AT(rdma_cm_id, event); AT(rdma_cm_id, send_cq);
	AT(rdma_cm_id, recv_cq_channel); AT(rdma_cm_id, srq); AT(rdma_cm_id, pd);
	AT(rdma_cm_id, qp_type);
	AT(rdma_conn_param, retry_count); AT(rdma_conn_param, srq); AT(rdma_conn_param, qp_num);
	AT(rdma_ud_param, ah_attr); AT(rdma_ud_param, qp_num); AT(rdma_ud_param, qkey);
	AT(rdma_cm_event, listen_id); AT(rdma_cm_event, event); AT(rdma_cm_event, status);
	AT(rdma_cm_event, param);
	AT(rdma_addrinfo, ai_src_len); AT(rdma_addrinfo, ai_dst_addr); AT(rdma_addrinfo, ai_route_len);
	AT(rdma_addrinfo, ai_connect); AT(rdma_addrinfo, ai_next);
	AT(rdma_cm_join_mc_attr_ex, addr);
	SIZE(sockaddr_ib);
	AT(sockaddr_ib, sib_addr); AT(sockaddr_ib, sib_sid); AT(sockaddr_ib, sib_scope_id);
	return 0;
}
