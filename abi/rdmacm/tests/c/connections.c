/* Connections between two channels of one process. */
#include "common.h"

#include <sys/epoll.h>

static struct rdma_event_channel *here, *there;

static void *acknowledge_late(void *event)
{
	usleep(50000);
	CHECK(rdma_ack_cm_event(event) == 0);
	return NULL;
}

static struct rdma_cm_id *request(const char *data)
{
	struct rdma_cm_event *event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = event->id;
	CHECK(child != event->listen_id && child->verbs && child->channel == there);
	CHECK(child->context == event->listen_id->context);
	CHECK(strcmp(event->param.conn.private_data, data) == 0);
	CHECK(event->param.conn.private_data_len == 56);
	CHECK(rdma_ack_cm_event(event) == 0);
	return child;
}

static void both_ways(int port)
{
	struct rdma_conn_param param = { .private_data = "hello", .private_data_len = 6,
		.responder_resources = 3, .initiator_depth = 2, .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_conn_param answer = { .private_data = "welcome", .private_data_len = 8,
		.responder_resources = RDMA_MAX_RESP_RES, .initiator_depth = RDMA_MAX_INIT_DEPTH };
	static const char more[256];
	struct ibv_qp_init_attr init = queues();
	struct ibv_qp_attr attr;
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	struct rdma_cm_event *event;
	struct rdma_event_channel *other;
	pthread_t thread;

	CHECK(rdma_create_qp(active, NULL, &init) == 0);
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("hello");
	init = queues();
	CHECK(rdma_create_qp(passive, NULL, &init) == 0);
	/* More than there is room for is refused, and nothing has changed. */
	answer.private_data = more;
	answer.private_data_len = 197;
	FAILS(rdma_accept(passive, &answer), EINVAL);
	CHECK(ibv_query_qp(passive->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_INIT);
	answer.private_data = "welcome";
	answer.private_data_len = 8;
	CHECK(rdma_accept(passive, &answer) == 0);
	event = expect(here, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == active && active->context == (void *)0x77);
	CHECK(strcmp(event->param.conn.private_data, "welcome") == 0);
	CHECK(event->param.conn.qp_num == passive->qp->qp_num);
	CHECK(rdma_ack_cm_event(event) == 0);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(ibv_query_qp(active->qp, &attr, IBV_QP_STATE, &init) == 0);
	CHECK(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == passive->qp->qp_num);
	CHECK(attr.max_dest_rd_atomic == 3 && attr.max_rd_atomic == 2);
	CHECK(ibv_query_qp(passive->qp, &attr, IBV_QP_STATE, &init) == 0);
	CHECK(attr.max_dest_rd_atomic == 2 && attr.max_rd_atomic == 3);

	/* An identifier and its events move to another channel. */
	other = rdma_create_event_channel();
	CHECK(rdma_migrate_id(passive, other) == 0 && passive->channel == other);
	CHECK(rdma_disconnect(active) == 0);
	pass(other, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(ibv_query_qp(active->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
	CHECK(rdma_disconnect(active) == 0 && rdma_disconnect(passive) == 0 && rdma_disconnect(passive) == 0);
	/* Destruction waits for the acknowledgement. */
	event = expect(here, RDMA_CM_EVENT_DISCONNECTED);
	rdma_destroy_qp(active);
	CHECK(pthread_create(&thread, NULL, acknowledge_late, event) == 0);
	CHECK(rdma_destroy_id(active) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	rdma_destroy_qp(passive);
	CHECK(rdma_destroy_id(passive) == 0);
	rdma_destroy_event_channel(other);
}

/* The reply says how many reads go either way, whatever was asked for. */
static void granted(int port)
{
	static const struct { int asked[2], answered[2], holds[2]; } cases[] = {
		{ { 16, 16 }, { 1, 2 }, { 2, 1 } },
		{ { RDMA_MAX_RESP_RES, RDMA_MAX_INIT_DEPTH }, { 3, 1 }, { 1, 3 } },
		{ { 0, 1 }, { 1, 1 }, { 1, 1 } },
	};
	for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
		struct rdma_conn_param param = { .private_data = "reads", .private_data_len = 6,
			.responder_resources = cases[n].asked[0], .initiator_depth = cases[n].asked[1] };
		struct rdma_conn_param answer = { .responder_resources = cases[n].answered[0],
			.initiator_depth = cases[n].answered[1] };
		struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
		struct ibv_qp_init_attr init = queues();
		struct rdma_cm_event *event;
		struct ibv_qp_attr attr;
		CHECK(rdma_create_qp(active, NULL, &init) == 0);
		CHECK(rdma_connect(active, &param) == 0);
		passive = request("reads");
		init = queues();
		CHECK(rdma_create_qp(passive, NULL, &init) == 0 && rdma_accept(passive, &answer) == 0);
		event = expect(here, RDMA_CM_EVENT_ESTABLISHED);
		CHECK(event->param.conn.initiator_depth == cases[n].answered[0]);
		CHECK(event->param.conn.responder_resources == cases[n].answered[1]);
		CHECK(rdma_ack_cm_event(event) == 0);
		pass(there, RDMA_CM_EVENT_ESTABLISHED);
		CHECK(ibv_query_qp(active->qp, &attr, IBV_QP_STATE, &init) == 0);
		CHECK(attr.max_dest_rd_atomic == cases[n].holds[0] && attr.max_rd_atomic == cases[n].holds[1]);
		CHECK(ibv_query_qp(passive->qp, &attr, IBV_QP_STATE, &init) == 0);
		CHECK(attr.max_dest_rd_atomic == cases[n].answered[0]);
		CHECK(attr.max_rd_atomic == cases[n].answered[1]);
		rdma_destroy_qp(active);
		CHECK(rdma_destroy_id(active) == 0);
		pass(there, RDMA_CM_EVENT_DISCONNECTED);
		rdma_destroy_qp(passive);
		CHECK(rdma_destroy_id(passive) == 0);
	}
}

static void refused(int port)
{
	struct rdma_conn_param param = { .private_data = "please", .private_data_len = 7, .qp_num = 5 };
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	struct rdma_cm_event *event;
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("please");
	CHECK(rdma_reject(passive, "no", 3) == 0);
	CHECK(rdma_destroy_id(passive) == 0);
	event = expect(here, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 28 && strcmp(event->param.conn.private_data, "no") == 0);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(active) == 0);

	/* Nobody listens there. */
	active = resolved(here, RDMA_PS_TCP, htons(1));
	CHECK(rdma_connect(active, &param) == 0);
	event = expect(here, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 8);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(active) == 0);
}

/* The program's own queue pair: it hears of the answer and completes the connection. */
static void established(int port)
{
	struct rdma_conn_param param = { .private_data = "mine", .private_data_len = 5, .qp_num = 77 };
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("mine");
	/* Without either there is no queue pair that the peer could be told. */
	FAILS(rdma_accept(passive, NULL), EINVAL);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_CONNECT_RESPONSE);
	CHECK(rdma_establish(active) == 0);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	/* The end of one side is told to the other one. */
	CHECK(rdma_destroy_id(active) == 0);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(rdma_destroy_id(passive) == 0);
}

/* What vendors' options programs say, with queue pairs of their own, reaches the other one. */
static void extensions(int port)
{
	struct rdma_conn_param param = { .private_data = "ece", .private_data_len = 4, .qp_num = 1 };
	struct ibv_ece ours = { .vendor_id = 0x1234567, .options = 5 }, theirs = { .vendor_id = 8, .options = 6 };
	struct ibv_ece said;
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	struct rdma_cm_event *event;
	CHECK(rdma_set_local_ece(active, &ours) == 0);
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("ece");
	CHECK(rdma_get_remote_ece(passive, &said) == 0 && memcmp(&said, &ours, sizeof said) == 0);
	CHECK(rdma_set_local_ece(passive, &theirs) == 0);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_CONNECT_RESPONSE);
	CHECK(rdma_get_remote_ece(active, &said) == 0 && memcmp(&said, &theirs, sizeof said) == 0);
	CHECK(rdma_establish(active) == 0);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_destroy_id(active) == 0);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(rdma_destroy_id(passive) == 0);

	active = resolved(here, RDMA_PS_TCP, port);
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("ece");
	CHECK(rdma_get_remote_ece(passive, &said) == 0 && said.vendor_id == 0 && said.options == 0);
	CHECK(rdma_reject_ece(passive, "no", 3) == 0);
	event = expect(here, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 35 && strcmp(event->param.conn.private_data, "no") == 0);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_destroy_id(active) == 0 && rdma_destroy_id(passive) == 0);
}

