/* Addresses of InfiniBand's own, on a port of InfiniBand: GIDs and services. */
#include "common.h"
#include <infiniband/ib.h>

static const char GID[] = "::ffff:127.0.0.1";

/* A GID and a service there, of which port 0 leaves the port open. */
static struct sockaddr_ib native(const char *gid, int ps, int port)
{
	struct sockaddr_ib sib = { .sib_family = AF_IB, .sib_pkey = htons(0xffff) };

	CHECK(inet_pton(AF_INET6, gid, &sib.sib_addr) == 1);
	sib.sib_sid = htobe64((uint64_t)ps << 16 | port);
	sib.sib_sid_mask = htobe64(port ? ~0ULL : RDMA_IB_IP_PS_MASK);
	return sib;
}

static struct sockaddr *raw(struct sockaddr_ib *sib)
{
	return (struct sockaddr *)sib;
}

static int is_at(const struct sockaddr *addr, const char *gid)
{
	struct in6_addr wanted;

	CHECK(addr->sa_family == AF_IB && inet_pton(AF_INET6, gid, &wanted) == 1);
	return memcmp(&((struct sockaddr_ib *)addr)->sib_addr, &wanted, sizeof wanted) == 0;
}

static struct rdma_addrinfo *looked_up(const char *node, const char *port, int flags)
{
	struct rdma_addrinfo hints = { .ai_family = AF_IB, .ai_port_space = RDMA_PS_TCP }, *res;

	hints.ai_flags = flags | RAI_FAMILY | RAI_NUMERICHOST;
	CHECK(rdma_getaddrinfo(node, port, &hints, &res) == 0 && res->ai_family == AF_IB);
	return res;
}

static void refusals(struct rdma_event_channel *channel)
{
	struct sockaddr_ib foreign = native("::ffff:192.0.2.1", RDMA_PS_TCP, 0);
	struct sockaddr_ib other_space = native(GID, RDMA_PS_UDP, 0), own = native(GID, RDMA_PS_TCP, 0);
	struct sockaddr_in in;
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_bind_addr(id, raw(&foreign)), ENODEV);
	FAILS(rdma_bind_addr(id, raw(&other_space)), EPROTONOSUPPORT);
	FAILS(rdma_resolve_addr(id, NULL, raw(&other_space), 100), EPROTONOSUPPORT);
	FAILS(rdma_resolve_addr(id, loopback(&in, 0), raw(&own), 100), EINVAL);
	FAILS(rdma_resolve_addr(id, raw(&own), loopback(&in, htons(1)), 100), EINVAL);
	CHECK(rdma_get_local_addr(id)->sa_family == AF_UNSPEC);
	CHECK(rdma_bind_addr(id, raw(&own)) == 0);
	FAILS(rdma_resolve_addr(id, NULL, loopback(&in, htons(1)), 100), EINVAL);
	CHECK(rdma_destroy_id(id) == 0);
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	FAILS(rdma_resolve_addr(id, NULL, raw(&own), 100), EINVAL);
	CHECK(rdma_destroy_id(id) == 0);
}

/* Connects to a listener at `gid` by what rdma_getaddrinfo makes of `to`. */
static void connections(struct rdma_event_channel *channel, const char *gid, const char *to)
{
	struct rdma_event_channel *there = rdma_create_event_channel();
	struct rdma_addrinfo *res = looked_up(gid, "0", RAI_PASSIVE);
	struct ibv_qp_init_attr init = queues();
	struct rdma_conn_param param = { .private_data = "seven", .private_data_len = 6 };
	struct rdma_cm_id *listening, *id, *child;
	struct rdma_cm_event *event;
	char port[16];

	CHECK(res->ai_src_len == sizeof(struct sockaddr_ib) && !res->ai_dst_addr);
	CHECK(rdma_create_id(there, &listening, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listening, res->ai_src_addr) == 0 && rdma_listen(listening, 4) == 0);
	CHECK(!listening->verbs == (strcmp(gid, GID) != 0));
	CHECK(is_at(rdma_get_local_addr(listening), gid) && rdma_get_src_port(listening));
	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listening)));
	rdma_freeaddrinfo(res);

	res = looked_up(to, port, 0);
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, res->ai_dst_addr, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(id->verbs && is_at(rdma_get_local_addr(id), GID));
	CHECK(memcmp(rdma_get_peer_addr(id), res->ai_dst_addr, res->ai_dst_len) == 0);
	CHECK(rdma_get_src_port(id) && rdma_get_dst_port(id) == rdma_get_src_port(listening));
	rdma_freeaddrinfo(res);
	CHECK(rdma_resolve_route(id, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(id->route.num_paths == 1 && rdma_create_qp(id, NULL, &init) == 0);
	CHECK(rdma_connect(id, &param) == 0);

	event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(memcmp(event->param.conn.private_data, "seven", 6) == 0);
	child = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(is_at(rdma_get_local_addr(child), GID) && is_at(rdma_get_peer_addr(child), GID));
	CHECK(rdma_get_src_port(child) == rdma_get_src_port(listening));
	CHECK(rdma_create_qp(child, NULL, &init) == 0 && rdma_accept(child, NULL) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	parted(channel, id, there, child);
	CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(child) == 0);
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(there);
}

static void endpoints(void)
{
	struct rdma_addrinfo *res = looked_up(GID, "0", RAI_PASSIVE);
	struct rdma_cm_id *listening, *id;
	char port[16];

	CHECK(rdma_create_ep(&listening, res, NULL, NULL) == 0 && rdma_listen(listening, 0) == 0);
	rdma_freeaddrinfo(res);
	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listening)));
	res = looked_up(GID, port, 0);
	CHECK(rdma_create_ep(&id, res, NULL, NULL) == 0);
	CHECK(is_at(rdma_get_local_addr(id), GID) && is_at(rdma_get_peer_addr(id), GID));
	rdma_freeaddrinfo(res);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listening);
}

