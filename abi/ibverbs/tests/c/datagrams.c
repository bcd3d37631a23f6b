/* Datagrams between two queue pairs of one process, and to those who send them: address handles, the header in
 * front of the payload, groups. */
#include "rc.h"

enum { QKEY = 0x11111111, HEADER = 40 };

static struct ibv_qp *datagram_qp(struct pair *p, struct end *end)
{
	struct ibv_qp_init_attr init = init_attr(end->cq, NULL);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	init.qp_type = IBV_QPT_UD;
	struct ibv_qp *qp = ibv_create_qp(p->pd, &init);
	CHECK(qp);
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), 0);
	attr.qp_state = IBV_QPS_RTR;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	return qp;
}

/* A pair whose queue pairs are of datagrams. */
static struct pair datagram_pair(void)
{
	struct pair p = make_pair(0);
	for (int i = 0; i < 2; i++) {
		struct end *end = i ? &p.b : &p.a;
		SAME(ibv_destroy_qp(end->qp), 0);
		end->qp = datagram_qp(&p, end);
	}
	return p;
}

static struct ibv_ah *handle_of(struct pair *p, union ibv_gid gid)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 4 } };
	struct ibv_ah *ah = ibv_create_ah(p->pd, &attr);
	CHECK(ah && ah->context == p->context && ah->pd == p->pd);
	return ah;
}

static struct ibv_send_wr datagram(uint64_t wr_id, struct ibv_sge *sge, struct ibv_ah *ah, uint32_t qpn)
{
	struct ibv_send_wr wr = work(wr_id, IBV_WR_SEND, sge, 1);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qpn;
	wr.wr.ud.remote_qkey = QKEY;
	return wr;
}

static void who_receives_can_answer(void)
{
	struct pair p = datagram_pair();
	struct ibv_ah *to_b = handle_of(&p, p.gid), *back;
	struct ibv_ah_attr attr;
	struct ibv_sge sge = piece(&p.a, 0, 100);
	struct ibv_send_wr wr = datagram(1, &sge, to_b, p.b.qp->qp_num);
	fill(&p.a, 0, 100, 5);
	wr.opcode = IBV_WR_SEND_WITH_IMM;
	wr.imm_data = htonl(0x1234);
	post_recv(&p.b, 2, 0, HEADER + 200);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	struct ibv_wc wc = done(&p.b, 2, IBV_WC_SUCCESS);
	SAME(wc.byte_len, HEADER + 100);
	SAME(wc.src_qp, p.a.qp->qp_num);
	CHECK(wc.wc_flags & IBV_WC_GRH && wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == 0x1234);
	SAME(memcmp(p.b.buffer + HEADER, p.a.buffer, 100), 0);

	struct ibv_grh *header = (struct ibv_grh *)p.b.buffer;
	SAME(ibv_init_ah_from_wc(p.context, 1, &wc, header, &attr), 0);
	CHECK(attr.is_global && attr.port_num == 1 && attr.grh.sgid_index == 0);
	SAME(memcmp(&attr.grh.dgid, &p.gid, sizeof p.gid), 0);
	CHECK((back = ibv_create_ah_from_wc(p.pd, &wc, header, 1)));
	CHECK(!ibv_create_ah_from_wc(p.pd, &wc, header, 2) && errno == EINVAL);
	sge = piece(&p.b, HEADER, 50);
	wr = datagram(3, &sge, back, wc.src_qp);
	wr.send_flags |= IBV_SEND_INLINE;
	post_recv(&p.a, 4, 1000, HEADER + 50);
	post_send(&p.b, &wr);
	/* It is not needed any more. */
	SAME(ibv_destroy_ah(back), 0);
	done(&p.b, 3, IBV_WC_SUCCESS);
	SAME(done(&p.a, 4, IBV_WC_SUCCESS).byte_len, HEADER + 50);
	SAME(memcmp(p.a.buffer + 1000 + HEADER, p.a.buffer, 50), 0);

	/* Nobody is meant without a handle. */
	struct ibv_send_wr *bad;
	sge = piece(&p.a, 0, 10);
	wr = datagram(5, &sge, NULL, p.b.qp->qp_num);
	SAME(ibv_post_send(p.a.qp, &wr, &bad), EINVAL);
	CHECK(bad == &wr);
	SAME(ibv_dealloc_pd(p.pd), EBUSY);
	SAME(ibv_destroy_ah(to_b), 0);
	close_pair(&p);
}

static void groups_reach_their_members(void)
{
	struct pair p = datagram_pair();
	union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 7, 7, 7 } };
	struct ibv_ah *ah = handle_of(&p, group);
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = datagram(1, &sge, ah, 0xffffff);
	union ibv_gid none = { .raw = { 1 } };
	SAME(ibv_attach_mcast(p.b.qp, &none, 0), EINVAL);
	SAME(ibv_detach_mcast(p.b.qp, &group, 0), EINVAL);
	SAME(ibv_attach_mcast(p.b.qp, &group, 0), 0);
	SAME(ibv_destroy_qp(p.b.qp), EBUSY);
	fill(&p.a, 0, 8, 3);
	post_recv(&p.b, 2, 0, HEADER + 8);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	SAME(done(&p.b, 2, IBV_WC_SUCCESS).src_qp, p.a.qp->qp_num);
	SAME(memcmp(p.b.buffer + HEADER, p.a.buffer, 8), 0);
	SAME(ibv_detach_mcast(p.b.qp, &group, 0), 0);
	SAME(ibv_destroy_ah(ah), 0);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "who_receives_can_answer", who_receives_can_answer },
		{ "groups_reach_their_members", groups_reach_their_members },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
