/* Signals that come while threads wait for events: as in a read(2), the wait goes on after a handler with
 * SA_RESTART and when the process is stopped and continued; it ends after one without. */
#include "common.h"
#include <signal.h>
#include <sys/wait.h>

static struct rdma_event_channel *channel;
static struct ibv_comp_channel *completion_channel;
static struct ibv_context *context;

static int connections(void)
{
	struct rdma_cm_event *event;
	return rdma_get_cm_event(channel, &event);
}

static int completions(void)
{
	struct ibv_cq *cq;
	void *cq_context;
	return ibv_get_cq_event(completion_channel, &cq, &cq_context);
}

static int asynchronous(void)
{
	struct ibv_async_event event;
	return ibv_get_async_event(context, &event);
}

/* The first that does not find the other waiting waits for the whole engine, the others for a descriptor. */
static int (*const CALLS[])(void) = { connections, completions, connections, asynchronous };
enum { COUNT = sizeof CALLS / sizeof CALLS[0] };

struct waiter {
	pthread_t thread;
	int (*call)(void);
	int result, number;
	volatile int over;
};

static void *wait_in(void *argument)
{
	struct waiter *waiter = argument;
	waiter->result = waiter->call();
	waiter->number = errno;
	waiter->over = 1;
	return NULL;
}

static volatile int handled;

static void handle(int number)
{
	(void)number;
	__atomic_add_fetch(&handled, 1, __ATOMIC_SEQ_CST);
}

/* A shell's ^Z and fg. */
static void stop_and_continue(void)
{
	int status;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		/* It may come before the stop. */
		for (int tries = 0; tries < 400; tries++) {
			usleep(50000);
			kill(getppid(), SIGCONT);
		}
		_exit(1);
	}
	raise(SIGSTOP);
	CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
}

static void all_wait(struct waiter *waiters, int count)
{
	usleep(50000);
	for (int i = 0; i < count; i++)
		CHECK(!waiters[i].over);
}

/* Of so many that wait at a time. */
static void interrupted(int (*const *calls)(void), int count)
{
	struct sigaction action = { .sa_handler = handle };
	struct waiter waiters[COUNT] = { 0 };

	signal(SIGUSR1, handle); /* with SA_RESTART */
	signal(SIGUSR2, SIG_IGN);
	for (int i = 0; i < count; i++) {
		waiters[i].call = calls[i];
		CHECK(pthread_create(&waiters[i].thread, NULL, wait_in, &waiters[i]) == 0);
		all_wait(waiters, i + 1);
	}
	handled = 0;
	for (int round = 1; round <= 3; round++) {
		for (int i = 0; i < count; i++)
			CHECK(pthread_kill(waiters[i].thread, SIGUSR1) == 0);
		for (int tries = 0; handled < round * count && tries < 500; tries++)
			usleep(10000);
		CHECK(handled == round * count);
		all_wait(waiters, count);
	}
	stop_and_continue();
	all_wait(waiters, count);

	CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
	for (int i = 0; i < count; i++) {
		/* One that comes between two sleeps interrupts none. */
		for (int tries = 0; !waiters[i].over && tries < 500; tries++) {
			CHECK(pthread_kill(waiters[i].thread, SIGUSR2) == 0);
			usleep(10000);
		}
		CHECK(pthread_join(waiters[i].thread, NULL) == 0);
		CHECK(waiters[i].result == -1 && waiters[i].number == EINTR);
	}
}

int main(void)
{
	int port;
	struct rdma_cm_id *id, *client;

	alarm(60);
	channel = rdma_create_event_channel();
	CHECK(channel);
	id = listener(channel, RDMA_PS_TCP, &port);
	client = resolved(channel, RDMA_PS_TCP, port);
	context = client->verbs;
	completion_channel = ibv_create_comp_channel(context);
	CHECK(completion_channel);
	for (int i = 0; i < COUNT; i++)
		interrupted(CALLS + i, 1);
	interrupted(CALLS, COUNT);
	CHECK(ibv_destroy_comp_channel(completion_channel) == 0);
	CHECK(rdma_destroy_id(client) == 0 && rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
	return 0;
}