/* Joins a group, and says which it is. */
static struct in6_addr joined(struct rdma_event_channel *channel, struct rdma_cm_id *id,
	struct sockaddr_ib *group)
{
	struct rdma_cm_event *event;
	struct in6_addr gid;

	CHECK(rdma_join_multicast(id, raw(group), id) == 0);
	event = expect(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(event->param.ud.private_data == id && event->param.ud.qp_num == 0xffffff);
	memcpy(&gid, &event->param.ud.ah_attr.grh.dgid, sizeof gid);
	CHECK(rdma_ack_cm_event(event) == 0);
	return gid;
}

static void groups(struct rdma_event_channel *channel)
{
	static const unsigned char assigned[] = { 0xff, 0x12, 0xa0, 0x1b };
	struct ibv_qp_init_attr init = queues();
	struct sockaddr_ib group = native("ff12:401b::77:1", 0, 0), any = { .sib_family = AF_IB };
	struct sockaddr_ib nobody = native(GID, 0, 0);
	struct in6_addr first, second;
	struct sockaddr_in in;
	struct rdma_cm_id *id;

	/* The identifier's own address need not be of that kind. */
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	init.qp_type = IBV_QPT_UD;
	CHECK(rdma_create_qp(id, NULL, &init) == 0);
	first = joined(channel, id, &group);
	CHECK(memcmp(&first, &group.sib_addr, sizeof first) == 0);
	CHECK(rdma_leave_multicast(id, raw(&group)) == 0);
	FAILS(rdma_leave_multicast(id, raw(&group)), EADDRNOTAVAIL);
	/* Without a GID one is a group that nobody else is in. */
	first = joined(channel, id, &any);
	second = joined(channel, id, &any);
	CHECK(memcmp(&first, assigned, sizeof assigned) == 0);
	CHECK(memcmp(&first, &second, sizeof first) != 0);
	CHECK(rdma_leave_multicast(id, raw(&any)) == 0 && rdma_leave_multicast(id, raw(&any)) == 0);
	FAILS(rdma_join_multicast(id, raw(&nobody), NULL), EINVAL);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

static void streams(void)
{
	int listening = rsocket(AF_IB, SOCK_STREAM, 0), here = rsocket(AF_IB, SOCK_STREAM, 0), there;
	struct sockaddr_ib sib = native(GID, RDMA_PS_TCP, 0), other;
	struct pollfd fds = { .fd = here, .events = POLLOUT };
	socklen_t length = sizeof sib;
	char text[5];

	CHECK(listening > 2 && here > 2);
	FAILS(rbind(listening, raw(&sib), sizeof sib - 1), EINVAL);
	CHECK(rbind(listening, raw(&sib), sizeof sib) == 0 && rlisten(listening, 5) == 0);
	CHECK(rgetsockname(listening, raw(&sib), &length) == 0 && length == sizeof sib);
	CHECK(rfcntl(here, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rconnect(here, raw(&sib), sizeof sib), EINPROGRESS);
	CHECK((there = raccept(listening, raw(&other), &length)) > 2 && is_at(raw(&other), GID));
	CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLOUT);
	CHECK(rfcntl(here, F_SETFL, 0) == 0);
	CHECK(rsend(here, "ping", 5, 0) == 5 && rrecv(there, text, 5, MSG_WAITALL) == 5);
	CHECK(strcmp(text, "ping") == 0);
	CHECK(rgetpeername(here, raw(&other), &length) == 0 && length == sizeof other);
	CHECK(memcmp(&sib, &other, sizeof sib) == 0);
	CHECK(rclose(here) == 0 && rclose(there) == 0 && rclose(listening) == 0);
	FAILS(rsocket(AF_IB, SOCK_DGRAM, 0), EAFNOSUPPORT);
}

int main(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();

	refusals(channel);
	connections(channel, GID, GID);
	connections(channel, "::", GID);
	connections(channel, "::", "::1");
	endpoints();
	groups(channel);
	streams();
	rdma_destroy_event_channel(channel);
	return 0;
}