/* The queue pairs of identifiers have options of their own vendor, none of which are known. */
static void options_of_queue_pairs(int port)
{
	struct rdma_conn_param param = { .private_data = "qp", .private_data_len = 3 };
	struct ibv_qp_init_attr init = queues();
	struct ibv_ece said = { 0 }, foreign = { .vendor_id = 0x2c9 }, none = { 0 };
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	CHECK(rdma_create_qp(active, NULL, &init) == 0);
	CHECK(ibv_query_ece(active->qp, &said) == 0 && said.vendor_id != 0 && said.options == 0);
	CHECK(ibv_query_ece(active->qp, NULL) == EINVAL && ibv_set_ece(active->qp, NULL) == EINVAL);
	CHECK(ibv_set_ece(active->qp, &foreign) == EINVAL && ibv_set_ece(active->qp, &none) == EOPNOTSUPP);
	said.comp_mask = 1;
	CHECK(ibv_set_ece(active->qp, &said) == EINVAL);
	said.comp_mask = 0;
	said.options = 77;
	CHECK(ibv_set_ece(active->qp, &said) == 0 && said.options == 0);
	FAILS(rdma_set_local_ece(active, &said), EINVAL);
	FAILS(rdma_get_remote_ece(active, &said), EINVAL);
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("qp");
	/* Before it has a queue pair of its own. */
	CHECK(rdma_get_remote_ece(passive, &none) == 0 && none.vendor_id == said.vendor_id && none.options == 0);
	init = queues();
	CHECK(rdma_create_qp(passive, NULL, &init) == 0);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	rdma_destroy_qp(active);
	CHECK(rdma_destroy_id(active) == 0);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	rdma_destroy_qp(passive);
	CHECK(rdma_destroy_id(passive) == 0);
}

