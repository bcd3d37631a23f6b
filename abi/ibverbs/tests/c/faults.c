/* Every error path that a plan of faults can lead a program to, through the C interface: each status of
 * a completion, each asynchronous event, each call that can be refused, and what befalls peers, ports
 * and devices. Each case is a process of its own, under a plan of its own. Over the real engine. */
#include "faults.h"

static struct ibv_send_wr sending(uint64_t id)
{
	return work(id, IBV_WR_SEND, NULL, 0);
}

/* How many completions there are after a while in which nothing more may come. */
static int idle(struct end *end)
{
	struct ibv_wc wc;
	double until = seconds() + 0.02;
	while (seconds() < until)
		if (ibv_poll_cq(end->cq, 1, &wc) != 0)
			return 0;
	return 1;
}

/* --- completions ------------------------------------------------------------------------------- */

static const struct {
	const char *name;
	enum ibv_wc_status status;
} statuses[] = {
	{ "loc_len_err", IBV_WC_LOC_LEN_ERR },
	{ "loc_qp_op_err", IBV_WC_LOC_QP_OP_ERR },
	{ "loc_eec_op_err", IBV_WC_LOC_EEC_OP_ERR },
	{ "loc_prot_err", IBV_WC_LOC_PROT_ERR },
	{ "wr_flush_err", IBV_WC_WR_FLUSH_ERR },
	{ "mw_bind_err", IBV_WC_MW_BIND_ERR },
	{ "bad_resp_err", IBV_WC_BAD_RESP_ERR },
	{ "loc_access_err", IBV_WC_LOC_ACCESS_ERR },
	{ "rem_inv_req_err", IBV_WC_REM_INV_REQ_ERR },
	{ "rem_access_err", IBV_WC_REM_ACCESS_ERR },
	{ "rem_op_err", IBV_WC_REM_OP_ERR },
	{ "retry_exc_err", IBV_WC_RETRY_EXC_ERR },
	{ "rnr_retry_exc_err", IBV_WC_RNR_RETRY_EXC_ERR },
	{ "loc_rdd_viol_err", IBV_WC_LOC_RDD_VIOL_ERR },
	{ "rem_inv_rd_req_err", IBV_WC_REM_INV_RD_REQ_ERR },
	{ "rem_abort_err", IBV_WC_REM_ABORT_ERR },
	{ "inv_eecn_err", IBV_WC_INV_EECN_ERR },
	{ "inv_eec_state_err", IBV_WC_INV_EEC_STATE_ERR },
	{ "fatal_err", IBV_WC_FATAL_ERR },
	{ "resp_timeout_err", IBV_WC_RESP_TIMEOUT_ERR },
	{ "general_err", IBV_WC_GENERAL_ERR },
	{ "tm_err", IBV_WC_TM_ERR },
	{ "tm_rndv_incomplete", IBV_WC_TM_RNDV_INCOMPLETE },
};

/* A pair that gives up after 2 x 4 x 4.2 ms, and after 2 x 4.2 ms on a peer that has left. */
static struct pair impatient_pair(void)
{
	struct pair p = make_pair(0);
	SAME(to_init(p.a.qp), 0);
	SAME(to_init(p.b.qp), 0);
	SAME(to_rtr(p.a.qp, p.gid, p.b.qp->qp_num, 1), 0);
	SAME(to_rtr(p.b.qp, p.gid, p.a.qp->qp_num, 1), 0);
	SAME(to_rts(p.a.qp, 10, 1, 7), 0);
	SAME(to_rts(p.b.qp, 10, 1, 7), 0);
	return p;
}

/* One request fails between two others: what is before it is done, what is behind it is flushed. */
static void send_fails(const void *argument)
{
	struct pair p = impatient_pair();
	struct ibv_send_wr wrs[3] = { sending(1), sending(2), sending(3) };
	wrs[0].next = &wrs[1];
	wrs[1].next = &wrs[2];
	wrs[1].send_flags = 0; /* failures are signalled in any case */
	post_recv(&p.a, 90, 0, 8);
	post_recv(&p.b, 10, 0, 8);
	post_recv(&p.b, 11, 0, 8);
	post_send(&p.a, wrs);
	done(&p.a, 1, IBV_WC_SUCCESS);
	done(&p.a, 2, *(const enum ibv_wc_status *)argument);
	done(&p.a, 3, IBV_WC_WR_FLUSH_ERR);
	done(&p.a, 90, IBV_WC_WR_FLUSH_ERR);
	SAME(state(&p.a), IBV_QPS_ERR);
	done(&p.b, 10, IBV_WC_SUCCESS);
	/* The peer learns of it when it next sends, after its own time. */
	struct ibv_send_wr wr = sending(20);
	double start = seconds();
	post_send(&p.b, &wr);
	done(&p.b, 20, IBV_WC_RETRY_EXC_ERR);
	CHECK(seconds() - start >= 0.008);
	done(&p.b, 11, IBV_WC_WR_FLUSH_ERR);
	close_pair(&p);
}

