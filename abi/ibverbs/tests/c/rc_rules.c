/* States, errors and events of a reliable connection, over the real engine. */
#include "rc.h"

static void addresses_need_a_gid(void)
{
	struct pair p = make_pair(0);
	SAME(to_init(p.a.qp), 0);
	SAME(to_rtr(p.a.qp, p.gid, p.b.qp->qp_num, 0), EINVAL);
	SAME(p.a.qp->state, IBV_QPS_INIT);
	SAME(to_rtr(p.a.qp, p.gid, p.b.qp->qp_num, 1), 0);
	struct ibv_ah_attr attr = { .port_num = 1 };
	CHECK(!ibv_create_ah(p.pd, &attr));
	attr.is_global = 1;
	attr.grh.dgid = p.gid;
	struct ibv_ah *ah = ibv_create_ah(p.pd, &attr);
	CHECK(ah);
	SAME(ibv_destroy_ah(ah), 0);
	close_pair(&p);
}

static void states_follow_the_table(void)
{
	struct pair p = make_pair(0);
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, NULL, 0), *bad_send;
	struct ibv_recv_wr recv = { .wr_id = 2 }, *bad_recv;
	SAME(ibv_post_recv(p.a.qp, &recv, &bad_recv), EINVAL);
	CHECK(bad_recv == &recv);
	SAME(to_rts(p.a.qp, 14, 7, 7), EINVAL); /* not from RESET */
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	SAME(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_PORT), EINVAL); /* too little */
	SAME(to_init(p.a.qp), 0);
	SAME(ibv_post_recv(p.a.qp, &recv, &bad_recv), 0);
	SAME(ibv_post_send(p.a.qp, &wr, &bad_send), EINVAL);
	CHECK(bad_send == &wr);
	struct ibv_qp_init_attr init;
	SAME(ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE, &init), 0);
	SAME(attr.qp_state, IBV_QPS_INIT);
	SAME(attr.port_num, 1);
	CHECK(init.send_cq == p.a.cq && init.qp_type == IBV_QPT_RC);
	CHECK(init.cap.max_send_wr >= DEPTH);
	attr.qp_state = IBV_QPS_ERR;
	SAME(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE), 0);
	done(&p.a, 2, IBV_WC_WR_FLUSH_ERR);
	SAME(ibv_post_send(p.a.qp, &wr, &bad_send), 0);
	done(&p.a, 1, IBV_WC_WR_FLUSH_ERR);
	attr.qp_state = IBV_QPS_RESET;
	SAME(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE), 0);
	SAME(p.a.qp->state, IBV_QPS_RESET);
	close_pair(&p);
}

static void limits_are_refused(void)
{
	struct pair p = make_pair(0);
	struct ibv_device_attr device;
	SAME(ibv_query_device(p.context, &device), 0);
	CHECK(device.vendor_id != 0 && device.vendor_id != 0xffffff && device.max_sge > 1);
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.cap.max_inline_data = 1 << 30;
	CHECK(!ibv_create_qp(p.pd, &init));
	init = init_attr(p.a.cq, NULL);
	init.cap.max_send_sge = (uint32_t)device.max_sge + 1;
	CHECK(!ibv_create_qp(p.pd, &init));
	SAME(errno, EINVAL);
	init = init_attr(p.a.cq, NULL);
	init.cap.max_send_wr = (uint32_t)device.max_qp_wr + 1;
	CHECK(!ibv_create_qp(p.pd, &init));
	init = init_attr(p.a.cq, NULL);
	init.qp_type = IBV_QPT_DRIVER;
	CHECK(!ibv_create_qp(p.pd, &init));
	SAME(errno, EOPNOTSUPP);
	CHECK(!ibv_reg_mr(p.pd, p.a.buffer, BYTES, IBV_ACCESS_REMOTE_WRITE)); /* needs local write */
	SAME(ibv_dealloc_pd(p.pd), EBUSY);
	SAME(ibv_destroy_cq(p.a.cq), EBUSY);
	SAME(ibv_destroy_comp_channel(p.a.channel), EBUSY);
	SAME(ibv_resize_cq(p.a.cq, 100), 0);
	CHECK(p.a.cq->cqe >= 100);
	close_pair(&p);
}

static void a_full_queue_names_the_first_that_did_not_fit(void)
{
	struct pair p = connected_pair();
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	SAME(ibv_query_qp(p.b.qp, &attr, IBV_QP_CAP, &init), 0);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	for (uint32_t i = 0; i < init.cap.max_recv_wr; i++)
		SAME(ibv_post_recv(p.b.qp, &wr, &bad), 0);
	SAME(ibv_post_recv(p.b.qp, &wr, &bad), ENOMEM);
	CHECK(bad == &wr);
	close_pair(&p);
}