/* A program that asks without waiting hears of the end after a last chance to see what came before it. */
static void last_words(int port, int looks)
{
	struct rdma_conn_param param = { .private_data = "words", .private_data_len = 6 };
	struct ibv_qp_init_attr init = queues();
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	struct pollfd fds = { .fd = there->fd, .events = POLLIN };
	struct epoll_event wish = { .events = EPOLLIN | EPOLLET }, ready;
	struct ibv_recv_wr receive = { .wr_id = 5 }, *bad;
	struct rdma_cm_event *event;
	struct ibv_wc wc;
	int flags = fcntl(there->fd, F_GETFL), edges = epoll_create1(0);

	CHECK(rdma_create_qp(active, NULL, &init) == 0);
	CHECK(rdma_connect(active, &param) == 0);
	passive = request("words");
	init = queues();
	CHECK(rdma_create_qp(passive, NULL, &init) == 0);
	CHECK(ibv_post_recv(passive->qp, &receive, &bad) == 0);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_post_send(active, NULL, NULL, 0, NULL, 0) == 0);
	CHECK(rdma_get_send_comp(active, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(epoll_ctl(edges, EPOLL_CTL_ADD, there->fd, &wish) == 0);
	CHECK(rdma_disconnect(active) == 0);

	CHECK(fcntl(there->fd, F_SETFL, flags | O_NONBLOCK) == 0);
	CHECK(epoll_wait(edges, &ready, 1, 5000) == 1);
	FAILS(rdma_get_cm_event(there, &event), EAGAIN);
	CHECK(poll(&fds, 1, 0) == 1);
	/* Nor does a program sleep on that waits for edges. */
	CHECK(epoll_wait(edges, &ready, 1, 0) == 1);
	CHECK(close(edges) == 0);
	if (looks)
		CHECK(ibv_poll_cq(passive->recv_cq, 1, &wc) == 1 && wc.wr_id == 5);
	/* Once is enough, whether the program has looked or not. */
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(fcntl(there->fd, F_SETFL, flags) == 0);
	CHECK(rdma_disconnect(passive) == 0);
	pass(here, RDMA_CM_EVENT_DISCONNECTED);
	rdma_destroy_qp(active);
	CHECK(rdma_destroy_id(active) == 0);
	rdma_destroy_qp(passive);
	CHECK(rdma_destroy_id(passive) == 0);
}

/* A request that nobody takes goes with its listener. */
static void not_taken(void)
{
	struct rdma_conn_param param = { .qp_num = 1 };
	int port;
	struct rdma_cm_id *id = listener(there, RDMA_PS_TCP, &port);
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port);
	struct rdma_cm_event *event;
	struct pollfd fds = { .fd = there->fd, .events = POLLIN };
	CHECK(rdma_connect(active, &param) == 0);
	CHECK(poll(&fds, 1, 10000) == 1);
	CHECK(rdma_destroy_id(id) == 0);
	CHECK(poll(&fds, 1, 0) == 0);
	CHECK(rdma_get_cm_event(here, &event) == 0);
	CHECK(event->event == RDMA_CM_EVENT_REJECTED || event->event == RDMA_CM_EVENT_UNREACHABLE ||
	      event->event == RDMA_CM_EVENT_CONNECT_ERROR);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(active) == 0);
}

