/* What the strict mode finds: for each kind a program that does it, and one that does nothing wrong. Each
 * is a process of its own, whose log is looked at afterwards. Over the real engine. */
#include "strict.h"

static void nothing_wrong(void)
{
	struct pair p = connected_pair();
	for (int i = 0; i < 3 * DEPTH; i++) {
		struct ibv_sge sge = piece(&p.a, 0, 100);
		struct ibv_send_wr wr = work(i, i % 2 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, &sge, 1);
		wr.send_flags = i % 4 == 3 ? IBV_SEND_SIGNALED : 0;
		post_recv(&p.b, i, 1000, 100);
		post_send(&p.a, &wr);
		if (i % 4 == 3)
			done(&p.a, i, IBV_WC_SUCCESS);
		done(&p.b, i, IBV_WC_SUCCESS);
		if (i % 4 == 3)
			fill(&p.a, 0, 100, i);
	}
	struct ibv_sge sge = piece(&p.a, 0, 4096);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	wr.opcode = IBV_WR_RDMA_READ; /* what it reads changes the buffer, of course */
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void use_after_dereg(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, 0);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	SAME(ibv_dereg_mr(mr), 0);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_LOC_PROT_ERR);
	close_pair(&p);
}

static void wrong_key(void)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, BYTES - 4, 8);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_LOC_PROT_ERR);
	close_pair(&p);
}

/* The key of a region in another domain. */
static void wrong_domain(void)
{
	struct pair p = connected_pair();
	struct ibv_pd *pd = ibv_alloc_pd(p.context);
	struct ibv_mr *mr = ibv_reg_mr(pd, p.a.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_LOC_PROT_ERR);
	SAME(ibv_dereg_mr(mr), 0);
	SAME(ibv_dealloc_pd(pd), 0);
	close_pair(&p);
}

/* Its region does not allow windows. */
static void window_without_right(void)
{
	struct pair p = connected_pair();
	struct ibv_mw *mw = ibv_alloc_mw(p.pd, IBV_MW_TYPE_2);
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mw && mr);
	struct ibv_send_wr wr = {
		.wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
		.bind_mw = { .mw = mw, .rkey = ibv_inc_rkey(mw->rkey),
			     .bind_info = { .mr = mr, .addr = (uintptr_t)p.a.buffer, .length = 8,
					    .mw_access_flags = IBV_ACCESS_REMOTE_WRITE } },
	};
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_MW_BIND_ERR);
	SAME(ibv_dealloc_mw(mw), 0);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

/* To be written to by the adapter, which has no right to: by a receive, and by a read. */
static void right_to_write(int receives)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, 0);
	CHECK(mr);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	if (receives) {
		SAME(ibv_post_recv(p.a.qp, &recv, &bad), 0);
		SAME(to_state(p.a.qp, IBV_QPS_ERR), 0);
	} else {
		wr.opcode = IBV_WR_RDMA_READ;
		post_send(&p.a, &wr);
		done(&p.a, 1, IBV_WC_LOC_PROT_ERR);
	}
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void receive_without_right(void)
{
	right_to_write(1);
}

static void read_without_right(void)
{
	right_to_write(0);
}

/* A key that the peer has given, and taken back; or of which it knows nothing; or more than it is of. */
static void write_by_key(int region, uint32_t other, uint32_t length)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.b.buffer, 100,
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	struct ibv_sge sge = piece(&p.a, 0, length);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	wr.wr.rdma.rkey = mr->rkey + other;
	if (!region)
		SAME(ibv_dereg_mr(mr), 0);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_REM_ACCESS_ERR);
	if (region)
		SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void stale_rkey(void)
{
	write_by_key(0, 0, 8);
}

static void unknown_rkey(void)
{
	write_by_key(0, 0x777, 8);
}

static void short_rkey(void)
{
	write_by_key(1, 0, 101);
}

static void dereg_in_use(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, 0);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	SAME(ibv_dereg_mr(mr), 0);
	next_wc(&p.a);
	close_pair(&p);
}

