/* Peers that do what no library does. */
#define _GNU_SOURCE
#include "common.h"
#include <signal.h>
#include <sys/socket.h>
#include <time.h>

enum { RING = 4096, MAPPINGS = 2 };

/* The greeting of specs/rsocket.md 1: a ring of 4096 bytes and 32 receives, of which there is none, and two mappings. */
static void greet(unsigned char *bytes, void *ring, uint32_t key)
{
	uint32_t words[8] = { 0x52534b31, 1 << 16, (uint64_t)(uintptr_t)ring >> 32,
		(uint32_t)(uintptr_t)ring, key, RING, 32, MAPPINGS };
	for (int i = 0; i < 8; i++)
		words[i] = htonl(words[i]);
	memcpy(bytes, words, sizeof words);
}

static struct linger second = { .l_onoff = 1, .l_linger = 1 };

/* Between these a thread is interrupted again and again. */
static volatile int in_the_way, over;

/* The end of a stream waits as long as the socket lingers, whatever signals come. */
static void *shuts(void *listening)
{
	int rs = raccept(*(int *)listening, NULL, NULL);
	CHECK(rs > 2 && rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &second, sizeof second) == 0);
	CHECK(rsend(rs, "nobody takes it", 16, 0) == 16);
	in_the_way = 1;
	CHECK(rshutdown(rs, SHUT_WR) == 0);
	over = 1;
	CHECK(rclose(rs) == 0);
	return NULL;
}

/* Calls about mappings for which there is no room, and which signals interrupt, leave everything as it was. */
static void *maps(void *listening)
{
	static char memory[128];
	int rs = raccept(*(int *)listening, NULL, NULL);
	CHECK(rs > 2 && rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &second, sizeof second) == 0);
	CHECK(riomap(rs, memory, 64, PROT_WRITE, 0, 0) == 0 && riomap(rs, memory + 64, 64, PROT_WRITE, 0, 64) == 64);
	/* All that was written has arrived. */
	CHECK(riounmap(rs, memory + 64, 64) == 0);
	CHECK(rfcntl(rs, F_SETFL, O_NONBLOCK) == 0);
	while (rsend(rs, "full", 4, 0) == 4)
		;
	CHECK(errno == EAGAIN);
	in_the_way = 1;
	for (int again = 0; again < 3; again++) {
		FAILS(riomap(rs, memory + 64, 64, PROT_WRITE, 0, 64), EINTR);
		FAILS((ssize_t)riounmap(rs, memory, 64), EINTR);
	}
	over = 1;
	CHECK(rclose(rs) == 0);
	return NULL;
}

static void *serve(void *listening)
{
	struct linger linger = { .l_onoff = 1, .l_linger = 1 }, told;
	socklen_t told_len = sizeof told;
	struct timespec begin, end;
	int rs = raccept(*(int *)listening, NULL, NULL);
	CHECK(rs > 2);
	FAILS(rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, 4), EINVAL);
	CHECK(rgetsockopt(rs, SOL_SOCKET, SO_LINGER, &told, &told_len) == 0 && !told.l_onoff);
	CHECK(rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	CHECK(rgetsockopt(rs, SOL_SOCKET, SO_LINGER, &told, &told_len) == 0);
	CHECK(told_len == sizeof told && told.l_onoff == 1 && told.l_linger == 1);
	told_len = 4;
	FAILS(rgetsockopt(rs, SOL_SOCKET, SO_LINGER, &told, &told_len), EINVAL);
	CHECK(rsend(rs, "nobody takes it", 16, 0) == 16);
	clock_gettime(CLOCK_MONOTONIC, &begin);
	CHECK(rclose(rs) == 0);
	clock_gettime(CLOCK_MONOTONIC, &end);
	CHECK(end.tv_sec - begin.tv_sec >= 1);
	return NULL;
}

/* A peer that speaks verbs to an r* socket, which `server` accepts. */
struct peer {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	pthread_t server;
	int listening;
};

static unsigned char ring[RING + MAPPINGS * 32];

static struct peer greeted(void *(*server)(void *), int *listening)
{
	static unsigned char greeting[32];
	struct rdma_conn_param param = { .private_data = greeting, .private_data_len = sizeof greeting,
		.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7 };
	struct peer peer = { .channel = rdma_create_event_channel() };
	struct ibv_qp_init_attr init = queues();
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	int sends = 4;

	peer.listening = *listening = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rsetsockopt(*listening, SOL_RDMA, RDMA_SQSIZE, &sends, sizeof sends) == 0);
	CHECK(rbind(*listening, loopback(&in, 0), sizeof in) == 0 && rlisten(*listening, 5) == 0);
	CHECK(rgetsockname(*listening, (struct sockaddr *)&in, &length) == 0);
	CHECK(pthread_create(&peer.server, NULL, server, listening) == 0);
	peer.id = resolved(peer.channel, RDMA_PS_TCP, in.sin_port);
	CHECK(rdma_create_qp(peer.id, NULL, &init) == 0);
	peer.mr = rdma_reg_write(peer.id, ring, sizeof ring);
	CHECK(peer.mr != NULL);
	greet(greeting, ring, peer.mr->rkey);
	CHECK(rdma_connect(peer.id, &param) == 0);
	pass(peer.channel, RDMA_CM_EVENT_ESTABLISHED);
	return peer;
}