static void receive_fails(const void *argument)
{
	enum ibv_wc_status status = *(const enum ibv_wc_status *)argument;
	struct pair p = connected_pair();
	struct ibv_send_wr wr = sending(1);
	for (int i = 10; i < 13; i++)
		post_recv(&p.b, i, 0, 8);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	wr = sending(2);
	post_send(&p.a, &wr);
	done(&p.a, 2, status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR);
	done(&p.b, 10, IBV_WC_SUCCESS);
	done(&p.b, 11, status);
	done(&p.b, 12, IBV_WC_WR_FLUSH_ERR);
	SAME(state(&p.b), IBV_QPS_ERR);
	close_pair(&p);
}

static void every_status(void)
{
	for (size_t i = 0; i < sizeof(statuses) / sizeof(*statuses); i++) {
		under(send_fails, &statuses[i].status,
		      "inject = 'completion'\nstatus = '%s'\nnth = 2\nqp = 1\n", statuses[i].name);
		under(receive_fails, &statuses[i].status,
		      "inject = 'completion'\nstatus = '%s'\nside = 'recv'\nnth = 2\nqp = 2\n",
		      statuses[i].name);
	}
}

/* A refusal for the key comes from the peer, which fails as well. */
static void key_refused(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	struct ibv_send_wr wr = work(1, IBV_WR_RDMA_READ, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer;
	wr.wr.rdma.rkey = p.b.mr->rkey;
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_REM_ACCESS_ERR);
	struct ibv_async_event event = next_event(p.context);
	SAME(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
	CHECK(event.element.qp == p.b.qp);
	SAME(state(&p.b), IBV_QPS_ERR);
	close_pair(&p);
}

static void remote_keys(void)
{
	under(key_refused, NULL,
	      "inject = 'completion'\nstatus = 'rem_access_err'\nopcode = 'rdma_read'\n");
}

/* --- time -------------------------------------------------------------------------------------- */

static void late_send(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_send_wr wr = sending(1);
	post_recv(&p.b, 10, 0, 8);
	SAME(ibv_req_notify_cq(p.a.cq, 0), 0);
	double start = seconds();
	post_send(&p.a, &wr);
	done(&p.b, 10, IBV_WC_SUCCESS);
	/* By the event, which comes with the completion. */
	struct ibv_cq *cq;
	void *context;
	SAME(ibv_get_cq_event(p.a.channel, &cq, &context), 0);
	ibv_ack_cq_events(cq, 1);
	CHECK(seconds() - start >= 0.05);
	done(&p.a, 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void late_receive(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_send_wr wr = sending(1);
	post_recv(&p.b, 10, 0, 8);
	double start = seconds();
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	done(&p.b, 10, IBV_WC_SUCCESS);
	CHECK(seconds() - start >= 0.05);
	close_pair(&p);
}

static void slow(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, 0, 8);
	fill(&p.a, 0, 8, 1);
	struct ibv_send_wr wr = work(1, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p.b.buffer;
	wr.wr.rdma.rkey = p.b.mr->rkey;
	double start = seconds();
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	CHECK(seconds() - start >= 0.05);
	SAME(memcmp(p.a.buffer, p.b.buffer, 8), 0);
	close_pair(&p);
}

static void delays(void)
{
	under(late_send, NULL, "inject = 'delay'\ntime = '50ms'\nqp = 1\n");
	under(late_receive, NULL, "inject = 'delay'\ntime = '50ms'\nside = 'recv'\nqp = 2\n");
	under(slow, NULL, "inject = 'slow_peer'\ntime = '50ms'\njitter = '10ms'\n");
}

/* --- receivers that are not ready -------------------------------------------------------------- */

static void not_ready(const void *argument)
{
	enum ibv_wc_status status = *(const enum ibv_wc_status *)argument;
	struct pair p = make_pair(0);
	connect_pair(&p, 2);
	struct ibv_send_wr wr = sending(1);
	post_recv(&p.b, 10, 0, 8);
	double start = seconds();
	post_send(&p.a, &wr);
	done(&p.a, 1, status);
	CHECK(seconds() - start >= 0.01);
	SAME(state(&p.a), status == IBV_WC_SUCCESS ? IBV_QPS_RTS : IBV_QPS_ERR);
	close_pair(&p);
}

/* A receive of a shared queue that is there late: the sender waits as long, and no longer. */
static void shared_not_ready(const void *argument)
{
	(void)argument;
	struct pair p = make_pair(1);
	connect_pair(&p, 7);
	struct ibv_recv_wr receive = { .wr_id = 10 }, *bad;
	double start = seconds();
	SAME(ibv_post_srq_recv(p.srq, &receive, &bad), 0);
	struct ibv_send_wr wr = sending(1);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	done(&p.b, 10, IBV_WC_SUCCESS);
	CHECK(seconds() - start >= 0.05);
	close_pair(&p);
}

static void rnr(void)
{
	static const enum ibv_wc_status ok = IBV_WC_SUCCESS, exceeded = IBV_WC_RNR_RETRY_EXC_ERR;
	under(not_ready, &ok, "inject = 'rnr'\ntimes = 2\ntime = '5ms'\n");
	under(not_ready, &exceeded, "inject = 'rnr'\ntimes = 3\ntime = '5ms'\n");
	/* The receiver's side: the pauses are those of its own min_rnr_timer (10 us), so two retries do not
	 * last. */
	under(not_ready, &exceeded,
	      "inject = 'rnr'\ntime = '200ms'\nside = 'recv'\n[[fault]]\ninject = 'slow_peer'\n"
	      "time = '10ms'\n");
	under(shared_not_ready, NULL, "inject = 'rnr'\ntime = '50ms'\nside = 'recv'\n");
}

/* --- peers, ports, devices ---------------------------------------------------------------------- */

static void peer_dies(const void *argument)
{
	(void)argument;
	struct pair p = impatient_pair();
	struct ibv_send_wr wr = sending(1);
	for (int i = 10; i < 13; i++)
		post_recv(&p.b, i, 0, 8);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_SUCCESS);
	double start = seconds();
	struct ibv_send_wr wrs[2] = { sending(2), sending(3) };
	wrs[0].next = &wrs[1];
	post_send(&p.a, wrs);
	done(&p.a, 2, IBV_WC_RETRY_EXC_ERR);
	CHECK(seconds() - start >= 0.033);
	done(&p.a, 3, IBV_WC_WR_FLUSH_ERR);
	done(&p.b, 10, IBV_WC_SUCCESS);
	wr = sending(20);
	post_send(&p.b, &wr);
	done(&p.b, 20, IBV_WC_RETRY_EXC_ERR);
	close_pair(&p);
}

static void dead_peers(void)
{
	under(peer_dies, NULL, "inject = 'dead_peer'\nnth = 2\nqp = 1\n");
}

static enum ibv_port_state port_state(struct ibv_context *context)
{
	struct ibv_port_attr attr;
	SAME(ibv_query_port(context, 1, &attr), 0);
	return attr.state;
}

static void port_blinks(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_send_wr wr = sending(1);
	post_recv(&p.b, 10, 0, 8);
	SAME(port_state(p.context), IBV_PORT_ACTIVE);
	double start = seconds();
	post_send(&p.a, &wr);
	enum ibv_port_state meanwhile = port_state(p.context);
	/* On a machine that has stopped it may be up again. */
	if (seconds() - start < 0.1)
		SAME(meanwhile, IBV_PORT_DOWN);
	struct ibv_async_event event = next_event(p.context);
	SAME(event.event_type, IBV_EVENT_PORT_ERR);
	SAME(event.element.port_num, 1);
	event = next_event(p.context);
	SAME(event.event_type, IBV_EVENT_PORT_ACTIVE);
	SAME(port_state(p.context), IBV_PORT_ACTIVE);
	CHECK(seconds() - start >= 0.1);
	done(&p.a, 1, IBV_WC_SUCCESS);
	done(&p.b, 10, IBV_WC_SUCCESS);
	close_pair(&p);
}

static void port_stays_down(const void *argument)
{
	(void)argument;
	struct pair p = impatient_pair();
	struct ibv_send_wr wr = sending(1);
	post_recv(&p.b, 10, 0, 8);
	SAME(next_event(p.context).event_type, IBV_EVENT_PORT_ERR);
	post_send(&p.a, &wr);
	done(&p.a, 1, IBV_WC_RETRY_EXC_ERR);
	SAME(state(&p.a), IBV_QPS_ERR);
	SAME(port_state(p.context), IBV_PORT_DOWN);
	CHECK(idle(&p.b));
	close_pair(&p);
}

static void ports(void)
{
	under(port_blinks, NULL, "inject = 'port_down'\ntime = '100ms'\nnth = 1\n");
	under(port_stays_down, NULL, "inject = 'port_down'\nafter = '50ms'\n");
}

static void device_goes(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_send_wr wr = sending(1), *bad = NULL;
	post_recv(&p.a, 90, 0, 8);
	post_recv(&p.b, 10, 0, 8);
	SAME(ibv_post_send(p.a.qp, &wr, &bad), EIO);
	CHECK(bad == &wr);
	SAME(next_event(p.context).event_type, IBV_EVENT_DEVICE_FATAL);
	done(&p.a, 90, IBV_WC_WR_FLUSH_ERR);
	done(&p.b, 10, IBV_WC_WR_FLUSH_ERR);
	/* Nothing works any more ... */
	CHECK(!ibv_reg_mr(p.pd, p.a.buffer, 8, 0));
	SAME(errno, EIO);
	CHECK(!ibv_create_cq(p.context, 1, NULL, NULL, 0));
	SAME(errno, EIO);
	struct ibv_port_attr attr;
	SAME(ibv_query_port(p.context, 1, &attr), EIO);
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	SAME(ibv_modify_qp(p.a.qp, &error, IBV_QP_STATE), EIO);
	struct ibv_recv_wr receive = { .wr_id = 1 }, *bad_receive;
	SAME(ibv_post_recv(p.a.qp, &receive, &bad_receive), EIO);
	CHECK(!ibv_open_device(p.context->device));
	SAME(errno, EIO);
	/* ... but to clean up. */
	close_pair(&p);
}

static void devices(void)
{
	under(device_goes, NULL, "inject = 'device_removal'\nnth = 1\n");
}

/* --- asynchronous events ------------------------------------------------------------------------ */

enum about { PORT, QP, CQ, SRQ };

static const struct event {
	const char *name;
	enum ibv_event_type type;
	enum about about;
	int fatal;
} all_events[] = {
	{ "cq_err", IBV_EVENT_CQ_ERR, CQ, 1 },
	{ "qp_fatal", IBV_EVENT_QP_FATAL, QP, 1 },
	{ "qp_req_err", IBV_EVENT_QP_REQ_ERR, QP, 1 },
	{ "qp_access_err", IBV_EVENT_QP_ACCESS_ERR, QP, 1 },
	{ "comm_est", IBV_EVENT_COMM_EST, QP, 0 },
	{ "sq_drained", IBV_EVENT_SQ_DRAINED, QP, 0 },
	{ "path_mig", IBV_EVENT_PATH_MIG, QP, 0 },
	{ "path_mig_err", IBV_EVENT_PATH_MIG_ERR, QP, 0 },
	{ "port_active", IBV_EVENT_PORT_ACTIVE, PORT, 0 },
	{ "port_err", IBV_EVENT_PORT_ERR, PORT, 0 },
	{ "lid_change", IBV_EVENT_LID_CHANGE, PORT, 0 },
	{ "pkey_change", IBV_EVENT_PKEY_CHANGE, PORT, 0 },
	{ "sm_change", IBV_EVENT_SM_CHANGE, PORT, 0 },
	{ "srq_err", IBV_EVENT_SRQ_ERR, SRQ, 1 },
	{ "srq_limit_reached", IBV_EVENT_SRQ_LIMIT_REACHED, SRQ, 0 },
	{ "qp_last_wqe_reached", IBV_EVENT_QP_LAST_WQE_REACHED, QP, 0 },
	{ "client_reregister", IBV_EVENT_CLIENT_REREGISTER, PORT, 0 },
	{ "gid_change", IBV_EVENT_GID_CHANGE, PORT, 0 },
};

/* End b, which has the shared receive queue, makes the call that raises the event. */
static void raised(const void *argument)
{
	const struct event *wanted = argument;
	struct pair p = make_pair(1);
	connect_pair(&p, 7);
	struct ibv_send_wr wr = sending(1);
	post_recv(&p.a, 10, 0, 8);
	struct ibv_send_wr *bad;
	SAME(ibv_post_send(p.b.qp, &wr, &bad), 0);
	struct ibv_async_event event = next_event(p.context);
	SAME(event.event_type, wanted->type);
	switch (wanted->about) {
	case PORT:
		SAME(event.element.port_num, 1);
		break;
	case QP:
		CHECK(event.element.qp == p.b.qp);
		break;
	case CQ:
		CHECK(event.element.cq == p.b.cq);
		break;
	case SRQ:
		CHECK(event.element.srq == p.srq);
		break;
	}
	SAME(state(&p.b), wanted->fatal ? IBV_QPS_ERR : IBV_QPS_RTS);
	struct ibv_wc wc;
	if (wanted->about == CQ)
		CHECK(ibv_poll_cq(p.b.cq, 1, &wc) < 0);
	else
		done(&p.b, 1, wanted->fatal ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS);
	close_pair(&p);
}

static void every_event(void)
{
	for (size_t i = 0; i < sizeof(all_events) / sizeof(*all_events); i++)
		under(raised, &all_events[i], "inject = 'event'\nevent = '%s'\nqp = 2\nnth = 1\n",
		      all_events[i].name);
}

/* --- calls that are refused ---------------------------------------------------------------------- */

static int expected;

/* 0, or the error number with which the call failed; what it made is destroyed. */
typedef int (*attempt)(struct pair *);

#define MADE(object, destroy)                                                                      \
	do {                                                                                       \
		errno = 0;                                                                         \
		__typeof__(object) made_ = (object);                                               \
		if (!made_)                                                                        \
			return errno;                                                              \
		SAME(destroy(made_), 0);                                                           \
		return 0;                                                                          \
	} while (0)

static int open_again(struct pair *p)
{
	MADE(ibv_open_device(p->context->device), ibv_close_device);
}
static int query_port(struct pair *p)
{
	struct ibv_port_attr attr;
	return ibv_query_port(p->context, 1, &attr);
}
static int query_gid(struct pair *p)
{
	union ibv_gid gid;
	errno = 0;
	return ibv_query_gid(p->context, 1, 0, &gid) ? errno : 0;
}
static int alloc_pd(struct pair *p)
{
	MADE(ibv_alloc_pd(p->context), ibv_dealloc_pd);
}
static int reg_mr(struct pair *p)
{
	MADE(ibv_reg_mr(p->pd, p->a.buffer, 8, 0), ibv_dereg_mr);
}
static int rereg_mr(struct pair *p)
{
	errno = 0;
	int result = ibv_rereg_mr(p->b.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS);
	return result ? errno : 0;
}
static int alloc_mw(struct pair *p)
{
	MADE(ibv_alloc_mw(p->pd, IBV_MW_TYPE_1), ibv_dealloc_mw);
}
static int create_comp_channel(struct pair *p)
{
	MADE(ibv_create_comp_channel(p->context), ibv_destroy_comp_channel);
}
static int create_cq(struct pair *p)
{
	MADE(ibv_create_cq(p->context, 4, NULL, NULL, 0), ibv_destroy_cq);
}
static int resize_cq(struct pair *p)
{
	return ibv_resize_cq(p->a.cq, 5 * DEPTH);
}
static int req_notify_cq(struct pair *p)
{
	return ibv_req_notify_cq(p->a.cq, 0);
}
static int poll_cq(struct pair *p)
{
	struct ibv_wc wc;
	return ibv_poll_cq(p->a.cq, 1, &wc) < 0 ? ENOMEM : 0; /* it tells no error number */
}
static int create_srq(struct pair *p)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	MADE(ibv_create_srq(p->pd, &init), ibv_destroy_srq);
}
static int create_xrc_srq(struct pair *p)
{
	struct ibv_xrcd_init_attr domain = { .fd = -1, .oflags = O_CREAT };
	domain.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	struct ibv_xrcd *xrcd = ibv_open_xrcd(p->context, &domain);
	CHECK(xrcd);
	struct ibv_srq_init_attr_ex init = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
					     .pd = p->pd, .xrcd = xrcd, .cq = p->a.cq };
	init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
			 IBV_SRQ_INIT_ATTR_CQ;
	errno = 0;
	struct ibv_srq *srq = ibv_create_srq_ex(p->context, &init);
	int result = srq ? 0 : errno;
	if (srq)
		SAME(ibv_destroy_srq(srq), 0);
	SAME(ibv_close_xrcd(xrcd), 0);
	return result;
}
static int modify_srq(struct pair *p)
{
	struct ibv_srq_attr attr = { .srq_limit = 1 };
	return ibv_modify_srq(p->srq, &attr, IBV_SRQ_LIMIT);
}
static int query_srq(struct pair *p)
{
	struct ibv_srq_attr attr;
	return ibv_query_srq(p->srq, &attr);
}
static int create_qp(struct pair *p)
{
	struct ibv_qp_init_attr init = init_attr(p->a.cq, NULL);
	MADE(ibv_create_qp(p->pd, &init), ibv_destroy_qp);
}
static int modify_qp(struct pair *p)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	return ibv_modify_qp(p->a.qp, &attr, IBV_QP_STATE);
}
static int query_qp(struct pair *p)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	return ibv_query_qp(p->a.qp, &attr, IBV_QP_STATE, &init);
}
static int create_ah(struct pair *p)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = p->gid } };
	MADE(ibv_create_ah(p->pd, &attr), ibv_destroy_ah);
}
static int post_a_send(struct pair *p)
{
	struct ibv_send_wr wr = sending(1), *bad = NULL;
	int result = ibv_post_send(p->a.qp, &wr, &bad);
	CHECK(!result || bad == &wr);
	return result;
}
static int post_a_receive(struct pair *p)
{
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad = NULL;
	int result = ibv_post_recv(p->a.qp, &wr, &bad);
	CHECK(!result || bad == &wr);
	return result;
}
static int post_a_shared_receive(struct pair *p)
{
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad = NULL;
	int result = ibv_post_srq_recv(p->srq, &wr, &bad);
	CHECK(!result || bad == &wr);
	return result;
}