/* Its region has another length while a write from it is under way. */
static void changed_in_use(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, 0);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	SAME(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, p.pd, p.a.buffer, 50, 0), 0);
	next_wc(&p.a);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void buffer_changed(void)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 100);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	p.a.buffer[50] ^= 1;
	done(&p.a, 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void send_queue_overflow(void)
{
	struct pair p = connected_pair();
	for (int i = 0; i < 2 * DEPTH; i++) {
		struct ibv_sge sge = piece(&p.a, 0, 8);
		struct ibv_send_wr wr = write_to_b(&p, i, &sge);
		wr.send_flags = i == 2 * DEPTH - 1 ? IBV_SEND_SIGNALED : 0;
		struct ibv_send_wr *bad;
		struct ibv_wc wc;
		/* Progress is made, but nothing is ever signalled. */
		SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
		SAME(ibv_post_send(p.a.qp, &wr, &bad), 0);
		usleep(100);
	}
	done(&p.a, 2 * DEPTH - 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

/* The same without a look at completions: then the last ones find no room. */
static void send_queue_full(void)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge), *bad;
	struct ibv_wc wc;
	int error;
	wr.send_flags = 0;
	for (int i = 0; i < 2 * DEPTH; i++) {
		error = ibv_post_send(p.a.qp, &wr, &bad);
		CHECK(error == 0 || error == ENOMEM);
	}
	wr.wr_id = 2;
	wr.send_flags = IBV_SEND_SIGNALED;
	do
		SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	while ((error = ibv_post_send(p.a.qp, &wr, &bad)) == ENOMEM);
	SAME(error, 0);
	done(&p.a, 2, IBV_WC_SUCCESS);
	close_pair(&p);
}

/* Posts until the queue is full, as ibv_post_send(3) allows, and polls then. One in so many is signalled. */
static void until_full(int every)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	int full = 0;
	for (int i = 0; i < 5 * DEPTH;) {
		struct ibv_send_wr wr = write_to_b(&p, i, &sge), *bad;
		wr.send_flags = i % every == every - 1 ? IBV_SEND_SIGNALED : 0;
		int error = ibv_post_send(p.a.qp, &wr, &bad);
		if (error) {
			SAME(error, ENOMEM);
			SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
			full++;
		}
		i += !error;
		usleep(100);
	}
	CHECK(full >= 3 * DEPTH / every);
	for (int left = 5 * DEPTH / every - full; left > 0; left--)
		SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void until_full_of_signalled(void)
{
	until_full(1);
}

static void until_full_of_few_signalled(void)
{
	until_full(DEPTH / 2);
}

static void cq_too_small(void)
{
	struct pair p = connected_pair();
	struct ibv_cq *cq = ibv_create_cq(p.context, 2, NULL, NULL, 0);
	struct ibv_qp_init_attr init = init_attr(cq, NULL);
	struct ibv_qp *qp = ibv_create_qp(p.pd, &init);
	SAME(to_init(qp), 0);
	for (int i = 0; i < 3; i++) {
		struct ibv_recv_wr wr = { .wr_id = i }, *bad;
		SAME(ibv_post_recv(qp, &wr, &bad), 0);
	}
	SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_destroy_cq(cq), 0);
	close_pair(&p);
}

static void missing_receive(void)
{
	struct pair p = connected_pair();
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, NULL, 0);
	post_send(&p.a, &wr);
	double until = seconds() + 0.05;
	struct ibv_wc wc;
	while (seconds() < until)
		SAME(ibv_poll_cq(p.b.cq, 1, &wc), 0);
	post_recv(&p.b, 10, 0, 8);
	done(&p.b, 10, IBV_WC_SUCCESS);
	done(&p.a, 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void illegal_transition(void)
{
	struct pair p = make_pair(0);
	SAME(to_rts(p.a.qp, 14, 7, 7), EINVAL);
	close_pair(&p);
}

static void refused_post(void)
{
	struct pair p = connected_pair();
	char text[100] = "";
	struct ibv_sge sge = { .addr = (uintptr_t)text, .length = sizeof(text) };
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &sge, 1), *bad;
	wr.send_flags |= IBV_SEND_INLINE; /* 64 bytes are granted */
	SAME(ibv_post_send(p.a.qp, &wr, &bad), EINVAL);
	close_pair(&p);
}

