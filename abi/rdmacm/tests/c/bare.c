/* The device of QPIP, on a link of this process alone: what programs see of ports, and what there is not. */
#include "common.h"

/* What queue pairs of the device could not use is not made either. */
static void cannot_make(struct ibv_context *device)
{
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_pd *pd = ibv_alloc_pd(device);
	CHECK(pd);
	errno = 0;
	CHECK(!ibv_create_srq(pd, &shared) && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(!ibv_alloc_mw(pd, IBV_MW_TYPE_1) && errno == EOPNOTSUPP);
	CHECK(ibv_dealloc_pd(pd) == 0);
}

/* The address of the link, which is the GID of its device. */
static struct sockaddr_in6 link_address(void)
{
	struct sockaddr_in6 own = { .sin6_family = AF_INET6 };
	int count, found = 0;
	struct ibv_context **devices = rdma_get_devices(&count);
	CHECK(devices);
	for (int i = 0; i < count; i++) {
		union ibv_gid gid;
		if (strcmp(ibv_get_device_name(devices[i]->device), "quipu_qp0") != 0)
			continue;
		CHECK(ibv_query_gid(devices[i], 1, 0, &gid) == 0);
		memcpy(&own.sin6_addr, gid.raw, sizeof gid.raw);
		cannot_make(devices[i]);
		found = 1;
	}
	rdma_free_devices(devices);
	CHECK(found);
	return own;
}

int main(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in6 own = link_address();
	struct ibv_qp_init_attr init = queues();
	struct rdma_conn_param param = { .retry_count = 7 };
	struct rdma_cm_id *listening, *active, *passive = NULL;
	CHECK(channel);

	/* A port at once, as rdma_bind_addr(3) says. */
	CHECK(rdma_create_id(channel, &listening, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listening, (struct sockaddr *)&own) == 0);
	CHECK((own.sin6_port = rdma_get_src_port(listening)) != 0);
	CHECK(rdma_listen(listening, 4) == 0 && rdma_get_src_port(listening) == own.sin6_port);

	CHECK(rdma_create_id(channel, &active, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(active, NULL, (struct sockaddr *)&own, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(strcmp(ibv_get_device_name(active->verbs->device), "quipu_qp0") == 0);
	CHECK(rdma_resolve_route(active, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(rdma_create_qp(active, NULL, &init) == 0);
	CHECK(rdma_connect(active, &param) == 0);
	struct rdma_cm_event *event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	init = queues();
	CHECK(rdma_create_qp(passive, NULL, &init) == 0);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED);
	/* The port that was chosen by then is the one that the peer sees. */
	CHECK(rdma_get_src_port(active) != 0);
	CHECK(rdma_get_src_port(active) == rdma_get_dst_port(passive));

	/* A stream has no room for its greeting there; the address is not wrong. */
	int rs = rsocket(AF_INET6, SOCK_STREAM, 0);
	CHECK(rs > 2);
	FAILS(rconnect(rs, (struct sockaddr *)&own, sizeof own), EOPNOTSUPP);
	CHECK(rclose(rs) == 0);

	rdma_destroy_qp(active);
	rdma_destroy_qp(passive);
	CHECK(rdma_destroy_id(active) == 0 && rdma_destroy_id(passive) == 0);
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
	return 0;
}