static int alloc_dm(struct pair *p)
{
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	MADE(ibv_alloc_dm(p->context, &attr), ibv_free_dm);
}
static int alloc_td(struct pair *p)
{
	struct ibv_td_init_attr attr = { 0 };
	MADE(ibv_alloc_td(p->context, &attr), ibv_dealloc_td);
}
static int alloc_parent_domain(struct pair *p)
{
	struct ibv_parent_domain_init_attr attr = { .pd = p->pd };
	MADE(ibv_alloc_parent_domain(p->context, &attr), ibv_dealloc_pd);
}
static int open_xrcd(struct pair *p)
{
	struct ibv_xrcd_init_attr init = { .fd = -1, .oflags = O_CREAT };
	init.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	MADE(ibv_open_xrcd(p->context, &init), ibv_close_xrcd);
}
static int advise_mr(struct pair *p)
{
	struct ibv_mr *mr = ibv_reg_mr(p->pd, p->a.buffer, 8, IBV_ACCESS_ON_DEMAND);
	CHECK(mr);
	struct ibv_sge sge = { (uintptr_t)p->a.buffer, 8, mr->lkey };
	int result = ibv_advise_mr(p->pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1);
	SAME(ibv_dereg_mr(mr), 0);
	return result;
}
static int modify_cq(struct pair *p)
{
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 1, 0 } };
	return ibv_modify_cq(p->a.cq, &attr);
}
static int set_ece(struct pair *p)
{
	struct ibv_ece ece;
	SAME(ibv_query_ece(p->a.qp, &ece), 0);
	return ibv_set_ece(p->a.qp, &ece);
}
static struct ibv_qp *datagrams(struct pair *p)
{
	struct ibv_qp_init_attr init = init_attr(p->a.cq, NULL);
	init.qp_type = IBV_QPT_UD;
	return ibv_create_qp(p->pd, &init);
}
static const union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 1, 2, 3 } };
static int attach_mcast(struct pair *p)
{
	static struct ibv_qp *qp;
	qp = qp ? qp : datagrams(p);
	int result = ibv_attach_mcast(qp, &group, 0);
	if (!result) {
		SAME(ibv_detach_mcast(qp, &group, 0), 0);
		SAME(ibv_destroy_qp(qp), 0);
	}
	return result;
}
/* Hosts without a link for raw packets, or without the right to it, say so when the call is not refused. */
static int create_wq(struct pair *p)
{
	struct ibv_wq_init_attr init = { .wq_type = IBV_WQT_RQ, .max_wr = 4, .max_sge = 1, .pd = p->pd, .cq = p->a.cq };
	errno = 0;
	struct ibv_wq *wq = ibv_create_wq(p->context, &init);
	if (wq)
		SAME(ibv_destroy_wq(wq), 0);
	return !wq && errno == expected ? errno : 0;
}
static int create_hashed_qp(struct pair *p)
{
	static uint8_t key[40];
	struct ibv_wq_init_attr queue = { .wq_type = IBV_WQT_RQ, .max_wr = 4, .max_sge = 1, .pd = p->pd, .cq = p->a.cq };
	struct ibv_wq *wq = ibv_create_wq(p->context, &queue);
	CHECK(wq);
	struct ibv_rwq_ind_table_init_attr entries = { .ind_tbl = &wq };
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(p->context, &entries);
	CHECK(table);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RAW_PACKET, .pd = p->pd, .rwq_ind_tbl = table };
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH;
	init.rx_hash_conf.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ;
	init.rx_hash_conf.rx_hash_key_len = sizeof key;
	init.rx_hash_conf.rx_hash_key = key;
	errno = 0;
	struct ibv_qp *qp = ibv_create_qp_ex(p->context, &init);
	int result = qp ? 0 : errno;
	if (qp)
		SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_destroy_rwq_ind_table(table), 0);
	SAME(ibv_destroy_wq(wq), 0);
	return result;
}
static int create_flow(struct pair *p)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth ethernet;
	} rule = { { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof rule, .num_of_specs = 1, .port = 1 },
		   { .type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.ethernet } };
	errno = 0;
	struct ibv_flow *flow = ibv_create_flow(p->a.qp, &rule.attr);
	if (flow)
		SAME(ibv_destroy_flow(flow), 0);
	return !flow && errno == expected ? errno : 0;
}

