/* What a program does to its process while it has queue pairs: forks, closes descriptors, runs out of
 * them, posts and polls from many threads. Over the real engine. */
#include "rc.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static void exchange(struct pair *p, uint64_t id)
{
	struct ibv_sge sge = piece(&p->a, 0, 100);
	struct ibv_send_wr wr = work(id, IBV_WR_SEND, &sge, 1);
	fill(&p->a, 0, 100, (uint8_t)id);
	post_recv(&p->b, id, 500, 100);
	post_send(&p->a, &wr);
	done(&p->a, id, IBV_WC_SUCCESS);
	done(&p->b, id, IBV_WC_SUCCESS);
	SAME(memcmp(p->a.buffer, p->b.buffer + 500, 100), 0);
}

/* What a child may do with objects that it inherited: nothing but ask what the device is like and free
 * them, and open anew. */
static int in_the_child(struct pair *p)
{
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, NULL, 0), *bad;
	struct ibv_device_attr attr;
	SAME(ibv_post_send(p->a.qp, &wr, &bad), ENODEV);
	SAME(ibv_query_device(p->context, &attr), 0);
	struct ibv_port_attr port;
	SAME(ibv_query_port(p->context, 1, &port), ENODEV);
	CHECK(!ibv_alloc_pd(p->context));
	close_pair(p);
	struct pair own = connected_pair();
	exchange(&own, 1);
	close_pair(&own);
	return 0;
}

static void forks(void)
{
	struct pair p = connected_pair();
	exchange(&p, 1);
	fflush(NULL);
	for (int i = 0; i < 2; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0)
			_exit(in_the_child(&p));
		exchange(&p, 2); /* the parent goes on meanwhile */
		int status;
		SAME(waitpid(child, &status, 0), child);
		SAME(status, 0);
	}
	exchange(&p, 3);
	close_pair(&p);
}

/* Nothing of ours may come to lie where a program believes its standard descriptors to be: what is
 * written to standard error would end up in it. */
static void closed_descriptors(void)
{
	int kept[3];
	for (int fd = 0; fd < 3; fd++) {
		kept[fd] = fcntl(fd, F_DUPFD, 100);
		close(fd);
	}
	struct pair p = connected_pair();
	int clear = p.context->cmd_fd > 2 && p.context->async_fd > 2 && p.a.channel->fd > 2 && p.b.channel->fd > 2;
	exchange(&p, 1);
	close_pair(&p);
	for (int fd = 0; fd < 3; fd++)
		if (kept[fd] >= 0)
			SAME(dup2(kept[fd], fd), fd);
	CHECK(clear);
}

static void few_descriptors(void)
{
	struct pair p = connected_pair();
	struct rlimit before, low;
	SAME(getrlimit(RLIMIT_NOFILE, &before), 0);
	low = before;
	low.rlim_cur = 0; /* no new ones */
	SAME(setrlimit(RLIMIT_NOFILE, &low), 0);
	CHECK(!ibv_create_comp_channel(p.context));
	SAME(errno, EMFILE);
	CHECK(!ibv_open_device(p.context->device));
	SAME(setrlimit(RLIMIT_NOFILE, &before), 0);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(p.context);
	CHECK(channel);
	SAME(ibv_destroy_comp_channel(channel), 0);
	exchange(&p, 1);
	close_pair(&p);
}

/* Queues of the sizes that the device offers, where the process may have little more memory: refused. */
static void little_memory(void)
{
	struct pair p = connected_pair();
	struct ibv_device_attr attr;
	struct rlimit before, low;
	unsigned long pages;
	SAME(ibv_query_device(p.context, &attr), 0);
	FILE *file = fopen("/proc/self/statm", "r");
	CHECK(file);
	SAME(fscanf(file, "%lu", &pages), 1);
	fclose(file);
	SAME(getrlimit(RLIMIT_AS, &before), 0);
	low = before;
	low.rlim_cur = pages * (rlim_t)sysconf(_SC_PAGESIZE) + (1 << 22);
	SAME(setrlimit(RLIMIT_AS, &low), 0);
	CHECK(!ibv_create_cq(p.context, attr.max_cqe, NULL, NULL, 0));
	SAME(errno, ENOMEM);
	SAME(ibv_resize_cq(p.a.cq, attr.max_cqe), ENOMEM);
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.cap.max_send_wr = init.cap.max_recv_wr = attr.max_qp_wr;
	init.cap.max_send_sge = init.cap.max_recv_sge = attr.max_sge;
	CHECK(!ibv_create_qp(p.pd, &init));
	SAME(errno, ENOMEM);
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = attr.max_srq_wr, .max_sge = attr.max_srq_sge } };
	CHECK(!ibv_create_srq(p.pd, &shared));
	SAME(errno, ENOMEM);
	SAME(setrlimit(RLIMIT_AS, &before), 0);
	exchange(&p, 1);
	close_pair(&p);
}