/* The server has closed, and this end hears of it. */
static void left(const struct peer *peer)
{
	pass(peer->channel, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(pthread_join(peer->server, NULL) == 0);
	CHECK(rdma_dereg_mr(peer->mr) == 0);
	rdma_destroy_qp(peer->id);
	CHECK(rdma_destroy_id(peer->id) == 0);
	rdma_destroy_event_channel(peer->channel);
	CHECK(rclose(peer->listening) == 0);
}

/* A peer that takes nothing does not keep a program in rclose. */
static void takes_nothing(void)
{
	int listening;
	struct peer peer = greeted(serve, &listening);
	left(&peer);
}

static void interrupts(int number)
{
	(void)number;
}

static void interrupted(void *(*server)(void *))
{
	struct sigaction action = { .sa_handler = interrupts };
	int listening;
	struct peer peer;
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	in_the_way = over = 0;
	peer = greeted(server, &listening);
	/* One that comes between two sleeps interrupts none. */
	for (; !over; usleep(10000))
		if (in_the_way)
			CHECK(pthread_kill(peer.server, SIGUSR1) == 0);
	left(&peer);
}

static void *accepts_and_leaves(void *listening)
{
	static unsigned char greeting[32];
	struct rdma_cm_id *id;
	struct rdma_conn_param param = { .private_data = greeting, .private_data_len = sizeof greeting };
	struct ibv_qp_init_attr init = queues();
	struct rdma_cm_event *event = expect(((struct rdma_cm_id *)listening)->channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	id = event->id;
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_create_qp(id, NULL, &init) == 0);
	greet(greeting, ring, 1);
	CHECK(rdma_accept(id, &param) == 0 && rdma_disconnect(id) == 0);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
	return NULL;
}

/* A server that accepts and is gone before the client has looked has accepted. */
static void leaves_at_once(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listening;
	struct sockaddr_in in;
	pthread_t server;
	char byte;
	int port, rs;

	listening = listener(channel, RDMA_PS_TCP, &port);
	for (int i = 0; i < 50; i++) {
		CHECK((rs = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
		CHECK(pthread_create(&server, NULL, accepts_and_leaves, listening) == 0);
		CHECK(rconnect(rs, loopback(&in, port), sizeof in) == 0);
		FAILS(rrecv(rs, &byte, 1, 0), ECONNRESET);
		CHECK(pthread_join(server, NULL) == 0 && rclose(rs) == 0);
	}
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
}

static void *receive_none(void *listening)
{
	char byte;
	int rs = raccept(*(int *)listening, NULL, NULL);
	CHECK(rs > 2);
	FAILS(rrecv(rs, &byte, 1, 0), EPROTO);
	CHECK(rclose(rs) == 0);
	return NULL;
}

/* A message of an RNIC's peer has four bytes, no less. */
static void no_message(void)
{
	int listening;
	struct peer peer = greeted(receive_none, &listening);
	CHECK(peer.id->verbs->device->transport_type == IBV_TRANSPORT_IWARP);
	CHECK(rdma_post_send(peer.id, NULL, ring, 3, peer.mr, 0) == 0);
	left(&peer);
}

/* An MPA request (RFC 5044 7.1.1) may have 512 bytes of private data; a program is told of 255 at most. */
static void says_much(int amount, int told)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	unsigned char frame[20 + 512] = "MPA ID Req Frame";
	struct rdma_cm_event *event;
	struct rdma_cm_id *listening, *child;
	struct sockaddr_in in;
	int port, fd = socket(AF_INET, SOCK_STREAM, 0);

	listening = listener(channel, RDMA_PS_TCP, &port);
	frame[17] = 1;
	frame[18] = amount >> 8;
	frame[19] = amount & 255;
	for (int i = 0; i < amount; i++)
		frame[20 + i] = i * 7;
	CHECK(connect(fd, loopback(&in, port), sizeof in) == 0);
	CHECK(send(fd, frame, 20 + amount, 0) == 20 + amount);
	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->param.conn.private_data_len == told);
	CHECK(!event->param.conn.private_data == !told);
	CHECK(told == 0 || memcmp(event->param.conn.private_data, frame + 20, told) == 0);
	child = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_destroy_id(child) == 0 && rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
	close(fd);
}

/* Returns when whatever had happened to other sockets before was seen: that of one connection is seen before that of the
   next, which comes later. */
static void settle(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listening;
	int port;

	listening = listener(channel, RDMA_PS_TCP, &port);
	for (int i = 0; i < 2; i++) {
		unsigned char frame[20] = "MPA ID Req Frame";
		int fd = socket(AF_INET, SOCK_STREAM, 0);
		struct rdma_cm_event *event;
		struct rdma_cm_id *child;
		struct sockaddr_in in;

		frame[17] = 1;
		CHECK(connect(fd, loopback(&in, port), sizeof in) == 0 && send(fd, frame, 20, 0) == 20);
		event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		child = event->id;
		CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(child) == 0 && close(fd) == 0);
	}
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
}