/* Calls that destroy fail with something made for the purpose. */
static int destroy_ah(struct pair *p)
{
	static struct ibv_ah *ah;
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = p->gid } };
	ah = ah ? ah : ibv_create_ah(p->pd, &attr);
	return ibv_destroy_ah(ah);
}
static int dealloc_pd(struct pair *p)
{
	static struct ibv_pd *pd;
	pd = pd ? pd : ibv_alloc_pd(p->context);
	return ibv_dealloc_pd(pd);
}
static int dereg_mr(struct pair *p)
{
	static struct ibv_mr *mr;
	mr = mr ? mr : ibv_reg_mr(p->pd, p->a.buffer, 8, 0);
	return ibv_dereg_mr(mr);
}
static int dealloc_mw(struct pair *p)
{
	static struct ibv_mw *mw;
	mw = mw ? mw : ibv_alloc_mw(p->pd, IBV_MW_TYPE_1);
	return ibv_dealloc_mw(mw);
}
static int destroy_comp_channel(struct pair *p)
{
	static struct ibv_comp_channel *channel;
	channel = channel ? channel : ibv_create_comp_channel(p->context);
	return ibv_destroy_comp_channel(channel);
}
static int destroy_cq(struct pair *p)
{
	static struct ibv_cq *cq;
	cq = cq ? cq : ibv_create_cq(p->context, 4, NULL, NULL, 0);
	return ibv_destroy_cq(cq);
}
static int destroy_srq(struct pair *p)
{
	static struct ibv_srq *srq;
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	srq = srq ? srq : ibv_create_srq(p->pd, &init);
	return ibv_destroy_srq(srq);
}
static int free_dm(struct pair *p)
{
	static struct ibv_dm *dm;
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	dm = dm ? dm : ibv_alloc_dm(p->context, &attr);
	return ibv_free_dm(dm);
}
static int dealloc_td(struct pair *p)
{
	static struct ibv_td *td;
	struct ibv_td_init_attr attr = { 0 };
	td = td ? td : ibv_alloc_td(p->context, &attr);
	return ibv_dealloc_td(td);
}
static int close_xrcd(struct pair *p)
{
	static struct ibv_xrcd *xrcd;
	struct ibv_xrcd_init_attr init = { .fd = -1, .oflags = O_CREAT };
	init.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	xrcd = xrcd ? xrcd : ibv_open_xrcd(p->context, &init);
	return ibv_close_xrcd(xrcd);
}
static int detach_mcast(struct pair *p)
{
	static struct ibv_qp *qp;
	if (!qp) {
		qp = datagrams(p);
		SAME(ibv_attach_mcast(qp, &group, 0), 0);
	}
	int result = ibv_detach_mcast(qp, &group, 0);
	if (!result)
		SAME(ibv_destroy_qp(qp), 0);
	return result;
}
static int destroy_qp(struct pair *p)
{
	static struct ibv_qp *qp;
	struct ibv_qp_init_attr init = init_attr(p->a.cq, NULL);
	qp = qp ? qp : ibv_create_qp(p->pd, &init);
	return ibv_destroy_qp(qp);
}