/* The peer refuses with a status of its own; then both queue pairs are in ERR and flush. */
static void refused(struct pair *p, struct ibv_send_wr *wr, enum ibv_wc_status status)
{
	post_recv(&p->a, 90, 0, 10);
	post_send(&p->a, wr);
	done(&p->a, wr->wr_id, status);
	done(&p->a, 90, IBV_WC_WR_FLUSH_ERR);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	SAME(ibv_query_qp(p->a.qp, &attr, IBV_QP_STATE, &init), 0);
	SAME(attr.qp_state, IBV_QPS_ERR);
	close_pair(p);
}

static void keys_and_rights_are_checked(void)
{
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct pair p = connected_pair();
	sge = piece(&p.a, 0, 8);
	wr = work(1, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer;
	wr.wr.rdma.rkey = p.b.mr->rkey ^ 0x100;
	refused(&p, &wr, IBV_WC_REM_ACCESS_ERR);

	p = connected_pair();
	sge = piece(&p.a, 0, 8);
	wr = work(2, IBV_WR_RDMA_READ, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer + BYTES - 4;
	wr.wr.rdma.rkey = p.b.mr->rkey;
	refused(&p, &wr, IBV_WC_REM_ACCESS_ERR);

	p = connected_pair();
	sge = piece(&p.a, BYTES - 4, 8);
	wr = work(3, IBV_WR_SEND, &sge, 1);
	post_recv(&p.b, 50, 0, 100);
	refused(&p, &wr, IBV_WC_LOC_PROT_ERR);

	p = connected_pair();
	struct ibv_mr *readable = ibv_reg_mr(p.pd, p.b.buffer, BYTES, IBV_ACCESS_REMOTE_READ);
	CHECK(readable);
	SAME(ibv_dereg_mr(p.b.mr), 0);
	p.b.mr = readable;
	sge = piece(&p.a, 0, 8);
	wr = work(4, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer;
	wr.wr.rdma.rkey = readable->rkey;
	refused(&p, &wr, IBV_WC_REM_ACCESS_ERR);
}

static void a_message_longer_than_its_receive_fails_both_ends(void)
{
	struct pair p = connected_pair();
	post_recv(&p.b, 1, 0, 10);
	struct ibv_sge sge = piece(&p.a, 0, 100);
	struct ibv_send_wr wr = work(2, IBV_WR_SEND, &sge, 1);
	post_send(&p.a, &wr);
	done(&p.a, 2, IBV_WC_REM_INV_REQ_ERR);
	done(&p.b, 1, IBV_WC_LOC_LEN_ERR);
	close_pair(&p);
}

static void a_receiver_that_is_not_ready(void)
{
	struct pair p = make_pair(0);
	connect_pair(&p, 7); /* waits for ever */
	struct ibv_sge sge = piece(&p.a, 0, 100);
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &sge, 1);
	post_send(&p.a, &wr);
	struct ibv_wc wc;
	double until = seconds() + 0.05;
	while (seconds() < until)
		SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	post_recv(&p.b, 2, 0, 100);
	done(&p.a, 1, IBV_WC_SUCCESS);
	done(&p.b, 2, IBV_WC_SUCCESS);
	close_pair(&p);

	p = make_pair(0);
	connect_pair(&p, 1);
	sge = piece(&p.a, 0, 100);
	wr = work(3, IBV_WR_SEND, &sge, 1);
	post_send(&p.a, &wr);
	done(&p.a, 3, IBV_WC_RNR_RETRY_EXC_ERR);
	close_pair(&p);
}

static void a_peer_that_is_not_there(void)
{
	struct pair p = make_pair(0);
	SAME(to_init(p.a.qp), 0);
	SAME(to_rtr(p.a.qp, p.gid, p.b.qp->qp_num ^ 0x40, 1), 0);
	SAME(to_rts(p.a.qp, 10, 1, 1), 0);
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &sge, 1);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_RETRY_EXC_ERR);
	close_pair(&p);
}

static int readable(int fd, int milliseconds)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	int ready = poll(&poll_fd, 1, milliseconds);
	CHECK(ready >= 0);
	return ready;
}

