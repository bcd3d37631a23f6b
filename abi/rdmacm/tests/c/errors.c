/* What calls answer to careless programs. */
#include "common.h"

static void channels(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_event *event;
	CHECK(channel && channel->fd > 2);
	CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rdma_get_cm_event(channel, &event), EAGAIN);
	FAILS(rdma_get_cm_event(channel, NULL), EINVAL);
	FAILS(rdma_get_cm_event(NULL, &event), EINVAL);
	FAILS(rdma_ack_cm_event(NULL), EINVAL);
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(NULL);
}

static void identifiers(struct rdma_event_channel *channel)
{
	struct sockaddr_in in;
	struct sockaddr_storage ib = { .ss_family = 27 }, none = { 0 };
	struct sockaddr_in6 wildcard = { .sin6_family = AF_INET6 };
	struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_port = htons(1), .sin6_addr = in6addr_loopback };
	struct sockaddr_in6 nowhere = { .sin6_family = AF_INET6, .sin6_scope_id = 999999,
		.sin6_addr.s6_addr = { 0xfe, 0x80, [15] = 1 } };
	struct rdma_cm_id *id, *other, *child;
	struct ibv_qp_init_attr init = queues();
	struct rdma_conn_param param = { 0 };
	struct ibv_ece ece = { 0 };
	int on = 1, port;

	FAILS(rdma_create_id(channel, NULL, NULL, RDMA_PS_TCP), EINVAL);
	FAILS(rdma_create_id(channel, &id, NULL, 0x999), EINVAL);
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(id->verbs == NULL && id->ps == RDMA_PS_TCP && id->qp_type == IBV_QPT_RC);
	FAILS(rdma_bind_addr(id, NULL), EINVAL);
	FAILS(rdma_bind_addr(id, (struct sockaddr *)&ib), ENODEV);
	FAILS(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ib, 1), ENODEV);
	FAILS(rdma_bind_addr(id, (struct sockaddr *)&none), EINVAL);
	FAILS(rdma_resolve_addr(id, NULL, (struct sockaddr *)&none, 1), EINVAL);
	FAILS(rdma_resolve_addr(id, (struct sockaddr *)&none, (struct sockaddr *)&six, 1), EINVAL);
	FAILS(rdma_join_multicast(id, (struct sockaddr *)&ib, NULL), EOPNOTSUPP);
	FAILS(rdma_join_multicast(id, (struct sockaddr *)&none, NULL), EINVAL);
	FAILS(rdma_leave_multicast(id, (struct sockaddr *)&none), EINVAL);
	FAILS(rdma_resolve_addr(id, NULL, NULL, 1), EINVAL);
	FAILS(rdma_resolve_route(id, 1), EINVAL);
	loopback(&in, 0);
	in.sin_addr.s_addr = htonl(0xc0000201);
	FAILS(rdma_bind_addr(id, (struct sockaddr *)&in), EADDRNOTAVAIL);
	/* No such interface; or no IPv6. */
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&nowhere) == -1);
	CHECK(errno == ENODEV || errno == EAFNOSUPPORT);
	FAILS(rdma_create_qp(id, NULL, &init), EINVAL);
	FAILS(rdma_create_qp(id, NULL, NULL), EINVAL);
	FAILS(rdma_connect(id, NULL), EINVAL);
	FAILS(rdma_connect(id, &param), EINVAL);
	FAILS(rdma_accept(id, &param), EINVAL);
	FAILS(rdma_reject(id, NULL, 0), EINVAL);
	FAILS(rdma_disconnect(id), EINVAL);
	FAILS(rdma_establish(id), EINVAL);
	FAILS(rdma_get_request(id, &child), EINVAL);
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, 99, &on, sizeof on), EOPNOTSUPP);
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, NULL, 4), EINVAL);
	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on) == 0);
	FAILS(rdma_set_local_ece(id, &ece), EINVAL);
	CHECK(rdma_get_remote_ece(id, &ece) == 0 && ece.vendor_id == 0);
	CHECK(rdma_destroy_id(id) == 0);
	/* One without an address listens at all of them, at a port of the system's choice. */
	for (int n = 0; n < 2; n++) {
		CHECK(rdma_create_id(channel, &id, NULL, n ? RDMA_PS_UDP : RDMA_PS_TCP) == 0);
		CHECK(rdma_listen(id, 1) == 0 && rdma_get_src_port(id) != 0);
		CHECK(rdma_get_local_addr(id)->sa_family == AF_INET && rdma_destroy_id(id) == 0);
	}
	/* From one family to the other there is no way; the identifier may try another one. */
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_resolve_addr(id, loopback(&in, 0), (struct sockaddr *)&six, 100), EINVAL);
	CHECK(rdma_resolve_addr(id, NULL, loopback(&in, htons(1)), 100) == 0);
	/* Whom it is to reach can be seen before anything comes of it. */
	CHECK(rdma_get_peer_addr(id)->sa_family == AF_INET && rdma_get_dst_port(id) == htons(1));
	FAILS(rdma_resolve_addr(id, NULL, loopback(&in, htons(2)), 100), EINVAL);
	CHECK(rdma_get_dst_port(id) == htons(1));
	pass(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(rdma_destroy_id(id) == 0);

	/* From the wildcard of the other family nobody is reached. */
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&wildcard) == 0);
	FAILS(rdma_resolve_addr(id, NULL, loopback(&in, htons(1)), 100), EINVAL);
	CHECK(rdma_destroy_id(id) == 0);

	/* A port of datagrams has one owner, whatever is asked for. */
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_create_id(channel, &other, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on) == 0);
	CHECK(rdma_set_option(other, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	FAILS(rdma_bind_addr(other, loopback(&in, rdma_get_src_port(id))), EADDRINUSE);
	CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(other) == 0);

	id = listener(channel, RDMA_PS_TCP, &port);
	CHECK(rdma_create_id(channel, &other, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_bind_addr(other, loopback(&in, port)), EADDRINUSE);
	in.sin_addr.s_addr = htonl(INADDR_ANY);
	FAILS(rdma_bind_addr(other, (struct sockaddr *)&in), EADDRNOTAVAIL);
	CHECK(rdma_destroy_id(other) == 0 && rdma_destroy_id(id) == 0);
	FAILS(rdma_destroy_id(NULL), EINVAL);
}

static void queue_pairs(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id = resolved(channel, RDMA_PS_TCP, htons(1));
	struct ibv_qp_init_attr init = queues();
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct rdma_conn_param param = { .responder_resources = 0xfe };
	struct ibv_context **devices;
	int count, mask;

	/* The device is open once, whoever asks. */
	devices = rdma_get_devices(&count);
	CHECK(devices && count >= 1 && devices[count] == NULL && devices[0] == id->verbs);
	rdma_free_devices(devices);

	init.cap.max_send_wr = 1 << 30;
	FAILS(rdma_create_qp(id, NULL, &init), EINVAL);
	CHECK(!id->qp && !id->send_cq && !id->recv_cq_channel);
	/* Datagrams are of another port space. */
	init = queues();
	init.qp_type = IBV_QPT_UD;
	FAILS(rdma_create_qp(id, NULL, &init), EINVAL);
	CHECK(!id->qp && !id->send_cq && id->qp_type == IBV_QPT_RC);
	init = queues();
	CHECK(rdma_create_qp(id, NULL, &init) == 0);
	CHECK(id->qp->qp_context == NULL && id->qp->pd == id->pd && id->qp->state == IBV_QPS_INIT);
	CHECK(init.send_cq == id->send_cq && id->send_cq->cq_context == id && id->recv_cq_channel);
	FAILS(rdma_create_qp(id, NULL, &init), EINVAL);
	FAILS(rdma_establish(id), EINVAL);
	FAILS(rdma_init_qp_attr(id, NULL, &mask), EINVAL);
	CHECK(rdma_init_qp_attr(id, &attr, &mask) == 0);
	CHECK(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	FAILS(rdma_connect(id, &param), EINVAL);
	rdma_destroy_qp(id);
	CHECK(!id->qp && !id->send_cq && !id->send_cq_channel);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

static void multicast(struct rdma_event_channel *channel)
{
	struct sockaddr_in in;
	struct rdma_cm_join_mc_attr_ex attr = { .comp_mask = 1 << 9 };
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0 && id->qp_type == IBV_QPT_UD);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	FAILS(rdma_join_multicast(id, NULL, NULL), EINVAL);
	FAILS(rdma_join_multicast(id, loopback(&in, 0), NULL), EINVAL);
	FAILS(rdma_join_multicast_ex(id, NULL, NULL), EINVAL);
	FAILS(rdma_join_multicast_ex(id, &attr, NULL), EOPNOTSUPP);
	attr.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS;
	FAILS(rdma_join_multicast_ex(id, &attr, NULL), EINVAL);
	FAILS(rdma_leave_multicast(id, loopback(&in, 0)), EADDRNOTAVAIL);
	loopback(&in, 0);
	in.sin_addr.s_addr = htonl(0xefc00001);
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&in, &in) == 0);
	struct rdma_cm_event *event = expect(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(event->param.ud.private_data == &in && event->param.ud.qp_num == 0xffffff);
	CHECK(event->param.ud.qkey == RDMA_UDP_QKEY && event->id == id);
	CHECK(rdma_ack_cm_event(event) == 0);
	/* Joined twice, it is left twice. */
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&in, &attr) == 0);
	event = expect(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(event->param.ud.private_data == &attr && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_leave_multicast(id, (struct sockaddr *)&in) == 0);
	CHECK(rdma_leave_multicast(id, (struct sockaddr *)&in) == 0);
	FAILS(rdma_leave_multicast(id, (struct sockaddr *)&in), EADDRNOTAVAIL);
	/* Destroying leaves what was joined. */
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&in, &in) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	/* A synchronous identifier keeps the event itself. */
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_UDP) == 0);
	loopback(&in, 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&in) == 0);
	in.sin_addr.s_addr = htonl(0xefc00001);
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&in, NULL) == 0);
	CHECK(id->event->event == RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(rdma_leave_multicast(id, (struct sockaddr *)&in) == 0 && id->event == NULL);
	CHECK(rdma_destroy_id(id) == 0);
}