static const struct refusal {
	const char *name;
	attempt call;
	int before; /* such calls that the set-up makes */
} refusals[] = {
	{ "open_device", open_again, 1 },
	{ "query_port", query_port, 0 },
	{ "query_gid", query_gid, 1 },
	{ "alloc_pd", alloc_pd, 1 },
	{ "dealloc_pd", dealloc_pd, 0 },
	{ "reg_mr", reg_mr, 2 },
	{ "rereg_mr", rereg_mr, 0 },
	{ "dereg_mr", dereg_mr, 0 },
	{ "alloc_mw", alloc_mw, 0 },
	{ "dealloc_mw", dealloc_mw, 0 },
	{ "create_comp_channel", create_comp_channel, 2 },
	{ "destroy_comp_channel", destroy_comp_channel, 0 },
	{ "create_cq", create_cq, 2 },
	{ "resize_cq", resize_cq, 0 },
	{ "req_notify_cq", req_notify_cq, 0 },
	{ "poll_cq", poll_cq, 0 },
	{ "destroy_cq", destroy_cq, 0 },
	{ "create_srq", create_srq, 1 },
	{ "create_srq", create_xrc_srq, 1 },
	{ "modify_srq", modify_srq, 0 },
	{ "query_srq", query_srq, 0 },
	{ "destroy_srq", destroy_srq, 0 },
	{ "create_qp", create_qp, 2 },
	{ "create_qp", create_hashed_qp, 2 },
	{ "modify_qp", modify_qp, 6 },
	{ "query_qp", query_qp, 0 },
	{ "destroy_qp", destroy_qp, 0 },
	{ "create_ah", create_ah, 0 },
	{ "destroy_ah", destroy_ah, 0 },
	{ "alloc_dm", alloc_dm, 0 },
	{ "free_dm", free_dm, 0 },
	{ "alloc_td", alloc_td, 0 },
	{ "dealloc_td", dealloc_td, 0 },
	{ "alloc_parent_domain", alloc_parent_domain, 0 },
	{ "open_xrcd", open_xrcd, 0 },
	{ "close_xrcd", close_xrcd, 0 },
	{ "advise_mr", advise_mr, 0 },
	{ "modify_cq", modify_cq, 0 },
	{ "set_ece", set_ece, 0 },
	{ "attach_mcast", attach_mcast, 0 },
	{ "detach_mcast", detach_mcast, 0 },
	{ "create_wq", create_wq, 0 },
	{ "create_flow", create_flow, 0 },
	{ "post_send", post_a_send, 0 },
	{ "post_recv", post_a_receive, 0 },
	{ "post_srq_recv", post_a_shared_receive, 0 },
};

