/* A program whose calls are traced: one of each kind that is shown in a way of its own. It succeeds where
 * a trace changes nothing; what the trace says is looked at by the test that runs it. */
#include "rc.h"

#include <sys/mman.h>
#include <unistd.h>

static void posted_and_polled(void)
{
	struct pair p = connected_pair();
	post_recv(&p.b, 0x21, 0, 100);
	struct ibv_sge sge = piece(&p.a, 0, 64);
	struct ibv_send_wr send = work(0x12, IBV_WR_SEND_WITH_IMM, &sge, 1);
	send.imm_data = htonl(0x2a);
	struct ibv_send_wr write = work(0x11, IBV_WR_RDMA_WRITE, &sge, 1);
	write.wr.rdma.remote_addr = (uintptr_t)p.b.buffer + 256;
	write.wr.rdma.rkey = p.b.mr->rkey;
	write.next = &send;
	post_send(&p.a, &write);
	done(&p.a, 0x11, IBV_WC_SUCCESS);
	done(&p.a, 0x12, IBV_WC_SUCCESS);
	done(&p.b, 0x21, IBV_WC_SUCCESS);
	/* Nothing is there: these are counted. */
	struct ibv_wc wc;
	for (int i = 0; i < 1000; i++)
		SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	/* A request of the peer's that is refused, and one behind it that is flushed. */
	write.next = NULL;
	write.wr.rdma.rkey ^= 0x5500;
	post_send(&p.a, &write);
	done(&p.a, 0x11, IBV_WC_REM_ACCESS_ERR);
	close_pair(&p);
}

/* Of those that only drivers call. */
void ibv_copy_qp_attr_from_kern(void *to, void *from);

static void failures(void)
{
	ibv_copy_qp_attr_from_kern(NULL, NULL); /* does nothing */
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	static char memory[4096];
	/* Remote writes need local ones. */
	errno = 0;
	CHECK(!ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_REMOTE_WRITE));
	SAME(errno, EINVAL);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	SAME(ibv_dealloc_pd(pd), EBUSY);
	SAME(errno, EBUSY);
	struct ibv_port_attr port;
	SAME(ibv_query_port(context, 2, &port), EINVAL);
	errno = 77; /* what succeeds leaves it alone */
	SAME(ibv_dereg_mr(mr), 0);
	SAME(ibv_dealloc_pd(pd), 0);
	SAME(errno, 77);
	SAME(ibv_close_device(context), 0);
}

/* Posting call by call, and polling field by field. */
static void step_by_step(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq_init_attr_ex wanted = { .cqe = 8, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &wanted);
	CHECK(cq);
	struct ibv_qp_init_attr_ex init = { .send_cq = ibv_cq_ex_to_cq(cq),
					    .recv_cq = ibv_cq_ex_to_cq(cq), .qp_type = IBV_QPT_RC,
					    .cap = { .max_send_wr = 4, .max_recv_wr = 4,
						     .max_send_sge = 1, .max_recv_sge = 1 },
					    .comp_mask = IBV_QP_INIT_ATTR_PD |
							 IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					    .pd = pd, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	CHECK(qp);
	union ibv_gid gid;
	SAME(ibv_query_gid(context, 1, 0, &gid), 0);
	SAME(to_init(qp), 0);
	SAME(to_rtr(qp, gid, qp->qp_num, 1), 0);
	SAME(to_rts(qp, 14, 7, 7), 0);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	/* In the error state, requests are flushed. */
	struct ibv_qp_ex *work = ibv_qp_to_qp_ex(qp);
	ibv_wr_start(work);
	work->wr_id = 0x77;
	work->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(work);
	ibv_wr_set_sge(work, 5, 0x1000, 0);
	SAME(ibv_wr_complete(work), 0);
	struct ibv_poll_cq_attr how = { 0 };
	int polled;
	double until = seconds() + 20;
	while ((polled = ibv_start_poll(cq, &how)) == ENOENT)
		CHECK(seconds() < until);
	SAME(polled, 0);
	SAME(cq->wr_id, 0x77);
	SAME(cq->status, IBV_WC_WR_FLUSH_ERR);
	ibv_end_poll(cq);
	SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	SAME(ibv_dealloc_pd(pd), 0);
	SAME(ibv_close_device(context), 0);
}

/* Calls that are refused before anything is read or written: what their pointers name stays unread. */
static void refused(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &shared);
	CHECK(cq && qp && srq);
	char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED);
	SAME(munmap(page + 4096, 4096), 0);

	/* Copies are no objects; all requests are bad. */
	struct { uint64_t before; struct ibv_qp qp; struct ibv_srq srq; } copy = { 0, *qp, *srq };
	struct ibv_send_wr send = { .wr_id = 0x31 }, *bad_send = (void *)0x1234567;
	SAME(ibv_post_send(&copy.qp, &send, &bad_send), EINVAL);
	CHECK(bad_send == &send);
	struct ibv_recv_wr recv = { .wr_id = 0x32 }, *bad_recv = (void *)0x1234567;
	SAME(ibv_post_recv(&copy.qp, &recv, &bad_recv), EINVAL);
	CHECK(bad_recv == &recv);
	bad_recv = (void *)0x1234567;
	SAME(ibv_post_srq_recv(&copy.srq, &recv, &bad_recv), EINVAL);
	CHECK(bad_recv == &recv);

	/* More elements than a queue takes, and than there are. */
	SAME(to_init(qp), 0);
	recv.sg_list = (struct ibv_sge *)(page + 4096) - 1;
	recv.num_sge = 8;
	SAME(ibv_post_recv(qp, &recv, &bad_recv), EINVAL);
	CHECK(bad_recv == &recv);

	/* A table without room, and rows that nobody has filled. */
	CHECK(ibv_query_gid_table(context, (void *)(page + 4092), 0, 0) < 0);
	SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_destroy_srq(srq), 0);
	SAME(ibv_destroy_cq(cq), 0);
	SAME(ibv_dealloc_pd(pd), 0);
	SAME(ibv_close_device(context), 0);
	munmap(page, 4096);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "posted_and_polled", posted_and_polled },
		{ "failures", failures },
		{ "step_by_step", step_by_step },
		{ "refused", refused },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