enum { THREADS = 4, EACH = 500 };

static struct pair shared;
static int received;

static void *sender(void *argument)
{
	uint64_t number = (uintptr_t)argument;
	for (uint64_t i = 0; i < EACH;) {
		struct ibv_sge sge = piece(&shared.a, 8 * number, 8);
		struct ibv_send_wr wr = work(number, IBV_WR_SEND, &sge, 1), *bad;
		int result = ibv_post_send(shared.a.qp, &wr, &bad);
		struct ibv_wc wcs[8];
		int polled = ibv_poll_cq(shared.a.cq, 8, wcs);
		CHECK(polled >= 0);
		for (int k = 0; k < polled; k++)
			SAME(wcs[k].status, IBV_WC_SUCCESS);
		if (result == 0)
			i++;
		else
			SAME(result, ENOMEM); /* full for now */
	}
	return NULL;
}

static void *receiver(void *argument)
{
	(void)argument;
	while (__atomic_load_n(&received, __ATOMIC_SEQ_CST) < THREADS * EACH) {
		struct ibv_wc wcs[4];
		int polled = ibv_poll_cq(shared.b.cq, 4, wcs);
		CHECK(polled >= 0);
		for (int k = 0; k < polled; k++) {
			SAME(wcs[k].status, IBV_WC_SUCCESS);
			SAME(wcs[k].byte_len, 8);
			post_recv(&shared.b, 0, 0, 64);
		}
		__atomic_add_fetch(&received, polled, __ATOMIC_SEQ_CST);
	}
	return NULL;
}

static void many_threads(void)
{
	pthread_t senders[THREADS], receivers[2];
	shared = connected_pair();
	for (int i = 0; i < DEPTH - 4; i++)
		post_recv(&shared.b, 0, 0, 64);
	for (uintptr_t i = 0; i < 2; i++)
		SAME(pthread_create(&receivers[i], NULL, receiver, NULL), 0);
	for (uintptr_t i = 0; i < THREADS; i++)
		SAME(pthread_create(&senders[i], NULL, sender, (void *)i), 0);
	for (int i = 0; i < THREADS; i++)
		SAME(pthread_join(senders[i], NULL), 0);
	for (int i = 0; i < 2; i++)
		SAME(pthread_join(receivers[i], NULL), 0);
	SAME(received, THREADS * EACH);
	close_pair(&shared);
}

static void *destroy_cq(void *cq)
{
	return (void *)(intptr_t)ibv_destroy_cq(cq);
}

/* A queue whose destruction waits for an acknowledgement is still one of its channel. */
static void a_channel_outlives_its_queues(void)
{
	struct pair p = connected_pair();
	struct ibv_cq *cq;
	void *context, *result;
	pthread_t thread;
	SAME(ibv_req_notify_cq(p.b.cq, 0), 0);
	exchange(&p, 1);
	SAME(ibv_get_cq_event(p.b.channel, &cq, &context), 0);
	SAME(ibv_destroy_qp(p.b.qp), 0);
	SAME(pthread_create(&thread, NULL, destroy_cq, cq), 0);
	usleep(100000);
	SAME(ibv_destroy_comp_channel(p.b.channel), EBUSY);
	ibv_ack_cq_events(cq, 1);
	SAME(pthread_join(thread, &result), 0);
	CHECK(!result);
	SAME(ibv_destroy_comp_channel(p.b.channel), 0);
	SAME(ibv_dereg_mr(p.b.mr), 0);
	free(p.b.buffer);
	close_end(&p.a);
	SAME(ibv_dealloc_pd(p.pd), 0);
	SAME(ibv_close_device(p.context), 0);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "forks", forks },
		{ "closed_descriptors", closed_descriptors },
		{ "few_descriptors", few_descriptors },
		{ "little_memory", little_memory },
		{ "many_threads", many_threads },
		{ "a_channel_outlives_its_queues", a_channel_outlives_its_queues },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
