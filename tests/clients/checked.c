/* A program for tools that look for errors: ThreadSanitizer and memcheck. One thread sends, another polls.
 * Arguments: none (correct), "race" (two threads write a variable), "leak" (loses memory),
 * "nothing" (opens no device). */
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                  \
	do {                                                                              \
		if (!(condition)) {                                                       \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
			exit(1);                                                          \
		}                                                                         \
	} while (0)

enum { MESSAGES = 50, SIZE = 4096 };

static struct ibv_qp *qps[2];
static struct ibv_cq *cqs[2];
static struct ibv_mr *mr;
static char buffer[2 * SIZE];
static int counter;
static volatile char *volatile lost;

static void connect_to(struct ibv_qp *qp, union ibv_gid gid, uint32_t number)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = number,
				     .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
				     .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid } } };
	CHECK(!ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				     IBV_QP_MAX_QP_RD_ATOMIC));
}

static void take(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int polled;
	while ((polled = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	CHECK(polled == 1 && wc.status == IBV_WC_SUCCESS);
}

static void *receives(void *race)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buffer + SIZE, .length = SIZE, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	for (int i = 0; i < MESSAGES; i++) {
		CHECK(!ibv_post_recv(qps[1], &wr, &bad));
		take(cqs[1]);
		CHECK(buffer[SIZE] == (char)i && buffer[2 * SIZE - 1] == (char)i);
		if (race)
			counter++;
	}
	return NULL;
}

static void exchange(int race)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = SIZE, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, receives, race ? &counter : NULL));
	for (int i = 0; i < MESSAGES; i++) {
		memset(buffer, i, SIZE);
		CHECK(!ibv_post_send(qps[0], &wr, &bad));
		take(cqs[0]);
		if (race)
			counter++;
	}
	CHECK(!pthread_join(thread, NULL));
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	union ibv_gid gid;
	if (!strcmp(mode, "nothing"))
		return 0;
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	struct ibv_context *context = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	CHECK(context && !ibv_query_gid(context, 1, 0, &gid));
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	CHECK(pd && channel);
	CHECK((mr = ibv_reg_mr(pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE)));
	for (int i = 0; i < 2; i++) {
		CHECK((cqs[i] = ibv_create_cq(context, 16, NULL, channel, 0)));
		struct ibv_qp_init_attr init = { .send_cq = cqs[i], .recv_cq = cqs[i], .qp_type = IBV_QPT_RC,
						 .cap = { 4, 4, 1, 1, 0 } };
		CHECK((qps[i] = ibv_create_qp(pd, &init)));
	}
	for (int i = 0; i < 2; i++)
		connect_to(qps[i], gid, qps[!i]->qp_num);
	exchange(!strcmp(mode, "race"));
	if (!strcmp(mode, "leak")) {
		lost = malloc(100);
		lost[0] = 1;
		lost = NULL;
		return 0;
	}
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qps[i]) && !ibv_destroy_cq(cqs[i]));
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	return 0;
}
