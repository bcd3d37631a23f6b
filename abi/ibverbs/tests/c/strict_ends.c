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

/* A region with a window cannot end yet, and is used on. */
static void end_is_refused(int ends)
{
	struct pair p = connected_pair();
	struct ibv_mw *mw = ibv_alloc_mw(p.pd, IBV_MW_TYPE_1);
	CHECK(mw);
	struct ibv_mw_bind bind = { .wr_id = 1, .send_flags = IBV_SEND_SIGNALED,
				    .bind_info = { .mr = p.b.mr, .addr = (uintptr_t)p.b.buffer, .length = 8,
						   .mw_access_flags = IBV_ACCESS_REMOTE_WRITE } };
	SAME(ibv_bind_mw(p.a.qp, mw, &bind), 0);
	done(&p.a, 1, IBV_WC_SUCCESS);
	post_recv(&p.b, 1, 0, 8);
	SAME(ibv_dereg_mr(p.b.mr), EBUSY);
	post_recv(&p.b, 2, 0, 8);
	SAME(ibv_dealloc_mw(mw), 0);
	if (ends)
		SAME(ibv_dereg_mr(p.b.mr), 0);
	SAME(to_state(p.b.qp, IBV_QPS_ERR), 0);
	if (ends)
		p.b.mr = ibv_reg_mr(p.pd, p.b.buffer, 8, 0);
	close_pair(&p);
}

static void refused(void)
{
	end_is_refused(0);
}

static void refused_once(void)
{
	end_is_refused(1);
}

/* A queue pair that is in a group cannot be destroyed, and sends on. */
static void destruction_is_refused(void)
{
	struct pair p = connected_pair();
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.qp_type = IBV_QPT_UD;
	struct ibv_qp *qp = ibv_create_qp(p.pd, &init);
	CHECK(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), 0);
	SAME(to_state(qp, IBV_QPS_RTR), 0);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = p.gid, .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(p.pd, &to);
	CHECK(ah);
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 1, [15] = 9 } };
	SAME(ibv_attach_mcast(qp, &group, 0), 0);
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &sge, 1);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = 7;
	struct ibv_send_wr *bad;
	/* It is sent to itself. */
	struct ibv_sge room = piece(&p.a, 64, 48);
	struct ibv_recv_wr receive = { .wr_id = 2, .sg_list = &room, .num_sge = 1 }, *bad_receive;
	SAME(ibv_post_recv(qp, &receive, &bad_receive), 0);
	SAME(ibv_post_send(qp, &wr, &bad), 0);
	SAME(ibv_destroy_qp(qp), EBUSY);
	for (int i = 0; i < 2; i++)
		SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
	SAME(ibv_detach_mcast(qp, &group, 0), 0);
	SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_destroy_ah(ah), 0);
	close_pair(&p);
}

/* A list of four from a region, all of the same number, every second one signalled. The second names more
 * than the region, which is reported: it fails, and what is behind it is flushed. */
static void post_four(struct end *end, struct ibv_qp *qp, struct ibv_mr *mr, struct ibv_send_wr like)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr, .length = 64, .lkey = mr->lkey };
	struct ibv_sge more = sge;
	more.length = mr->length + 1;
	struct ibv_send_wr wrs[4], *bad;
	for (int i = 0; i < 4; i++) {
		wrs[i] = like;
		wrs[i].sg_list = i == 1 ? &more : &sge;
		wrs[i].send_flags = i % 2 ? IBV_SEND_SIGNALED : 0;
		wrs[i].next = i < 3 ? &wrs[i + 1] : NULL;
	}
	SAME(ibv_post_send(qp, wrs, &bad), 0);
	for (int i = 0; i < 3; i++)
		SAME(next_wc(end).status, i ? IBV_WC_WR_FLUSH_ERR : IBV_WC_LOC_PROT_ERR);
}