/* The call is refused once, and works when it is made again. */
static void refused(const void *argument)
{
	const struct refusal *refusal = argument;
	struct pair p = make_pair(1);
	connect_pair(&p, 7);
	SAME(refusal->call(&p), expected);
	SAME(refusal->call(&p), 0);
	close_pair(&p);
}

static void every_refusal(void)
{
	expected = ENOMEM;
	for (size_t i = 0; i < sizeof(refusals) / sizeof(*refusals); i++)
		under(refused, &refusals[i],
		      "inject = 'refuse'\ncall = '%s'\nerrno = 'ENOMEM'\nnth = %d\n",
		      refusals[i].name, refusals[i].before + 1);
}

static void every_error_number(void)
{
	static const struct {
		const char *name;
		int number;
	} numbers[] = {
		{ "EPERM", EPERM },	      { "ENOENT", ENOENT },
		{ "EINTR", EINTR },	      { "EIO", EIO },
		{ "EAGAIN", EAGAIN },	      { "ENOMEM", ENOMEM },
		{ "EFAULT", EFAULT },	      { "EBUSY", EBUSY },
		{ "ENODEV", ENODEV },	      { "EINVAL", EINVAL },
		{ "EMFILE", EMFILE },	      { "EOPNOTSUPP", EOPNOTSUPP },
		{ "EADDRINUSE", EADDRINUSE }, { "EADDRNOTAVAIL", EADDRNOTAVAIL },
		{ "ETIMEDOUT", ETIMEDOUT },   { "ECONNREFUSED", ECONNREFUSED },
		{ "EHOSTUNREACH", EHOSTUNREACH },
	};
	static const struct refusal modify = { "modify_qp", modify_qp, 0 };
	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
		expected = numbers[i].number;
		under(refused, &modify,
		      "inject = 'refuse'\ncall = 'modify_qp'\nstate = 'err'\nerrno = '%s'\n",
		      numbers[i].name);
	}
}