static void completion_events(void)
{
	struct pair p = connected_pair();
	struct ibv_cq *cq;
	void *context;
	int flags = fcntl(p.b.channel->fd, F_GETFL);
	SAME(fcntl(p.b.channel->fd, F_SETFL, flags | O_NONBLOCK), 0);
	SAME(ibv_get_cq_event(p.b.channel, &cq, &context), -1);
	SAME(errno, EAGAIN);
	post_recv(&p.b, 1, 0, 100);
	post_recv(&p.b, 2, 0, 100);
	SAME(ibv_req_notify_cq(p.b.cq, 1), 0); /* solicited only */
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, NULL, 0);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	SAME(readable(p.b.channel->fd, 0), 0);
	wr.wr_id = 2;
	wr.send_flags |= IBV_SEND_SOLICITED;
	post_send(&p.a, &wr);
	SAME(readable(p.b.channel->fd, 10000), 1);
	SAME(ibv_get_cq_event(p.b.channel, &cq, &context), 0);
	CHECK(cq == p.b.cq && context == p.b.buffer);
	SAME(readable(p.b.channel->fd, 0), 0); /* one event for one arming */
	ibv_ack_cq_events(cq, 1);
	done(&p.a, 2, IBV_WC_SUCCESS);
	done(&p.b, 1, IBV_WC_SUCCESS);
	done(&p.b, 2, IBV_WC_SUCCESS);
	/* Asleep on the descriptor, with nobody polling: the data comes all the same. */
	SAME(fcntl(p.b.channel->fd, F_SETFL, flags), 0);
	SAME(ibv_req_notify_cq(p.a.cq, 0), 0);
	post_recv(&p.b, 3, 0, 100);
	wr.wr_id = 3;
	post_send(&p.a, &wr);
	SAME(ibv_get_cq_event(p.a.channel, &cq, &context), 0);
	CHECK(cq == p.a.cq);
	ibv_ack_cq_events(cq, 1);
	done(&p.a, 3, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void draining(void)
{
	struct pair p = connected_pair();
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	SAME(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	struct ibv_async_event event;
	do {
		SAME(ibv_get_async_event(p.context, &event), 0);
		ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_COMM_EST);
	SAME(event.event_type, IBV_EVENT_SQ_DRAINED);
	CHECK(event.element.qp == p.a.qp);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE), 0);
	SAME(p.a.qp->state, IBV_QPS_RTS);
	close_pair(&p);
}

static void regions_have_their_own_addresses(void)
{
	struct pair p = connected_pair();
	struct ibv_mr *mr = ibv_reg_mr_iova(p.pd, p.b.buffer, 4096, 0x10000, ALL_ACCESS);
	struct ibv_mr *zero = ibv_reg_mr(p.pd, p.b.buffer, 4096, ALL_ACCESS | IBV_ACCESS_ZERO_BASED);
	CHECK(mr && zero);
	fill(&p.a, 0, 16, 8);
	struct ibv_sge sge = piece(&p.a, 0, 16);
	struct ibv_send_wr wr = work(1, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.remote_addr = 0x10000 + 100;
	wr.wr.rdma.rkey = mr->rkey;
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	SAME(memcmp(p.a.buffer, p.b.buffer + 100, 16), 0);
	wr.wr_id = 2;
	wr.wr.rdma.remote_addr = 300;
	wr.wr.rdma.rkey = zero->rkey;
	post_send(&p.a, &wr);
	done(&p.a, 2, IBV_WC_SUCCESS);
	SAME(memcmp(p.a.buffer, p.b.buffer + 300, 16), 0);
	SAME(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, p.pd, NULL, 0, ALL_ACCESS), IBV_REREG_MR_ERR_INPUT);
	SAME(errno, EINVAL); /* rights that are not to change */
	SAME(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0), 0);
	SAME(ibv_dereg_mr(mr), 0);
	SAME(ibv_dereg_mr(zero), 0);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "addresses_need_a_gid", addresses_need_a_gid },
		{ "states_follow_the_table", states_follow_the_table },
		{ "limits_are_refused", limits_are_refused },
		{ "a_full_queue_names_the_first_that_did_not_fit",
		  a_full_queue_names_the_first_that_did_not_fit },
		{ "keys_and_rights_are_checked", keys_and_rights_are_checked },
		{ "a_message_longer_than_its_receive_fails_both_ends",
		  a_message_longer_than_its_receive_fails_both_ends },
		{ "a_receiver_that_is_not_ready", a_receiver_that_is_not_ready },
		{ "a_peer_that_is_not_there", a_peer_that_is_not_there },
		{ "completion_events", completion_events },
		{ "draining", draining },
		{ "regions_have_their_own_addresses", regions_have_their_own_addresses },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
