/* Two queue pairs of one process, connected to each other: the set-up that the tests share. */
#ifndef RC_H
#define RC_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Ends the test, with what was wrong and where. */
#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition,  \
				errno);                                                            \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* As CHECK, for two numbers, which are shown. */
#define SAME(ours, theirs)                                                                         \
	do {                                                                                       \
		long long a_ = (long long)(ours), b_ = (long long)(theirs);                        \
		if (a_ != b_) {                                                                    \
			fprintf(stderr, "%s:%d: %s is %lld, not %s (%lld)\n", __FILE__, __LINE__,  \
				#ours, a_, #theirs, b_);                                           \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

enum { BYTES = 1 << 16, DEPTH = 32 };

/* One end. */
struct end {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct ibv_mr *mr;
	uint8_t *buffer;
};

struct pair {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_srq *srq; /* of end b, or NULL */
	union ibv_gid gid;
	struct end a, b;
};

enum { ALL_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		    IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND };

static inline struct ibv_context *open_device(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count >= 1);
	struct ibv_context *context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	return context;
}

static inline int to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = 0,
				    .qp_access_flags = ALL_ACCESS & ~IBV_ACCESS_MW_BIND };
	return ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static inline int to_rtr(struct ibv_qp *qp, union ibv_gid gid, uint32_t number, int global)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096,
				    .dest_qp_num = number, .rq_psn = 0, .max_dest_rd_atomic = 4,
				    .min_rnr_timer = 1,
				    .ah_attr = { .is_global = global, .port_num = 1,
						 .grh = { .dgid = gid, .hop_limit = 1 } } };
	return ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				     IBV_QP_MIN_RNR_TIMER);
}

static inline int to_rts(struct ibv_qp *qp, int timeout, int retries, int rnr_retries)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = timeout,
				    .retry_cnt = retries, .rnr_retry = rnr_retries, .sq_psn = 0,
				    .max_rd_atomic = 4 };
	return ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static inline struct ibv_qp_init_attr init_attr(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = srq,
					 .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH,
						  .max_send_sge = 4, .max_recv_sge = 4,
						  .max_inline_data = 64 } };
	return init;
}

static inline void make_end(struct pair *p, struct end *end, struct ibv_srq *srq)
{
	end->buffer = calloc(1, BYTES);
	CHECK(end->buffer);
	end->channel = ibv_create_comp_channel(p->context);
	CHECK(end->channel);
	/* The buffer's address serves as the context that completion events give back. */
	end->cq = ibv_create_cq(p->context, 4 * DEPTH, end->buffer, end->channel, 0);
	CHECK(end->cq && end->cq->cqe >= 4 * DEPTH);
	struct ibv_qp_init_attr init = init_attr(end->cq, srq);
	end->qp = ibv_create_qp(p->pd, &init);
	CHECK(end->qp && end->qp->state == IBV_QPS_RESET);
	end->mr = ibv_reg_mr(p->pd, end->buffer, BYTES, ALL_ACCESS);
	CHECK(end->mr);
}

/* Both ends, in RESET. */
static inline struct pair make_pair(int with_srq)
{
	struct pair p = { .context = open_device() };
	p.pd = ibv_alloc_pd(p.context);
	CHECK(p.pd);
	SAME(ibv_query_gid(p.context, 1, 0, &p.gid), 0);
	if (with_srq) {
		struct ibv_srq_init_attr init = { .attr = { .max_wr = DEPTH, .max_sge = 2 } };
		p.srq = ibv_create_srq(p.pd, &init);
		CHECK(p.srq);
	}
	make_end(&p, &p.a, NULL);
	make_end(&p, &p.b, p.srq);
	CHECK(p.a.qp->qp_num != p.b.qp->qp_num);
	return p;
}

static inline void connect_pair(struct pair *p, int rnr_retries)
{
	SAME(to_init(p->a.qp), 0);
	SAME(to_init(p->b.qp), 0);
	SAME(to_rtr(p->a.qp, p->gid, p->b.qp->qp_num, 1), 0);
	SAME(to_rtr(p->b.qp, p->gid, p->a.qp->qp_num, 1), 0);
	SAME(to_rts(p->a.qp, 14, 7, rnr_retries), 0);
	SAME(to_rts(p->b.qp, 14, 7, rnr_retries), 0);
	SAME(p->a.qp->state, IBV_QPS_RTS);
}

static inline struct pair connected_pair(void)
{
	struct pair p = make_pair(0);
	connect_pair(&p, 7);
	return p;
}

static inline void close_end(struct end *end)
{
	SAME(ibv_destroy_qp(end->qp), 0);
	SAME(ibv_destroy_cq(end->cq), 0);
	SAME(ibv_destroy_comp_channel(end->channel), 0);
	SAME(ibv_dereg_mr(end->mr), 0);
	free(end->buffer);
}

static inline void close_pair(struct pair *p)
{
	close_end(&p->a);
	close_end(&p->b);
	if (p->srq)
		SAME(ibv_destroy_srq(p->srq), 0);
	SAME(ibv_dealloc_pd(p->pd), 0);
	SAME(ibv_close_device(p->context), 0);
}

static inline double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Waits for the next completion of one end. Both ends are polled meanwhile, as two programs would:
 * a completion of the other end stays in its queue. */
static inline struct ibv_wc next_wc(struct end *end)
{
	struct ibv_wc wc;
	double until = seconds() + 20;
	for (;;) {
		int polled = ibv_poll_cq(end->cq, 1, &wc);
		CHECK(polled >= 0);
		if (polled)
			return wc;
		CHECK(seconds() < until);
	}
}

static inline struct ibv_wc done(struct end *end, uint64_t wr_id, enum ibv_wc_status status)
{
	struct ibv_wc wc = next_wc(end);
	if (wc.status != status)
		fprintf(stderr, "completion %llu: %s, not %s\n", (unsigned long long)wc.wr_id,
			ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
	SAME(wc.wr_id, wr_id);
	SAME(wc.status, status);
	SAME(wc.qp_num, end->qp->qp_num);
	return wc;
}

static inline struct ibv_sge piece(struct end *end, size_t offset, uint32_t length)
{
	struct ibv_sge sge = { .addr = (uintptr_t)end->buffer + offset, .length = length,
			       .lkey = end->mr->lkey };
	return sge;
}

static inline void post_recv(struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = piece(end, offset, length);
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;
	SAME(ibv_post_recv(end->qp, &wr, &bad), 0);
}

static inline struct ibv_send_wr work(uint64_t wr_id, enum ibv_wr_opcode opcode,
				      struct ibv_sge *sges, int count)
{
	struct ibv_send_wr wr = { .wr_id = wr_id, .opcode = opcode, .sg_list = sges,
				  .num_sge = count, .send_flags = IBV_SEND_SIGNALED };
	return wr;
}

static inline void post_send(struct end *end, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	SAME(ibv_post_send(end->qp, wr, &bad), 0);
}

static inline void fill(struct end *end, size_t offset, size_t length, uint8_t seed)
{
	for (size_t i = 0; i < length; i++)
		end->buffer[offset + i] = (uint8_t)(seed + 31 * i);
}

/* One named test. A program lists its own and hands them to run_tests. */
struct test {
	const char *name;
	void (*run)(void);
};

static inline int run_tests(const struct test *tests, int argc, char **argv)
{
	for (; tests->name; tests++)
		if (argc < 2 || !strcmp(argv[1], tests->name)) {
			tests->run();
			printf("ok %s\n", tests->name);
			fflush(stdout);
		}
	return 0;
}

#endif