/* Memberships of one group by several addresses do not end each other. */
static void a_group_of_several_addresses(struct rdma_event_channel *channel)
{
	struct sockaddr_in in, port;
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6 };
	struct sockaddr *ways[] = { (struct sockaddr *)&in, (struct sockaddr *)&port, (struct sockaddr *)&in6 };
	struct ibv_qp_init_attr init = queues();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	union ibv_gid groups[3];
	init.qp_type = IBV_QPT_UD;
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0 && rdma_create_qp(id, NULL, &init) == 0);
	loopback(&port, 7);
	in.sin_addr.s_addr = port.sin_addr.s_addr = htonl(0xefc00001);
	CHECK(inet_pton(AF_INET6, "ff0e::ffff:239.192.0.1", &in6.sin6_addr) == 1);
	for (int i = 0; i < 3; i++) {
		CHECK(rdma_join_multicast(id, ways[i], NULL) == 0);
		event = expect(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
		groups[i] = event->param.ud.ah_attr.grh.dgid;
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	CHECK(rdma_leave_multicast(id, ways[0]) == 0);
	/* It is attached by both names still. */
	for (int i = 1; i < 3; i++) {
		CHECK(ibv_detach_mcast(id->qp, &groups[i], 0) == 0);
		CHECK(ibv_attach_mcast(id->qp, &groups[i], 0) == 0);
	}
	for (int i = 1; i < 3; i++) {
		CHECK(rdma_leave_multicast(id, ways[i]) == 0);
		CHECK(ibv_detach_mcast(id->qp, &groups[i], 0) == EINVAL);
	}
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

int main(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	CHECK(channel);
	channels();
	identifiers(channel);
	queue_pairs(channel);
	multicast(channel);
	a_group_of_several_addresses(channel);
	rdma_destroy_event_channel(channel);
	return 0;
}
