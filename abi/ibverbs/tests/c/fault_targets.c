/* What a plan of faults strikes: the queues that it names, and all that belongs to a device that is removed.
 * Over the real engine. */
#include "faults.h"

/* Whether an event waits. */
static int has_event(struct ibv_context *context)
{
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	return poll(&fd, 1, 0);
}

/* The second receive of a shared queue raises the event, of that queue. */
static void shared_receive(const void *argument)
{
	const enum ibv_event_type *type = argument;
	struct pair p = make_pair(1);
	connect_pair(&p, 7);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	SAME(has_event(p.context), 0);
	SAME(ibv_post_srq_recv(p.srq, &wr, &bad), 0);
	struct ibv_async_event event = next_event(p.context);
	SAME(event.event_type, *type);
	CHECK(event.element.srq == p.srq);
	SAME(state(&p.b), *type == IBV_EVENT_SRQ_ERR ? IBV_QPS_ERR : IBV_QPS_RTS);
	close_pair(&p);
}

/* The clock finds a shared queue that no queue pair names. */
static void queue_of_xrc(const void *argument)
{
	(void)argument;
	struct pair p = { .context = open_device() };
	p.pd = ibv_alloc_pd(p.context);
	struct ibv_cq *cq = ibv_create_cq(p.context, 4, NULL, NULL, 0);
	struct ibv_xrcd_init_attr opened = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
					     .fd = -1, .oflags = O_CREAT };
	struct ibv_xrcd *domain = ibv_open_xrcd(p.context, &opened);
	CHECK(p.pd && cq && domain);
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = p.pd,
		.xrcd = domain, .cq = cq,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
			     IBV_SRQ_INIT_ATTR_CQ };
	struct ibv_srq *srq = ibv_create_srq_ex(p.context, &init);
	CHECK(srq);
	struct ibv_async_event event = next_event(p.context);
	SAME(event.event_type, IBV_EVENT_SRQ_ERR);
	CHECK(event.element.srq == srq);
	SAME(ibv_destroy_srq(srq), 0);
	SAME(ibv_close_xrcd(domain), 0);
	SAME(ibv_destroy_cq(cq), 0);
	SAME(ibv_dealloc_pd(p.pd), 0);
	SAME(ibv_close_device(p.context), 0);
}

static void shared_queues(void)
{
	static const enum ibv_event_type error = IBV_EVENT_SRQ_ERR, limit = IBV_EVENT_SRQ_LIMIT_REACHED;
	under(shared_receive, &error, "inject = 'event'\nevent = 'srq_err'\nside = 'recv'\nnth = 2\n");
	under(shared_receive, &limit,
	      "inject = 'event'\nevent = 'srq_limit_reached'\ncall = 'post_srq_recv'\nnth = 2\n");
	under(queue_of_xrc, NULL, "inject = 'event'\nevent = 'srq_err'\nafter = '0s'\nevery = '1ms'\ncount = 1\n");
}

/* The completion queue of receives fails, and that of sends does not. */
static void one_queue(const void *argument)
{
	(void)argument;
	struct pair p = make_pair(0);
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.recv_cq = p.b.cq;
	struct ibv_qp *qp = ibv_create_qp(p.pd, &init);
	CHECK(qp);
	SAME(to_init(qp), 0);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	SAME(ibv_post_recv(qp, &wr, &bad), 0);
	struct ibv_async_event event = next_event(p.context);
	SAME(event.event_type, IBV_EVENT_CQ_ERR);
	CHECK(event.element.cq == p.b.cq);
	struct ibv_wc wc;
	SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	CHECK(ibv_poll_cq(p.b.cq, 1, &wc) < 0);
	SAME(ibv_destroy_qp(qp), 0);
	close_pair(&p);
}

/* A call about a completion queue is known by that queue. */
static void one_queue_is_polled(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_wc wc;
	SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	CHECK(ibv_poll_cq(p.b.cq, 1, &wc) < 0);
	SAME(ibv_poll_cq(p.b.cq, 1, &wc), 0);
	close_pair(&p);
}

