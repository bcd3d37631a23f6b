/* Shared receive queues that messages name, and responders that several have open (XRC); polls and posts by the
 * functions of extended queues. */
#include "rc.h"

#include <unistd.h>

struct xrc {
	struct pair p;
	struct ibv_xrcd *domain;
	struct ibv_cq_ex *cq; /* of the shared queue */
	struct ibv_srq *srq;
	struct ibv_qp *from, *to;
};

static void to_rts_of(struct xrc *x, struct ibv_qp *qp, struct ibv_qp *peer, int asks)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096,
				    .dest_qp_num = peer->qp_num, .max_dest_rd_atomic = 4, .min_rnr_timer = 1,
				    .ah_attr = { .is_global = 1, .port_num = 1,
						 .grh = { .dgid = x->p.gid, .hop_limit = 1 } } };
	int serves = asks ? 0 : IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	SAME(to_init(qp), 0);
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
						IBV_QP_RQ_PSN | serves), 0);
	int asking = asks ? IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0;
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = attr.rnr_retry = 7;
	attr.max_rd_atomic = 4;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN | asking), 0);
}

static struct xrc xrc(void)
{
	struct xrc x = { .p = make_pair(0) };
	struct ibv_xrcd_init_attr domain = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
					     .fd = -1, .oflags = O_CREAT };
	CHECK((x.domain = ibv_open_xrcd(x.p.context, &domain)));
	struct ibv_cq_init_attr_ex queue = { .cqe = 16, .cq_context = &x,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM };
	CHECK((x.cq = ibv_create_cq_ex(x.p.context, &queue)));
	struct ibv_srq_init_attr_ex shared = { .attr = { .max_wr = 8, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
		.pd = x.p.pd, .xrcd = x.domain, .cq = ibv_cq_ex_to_cq(x.cq),
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ |
			     IBV_SRQ_INIT_ATTR_PD };
	CHECK((x.srq = ibv_create_srq_ex(x.p.context, &shared)));
	struct ibv_qp_init_attr_ex asks = { .send_cq = x.p.a.cq, .qp_type = IBV_QPT_XRC_SEND, .pd = x.p.pd,
		.cap = { .max_send_wr = 8, .max_send_sge = 1, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_SEND };
	struct ibv_qp_init_attr_ex serves = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = x.domain };
	CHECK((x.from = ibv_create_qp_ex(x.p.context, &asks)));
	CHECK((x.to = ibv_create_qp_ex(x.p.context, &serves)));
	return x;
}

static void close_xrc(struct xrc *x)
{
	SAME(ibv_destroy_qp(x->from), 0);
	SAME(ibv_destroy_srq(x->srq), 0);
	SAME(ibv_destroy_cq(ibv_cq_ex_to_cq(x->cq)), 0);
	SAME(ibv_close_xrcd(x->domain), 0);
	close_pair(&x->p);
}

static void messages_name_their_queue(void)
{
	struct xrc x = xrc();
	struct ibv_sge place = piece(&x.p.b, 0, 64);
	struct ibv_recv_wr receive = { .wr_id = 9, .sg_list = &place, .num_sge = 1 }, *bad;
	struct ibv_poll_cq_attr poll = { 0 };
	struct ibv_wc wc;
	uint32_t number = 0;
	double until = seconds() + 20;
	int found;

	SAME(ibv_get_srq_num(x.srq, &number), 0);
	CHECK(number != 0 && number < 1 << 24);
	to_rts_of(&x, x.to, x.from, 0);
	to_rts_of(&x, x.from, x.to, 1);
	SAME(ibv_post_srq_recv(x.srq, &receive, &bad), 0);
	SAME(ibv_start_poll(x.cq, &poll), ENOENT);

	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(x.from);
	CHECK(qp);
	ibv_wr_start(qp);
	qp->wr_id = 8;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(qp, htonl(0xabcd));
	ibv_wr_set_xrc_srqn(qp, number);
	ibv_wr_set_inline_data(qp, "extended", 8);
	SAME(ibv_wr_complete(qp), 0);
	while ((found = ibv_start_poll(x.cq, &poll)) == ENOENT)
		CHECK(seconds() < until);
	SAME(found, 0);
	CHECK(x.cq->wr_id == 9 && x.cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(x.cq) == IBV_WC_RECV && ibv_wc_read_byte_len(x.cq) == 8);
	CHECK(ibv_wc_read_wc_flags(x.cq) & IBV_WC_WITH_IMM && ntohl(ibv_wc_read_imm_data(x.cq)) == 0xabcd);
	SAME(ibv_wc_read_qp_num(x.cq), x.to->qp_num);
	SAME(ibv_next_poll(x.cq), ENOENT);
	ibv_end_poll(x.cq);
	SAME(memcmp(x.p.b.buffer, "extended", 8), 0);
	while (!(found = ibv_poll_cq(x.p.a.cq, 1, &wc)))
		CHECK(seconds() < until);
	CHECK(found == 1 && wc.wr_id == 8 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND);
	/* What is begun and thought better of is not sent. */
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_abort(qp);
	SAME(ibv_close_xrcd(x.domain), EBUSY);
	SAME(ibv_destroy_qp(x.to), 0);
	close_xrc(&x);
}

/* Whoever has it open can move it, and hears of it; it goes with the last. */
static void a_responder_is_opened_by_its_number(void)
{
	struct xrc x = xrc();
	struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD |
			IBV_QP_OPEN_ATTR_CONTEXT | IBV_QP_OPEN_ATTR_TYPE,
		.qp_num = x.to->qp_num, .xrcd = x.domain, .qp_context = &attr, .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_qp_attr state = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp_init_attr init;
	struct ibv_qp *opened = ibv_open_qp(x.p.context, &attr);
	CHECK(opened && opened->qp_context == &attr && opened->qp_num == x.to->qp_num);
	CHECK(opened->qp_type == IBV_QPT_XRC_RECV);
	SAME(to_init(opened), 0);
	SAME(ibv_query_qp(x.to, &state, IBV_QP_STATE, &init), 0);
	SAME(state.qp_state, IBV_QPS_INIT);
	SAME(ibv_destroy_qp(x.to), 0);
	SAME(ibv_query_qp(opened, &state, IBV_QP_STATE, &init), 0);
	SAME(state.qp_state, IBV_QPS_INIT);
	SAME(ibv_destroy_qp(opened), 0);
	CHECK(!ibv_open_qp(x.p.context, &attr) && errno == EINVAL);
	attr.comp_mask &= ~IBV_QP_OPEN_ATTR_XRCD;
	CHECK(!ibv_open_qp(x.p.context, &attr) && errno == EINVAL);
	close_xrc(&x);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "messages_name_their_queue", messages_name_their_queue },
		{ "a_responder_is_opened_by_its_number", a_responder_is_opened_by_its_number },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
