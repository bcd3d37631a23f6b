/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Two queue pairs send one message to and fro over TCP, or in datagrams over UDP.
 *
 *     cc pingpong.c -lqpip -o pingpong
 *     ./pingpong udp:127.0.0.1:4000 7000            waits for the other, and says its address
 *     ./pingpong udp:127.0.0.1:4001 7000 ADDRESS    goes to it
 */
#include <arpa/inet.h>
#include <qpip.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SIZE = 64, TURNS = 1000, DEPTH = 8 };

static char (*memory)[SIZE]; /* receives, and the message */
static qpip_adapter *adapter;
static qpip_cq *cq;
static qpip_qp *qp;
static uint32_t key;

static void check(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "pingpong: %s: %s\n", what, qpip_error());
	exit(1);
}

static void post_receive(uint64_t id)
{
	struct qpip_segment room = {memory[id], SIZE, key};
	struct qpip_receive receive = {.id = id, .segments = &room, .count = 1};

	check(!qpip_post_receive(qp, &receive), "receive");
}

static void post_send(void)
{
	struct qpip_segment message = {memory[DEPTH], SIZE, key};
	struct qpip_send send = {.id = DEPTH, .segments = &message, .count = 1};

	check(!qpip_post_send(qp, &send), "send");
}

/* Polls until a message has come. */
static void await_message(void)
{
	struct qpip_completion done;

	for (;;) {
		int count = qpip_poll(cq, &done, 1);

		check(count >= 0, "poll");
		if (count == 0)
			continue;
		if (done.status != QPIP_OK) {
			fprintf(stderr, "pingpong: %s\n", qpip_status_text(done.status));
			exit(1);
		}
		if (done.operation == QPIP_RECEIVED) {
			post_receive(done.id);
			return;
		}
	}
}

static void await_event(uint32_t kind)
{
	struct qpip_event event;

	while (qpip_event(adapter, &event) == 0)
		check(qpip_wait(cq, 10000) > 0, "no event in ten seconds");
	if (event.kind != kind) {
		fprintf(stderr, "pingpong: the connection failed, event %u\n", event.kind);
		exit(1);
	}
}

static void show_address(void)
{
	struct sockaddr_storage own;
	char text[INET6_ADDRSTRLEN];
	const void *at = &((struct sockaddr_in6 *)&own)->sin6_addr;

	check(!qpip_address(adapter, 0, &own), "address");
	if (own.ss_family == AF_INET)
		at = &((struct sockaddr_in *)&own)->sin_addr;
	printf("waiting at %s\n", inet_ntop(own.ss_family, at, text, sizeof(text)));
	fflush(stdout);
}

static void connect_to(const char *address, uint16_t port)
{
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};

	if (inet_pton(AF_INET, address, &v4.sin_addr) == 1)
		check(!qpip_connect(qp, (struct sockaddr *)&v4, sizeof(v4), 0, QPIP_MESSAGES), "connect");
	else if (inet_pton(AF_INET6, address, &v6.sin6_addr) == 1)
		check(!qpip_connect(qp, (struct sockaddr *)&v6, sizeof(v6), 0, QPIP_MESSAGES), "connect");
	else {
		fprintf(stderr, "pingpong: not an address: %s\n", address);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	struct qpip_qp_init init = {.type = QPIP_TCP};
	struct timespec begun, ended;
	qpip_listener *listener = NULL;
	uint16_t port = argc > 2 ? atoi(argv[2]) : 7000;

	adapter = qpip_open(argc > 1 ? argv[1] : NULL, NULL);
	check(adapter && (cq = qpip_cq_create(adapter, 4 * DEPTH)), "adapter");
	size_t length = (DEPTH + 1) * SIZE;
	check((memory = qpip_allocate(adapter, length)) != NULL, "memory");
	qpip_memory *registered = qpip_register(adapter, memory, length);
	check(registered != NULL, "memory");
	key = qpip_key(registered);
	init.send_cq = init.receive_cq = cq;
	check((qp = qpip_create(adapter, &init)) != NULL, "queue pair");
	for (uint64_t id = 0; id < DEPTH; id++)
		post_receive(id);
	if (argc > 3) {
		connect_to(argv[3], port);
	} else {
		listener = qpip_listen(adapter, port, QPIP_MESSAGES, 1);
		check(listener && !qpip_offer(listener, qp), "listen");
		show_address();
	}
	await_event(QPIP_CONNECTED);
	clock_gettime(CLOCK_MONOTONIC, &begun);
	for (int turn = 0; turn < TURNS; turn++) {
		if (!listener)
			post_send();
		await_message();
		if (listener)
			post_send();
	}
	clock_gettime(CLOCK_MONOTONIC, &ended);
	double us = (ended.tv_sec - begun.tv_sec) * 1e6 + (ended.tv_nsec - begun.tv_nsec) / 1e3;
	printf("%d turns of %d octets: %.1f us each\n", TURNS, SIZE, us / TURNS);
	check(!qpip_finish(qp), "finish");
	await_event(QPIP_PEER_FINISHED);
	await_event(QPIP_CLOSED);
	check(!qpip_destroy(qp) && (!listener || !qpip_unlisten(listener)), "end");
	check(!qpip_cq_destroy(cq) && !qpip_deregister(registered), "end");
	check(!qpip_free(adapter, memory) && !qpip_close(adapter), "end");
	return 0;
}