/* Longer than any adapter takes. */
static void refused_long_post(void)
{
	struct pair p = connected_pair();
	static char text[5000];
	struct ibv_sge sge = { .addr = (uintptr_t)text, .length = sizeof(text) };
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &sge, 1), *bad;
	wr.send_flags |= IBV_SEND_INLINE;
	SAME(ibv_post_send(p.a.qp, &wr, &bad), EINVAL);
	close_pair(&p);
}

/* End a builds its sends call by call. */
static struct pair building_pair(void)
{
	struct pair p = make_pair(0);
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .send_cq = p.a.cq, .recv_cq = p.a.cq, .pd = p.pd,
		.cap = { DEPTH, 4, 1, 1, 16 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE };
	CHECK(ibv_destroy_qp(p.a.qp) == 0 && (p.a.qp = ibv_create_qp_ex(p.context, &init)));
	connect_pair(&p, 7);
	return p;
}

/* Two requests that are posted together or not at all, of which the second has too much inline data. */
static void refused_batch(void)
{
	struct pair p = building_pair();
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(p.a.qp);
	ibv_wr_start(qp);
	for (int i = 0; i < 2; i++) {
		qp->wr_id = i;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(qp);
		ibv_wr_set_inline_data(qp, p.a.buffer, i ? 1000 : 8);
	}
	SAME(ibv_wr_complete(qp), EINVAL);
	close_pair(&p);
}

/* Two at a time until the queue is full: what is unread takes room, and both have room or neither. */
static void batches_until_full(void)
{
	struct pair p = building_pair();
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(p.a.qp);
	int seen = 0;
	for (int posted = 0; posted < 5 * DEPTH;) {
		ibv_wr_start(qp);
		for (int i = 0; i < 2; i++) {
			qp->wr_id = posted + i;
			qp->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(qp, p.b.mr->rkey, (uintptr_t)p.b.buffer);
			ibv_wr_set_sge(qp, p.a.mr->lkey, (uintptr_t)p.a.buffer, 8);
		}
		if (ibv_wr_complete(qp) == ENOMEM)
			done(&p.a, seen++, IBV_WC_SUCCESS);
		else
			posted += 2;
	}
	CHECK(seen >= 3 * DEPTH);
	while (seen < 5 * DEPTH)
		done(&p.a, seen++, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void destroyed_in_use(void)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	close_pair(&p);
}

/* Receives of a shared queue, in a queue that is not full and in one that is. */
static void shared_wrong_key(void)
{
	struct pair p = make_pair(1);
	struct ibv_sge sge = piece(&p.b, BYTES - 4, 8);
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	sge = piece(&p.b, 0, 8);
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	close_pair(&p);
}

static void shared_after_dereg(void)
{
	struct pair p = make_pair(1);
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.b.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { .addr = (uintptr_t)p.b.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	SAME(ibv_dereg_mr(mr), 0);
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	close_pair(&p);
}

static void shared_refused(void)
{
	struct pair p = make_pair(1);
	struct ibv_sge sges[10] = { 0 };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = sges, .num_sge = 10 }, *bad;
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), EINVAL);
	close_pair(&p);
}

/* Receives until there is no more room. */
static void shared_full(void)
{
	struct pair p = make_pair(1);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	for (int i = 0; i < DEPTH; i++)
		SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), ENOMEM);
	close_pair(&p);
}

/* A datagram, whose address handle goes before or behind its completion, to a receive or none. */
static void to_myself(int early, int received, uint32_t length)
{
	struct pair p = make_pair(0);
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.qp_type = IBV_QPT_UD;
	struct ibv_qp *qp = ibv_create_qp(p.pd, &init);
	CHECK(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 5 };
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
	     0);
	attr.qp_state = IBV_QPS_RTR;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1,
				  .grh = { .dgid = p.gid, .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(p.pd, &to);
	CHECK(ah);
	struct ibv_sge sge = piece(&p.b, 0, 40);
	struct ibv_recv_wr recv = { .wr_id = 2, .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	if (received)
		SAME(ibv_post_recv(qp, &recv, &bad_recv), 0);
	struct ibv_sge payload = piece(&p.a, 0, length);
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &payload, length > 0), *bad;
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = 5;
	SAME(ibv_post_send(qp, &wr, &bad), 0);
	if (early)
		SAME(ibv_destroy_ah(ah), 0);
	for (int i = 0; i < 1 + received; i++)
		SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
	double until = seconds() + (received ? 0 : 0.05);
	struct ibv_wc wc;
	while (seconds() < until)
		SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	if (!early)
		SAME(ibv_destroy_ah(ah), 0);
	SAME(ibv_destroy_qp(qp), 0);
	close_pair(&p);
}

