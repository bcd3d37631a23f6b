/* Which descriptors a program finds taken, which limit its children have, and how those behave by which it
 * waits. Two processes that are connected over TCP, over the real engine. */
#define _GNU_SOURCE
#include "rc.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAIRS = 100, LIMIT = 64 };

struct name {
	uint32_t number;
	union ibv_gid gid;
};

static void whole(int socket, void *bytes, size_t left, int writes)
{
	for (char *at = bytes; left;) {
		ssize_t done = writes ? write(socket, at, left) : read(socket, at, left);
		CHECK(done > 0);
		at += done;
		left -= (size_t)done;
	}
}

/* Waits for the other process to come here, too. */
static void meet(int socket)
{
	char byte = 0;
	whole(socket, &byte, 1, 1);
	whole(socket, &byte, 1, 0);
}

/* Descriptors below FD_SETSIZE. */
static int low_ones(void)
{
	DIR *list = opendir("/proc/self/fd");
	CHECK(list);
	int count = 0;
	for (struct dirent *entry; (entry = readdir(list));)
		count += entry->d_name[0] != '.' && atoi(entry->d_name) < FD_SETSIZE;
	closedir(list);
	return count;
}

static void connected(int socket, int sends)
{
	static struct ibv_qp *qps[PAIRS];
	static struct name own[PAIRS], other[PAIRS];
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 2 * PAIRS, NULL, NULL, 0);
	CHECK(pd && cq);
	int before = low_ones();
	for (int i = 0; i < PAIRS; i++) {
		struct ibv_qp_init_attr init = init_attr(cq, NULL);
		CHECK((qps[i] = ibv_create_qp(pd, &init)));
		own[i].number = qps[i]->qp_num;
		SAME(ibv_query_gid(context, 1, 0, &own[i].gid), 0);
	}
	whole(socket, own, sizeof own, 1);
	whole(socket, other, sizeof other, 0);
	for (int i = 0; i < PAIRS; i++) {
		struct ibv_send_wr write = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
		SAME(to_init(qps[i]), 0);
		SAME(to_rtr(qps[i], other[i].gid, other[i].number, 1), 0);
		SAME(to_rts(qps[i], 14, 7, 7), 0);
		if (sends)
			SAME(ibv_post_send(qps[i], &write, &bad), 0);
	}
	double until = seconds() + 60;
	for (int done = 0; sends && done < PAIRS;) {
		struct ibv_wc wc;
		int polled = ibv_poll_cq(cq, 1, &wc);
		CHECK(polled >= 0 && seconds() < until && (!polled || wc.status == IBV_WC_SUCCESS));
		done += polled;
	}
	meet(socket);
	SAME(low_ones(), before);
	struct rlimit limit;
	SAME(getrlimit(RLIMIT_NOFILE, &limit), 0);
	SAME(limit.rlim_cur, LIMIT);
	CHECK(limit.rlim_max > FD_SETSIZE); /* or the test is none */
	SAME(system("test $(ulimit -Sn) = 64"), 0);
	int fd = open("/dev/null", O_RDONLY);
	CHECK(fd > 2 && fd < LIMIT);
	meet(socket);
}

/* As many connections over TCP as there are numbers twice. */
static void numbers_are_left_to_the_program(void)
{
	int sockets[2], status;
	struct rlimit limit;
	SAME(getrlimit(RLIMIT_NOFILE, &limit), 0);
	if (limit.rlim_max < FD_SETSIZE + 4 * PAIRS) {
		fprintf(stderr, "skipped: the hard limit of descriptors is %llu\n", (unsigned long long)limit.rlim_max);
		return;
	}
	limit.rlim_cur = LIMIT;
	SAME(setrlimit(RLIMIT_NOFILE, &limit), 0);
	SAME(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	connected(sockets[!child], !child);
	if (!child)
		_exit(0);
	SAME(waitpid(child, &status, 0), child);
	SAME(status, 0);
}

static volatile sig_atomic_t signals;

static void count(int number)
{
	(void)number;
	signals++;
}

static void waits_for_signal(int fd)
{
	double until = seconds() + 20;
	while (!signals && seconds() < until)
		usleep(1000);
	CHECK(signals > 0);
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN | POLLOUT };
	SAME(poll(&poll_fd, 1, 0), 1);
	SAME(poll_fd.revents, POLLIN);
}

static void asks_for_signals(int fd)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN | POLLOUT };
	SAME(poll(&poll_fd, 1, 0), 0); /* not writable */
	signals = 0;
	SAME(fcntl(fd, F_SETOWN, getpid()), 0);
	SAME(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC), 0);
}

/* A descriptor of completions and one of asynchronous events send SIGIO, and are never writable. */
static void events_send_signals(void)
{
	struct sigaction action = { .sa_handler = count };
	struct pair p = connected_pair();
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	struct ibv_cq *cq;
	struct ibv_async_event event;
	void *context;
	SAME(sigaction(SIGIO, &action, NULL), 0);
	SAME(ibv_req_notify_cq(p.b.cq, 0), 0);
	SAME(ibv_post_recv(p.b.qp, &wr, &bad), 0);
	asks_for_signals(p.b.channel->fd);
	asks_for_signals(p.context->async_fd);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	SAME(ibv_modify_qp(p.b.qp, &attr, IBV_QP_STATE), 0); /* flushes */
	waits_for_signal(p.b.channel->fd);
	SAME(ibv_get_cq_event(p.b.channel, &cq, &context), 0);
	ibv_ack_cq_events(cq, 1);
	/* An access that the peer refuses is an event of its queue pair. */
	struct pair q = connected_pair();
	struct ibv_sge sge = piece(&q.a, 0, 8);
	struct ibv_send_wr write = work(1, IBV_WR_RDMA_WRITE, &sge, 1);
	asks_for_signals(q.context->async_fd);
	write.wr.rdma.rkey = 0x12345;
	post_send(&q.a, &write);
	done(&q.a, 1, IBV_WC_REM_ACCESS_ERR);
	waits_for_signal(q.context->async_fd);
	SAME(ibv_get_async_event(q.context, &event), 0);
	SAME(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
	ibv_ack_async_event(&event);
	close_pair(&q);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "numbers_are_left_to_the_program", numbers_are_left_to_the_program },
		{ "events_send_signals", events_send_signals },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
