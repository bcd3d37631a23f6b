/* Every operation of a reliable connection, posted in both ways, over the real engine. */
#include "rc.h"

static void sends(void)
{
	struct pair p = connected_pair();
	fill(&p.a, 0, 3000, 1);
	post_recv(&p.b, 10, 0, 4096);
	post_recv(&p.b, 11, 8192, 4096);
	struct ibv_sge sges[3] = { piece(&p.a, 0, 1000), piece(&p.a, 1000, 0),
				   piece(&p.a, 1000, 2000) };
	struct ibv_send_wr second = work(2, IBV_WR_SEND_WITH_IMM, NULL, 0);
	second.imm_data = htonl(0xabcd);
	struct ibv_send_wr first = work(1, IBV_WR_SEND, sges, 3);
	first.next = &second;
	post_send(&p.a, &first);
	SAME(done(&p.a, 1, IBV_WC_SUCCESS).opcode, IBV_WC_SEND);
	done(&p.a, 2, IBV_WC_SUCCESS);
	struct ibv_wc wc = done(&p.b, 10, IBV_WC_SUCCESS);
	SAME(wc.opcode, IBV_WC_RECV);
	SAME(wc.byte_len, 3000);
	SAME(wc.src_qp, p.a.qp->qp_num);
	SAME(wc.wc_flags & IBV_WC_WITH_IMM, 0);
	SAME(memcmp(p.a.buffer, p.b.buffer, 3000), 0);
	wc = done(&p.b, 11, IBV_WC_SUCCESS);
	SAME(wc.byte_len, 0);
	CHECK(wc.wc_flags & IBV_WC_WITH_IMM);
	SAME(ntohl(wc.imm_data), 0xabcd);
	close_pair(&p);
}

static void inline_and_unsignaled(void)
{
	struct pair p = connected_pair();
	for (int i = 0; i < 4; i++)
		post_recv(&p.b, i, 64 * i, 64);
	char text[] = "gone when it is overwritten";
	struct ibv_sge sge = { .addr = (uintptr_t)text, .length = sizeof(text) };
	for (int i = 0; i < 4; i++) {
		struct ibv_send_wr wr = work(100 + i, IBV_WR_SEND, &sge, 1);
		wr.send_flags = IBV_SEND_INLINE | (i == 3 ? IBV_SEND_SIGNALED : 0);
		text[0] = (char)('0' + i);
		post_send(&p.a, &wr);
	}
	memset(text, 0, sizeof(text));
	done(&p.a, 103, IBV_WC_SUCCESS);
	for (int i = 0; i < 4; i++) {
		SAME(done(&p.b, i, IBV_WC_SUCCESS).byte_len, sizeof(text));
		SAME(p.b.buffer[64 * i], '0' + i);
		SAME(strcmp((char *)p.b.buffer + 64 * i + 1, "one when it is overwritten"), 0);
	}
	struct ibv_wc wc;
	SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	close_pair(&p);
}