static void ah_in_use(void)
{
	to_myself(1, 1, 0);
}

static void ah_in_time(void)
{
	to_myself(0, 1, 0);
}

static void datagram_too_long(void)
{
	to_myself(0, 0, 4097);
}

static void missing_receive_of_datagram(void)
{
	to_myself(0, 0, 0);
}

/* A write of 1000 bytes to end b, of which the last one is not 0. */
static void write_begins(struct pair *p)
{
	struct ibv_sge sge = piece(&p->a, 0, 1000);
	struct ibv_send_wr wr = write_to_b(p, 1, &sge);
	fill(&p->a, 0, 1000, 1);
	post_recv(&p->b, 10, 2000, 8);
	post_send(&p->a, &wr);
}

/* A send behind it, whose completion orders it. */
static void write_ends(struct pair *p)
{
	struct ibv_send_wr wr = work(2, IBV_WR_SEND, NULL, 0);
	post_send(&p->a, &wr);
	done(&p->b, 10, IBV_WC_SUCCESS);
	done(&p->a, 1, IBV_WC_SUCCESS);
	done(&p->a, 2, IBV_WC_SUCCESS);
}

static void poll_last_byte(struct pair *p)
{
	volatile uint8_t *last = p->b.buffer + 999;
	double until = seconds() + 20;
	struct ibv_wc wc;
	while (*last == 0) {
		SAME(ibv_poll_cq(p->b.cq, 1, &wc), 0);
		CHECK(seconds() < until);
	}
}

/* Takes the last byte for the end, and the buffer back for the next message. */
static void polls_memory(void)
{
	struct pair p = connected_pair();
	write_begins(&p);
	poll_last_byte(&p);
	CHECK(memcmp(p.b.buffer, p.a.buffer, 1000) != 0);
	p.b.buffer[999] = 0;
	write_ends(&p);
	close_pair(&p);
}

/* The same, in order. */
static void polls_memory_in_order(void)
{
	struct pair p = connected_pair();
	write_begins(&p);
	poll_last_byte(&p);
	SAME(memcmp(p.b.buffer, p.a.buffer, 1000), 0);
	p.b.buffer[999] = 0;
	write_ends(&p);
	close_pair(&p);
}

/* Sends what it has not got yet to somebody else. */
static void passes_on(void)
{
	struct pair p = connected_pair();
	write_begins(&p);
	poll_last_byte(&p);
	struct ibv_sge sge = piece(&p.b, 500, 8);
	struct ibv_send_wr wr = work(20, IBV_WR_SEND, &sge, 1);
	post_recv(&p.a, 3, 2000, 8);
	post_send(&p.b, &wr);
	done(&p.a, 3, IBV_WC_SUCCESS);
	done(&p.b, 20, IBV_WC_SUCCESS);
	write_ends(&p);
	close_pair(&p);
}

/* Waits for the completion: then all is there, and its own. */
static void waits_for_the_completion(void)
{
	struct pair p = connected_pair();
	write_begins(&p);
	write_ends(&p);
	SAME(memcmp(p.b.buffer, p.a.buffer, 1000), 0);
	memset(p.b.buffer, 0, 1000);
	close_pair(&p);
}

/* In the end the writer learns of it, and all is there. */
static void waits_for_the_writer(void)
{
	struct pair p = connected_pair();
	write_begins(&p);
	done(&p.a, 1, IBV_WC_SUCCESS);
	SAME(memcmp(p.b.buffer, p.a.buffer, 1000), 0);
	close_pair(&p);
}