static void all_is_polled(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	post_four(&p.a, p.a.qp, mr, write_to_b(&p, 0, NULL));
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

/* To drain a queue pair: to the error state, and a request behind all others, which is polled. */
static void drained(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = write_to_b(&p, 0, &sge), marker = work(0, IBV_WR_SEND, NULL, 0);
	wr.send_flags = 0;
	for (int i = 0; i < 5; i++)
		post_send(&p.a, &wr);
	/* Most often they are executed by then; if not, they are flushed as well. */
	struct ibv_wc wc;
	for (double until = seconds() + 0.02; seconds() < until;)
		SAME(ibv_poll_cq(p.a.cq, 1, &wc) + ibv_poll_cq(p.b.cq, 1, &wc), 0);
	SAME(to_state(p.a.qp, IBV_QPS_ERR), 0);
	post_send(&p.a, &marker);
	SAME(next_wc(&p.a).status, IBV_WC_WR_FLUSH_ERR);
	while (ibv_poll_cq(p.a.cq, 1, &wc) > 0)
		SAME(wc.status, IBV_WC_WR_FLUSH_ERR);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

/* A queue pair of datagrams goes on after a failure, and its buffer is used again when all is polled. */
static void goes_on(void)
{
	struct pair p = make_pair(0);
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.qp_type = IBV_QPT_UD;
	struct ibv_qp *qp = ibv_create_qp(p.pd, &init);
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 1,
				       .grh = { .dgid = p.gid, .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(p.pd, &address);
	struct ibv_mr *mr = ibv_reg_mr(p.pd, p.a.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(qp && ah && mr);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
	     0);
	SAME(to_state(qp, IBV_QPS_RTR), 0);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	struct ibv_sge sge = { .addr = (uintptr_t)p.a.buffer, .length = 64, .lkey = mr->lkey };
	struct ibv_send_wr wr = work(0, IBV_WR_SEND, &sge, 1), *bad;
	wr.wr.ud.ah = ah;
	/* Nobody has it: the datagrams are lost, which nobody notices. */
	wr.wr.ud.remote_qpn = p.b.qp->qp_num;
	wr.wr.ud.remote_qkey = 7;
	post_four(&p.a, qp, mr, wr);
	SAME(to_state(qp, IBV_QPS_RTS), 0);
	for (int round = 0; round < 3; round++) {
		memset(p.a.buffer, 'a' + round, 64);
		SAME(ibv_post_send(qp, &wr, &bad), 0);
		SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
	}
	SAME(ibv_destroy_ah(ah), 0);
	SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_dereg_mr(mr), 0);
	close_pair(&p);
}

static void numbers_repeat(void)
{
	finds("wrong-key", all_is_polled);
	finds("wrong-key", goes_on);
	innocent(drained);
}

static void what_is_refused(void)
{
	innocent(refused);
	finds("dereg-in-use", refused_once);
	innocent(destruction_is_refused);
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

/* Of a server that sleeps, or polls, until a signal ends it; `ready` is told when it is. */
static void serve(int polls, int ready)
{
	struct pair p = connected_pair();
	struct ibv_wc wc;
	CHECK(dup2(open(log_file, O_WRONLY | O_APPEND | O_CREAT, 0600), STDERR_FILENO) == STDERR_FILENO);
	CHECK(write(ready, "", 1) == 1);
	for (;;) {
		if (polls)
			ibv_poll_cq(p.a.cq, 1, &wc);
		else if (pause())
			exit(3); /* It would take an interrupted call for an error. */
	}
}

static void ended_by_signals(void)
{
	static const int signals[] = { SIGTERM, SIGINT, SIGHUP };
	for (int n = 0; n < 6; n++) {
		int ready[2], status, by = signals[n % 3];
		char byte;
		unlink(log_file);
		fflush(NULL);
		CHECK(pipe(ready) == 0);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			setenv("QUIPU_STRICT", "1", 1);
			signal(by, SIG_DFL);
			serve(n < 3, ready[1]);
		}
		CHECK(close(ready[1]) == 0 && read(ready[0], &byte, 1) == 1 && kill(child, by) == 0);
		SAME(waitpid(child, &status, 0), child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == by && close(ready[0]) == 0);
		SAME(lines_with("quipu: strict:"), 1);
	}
}

/* One that the program ignores does nothing; one that comes to a child of fork ends that. */
static void other_signals(void)
{
	signal(SIGHUP, SIG_IGN);
	setenv("QUIPU_STRICT", "1", 1);
	struct pair p = connected_pair();
	CHECK(raise(SIGHUP) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		for (;;)
			pause();
	int status;
	CHECK(kill(child, SIGTERM) == 0);
	SAME(waitpid(child, &status, 0), child);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "memory_of_receives", memory_of_receives },
		{ "queue_pairs", queue_pairs },
		{ "numbers_repeat", numbers_repeat },
		{ "what_is_refused", what_is_refused },
		{ "ended_by_signals", ended_by_signals },
		{ "other_signals", other_signals },
		{ NULL, NULL },
	};
	return run_strictly(tests, argc, argv);
}