static void completion_queues(void)
{
	under(one_queue, NULL, "inject = 'event'\nevent = 'cq_err'\nside = 'recv'\n");
	under(one_queue, NULL, "inject = 'event'\nevent = 'cq_err'\nside = 'recv'\ncq = 2\n");
	under(one_queue_is_polled, NULL, "inject = 'refuse'\ncall = 'poll_cq'\nerrno = 'EIO'\ncq = 2\n");
}

struct work_queue {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_wq *wq;
};

static struct work_queue work_queue(void)
{
	struct work_queue w = { .context = open_device() };
	w.pd = ibv_alloc_pd(w.context);
	w.cq = ibv_create_cq(w.context, 16, NULL, NULL, 0);
	struct ibv_wq_init_attr init = { .wq_type = IBV_WQT_RQ, .max_wr = 4, .max_sge = 1, .pd = w.pd, .cq = w.cq };
	w.wq = ibv_create_wq(w.context, &init);
	CHECK(w.pd && w.cq && w.wq);
	return w;
}

static void end_work_queue(struct work_queue *w)
{
	SAME(ibv_destroy_wq(w->wq), 0);
	SAME(ibv_destroy_cq(w->cq), 0);
	SAME(ibv_dealloc_pd(w->pd), 0);
	SAME(ibv_close_device(w->context), 0);
}

static int ready(struct work_queue *w)
{
	struct ibv_wq_attr attr = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY };
	return ibv_modify_wq(w->wq, &attr);
}

static int post(struct work_queue *w, uint64_t id)
{
	struct ibv_recv_wr wr = { .wr_id = id }, *bad;
	return ibv_post_wq_recv(w->wq, &wr, &bad);
}

static int count(struct work_queue *w)
{
	struct ibv_counters_init_attr init = { 0 };
	errno = 0;
	struct ibv_counters *counters = ibv_create_counters(w->context, &init);
	if (counters)
		SAME(ibv_destroy_counters(counters), 0);
	return counters ? 0 : errno;
}

/* Counters are read and go, a table and a queue go, each at the second try. */
static void ends_are_refused(const void *argument)
{
	(void)argument;
	struct work_queue w = work_queue();
	struct ibv_counters_init_attr none = { 0 };
	struct ibv_counters *counters = ibv_create_counters(w.context, &none);
	struct ibv_rwq_ind_table_init_attr init = { .ind_tbl = &w.wq };
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(w.context, &init);
	uint64_t value = 1;
	CHECK(counters && table);
	SAME(ibv_read_counters(counters, &value, 1, 0), ENOMEM);
	SAME(value, 1);
	SAME(ibv_read_counters(counters, &value, 1, 0), 0);
	SAME(value, 0);
	SAME(ibv_destroy_counters(counters), ENOMEM);
	SAME(ibv_destroy_counters(counters), 0);
	SAME(ibv_destroy_rwq_ind_table(table), ENOMEM);
	SAME(ibv_destroy_rwq_ind_table(table), 0);
	SAME(ibv_destroy_wq(w.wq), ENOMEM);
	end_work_queue(&w);
}

/* A rule goes at the second try, where there may be any. */
static void rule_stays(const void *argument)
{
	(void)argument;
	struct work_queue w = work_queue();
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RAW_PACKET, .send_cq = w.cq, .recv_cq = w.cq,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(w.pd, &attr);
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth ethernet;
	} rule = { { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof rule, .num_of_specs = 1, .port = 1 },
		   { .type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.ethernet } };
	struct ibv_flow *flow = qp ? ibv_create_flow(qp, &rule.attr) : NULL;
	if (flow) {
		SAME(ibv_destroy_flow(flow), ENOMEM);
		SAME(ibv_destroy_flow(flow), 0);
	}
	if (qp)
		SAME(ibv_destroy_qp(qp), 0);
	end_work_queue(&w);
}

static int spread(struct work_queue *w)
{
	struct ibv_rwq_ind_table_init_attr init = { .ind_tbl = &w->wq };
	errno = 0;
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(w->context, &init);
	if (table)
		SAME(ibv_destroy_rwq_ind_table(table), 0);
	return table ? 0 : errno;
}