static void order_of_writes(void)
{
	/* For so long that none of this is a matter of time. */
	setenv("QUIPU_STRICT_HOLD_US", "60000000", 1);
	finds("write-order", polls_memory);
	finds("write-order", passes_on);
	SAME(strictly("fail", waits_for_the_completion), 0);
	unsetenv("QUIPU_STRICT_HOLD_US");
	SAME(strictly("fail", waits_for_the_writer), 0);
	setenv("QUIPU_STRICT_ORDER", "off", 1);
	SAME(strictly("fail", polls_memory_in_order), 0);
	setenv("QUIPU_STRICT_ORDER", "shuffle:7", 1);
	SAME(strictly("fail", waits_for_the_writer), 0);
	unsetenv("QUIPU_STRICT_ORDER");
}

static void the_innocent(void)
{
	SAME(strictly("1", nothing_wrong), 0);
	SAME(lines_with("\"kind\""), 0);
	SAME(strictly("fail", nothing_wrong), 0);
	SAME(strictly("fail", ah_in_time), 0);
	innocent(until_full_of_signalled);
	innocent(batches_until_full);
	innocent(until_full_of_few_signalled);
	innocent(shared_full);
}

static void every_kind(void)
{
	finds("use-after-dereg", use_after_dereg);
	finds("wrong-key", wrong_key);
	finds("wrong-key", wrong_domain);
	finds("wrong-key", receive_without_right);
	finds("wrong-key", read_without_right);
	finds("wrong-key", window_without_right);
	finds_both("use-after-dereg", "wrong-key", stale_rkey);
	finds("wrong-key", unknown_rkey);
	/* Both ends know that key. */
	SAME(strictly("1", short_rkey), 0);
	SAME(lines_with("\"wrong-key\""), 2);
	SAME(lines_with("registered here"), 1);
	finds("dereg-in-use", dereg_in_use);
	finds("dereg-in-use", changed_in_use);
	SAME(lines_with("is changed by ibv_rereg_mr"), 1);
	finds("buffer-changed", buffer_changed);
	finds("send-queue-overflow", send_queue_overflow);
	finds("send-queue-overflow", send_queue_full);
	SAME(lines_with("none of them signalled"), 1);
	finds("cq-too-small", cq_too_small);
	finds("missing-receive", missing_receive);
	finds("missing-receive", missing_receive_of_datagram);
	finds("illegal-transition", illegal_transition);
	finds("refused-post", refused_post);
	finds("refused-post", refused_long_post);
	finds("refused-post", refused_batch);
	finds("destroyed-in-use", destroyed_in_use);
	finds("wrong-key", shared_wrong_key);
	finds("use-after-dereg", shared_after_dereg);
	finds("refused-post", shared_refused);
	finds("ah-in-use", ah_in_use);
	finds("datagram-too-long", datagram_too_long);
}

/* A report names the functions of the program. */
static void traces(void)
{
	SAME(strictly("1", use_after_dereg), 0);
	SAME(lines_with("use_after_dereg"), 1);
	SAME(lines_with("ibv_dereg_mr"), 1);
}

static void modes(void)
{
	int status = strictly("fail", buffer_changed);
	CHECK(WIFEXITED(status));
	SAME(WEXITSTATUS(status), 86);
	status = strictly("abort", buffer_changed);
	CHECK(WIFSIGNALED(status));
	SAME(WTERMSIG(status), SIGABRT);
	SAME(lines_with("buffer-changed"), 1);
}

/* What is known is not reported, and is no failure: of a kind, or where somebody is involved. */
static void ignored(void)
{
	static const char *rules[] = { "buffer-changed", "wrong-key, buffer-changed@buffer_changed" };
	for (int i = 0; i < 2; i++) {
		setenv("QUIPU_STRICT_IGNORE", rules[i], 1);
		SAME(strictly("fail", buffer_changed), 0);
		SAME(lines_with("\"kind\""), 0);
	}
	setenv("QUIPU_STRICT_IGNORE", "wrong-key, buffer-changed@libnone.so", 1);
	int status = strictly("fail", buffer_changed);
	CHECK(WIFEXITED(status));
	SAME(WEXITSTATUS(status), 86);
	SAME(lines_with("buffer-changed"), 1);
	unsetenv("QUIPU_STRICT_IGNORE");
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "the_innocent", the_innocent },
		{ "every_kind", every_kind },
		{ "order_of_writes", order_of_writes },
		{ "traces", traces },
		{ "modes", modes },
		{ "ignored", ignored },
		{ NULL, NULL },
	};
	return run_strictly(tests, argc, argv);
}
