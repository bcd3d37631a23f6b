/* What the programs share: checks that say where they failed, and addresses of the loopback. */
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
			exit(1); \
		} \
	} while (0)
/* A call that must fail with -1 and this errno. */
#define FAILS(call, number) CHECK((errno = 0, (call) == -1 && errno == (number)))

static inline struct sockaddr *loopback(struct sockaddr_in *in, int port)
{
	memset(in, 0, sizeof *in);
	in->sin_family = AF_INET;
	in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	in->sin_port = port;
	return (struct sockaddr *)in;
}

/* The next event, which must be of that type. */
static inline struct rdma_cm_event *expect(struct rdma_event_channel *channel, int type)
{
	struct rdma_cm_event *event;
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	if ((int)event->event != type)
		fprintf(stderr, "%s, status %d, in place of %s\n", rdma_event_str(event->event),
			event->status, rdma_event_str(type));
	CHECK((int)event->event == type);
	return event;
}

static inline void pass(struct rdma_event_channel *channel, int type)
{
	CHECK(rdma_ack_cm_event(expect(channel, type)) == 0);
}

/* Ends a connection from both sides, and their queue pairs. */
static inline void parted(struct rdma_event_channel *here, struct rdma_cm_id *active,
	struct rdma_event_channel *there, struct rdma_cm_id *passive)
{
	CHECK(rdma_disconnect(active) == 0);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(rdma_disconnect(passive) == 0);
	pass(here, RDMA_CM_EVENT_DISCONNECTED);
	rdma_destroy_qp(active);
	rdma_destroy_qp(passive);
}

/* An identifier that listens; its port in *port, big endian. */
static inline struct rdma_cm_id *listener(struct rdma_event_channel *channel, int ps, int *port)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(channel, &id, NULL, ps) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	CHECK(rdma_listen(id, 4) == 0);
	*port = rdma_get_src_port(id);
	CHECK(*port != 0);
	return id;
}

/* An identifier whose route to a port is resolved. */
static inline struct rdma_cm_id *resolved(struct rdma_event_channel *channel, int ps, int port)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(channel, &id, (void *)0x77, ps) == 0);
	CHECK(rdma_resolve_addr(id, NULL, loopback(&in, port), 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(id->verbs && id->pd && id->port_num == 1);
	CHECK(rdma_resolve_route(id, 2000) == 0);
	pass(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(id->route.num_paths == 1 && id->route.path_rec->mtu > 0);
	CHECK(rdma_get_dst_port(id) == port && rdma_get_src_port(id) != 0);
	return id;
}

static inline struct ibv_qp_init_attr queues(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
	init.cap.max_send_wr = init.cap.max_recv_wr = 4;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	return init;
}
