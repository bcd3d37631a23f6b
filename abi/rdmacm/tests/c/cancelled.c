/* Threads that are cancelled while they wait for events (pthread_cancel(3)), as those of libiscsi are. */
#include "common.h"

struct waiter {
	struct rdma_event_channel *channel;
	struct ibv_comp_channel *completions;
	struct ibv_context *context;
	int cleaned;
	volatile int returned;
};

static void clean(void *argument)
{
	((struct waiter *)argument)->cleaned++;
}

static void *connections(void *argument)
{
	struct waiter *waiter = argument;
	struct rdma_cm_event *event;
	pthread_cleanup_push(clean, waiter);
	rdma_get_cm_event(waiter->channel, &event);
	waiter->returned = 1;
	pthread_cleanup_pop(0);
	return NULL;
}

static void *completions(void *argument)
{
	struct waiter *waiter = argument;
	struct ibv_cq *cq;
	void *context;
	pthread_cleanup_push(clean, waiter);
	ibv_get_cq_event(waiter->completions, &cq, &context);
	waiter->returned = 1;
	pthread_cleanup_pop(0);
	return NULL;
}

static void *asynchronous(void *argument)
{
	struct waiter *waiter = argument;
	struct ibv_async_event event;
	pthread_cleanup_push(clean, waiter);
	ibv_get_async_event(waiter->context, &event);
	pthread_cleanup_pop(0);
	return NULL;
}

/* Cancelled before it comes to its wait: no call on the way there is a place to end. */
static void *late(void *argument)
{
	struct waiter *waiter = argument;
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	pthread_cancel(pthread_self());
	pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
	CHECK(rdma_create_id(waiter->channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	CHECK(rdma_listen(id, 1) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	return connections(argument);
}

/* A cleanup handler asks others than the one that its thread was cancelled in, none of which has anything. */
static void ask_others(void *argument)
{
	struct waiter *waiter = argument;
	struct rdma_cm_event *event;
	struct ibv_cq *cq;
	void *context;
	FAILS(rdma_get_cm_event(waiter->channel, &event), EAGAIN);
	FAILS(ibv_get_cq_event(waiter->completions, &cq, &context), EAGAIN);
	waiter->cleaned++;
}

static void *asks_others(void *argument)
{
	struct waiter **waiters = argument;
	pthread_cleanup_push(ask_others, waiters[1]);
	waiters[2] ? connections(waiters[0]) : completions(waiters[0]);
	pthread_cleanup_pop(0);
	return NULL;
}

static void cleaning(struct ibv_context *context)
{
	for (int i = 0; i < 2; i++) {
		struct waiter both[2] = { 0 };
		struct waiter *argument[3] = { &both[0], &both[1], i ? both : NULL };
		pthread_t thread;
		for (int k = 0; k < 2; k++) {
			both[k].channel = rdma_create_event_channel();
			both[k].completions = ibv_create_comp_channel(context);
			CHECK(both[k].channel && both[k].completions);
		}
		CHECK(fcntl(both[1].channel->fd, F_SETFL, O_NONBLOCK) == 0);
		CHECK(fcntl(both[1].completions->fd, F_SETFL, O_NONBLOCK) == 0);
		CHECK(pthread_create(&thread, NULL, asks_others, argument) == 0);
		usleep(300000);
		CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
		CHECK(both[0].cleaned == 1 && both[1].cleaned == 1);
		for (int k = 0; k < 2; k++) {
			rdma_destroy_event_channel(both[k].channel);
			CHECK(ibv_destroy_comp_channel(both[k].completions) == 0);
		}
	}
}

/* What a thread waits in is destroyed: it waits on, as in a read(2), and hears nothing of what comes after. */
static void destroyed(struct ibv_context *context)
{
	struct waiter waiter = { .channel = rdma_create_event_channel() };
	struct rdma_event_channel *next;
	struct rdma_cm_id *id;
	struct sockaddr_in in;
	pthread_t threads[2];
	int i;

	waiter.completions = ibv_create_comp_channel(context);
	CHECK(waiter.channel && waiter.completions);
	CHECK(pthread_create(&threads[0], NULL, connections, &waiter) == 0);
	CHECK(pthread_create(&threads[1], NULL, completions, &waiter) == 0);
	usleep(300000);
	rdma_destroy_event_channel(waiter.channel);
	CHECK(ibv_destroy_comp_channel(waiter.completions) == 0);
	/* Most likely at the same address. */
	next = rdma_create_event_channel();
	CHECK(next && rdma_create_id(next, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, loopback(&in, 9), 1000) == 0);
	usleep(600000);
	CHECK(!waiter.returned);
	pass(next, RDMA_CM_EVENT_ADDR_RESOLVED);
	for (i = 0; i < 2; i++) {
		void *result;
		CHECK(pthread_cancel(threads[i]) == 0 && pthread_join(threads[i], &result) == 0);
		CHECK(result == PTHREAD_CANCELED);
	}
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(next);
}

int main(void)
{
	void *(*waits[])(void *) = { connections, completions, asynchronous, late };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct waiter waiter = { .channel = channel };
	int port, i;
	struct rdma_cm_id *id = listener(channel, RDMA_PS_TCP, &port), *client;

	client = resolved(channel, RDMA_PS_TCP, port);
	waiter.context = client->verbs;
	waiter.completions = ibv_create_comp_channel(client->verbs);
	CHECK(waiter.completions);
	for (i = 0; i < 4; i++) {
		pthread_t thread;
		void *result;
		CHECK(pthread_create(&thread, NULL, waits[i], &waiter) == 0);
		usleep(20000);
		if (waits[i] != late)
			CHECK(pthread_cancel(thread) == 0);
		CHECK(pthread_join(thread, &result) == 0);
		CHECK(result == PTHREAD_CANCELED && waiter.cleaned == i + 1);
	}
	destroyed(client->verbs);
	alarm(60);
	cleaning(client->verbs);
	/* Those who were cancelled hold nothing that others need. */
	CHECK(ibv_destroy_comp_channel(waiter.completions) == 0);
	CHECK(rdma_destroy_id(client) == 0 && rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
	return 0;
}