/* Who has seen that a request is there gets it, though its sender has taken it back; then it can't be accepted. */
static void takes_back(int before_it_is_taken)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	unsigned char frame[20] = "MPA ID Req Frame";
	struct linger reset = { .l_onoff = 1 };
	struct pollfd fds = { .fd = channel->fd, .events = POLLIN };
	struct rdma_conn_param param = { .qp_num = 1 };
	struct rdma_cm_event *event = NULL;
	struct rdma_cm_id *listening, *child;
	struct sockaddr_in in;
	int port, fd = socket(AF_INET, SOCK_STREAM, 0);

	listening = listener(channel, RDMA_PS_TCP, &port);
	frame[17] = 1;
	CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	CHECK(connect(fd, loopback(&in, port), sizeof in) == 0 && send(fd, frame, 20, 0) == 20);
	CHECK(poll(&fds, 1, 5000) == 1);
	if (!before_it_is_taken)
		event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset) == 0 && close(fd) == 0);
	settle();
	CHECK(poll(&fds, 1, 0) == before_it_is_taken);
	if (before_it_is_taken)
		event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	child = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	FAILS(rdma_accept(child, &param), EINVAL);
	FAILS(rdma_get_cm_event(channel, &event), EAGAIN);
	CHECK(rdma_destroy_id(child) == 0 && rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
}

static void *accepts_and_goes(void *listening)
{
	/* A REP of specs/quipu-cm.md 3 in an MPA reply. */
	static const unsigned char rep[] = { 0x51, 0x55, 0x43, 0x4d, 1, 2, 0, 0, 1, 6, 2, 0, 0, 0x12, 0x34, 0x56,
		0, 0xab, 0xcd, 0xef, 16, 16, 7, 7, 5, 0, 18, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1 };
	unsigned char frame[20 + sizeof rep] = "MPA ID Rep Frame", request[512];
	int fd = accept(*(int *)listening, NULL, NULL);
	CHECK(fd >= 0 && recv(fd, request, sizeof request, 0) > 20);
	frame[16] = 0x40;
	frame[17] = 1;
	frame[19] = sizeof rep;
	memcpy(frame + 20, rep, sizeof rep);
	CHECK(send(fd, frame, sizeof frame, 0) == sizeof frame && close(fd) == 0);
	return NULL;
}

/* A peer that accepts and is gone before the program hears of it: there is one event. */
static void gone_again(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = { .retry_count = 7 };
	struct ibv_qp_init_attr init = queues();
	struct pollfd fds = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	int listening = socket(AF_INET, SOCK_STREAM, 0);
	pthread_t thread;

	CHECK(bind(listening, loopback(&in, 0), sizeof in) == 0 && listen(listening, 5) == 0);
	CHECK(getsockname(listening, (struct sockaddr *)&in, &length) == 0);
	CHECK(pthread_create(&thread, NULL, accepts_and_goes, &listening) == 0);
	id = resolved(channel, RDMA_PS_TCP, in.sin_port);
	CHECK(rdma_create_qp(id, NULL, &init) == 0 && rdma_connect(id, &param) == 0);
	CHECK(pthread_join(thread, NULL) == 0 && poll(&fds, 1, 5000) == 1);
	settle();
	event = expect(channel, RDMA_CM_EVENT_CONNECT_ERROR);
	CHECK(event->status == -ECONNRESET && rdma_ack_cm_event(event) == 0);
	CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rdma_get_cm_event(channel, &event), EAGAIN);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0 && close(listening) == 0);
	rdma_destroy_event_channel(channel);
}

static void *wait_in(void *channel)
{
	struct rdma_cm_event *event;
	rdma_get_cm_event(channel, &event);
	CHECK(!"a thread that comes too late waits, as one that came in time does");
	return NULL;
}

/* A thread takes an event, and is about to wait for the next one when another thread destroys the channel. */
static void waits_too_late(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_event *event;
	struct timespec soon;
	pthread_t thread;

	rdma_destroy_event_channel(channel);
	/* Who has destroyed it himself knows. */
	FAILS(rdma_get_cm_event(channel, &event), EINVAL);
	CHECK(pthread_create(&thread, NULL, wait_in, channel) == 0);
	clock_gettime(CLOCK_REALTIME, &soon);
	soon.tv_nsec += 300000000;
	soon.tv_sec += soon.tv_nsec / 1000000000;
	soon.tv_nsec %= 1000000000;
	CHECK(pthread_timedjoin_np(thread, NULL, &soon) == ETIMEDOUT);
}

int main(void)
{
	/* What hangs fails. */
	alarm(60);
	if (strcmp(getenv("QUIPU_DEVICES"), "quipu_iw0") == 0) {
		no_message();
		return 0;
	}
	takes_nothing();
	interrupted(shuts);
	interrupted(maps);
	leaves_at_once();
	says_much(0, 0);
	says_much(255, 255);
	says_much(256, 255);
	says_much(512, 255);
	takes_back(1);
	takes_back(0);
	gone_again();
	waits_too_late();
	return 0;
}