/* Every call about work queues is refused once. */
static void calls_are_refused(const void *argument)
{
	(void)argument;
	struct work_queue w = work_queue();
	for (int refused = 1; refused >= 0; refused--) {
		int expected = refused ? ENOMEM : 0;
		SAME(spread(&w), expected);
		SAME(count(&w), expected);
		SAME(ready(&w), expected);
		if (refused)
			SAME(ready(&w), 0);
		SAME(post(&w, 1), expected);
	}
	end_work_queue(&w);
}

/* The device goes: what is posted is flushed, and nothing can be posted or made any more. */
static void device_goes(const void *argument)
{
	(void)argument;
	struct work_queue w = work_queue();
	SAME(ready(&w), 0);
	SAME(post(&w, 7), 0);
	SAME(post(&w, 8), EIO);
	SAME(next_event(w.context).event_type, IBV_EVENT_DEVICE_FATAL);
	struct ibv_wc wc;
	SAME(ibv_poll_cq(w.cq, 1, &wc), 1);
	SAME(wc.wr_id, 7);
	SAME(wc.status, IBV_WC_WR_FLUSH_ERR);
	SAME(ready(&w), EIO);
	SAME(count(&w), EIO);
	SAME(spread(&w), EIO);
	/* It goes once. */
	for (int i = 0; i < 100; i++)
		SAME(ibv_poll_cq(w.cq, 1, &wc), 0);
	SAME(has_event(w.context), 0);
	end_work_queue(&w);
}

static void work_queues(void)
{
	under(calls_are_refused, NULL,
	      "inject = 'refuse'\ncall = 'post_wq_recv'\nerrno = 'ENOMEM'\n"
	      "[[fault]]\ninject = 'refuse'\ncall = 'modify_wq'\nerrno = 'ENOMEM'\n"
	      "[[fault]]\ninject = 'refuse'\ncall = 'create_counters'\nerrno = 'ENOMEM'\n"
	      "[[fault]]\ninject = 'refuse'\ncall = 'create_rwq_ind_table'\nerrno = 'ENOMEM'\n");
	under(ends_are_refused, NULL,
	      "inject = 'refuse'\ncall = 'read_counters'\nerrno = 'ENOMEM'\n"
	      "[[fault]]\ninject = 'refuse'\ncall = 'destroy_counters'\nerrno = 'ENOMEM'\n"
	      "[[fault]]\ninject = 'refuse'\ncall = 'destroy_rwq_ind_table'\nerrno = 'ENOMEM'\n"
	      "[[fault]]\ninject = 'refuse'\ncall = 'destroy_wq'\nerrno = 'ENOMEM'\n");
	under(rule_stays, NULL, "inject = 'refuse'\ncall = 'destroy_flow'\nerrno = 'ENOMEM'\n");
	under(device_goes, NULL,
	      "inject = 'device_removal'\ncall = ['post_wq_recv', 'poll_cq']\nnth = 2\nevery = 1\n");
}

/* Down for ever is for ever, whatever comes later. */
static void stays_down(const void *argument)
{
	(void)argument;
	struct pair p = connected_pair();
	struct ibv_wc wc;
	struct ibv_port_attr port;
	SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	SAME(next_event(p.context).event_type, IBV_EVENT_PORT_ERR);
	for (double until = seconds() + 0.02; seconds() < until;)
		SAME(ibv_poll_cq(p.a.cq, 1, &wc), 0);
	SAME(has_event(p.context), 0);
	SAME(ibv_query_port(p.context, 1, &port), 0);
	SAME(port.state, IBV_PORT_DOWN);
	close_pair(&p);
}

static void ports(void)
{
	under(stays_down, NULL,
	      "inject = 'port_down'\ncall = 'poll_cq'\n"
	      "[[fault]]\ninject = 'port_down'\ncall = 'poll_cq'\nnth = 2\ntime = '1ms'\n");
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "shared_queues", shared_queues },
		{ "completion_queues", completion_queues },
		{ "work_queues", work_queues },
		{ "ports", ports },
		{ NULL, NULL },
	};
	return run_under_plans(tests, argc, argv);
}