static void nth_and_size(const void *argument)
{
	(void)argument;
	struct pair p = make_pair(0); /* registers twice, 64 KB each */
	CHECK(ibv_dereg_mr(ibv_reg_mr(p.pd, p.a.buffer, 100, 0)) == 0);
	CHECK(!ibv_reg_mr(p.pd, p.a.buffer, BYTES, 0));
	SAME(errno, ENOMEM);
	close_pair(&p);
}

static void bad_plan(const void *argument)
{
	(void)argument;
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	if (list && count > 0) {
		CHECK(!ibv_open_device(list[0]));
		SAME(errno, EINVAL);
	}
	if (list)
		ibv_free_device_list(list);
}

static void plans(void)
{
	under(nth_and_size, NULL,
	      "inject = 'refuse'\ncall = 'reg_mr'\nbytes = '64K'\nnth = 3\nerrno = 'ENOMEM'\n");
	under(bad_plan, NULL, "inject = 'completion'\nstatus = 'what'\n");
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "every_status", every_status },
		{ "remote_keys", remote_keys },
		{ "delays", delays },
		{ "rnr", rnr },
		{ "dead_peers", dead_peers },
		{ "ports", ports },
		{ "devices", devices },
		{ "every_event", every_event },
		{ "every_refusal", every_refusal },
		{ "every_error_number", every_error_number },
		{ "plans", plans },
		{ NULL, NULL },
	};
	return run_under_plans(tests, argc, argv);
}