static void writes_and_reads(void)
{
	struct pair p = connected_pair();
	fill(&p.a, 0, 20000, 3);
	struct ibv_sge sge = piece(&p.a, 0, 20000);
	struct ibv_send_wr wr = work(1, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer + 5;
	wr.wr.rdma.rkey = p.b.mr->rkey;
	post_send(&p.a, &wr);
	SAME(done(&p.a, 1, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_WRITE);
	SAME(memcmp(p.a.buffer, p.b.buffer + 5, 20000), 0);
	struct ibv_sge into = piece(&p.a, 30000, 20000);
	wr = work(2, IBV_WR_RDMA_READ, &into, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer + 5;
	wr.wr.rdma.rkey = p.b.mr->rkey;
	post_send(&p.a, &wr);
	struct ibv_wc wc = done(&p.a, 2, IBV_WC_SUCCESS);
	SAME(wc.opcode, IBV_WC_RDMA_READ);
	SAME(memcmp(p.a.buffer, p.a.buffer + 30000, 20000), 0);
	post_recv(&p.b, 9, 0, 0);
	wr = work(3, IBV_WR_RDMA_WRITE_WITH_IMM, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer + 40000;
	wr.wr.rdma.rkey = p.b.mr->rkey;
	wr.imm_data = htonl(77);
	post_send(&p.a, &wr);
	wc = done(&p.b, 9, IBV_WC_SUCCESS);
	SAME(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	SAME(wc.byte_len, 20000);
	SAME(ntohl(wc.imm_data), 77);
	SAME(memcmp(p.a.buffer, p.b.buffer + 40000, 20000), 0);
	done(&p.a, 3, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void atomics(void)
{
	struct pair p = connected_pair();
	volatile uint64_t *target = (uint64_t *)(p.b.buffer + 64);
	*target = 40;
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = work(1, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);
	wr.wr.atomic.remote_addr = (uintptr_t)target;
	wr.wr.atomic.rkey = p.b.mr->rkey;
	wr.wr.atomic.compare_add = 2;
	post_send(&p.a, &wr);
	SAME(done(&p.a, 1, IBV_WC_SUCCESS).opcode, IBV_WC_FETCH_ADD);
	SAME(*(uint64_t *)p.a.buffer, 40);
	SAME(*target, 42);
	wr.wr_id = 2;
	wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
	wr.wr.atomic.compare_add = 42;
	wr.wr.atomic.swap = 7;
	post_send(&p.a, &wr);
	SAME(done(&p.a, 2, IBV_WC_SUCCESS).opcode, IBV_WC_COMP_SWAP);
	SAME(*(uint64_t *)p.a.buffer, 42);
	SAME(*target, 7);
	wr.wr_id = 3; /* compares with what is no longer there: nothing is swapped */
	post_send(&p.a, &wr);
	done(&p.a, 3, IBV_WC_SUCCESS);
	SAME(*(uint64_t *)p.a.buffer, 7);
	SAME(*target, 7);
	close_pair(&p);
}

/* The same operations by ibv_wr_*, completions by ibv_start_poll. */
static void call_by_call(void)
{
	struct pair p = make_pair(0);
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = DEPTH, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(p.context, &cq_attr);
	CHECK(cq);
	struct ibv_qp_init_attr_ex init = {
		.send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq),
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2,
			 .max_inline_data = 32 },
		.qp_type = IBV_QPT_RC, .pd = p.pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
				  IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
	};
	SAME(ibv_destroy_qp(p.a.qp), 0);
	p.a.qp = ibv_create_qp_ex(p.context, &init);
	CHECK(p.a.qp);
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(p.a.qp);
	CHECK(qp);
	connect_pair(&p, 7);
	fill(&p.a, 0, 100, 9);
	post_recv(&p.b, 50, 1000, 200);
	post_recv(&p.b, 51, 2000, 200);
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = 0;
	ibv_wr_rdma_write(qp, p.b.mr->rkey, (uintptr_t)p.b.buffer);
	ibv_wr_set_sge(qp, p.a.mr->lkey, (uintptr_t)p.a.buffer, 100);
	qp->wr_id = 2;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(qp, htonl(5));
	ibv_wr_set_inline_data(qp, "inline", 7);
	qp->wr_id = 3;
	ibv_wr_send(qp);
	struct ibv_sge two[2] = { piece(&p.a, 0, 50), piece(&p.a, 50, 50) };
	ibv_wr_set_sge_list(qp, 2, two);
	qp->wr_id = 4;
	ibv_wr_rdma_read(qp, p.b.mr->rkey, (uintptr_t)p.b.buffer);
	ibv_wr_set_sge(qp, p.a.mr->lkey, (uintptr_t)p.a.buffer + 500, 100);
	SAME(ibv_wr_complete(qp), 0);
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_abort(qp);

	for (uint64_t id = 2; id <= 4;) {
		struct ibv_poll_cq_attr none = { 0 };
		int result = ibv_start_poll(cq, &none);
		if (result == ENOENT)
			continue;
		while (result == 0) {
			SAME(cq->wr_id, id);
			SAME(cq->status, IBV_WC_SUCCESS);
			SAME(ibv_wc_read_qp_num(cq), p.a.qp->qp_num);
			SAME(ibv_wc_read_opcode(cq), id == 4 ? IBV_WC_RDMA_READ : IBV_WC_SEND);
			id++;
			result = ibv_next_poll(cq);
		}
		SAME(result, ENOENT);
		ibv_end_poll(cq);
	}
	SAME(memcmp(p.b.buffer, p.a.buffer, 100), 0);
	SAME(memcmp(p.a.buffer + 500, p.a.buffer, 100), 0);
	struct ibv_wc wc = done(&p.b, 50, IBV_WC_SUCCESS);
	SAME(ntohl(wc.imm_data), 5);
	SAME(strcmp((char *)p.b.buffer + 1000, "inline"), 0);
	SAME(done(&p.b, 51, IBV_WC_SUCCESS).byte_len, 100);
	SAME(memcmp(p.b.buffer + 2000, p.a.buffer, 100), 0);
	SAME(ibv_destroy_qp(p.a.qp), 0);
	SAME(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	struct ibv_qp_init_attr plain = init_attr(p.a.cq, NULL);
	p.a.qp = ibv_create_qp(p.pd, &plain);
	CHECK(p.a.qp && !ibv_qp_to_qp_ex(p.a.qp));
	close_pair(&p);
}

static void shared_receives(void)
{
	struct pair p = make_pair(1);
	connect_pair(&p, 7);
	struct ibv_sge sge = piece(&p.b, 0, 512);
	for (int i = 0; i < 4; i++) {
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;
		SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	}
	struct ibv_srq_attr attr = { .srq_limit = 2 };
	SAME(ibv_modify_srq(p.srq, &attr, IBV_SRQ_LIMIT), 0);
	SAME(ibv_query_srq(p.srq, &attr), 0);
	SAME(attr.srq_limit, 2);
	struct ibv_sge from = piece(&p.a, 0, 100);
	for (int i = 0; i < 3; i++) {
		struct ibv_send_wr wr = work(i, IBV_WR_SEND, &from, 1);
		post_send(&p.a, &wr);
		done(&p.a, i, IBV_WC_SUCCESS);
		done(&p.b, i, IBV_WC_SUCCESS);
	}
	struct ibv_async_event event;
	do {
		SAME(ibv_get_async_event(p.context, &event), 0);
		ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_COMM_EST);
	SAME(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(event.element.srq == p.srq);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	CHECK(ibv_post_recv(p.b.qp, &wr, &bad) != 0); /* its receives come from the SRQ */
	close_pair(&p);
}

static void windows(void)
{
	struct pair p = connected_pair();
	struct ibv_mw *mw = ibv_alloc_mw(p.pd, IBV_MW_TYPE_1);
	CHECK(mw);
	struct ibv_mw_bind bind = { .wr_id = 1, .send_flags = IBV_SEND_SIGNALED,
				    .bind_info = { .mr = p.b.mr,
						   .addr = (uintptr_t)p.b.buffer + 100,
						   .length = 50,
						   .mw_access_flags = IBV_ACCESS_REMOTE_WRITE } };
	SAME(ibv_bind_mw(p.b.qp, mw, &bind), 0);
	SAME(done(&p.b, 1, IBV_WC_SUCCESS).opcode, IBV_WC_BIND_MW);
	fill(&p.a, 0, 50, 4);
	struct ibv_sge sge = piece(&p.a, 0, 50);
	struct ibv_send_wr wr = work(2, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer + 100;
	wr.wr.rdma.rkey = mw->rkey;
	post_send(&p.a, &wr);
	done(&p.a, 2, IBV_WC_SUCCESS);
	SAME(memcmp(p.a.buffer, p.b.buffer + 100, 50), 0);
	SAME(ibv_dealloc_mw(mw), 0);

	mw = ibv_alloc_mw(p.pd, IBV_MW_TYPE_2);
	CHECK(mw);
	uint32_t rkey = ibv_inc_rkey(mw->rkey);
	struct ibv_send_wr binding = work(3, IBV_WR_BIND_MW, NULL, 0);
	binding.bind_mw.mw = mw;
	binding.bind_mw.rkey = rkey;
	binding.bind_mw.bind_info = bind.bind_info;
	post_send(&p.b, &binding);
	done(&p.b, 3, IBV_WC_SUCCESS);
	wr.wr_id = 4;
	wr.wr.rdma.rkey = rkey;
	post_send(&p.a, &wr);
	done(&p.a, 4, IBV_WC_SUCCESS);
	post_recv(&p.b, 5, 0, 10);
	struct ibv_send_wr invalidate = work(6, IBV_WR_SEND_WITH_INV, NULL, 0);
	invalidate.invalidate_rkey = rkey;
	post_send(&p.a, &invalidate);
	done(&p.a, 6, IBV_WC_SUCCESS);
	struct ibv_wc wc = done(&p.b, 5, IBV_WC_SUCCESS);
	CHECK(wc.wc_flags & IBV_WC_WITH_INV);
	SAME(wc.invalidated_rkey, rkey);
	wr.wr_id = 7; /* the window is no longer bound */
	post_send(&p.a, &wr);
	done(&p.a, 7, IBV_WC_REM_ACCESS_ERR);
	SAME(ibv_dealloc_mw(mw), 0);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "sends", sends },
		{ "inline_and_unsignaled", inline_and_unsignaled },
		{ "writes_and_reads", writes_and_reads },
		{ "atomics", atomics },
		{ "call_by_call", call_by_call },
		{ "shared_receives", shared_receives },
		{ "windows", windows },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
