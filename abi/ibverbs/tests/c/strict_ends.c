/* What the strict mode finds of memory and queue pairs that end while something is posted. Over the real
 * engine. */
#include "strict.h"

/* A region of its own in the buffer of end b. */
static struct ibv_mr *region(struct pair *p)
{
	struct ibv_mr *mr = ibv_reg_mr(p->pd, p->b.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	return mr;
}

/* A receive of end b into a region. */
static void receive_into(struct pair *p, struct ibv_mr *mr, uint32_t length)
{
	struct ibv_sge sge = { .addr = (uintptr_t)p->b.buffer, .length = length, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	if (p->srq)
		SAME(ibv_post_srq_recv(p->srq, &wr, &bad), 0);
	else
		SAME(ibv_post_recv(p->b.qp, &wr, &bad), 0);
}

static void receive_is_posted(int with_srq)
{
	struct pair p = make_pair(with_srq);
	connect_pair(&p, 7);
	struct ibv_mr *mr = region(&p);
	receive_into(&p, mr, 8);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void own_receive(void)
{
	receive_is_posted(0);
}

static void shared_receive(void)
{
	receive_is_posted(1);
}

/* The key of a region goes when its memory is another. */
static void reregistered(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = region(&p);
	receive_into(&p, mr, 8);
	SAME(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, p.a.buffer, 100, 0), 0);
	SAME(to_state(p.b.qp, IBV_QPS_ERR), 0);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

/* A message has filled it, and it is nobody's any more. */
static void receive_is_filled(int with_srq)
{
	struct pair p = make_pair(with_srq);
	connect_pair(&p, 7);
	struct ibv_mr *mr = region(&p);
	receive_into(&p, mr, 8);
	struct ibv_send_wr wr = work(2, IBV_WR_SEND, NULL, 0);
	post_send(&p.a, &wr);
	done(&p.b, 1, IBV_WC_SUCCESS);
	done(&p.a, 2, IBV_WC_SUCCESS);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void own_receive_is_filled(void)
{
	receive_is_filled(0);
}

static void shared_receive_is_filled(void)
{
	receive_is_filled(1);
}

/* Nothing will be placed into it any more, though its completion was not polled. */
static void receive_is_flushed(int with_srq)
{
	struct pair p = make_pair(with_srq);
	connect_pair(&p, 7);
	struct ibv_mr *mr = region(&p);
	receive_into(&p, mr, 8);
	SAME(to_state(p.b.qp, IBV_QPS_ERR), 0);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void own_receive_is_flushed(void)
{
	receive_is_flushed(0);
}

static void shared_receive_is_flushed(void)
{
	receive_is_flushed(1);
}

/* Nothing is placed yet; and into no bytes nothing ever is. */
static void receive_is_out_of_reach(void)
{
	struct pair p = make_pair(0);
	SAME(to_init(p.b.qp), 0);
	struct ibv_mr *mr = region(&p);
	receive_into(&p, mr, 8);
	SAME(ibv_dereg_mr(mr), 0);
	SAME(to_state(p.b.qp, IBV_QPS_RESET), 0);
	connect_pair(&p, 7);
	mr = region(&p);
	receive_into(&p, mr, 0);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

/* To RESET with a send outstanding, from a state or by way of another; and it is over. */
static void reset(enum ibv_qp_state by_way_of)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	if (by_way_of != IBV_QPS_RTS)
		SAME(to_state(p.a.qp, by_way_of), 0);
	SAME(to_state(p.a.qp, IBV_QPS_RESET), 0);
	close_pair(&p);
}

static void reset_in_use(void)
{
	reset(IBV_QPS_RTS);
}

static void reset_while_draining(void)
{
	reset(IBV_QPS_SQD);
}

static void reset_after_error(void)
{
	reset(IBV_QPS_ERR);
}

static void reset_in_time(void)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = write_to_b(&p, 1, &sge);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	post_recv(&p.a, 2, 0, 8);
	SAME(to_state(p.a.qp, IBV_QPS_RESET), 0);
	close_pair(&p);
}

static void memory_of_receives(void)
{
	finds("dereg-in-use", own_receive);
	SAME(lines_with("a receive that names it was posted here"), 1);
	SAME(lines_with("receive_into"), 1);
	finds("dereg-in-use", shared_receive);
	SAME(lines_with("receive_into"), 1);
	finds("dereg-in-use", reregistered);
	innocent(own_receive_is_filled);
	innocent(shared_receive_is_filled);
	innocent(own_receive_is_flushed);
	innocent(shared_receive_is_flushed);
	innocent(receive_is_out_of_reach);
}

static void queue_pairs(void)
{
	finds("reset-in-use", reset_in_use);
	finds("reset-in-use", reset_while_draining);
	innocent(reset_after_error);
	innocent(reset_in_time);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "memory_of_receives", memory_of_receives },
		{ "queue_pairs", queue_pairs },
		{ NULL, NULL },
	};
	return run_strictly(tests, argc, argv);
}
