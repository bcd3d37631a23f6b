/* Raw packets in the structures of C: rules that steer and count frames, work queues that a hash chooses from. */
#include "rc.h"

#include <unistd.h>

enum { FRAME = 42, FRAMES = 16 };

/* Frames to a group of stations, of this process alone: all adapters of a host share the segment. */
struct rule {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_eth ethernet;
	struct ibv_flow_spec_counter_action action;
} __attribute__((packed, aligned(8)));

static void group(uint8_t *mac, int test)
{
	uint16_t process = htons((uint16_t)getpid());
	memcpy(mac, "\1\x50\x56", 3);
	memcpy(mac + 3, &process, 2);
	mac[5] = (uint8_t)test;
}

static struct rule rule_of(int test, struct ibv_counters *counters)
{
	struct rule rule = { .attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof rule, .port = 1,
				       .num_of_specs = counters ? 2 : 1 },
			     .ethernet = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.ethernet },
			     .action = { .type = IBV_FLOW_SPEC_ACTION_COUNT, .size = sizeof rule.action,
					 .counters = counters } };
	if (!counters)
		rule.attr.size = (uint16_t)(sizeof rule - sizeof rule.action);
	group(rule.ethernet.val.dst_mac, test);
	memset(rule.ethernet.mask.dst_mac, 0xff, 6);
	return rule;
}

static void to_raw_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT), 0);
	attr.qp_state = IBV_QPS_RTR;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
}

static struct pair raw_pair(void)
{
	struct pair p = make_pair(0);
	for (int i = 0; i < 2; i++) {
		struct end *end = i ? &p.b : &p.a;
		struct ibv_qp_init_attr init = init_attr(end->cq, NULL);
		SAME(ibv_destroy_qp(end->qp), 0);
		init.qp_type = IBV_QPT_RAW_PACKET;
		CHECK((end->qp = ibv_create_qp(p.pd, &init)));
		to_raw_rts(end->qp);
	}
	return p;
}

/* A UDP datagram from 1.1.1.last to 2.2.2.2. */
static void transmit(struct pair *p, int test, int last)
{
	static const uint8_t rest[] = { 2, 2, 2, 2, 2, 2, 8, 0, 0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 1, 1, 1,
					0, 2, 2, 2, 2, 0x04, 0xd2, 0x16, 0x2e, 0, 8, 0, 0 };
	struct ibv_sge sge = piece(&p->a, 0, FRAME);
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &sge, 1);
	group(p->a.buffer, test);
	memcpy(p->a.buffer + 6, rest, sizeof rest);
	p->a.buffer[29] = (uint8_t)last;
	post_send(&p->a, &wr);
	struct ibv_wc wc = next_wc(&p->a);
	CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS);
}

static void rules_steer_and_count(void)
{
	struct pair p = raw_pair();
	struct ibv_counters_init_attr none = { 0 };
	struct ibv_counter_attach_attr packets = { .counter_desc = IBV_COUNTER_PACKETS, .index = 1 };
	struct ibv_counter_attach_attr bytes = { .counter_desc = IBV_COUNTER_BYTES, .index = 0 };
	uint64_t values[3] = { 7, 7, 7 };
	struct ibv_counters *counters = ibv_create_counters(p.context, &none);
	CHECK(counters && counters->context == p.context);
	SAME(ibv_attach_counters_point_flow(counters, &packets, NULL), 0);
	SAME(ibv_attach_counters_point_flow(counters, &bytes, NULL), 0);
	struct rule rule = rule_of(1, counters);
	struct ibv_flow *flow = ibv_create_flow(p.b.qp, &rule.attr);
	CHECK(flow && flow->context == p.context);
	SAME(ibv_attach_counters_point_flow(counters, &bytes, NULL), EBUSY);
	for (int i = 0; i < 2; i++) {
		post_recv(&p.b, 9, 4096, 2048);
		transmit(&p, 1, i);
		struct ibv_wc wc = done(&p.b, 9, IBV_WC_SUCCESS);
		CHECK(wc.byte_len == FRAME && memcmp(p.a.buffer, p.b.buffer + 4096, FRAME) == 0);
	}
	SAME(ibv_read_counters(counters, values, 2, IBV_READ_COUNTERS_ATTR_PREFER_CACHED), 0);
	CHECK(values[0] == 2 * FRAME && values[1] == 2 && values[2] == 7);
	SAME(ibv_destroy_counters(counters), EBUSY);
	SAME(ibv_destroy_qp(p.b.qp), EBUSY);
	SAME(ibv_destroy_flow(flow), 0);
	SAME(ibv_destroy_counters(counters), 0);
	rule.attr.port = 2;
	CHECK(!ibv_create_flow(p.b.qp, &rule.attr) && errno == EINVAL);
	close_pair(&p);
}

