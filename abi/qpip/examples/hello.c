/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * An HTTP server without a socket: it answers each request with a line of text, from queue pairs over TCP.
 *
 *     cc hello.c -lqpip -o hello
 *     ./hello tap:qp0 10.9.0.2/24 80          then, on the same machine:   curl http://10.9.0.2/
 */
#include <qpip.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POOL = 16, REQUEST = 4096 };

static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 24\r\n"
                             "Connection: close\r\n\r\nHello from queue pairs.\n";

static qpip_adapter *adapter;
static qpip_cq *cq;
static qpip_listener *listener;
static char (*memory)[REQUEST]; /* the adapter writes requests here; the last is the answer */
static uint32_t key;
static qpip_qp *pool[POOL];

static void die(const char *what)
{
	fprintf(stderr, "hello: %s: %s\n", what, qpip_error());
	exit(1);
}

static void prepare_memory(void)
{
	size_t length = (POOL + 1) * REQUEST;
	qpip_memory *registered;

	if (!(memory = qpip_allocate(adapter, length)) || !(registered = qpip_register(adapter, memory, length)))
		die("memory");
	key = qpip_key(registered);
	memcpy(memory[POOL], answer, sizeof(answer));
}

/* A new queue pair in a place of the pool, that waits for the next connection. */
static void renew(size_t place)
{
	struct qpip_qp_init init = {.type = QPIP_TCP, .send_cq = cq, .receive_cq = cq,
	                            .context = (void *)place};
	struct qpip_segment room = {memory[place], REQUEST, key};
	struct qpip_receive receive = {.id = place, .segments = &room, .count = 1};

	if (pool[place] && qpip_destroy(pool[place]))
		die("queue pair");
	pool[place] = qpip_create(adapter, &init);
	if (!pool[place] || qpip_post_receive(pool[place], &receive) || qpip_offer(listener, pool[place]))
		die("queue pair");
}

static void handle(const struct qpip_completion *done)
{
	struct qpip_segment text = {memory[POOL], sizeof(answer) - 1, key};
	struct qpip_send send = {.id = done->id, .segments = &text, .count = 1};

	if (done->status != QPIP_OK || done->operation != QPIP_RECEIVED || done->length == 0)
		return; /* its connection is over or ends: the event says so */
	/* One push is taken for one request: that is what curl sends. */
	if (qpip_post_send(pool[done->id], &send) || qpip_finish(pool[done->id]))
		qpip_abort(pool[done->id]);
}

int main(int argc, char **argv)
{
	struct qpip_completion done[POOL];
	struct qpip_event event;
	int count;

	adapter = qpip_open(argc > 1 ? argv[1] : NULL, argc > 2 ? argv[2] : NULL);
	if (!adapter || !(cq = qpip_cq_create(adapter, 4 * POOL)))
		die("adapter");
	listener = qpip_listen(adapter, argc > 3 ? atoi(argv[3]) : 80, QPIP_STREAM, POOL);
	if (!listener)
		die("port");
	prepare_memory();
	for (size_t place = 0; place < POOL; place++)
		renew(place);
	printf("serving port %u\n", qpip_listener_port(listener));
	fflush(stdout);
	for (;;) {
		if (qpip_wait(cq, -1) < 0)
			die("wait");
		while ((count = qpip_poll(cq, done, POOL)) > 0)
			for (int i = 0; i < count; i++)
				handle(&done[i]);
		while (qpip_event(adapter, &event) == 1)
			if (event.kind >= QPIP_CLOSED)
				renew((size_t)event.context);
	}
}
