/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A program that ends with a connection: its peer, which is this one's parent, is to hear of it.
 *
 *     ./exit return|exit|handler|signal|fork|cancel
 */
#include <pthread.h>
#include <qpip.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SHORT = 10, LONG = 200 };

static char bytes[4096];
static qpip_adapter *adapter;
static qpip_cq *cq;
static qpip_qp *qp;

static void check(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "%s: %s\n", what, qpip_error());
	_exit(1);
}

static void open_adapter(void)
{
	struct qpip_qp_init init = {.type = QPIP_TCP};
	struct qpip_segment room = {bytes, sizeof bytes / 2, 0};
	struct qpip_receive receive = {.id = 1, .segments = &room, .count = 1};
	qpip_memory *memory;

	adapter = qpip_open("udp:127.0.0.1:0", NULL);
	check(adapter != NULL, "open");
	cq = qpip_cq_create(adapter, 16);
	memory = qpip_register(adapter, bytes, sizeof bytes);
	check(cq && memory, "queue and memory");
	init.send_cq = init.receive_cq = cq;
	qp = qpip_create(adapter, &init);
	check(qp != NULL, "queue pair");
	room.key = qpip_key(memory);
	check(!qpip_post_receive(qp, &receive), "receive");
}

/* The next event within some tenths of a second; 0 if there is none. */
static unsigned next_event(int tenths)
{
	struct qpip_event event;
	struct qpip_completion done;

	for (; tenths > 0; tenths--) {
		if (qpip_event(adapter, &event) == 1)
			return event.kind;
		while (qpip_poll(cq, &done, 1) == 1)
			continue;
		qpip_wait(cq, 100);
	}
	return 0;
}

static void leave(int number)
{
	(void)number;
	exit(0);
}

static void leave_at_exit(void)
{
	/* The connection is still there for the program's own handlers. */
	check(!qpip_ends(qp, NULL, NULL), "ends");
}

static void *wait_for_nothing(void *unused)
{
	(void)unused;
	qpip_wait(cq, -1);
	return NULL;
}

/* The end that goes. */
static int client(const char *how, int from)
{
	struct sockaddr_storage peer;
	struct qpip_completion done;

	check(read(from, &peer, sizeof peer) == sizeof peer, "address");
	open_adapter();
	check(!qpip_connect(qp, (struct sockaddr *)&peer, sizeof peer, 0, QPIP_MESSAGES), "connect");
	check(next_event(LONG) == QPIP_CONNECTED, "connected");
	if (!strcmp(how, "exit"))
		exit(0);
	if (!strcmp(how, "handler"))
		atexit(leave_at_exit);
	if (!strcmp(how, "signal")) {
		/* Mostly in the middle of a call, which cannot be ended then: the peer may hear nothing. */
		signal(SIGALRM, leave);
		ualarm(20000, 0);
		for (;;)
			qpip_poll(cq, &done, 1);
	}
	if (!strcmp(how, "fork")) {
		/* A child of it says nothing to the peer. */
		pid_t child = fork();

		if (child == 0)
			exit(0);
		waitpid(child, NULL, 0);
		check(next_event(2 * SHORT) == 0, "no event");
	}
	if (!strcmp(how, "cancel")) {
		/* Only a thread of it ends at first, in the middle of a wait. */
		pthread_t waits;
		void *result;

		check(!pthread_create(&waits, NULL, wait_for_nothing, NULL), "thread");
		usleep(50000);
		check(!pthread_cancel(waits) && !pthread_join(waits, &result), "cancel");
		check(result == PTHREAD_CANCELED && !qpip_ends(qp, NULL, NULL), "cancelled");
	}
	return 0;
}

int main(int count, char **words)
{
	struct sockaddr_storage own;
	qpip_listener *listener;
	int ends[2], status = -1;
	pid_t child;

	if (count < 2 || pipe(ends))
		return 2;
	child = fork();
	if (child == 0)
		return client(words[1], ends[0]);
	open_adapter();
	listener = qpip_listen(adapter, 0, QPIP_MESSAGES, 1);
	check(listener && !qpip_offer(listener, qp) && !qpip_address(adapter, 0, &own), "listen");
	/* The port stands at the same place in an address of either family. */
	((unsigned char *)&own)[2] = qpip_listener_port(listener) >> 8;
	((unsigned char *)&own)[3] = qpip_listener_port(listener) & 0xff;
	check(write(ends[1], &own, sizeof own) == sizeof own, "address");
	check(next_event(LONG) == QPIP_CONNECTED, "connected");
	if (!strcmp(words[1], "fork"))
		check(next_event(SHORT) == 0, "no event while the child's child ends");
	if (strcmp(words[1], "signal"))
		check(next_event(LONG) == QPIP_RESET, "reset");
	waitpid(child, &status, 0);
	return status != 0;
}