static void frames_are_spread(void)
{
	static uint8_t key[40] = { 0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2 };
	struct pair p = raw_pair();
	struct ibv_wq *queues[2];
	for (int i = 0; i < 2; i++) {
		struct ibv_wq_init_attr init = { .wq_type = IBV_WQT_RQ, .max_wr = FRAMES, .max_sge = 1, .pd = p.pd,
			.cq = p.b.cq, .wq_context = &p };
		struct ibv_wq_attr attr = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY };
		CHECK((queues[i] = ibv_create_wq(p.context, &init)) && queues[i]->wq_context == &p);
		CHECK(queues[i]->state == IBV_WQS_RESET && init.max_wr >= FRAMES);
		SAME(ibv_modify_wq(queues[i], &attr), 0);
		SAME(queues[i]->state, IBV_WQS_RDY);
		for (uint64_t n = 0; n < FRAMES; n++) {
			struct ibv_sge place = piece(&p.b, 4096, 2048);
			struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &place, .num_sge = 1 }, *bad;
			SAME(ibv_post_wq_recv(queues[i], &wr, &bad), 0);
		}
	}
	struct ibv_rwq_ind_table_init_attr entries = { .log_ind_tbl_size = 1, .ind_tbl = queues };
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(p.context, &entries);
	CHECK(table);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RAW_PACKET, .pd = p.pd, .rwq_ind_tbl = table,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH,
		.rx_hash_conf = { .rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ, .rx_hash_key_len = sizeof key,
				  .rx_hash_key = key, .rx_hash_fields_mask = IBV_RX_HASH_SRC_IPV4 } };
	struct ibv_qp *qp = ibv_create_qp_ex(p.context, &init);
	struct rule rule = rule_of(2, NULL);
	CHECK(qp);
	struct ibv_flow *flow = ibv_create_flow(qp, &rule.attr);
	CHECK(flow);
	int counts[2] = { 0, 0 };
	for (int i = 0; i < FRAMES; i++) {
		transmit(&p, 2, i);
		struct ibv_wc wc = next_wc(&p.b);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == FRAME);
		/* Which of the two it was: its requests come in order. */
		CHECK((int)wc.wr_id == counts[0] || (int)wc.wr_id == counts[1]);
		counts[(int)wc.wr_id != counts[0]]++;
	}
	SAME(counts[0] + counts[1], FRAMES);
	CHECK(counts[0] < FRAMES);
	SAME(ibv_destroy_wq(queues[0]), EBUSY);
	SAME(ibv_destroy_rwq_ind_table(table), EBUSY);
	SAME(ibv_destroy_flow(flow), 0);
	SAME(ibv_destroy_qp(qp), 0);
	SAME(ibv_destroy_rwq_ind_table(table), 0);
	SAME(ibv_destroy_wq(queues[0]), 0);
	SAME(ibv_destroy_wq(queues[1]), 0);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "rules_steer_and_count", rules_steer_and_count },
		{ "frames_are_spread", frames_are_spread },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