/* Requests that nobody has taken go with their listener to another channel. */
static void moved_with_the_listener(void)
{
	struct rdma_conn_param param = { .private_data = "mine", .private_data_len = 5, .qp_num = 77 };
	struct rdma_event_channel *other = rdma_create_event_channel();
	struct pollfd fds[2] = { { .fd = there->fd, .events = POLLIN }, { .fd = other->fd, .events = POLLIN } };
	struct rdma_cm_id *id, *active, *passive;
	struct rdma_cm_event *event;
	int port;

	id = listener(there, RDMA_PS_TCP, &port);
	active = resolved(here, RDMA_PS_TCP, port);
	CHECK(rdma_connect(active, &param) == 0 && poll(fds, 1, 10000) == 1);
	CHECK(rdma_migrate_id(id, other) == 0 && poll(fds, 1, 0) == 0 && poll(fds + 1, 1, 0) == 1);
	event = expect(other, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	CHECK(event->listen_id == id && passive->channel == other && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_CONNECT_RESPONSE);
	CHECK(rdma_establish(active) == 0);
	pass(other, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_destroy_id(active) == 0);
	pass(other, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(rdma_destroy_id(passive) == 0);

	/* To none: a listener that waits for them. */
	active = resolved(here, RDMA_PS_TCP, port);
	CHECK(rdma_connect(active, &param) == 0 && poll(fds + 1, 1, 10000) == 1);
	CHECK(rdma_migrate_id(id, NULL) == 0 && rdma_get_request(id, &passive) == 0);
	CHECK(rdma_reject(passive, NULL, 0) == 0 && rdma_destroy_id(passive) == 0);
	pass(here, RDMA_CM_EVENT_REJECTED);
	CHECK(rdma_destroy_id(active) == 0 && rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(other);
}

/* Moves an identifier in a thread of its own, which waits for what is not acknowledged. */
static struct {
	struct rdma_cm_id *id;
	struct rdma_event_channel *to;
	volatile int done;
} moving;

static void *moves(void *unused)
{
	(void)unused;
	CHECK(rdma_migrate_id(moving.id, moving.to) == 0);
	moving.done = 1;
	return NULL;
}

static pthread_t begin_to_move(struct rdma_cm_id *id, struct rdma_event_channel *to)
{
	pthread_t thread;
	moving.id = id;
	moving.to = to;
	moving.done = 0;
	CHECK(pthread_create(&thread, NULL, moves, NULL) == 0);
	return thread;
}

/* Requests that come while rdma_migrate_id waits belong where the listener goes. */
static void a_listener_that_is_being_moved(void)
{
	struct rdma_conn_param param = { .qp_num = 77 };
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct rdma_event_channel *other = rdma_create_event_channel();
	struct rdma_cm_id *id, *active[2], *passive;
	struct rdma_cm_event *event;
	struct pollfd fd = { .events = POLLIN };
	pthread_t thread;

	CHECK(rdma_getaddrinfo("127.0.0.1", "0", &hints, &res) == 0);
	CHECK(rdma_create_ep(&id, res, NULL, NULL) == 0 && rdma_listen(id, 0) == 0);
	rdma_freeaddrinfo(res);
	active[0] = resolved(here, RDMA_PS_TCP, rdma_get_src_port(id));
	CHECK(rdma_connect(active[0], &param) == 0 && rdma_get_request(id, &passive) == 0);
	active[1] = resolved(here, RDMA_PS_TCP, rdma_get_src_port(id));
	fd.fd = id->channel->fd;
	CHECK(rdma_connect(active[1], &param) == 0 && poll(&fd, 1, 30000) == 1);
	thread = begin_to_move(id, other);
	event = expect(other, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->listen_id == id && id->channel == other && event->id->channel == other);
	CHECK(rdma_destroy_id(event->id) == 0);
	/* The first request is the listener's event. */
	CHECK(!moving.done);
	CHECK(rdma_ack_cm_event(event) == 0);
	rdma_destroy_ep(passive);
	CHECK(pthread_join(thread, NULL) == 0);
	pass(here, RDMA_CM_EVENT_REJECTED);
	pass(here, RDMA_CM_EVENT_REJECTED);
	CHECK(rdma_destroy_id(active[0]) == 0 && rdma_destroy_id(active[1]) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(other);
}

/* The events of groups are the identifier's, too. */
static void a_member_that_is_being_moved(void)
{
	struct rdma_event_channel *other = rdma_create_event_channel();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct sockaddr_in in;
	struct pollfd fd = { .events = POLLIN };
	pthread_t thread;

	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	in.sin_addr.s_addr = inet_addr("239.1.2.3");
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&in, NULL) == 0);
	event = expect(here, RDMA_CM_EVENT_MULTICAST_JOIN);
	in.sin_addr.s_addr = inet_addr("239.1.2.4");
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&in, NULL) == 0);
	thread = begin_to_move(id, other);
	fd.fd = other->fd;
	CHECK(poll(&fd, 1, 30000) == 1);
	usleep(20000);
	CHECK(!moving.done && rdma_ack_cm_event(event) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	pass(other, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(other);
}

/* What is said in refusing to tell where datagrams go arrives. */
static void refused_datagrams(void)
{
	/* What is of connections only may say anything. */
	struct rdma_conn_param param = { .private_data = "where", .private_data_len = 6,
		.responder_resources = 0xa5, .initiator_depth = 0xa5 };
	struct rdma_cm_id *id, *active, *passive;
	struct rdma_cm_event *event;
	int port;

	id = listener(there, RDMA_PS_UDP, &port);
	active = resolved(here, RDMA_PS_UDP, port);
	CHECK(rdma_connect(active, &param) == 0);
	event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	CHECK(strcmp(event->param.ud.private_data, "where") == 0 && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_reject(passive, "too busy", 9) == 0);
	event = expect(here, RDMA_CM_EVENT_UNREACHABLE);
	CHECK(event->status != 0 && event->param.ud.private_data_len >= 9);
	CHECK(strcmp(event->param.ud.private_data, "too busy") == 0 && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_destroy_id(passive) == 0 && rdma_destroy_id(active) == 0 && rdma_destroy_id(id) == 0);
}

int main(void)
{
	struct rdma_cm_id *id;
	int port;
	/* What hangs fails. */
	alarm(120);
	here = rdma_create_event_channel();
	there = rdma_create_event_channel();
	id = listener(there, RDMA_PS_TCP, &port);
	both_ways(port);
	granted(port);
	refused(port);
	established(port);
	extensions(port);
	options_of_queue_pairs(port);
	last_words(port, 1);
	last_words(port, 0);
	not_taken();
	moved_with_the_listener();
	a_listener_that_is_being_moved();
	a_member_that_is_being_moved();
	refused_datagrams();
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
	return 0;
}
