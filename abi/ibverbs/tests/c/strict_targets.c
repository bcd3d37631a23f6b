/* What the strict mode finds of memory that the adapter is to write to, and the program changes, and what it
 * leaves alone. Over the real engine. */
#include "strict.h"

enum { AT = 2000, LENGTH = 100 };

/* Sends the first bytes of end a to end b, where there is a receive. */
static void send_to_b(struct pair *p, uint64_t id, uint32_t length)
{
	struct ibv_sge sge = piece(&p->a, 0, length);
	struct ibv_send_wr wr = work(id, IBV_WR_SEND, &sge, 1);
	post_send(&p->a, &wr);
	done(&p->a, id, IBV_WC_SUCCESS);
}

static void post_shared(struct pair *p, uint64_t id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = piece(&p->b, offset, length);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	SAME(ibv_post_srq_recv(p->srq, &wr, &bad), 0);
}

/* Posts a receive, changes it, gets the message, changes it again. */
static void receive(int with_srq, int before, int behind)
{
	struct pair p = make_pair(with_srq);
	connect_pair(&p, 7);
	if (with_srq)
		post_shared(&p, 1, AT, LENGTH);
	else
		post_recv(&p.b, 1, AT, LENGTH);
	fill(&p.a, 0, LENGTH, 1);
	if (before)
		p.b.buffer[AT + 50] ^= 1;
	send_to_b(&p, 2, 60);
	if (behind)
		p.b.buffer[AT + 51] ^= 1;
	done(&p.b, 1, IBV_WC_SUCCESS);
	memset(p.b.buffer + AT, 0, LENGTH);
	close_pair(&p);
}

static void before_the_message(void)
{
	receive(0, 1, 0);
}

static void behind_the_message(void)
{
	receive(0, 0, 1);
}

static void shared_receive(void)
{
	receive(1, 1, 0);
}

/* The kernel does it on behalf of the program. */
static void by_the_kernel(void)
{
	struct pair p = connected_pair();
	int ends[2];
	SAME(pipe(ends), 0);
	SAME(write(ends[1], "x", 1), 1);
	post_recv(&p.b, 1, AT, LENGTH);
	SAME(read(ends[0], p.b.buffer + AT, 1), 1);
	send_to_b(&p, 2, 60);
	done(&p.b, 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

/* A datagram to itself, of whose receive a byte is changed. */
static void datagram(void)
{
	struct pair p = make_pair(0);
	struct ibv_qp_init_attr init = init_attr(p.a.cq, NULL);
	init.qp_type = IBV_QPT_UD;
	struct ibv_qp *qp = ibv_create_qp(p.pd, &init);
	CHECK(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 5 };
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
	     0);
	attr.qp_state = IBV_QPS_RTR;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	attr.qp_state = IBV_QPS_RTS;
	SAME(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1,
				  .grh = { .dgid = p.gid, .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(p.pd, &to);
	CHECK(ah);
	struct ibv_sge sge = piece(&p.b, 0, 100), payload = piece(&p.a, 0, 60);
	struct ibv_recv_wr recv = { .wr_id = 2, .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	SAME(ibv_post_recv(qp, &recv, &bad_recv), 0);
	p.b.buffer[99] ^= 1;
	struct ibv_send_wr wr = work(1, IBV_WR_SEND, &payload, 1), *bad;
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = 5;
	SAME(ibv_post_send(qp, &wr, &bad), 0);
	SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
	SAME(next_wc(&p.a).status, IBV_WC_SUCCESS);
	SAME(ibv_destroy_ah(ah), 0);
	SAME(ibv_destroy_qp(qp), 0);
	close_pair(&p);
}

/* A request by which something is fetched from end b. */
static struct ibv_send_wr fetch(struct pair *p, uint64_t id, int atomic, struct ibv_sge *sge)
{
	struct ibv_send_wr wr = write_to_b(p, id, sge);
	wr.opcode = IBV_WR_RDMA_READ;
	if (atomic) {
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.wr.atomic.remote_addr = (uintptr_t)p->b.buffer;
		wr.wr.atomic.rkey = p->b.mr->rkey;
		wr.wr.atomic.compare_add = 1;
	}
	return wr;
}

static void fetch_into(int atomic, int signaled)
{
	struct pair p = connected_pair();
	struct ibv_sge sge = piece(&p.a, AT, atomic ? 8 : LENGTH);
	struct ibv_send_wr wr = fetch(&p, 1, atomic, &sge);
	wr.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
	post_send(&p.a, &wr);
	p.a.buffer[AT + 7] ^= 1;
	if (!signaled) {
		struct ibv_sge next = piece(&p.a, 0, 8);
		wr = write_to_b(&p, 1, &next);
		post_send(&p.a, &wr);
	}
	done(&p.a, 1, IBV_WC_SUCCESS);
	memset(p.a.buffer + AT, 0, LENGTH);
	close_pair(&p);
}

static void target_of_a_read(void)
{
	fetch_into(0, 1);
}

static void target_of_an_unsignalled_read(void)
{
	fetch_into(0, 0);
}

static void result_of_an_atomic(void)
{
	fetch_into(1, 1);
}

/* The same bytes for many receives, which nobody wants to keep apart. */
static void posted_many_times(void)
{
	struct pair p = connected_pair();
	for (int i = 0; i < 16; i++)
		post_recv(&p.b, i, AT + i % 3, LENGTH);
	for (int i = 0; i < 16; i++) {
		fill(&p.a, 0, LENGTH, i);
		send_to_b(&p, i, LENGTH);
		done(&p.b, i, IBV_WC_SUCCESS);
		SAME(p.b.buffer[AT + i % 3], i & 0xff);
		p.b.buffer[AT + 3] ^= 1;
	}
	close_pair(&p);
}

/* Receives in turn, which all have the same number, and are the program's while they are not posted. */
static void in_turn(int with_srq)
{
	struct pair p = make_pair(with_srq);
	connect_pair(&p, 7);
	for (int i = 0; i < 40; i++) {
		int at = AT + i % 4 * LENGTH;
		if (i >= 4) {
			send_to_b(&p, i, LENGTH - i);
			done(&p.b, 0, IBV_WC_SUCCESS);
			memset(p.b.buffer + at, i, LENGTH);
		}
		if (i < 36 && with_srq)
			post_shared(&p, 0, at, LENGTH);
		else if (i < 36)
			post_recv(&p.b, 0, at, LENGTH);
	}
	close_pair(&p);
}

static void own_in_turn(void)
{
	in_turn(0);
}

static void shared_in_turn(void)
{
	in_turn(1);
}

/* Whatever the peer does to a receive is no mistake of this program. */
static void written_by_the_peer(void)
{
	struct pair p = connected_pair();
	post_recv(&p.b, 1, 0, LENGTH);
	struct ibv_sge sge = piece(&p.a, AT, LENGTH), result = piece(&p.a, AT + LENGTH, 8);
	struct ibv_send_wr wr = write_to_b(&p, 2, &sge);
	fill(&p.a, 0, 2 * AT, 7);
	post_send(&p.a, &wr);
	done(&p.a, 2, IBV_WC_SUCCESS);
	wr = fetch(&p, 3, 1, &result);
	post_send(&p.a, &wr);
	done(&p.a, 3, IBV_WC_SUCCESS);
	send_to_b(&p, 4, LENGTH);
	done(&p.b, 1, IBV_WC_SUCCESS);
	/* So is what it does behind the message. */
	post_recv(&p.b, 1, 0, LENGTH);
	send_to_b(&p, 4, LENGTH);
	wr = write_to_b(&p, 2, &sge);
	post_send(&p.a, &wr);
	done(&p.a, 2, IBV_WC_SUCCESS);
	done(&p.b, 1, IBV_WC_SUCCESS);
	close_pair(&p);
}

/* Two requests at a time, then one after the other, into bytes that overlap. */
static void fetch_twice(int atomic)
{
	struct pair p = connected_pair();
	for (int i = 0; i < 4; i++) {
		struct ibv_sge sge = piece(&p.a, AT + i * 4, atomic ? 8 : LENGTH);
		struct ibv_send_wr wr = fetch(&p, i, atomic, &sge);
		fill(&p.b, 0, LENGTH, i);
		post_send(&p.a, &wr);
		if (i > 0)
			done(&p.a, i > 1 ? i : 0, IBV_WC_SUCCESS);
		if (i == 1)
			done(&p.a, 1, IBV_WC_SUCCESS);
		if (i > 1)
			p.a.buffer[AT + i * 4] ^= 1;
	}
	close_pair(&p);
}

static void reads_into_one_place(void)
{
	fetch_twice(0);
}

static void atomics_into_one_place(void)
{
	fetch_twice(1);
}

/* Bytes that no message reaches: of a longer receive, of one that only an immediate completes, of those that are
 * flushed, and of one that is gone. */
static void out_of_reach(void)
{
	struct pair p = connected_pair();
	post_recv(&p.b, 1, AT, LENGTH);
	p.b.buffer[AT + 60] ^= 1;
	send_to_b(&p, 2, 60);
	p.b.buffer[AT + 60] ^= 1;
	done(&p.b, 1, IBV_WC_SUCCESS);
	post_recv(&p.b, 3, AT, LENGTH);
	struct ibv_sge sge = piece(&p.a, 0, 60);
	struct ibv_send_wr wr = write_to_b(&p, 4, &sge);
	wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
	p.b.buffer[AT] ^= 1;
	post_send(&p.a, &wr);
	done(&p.a, 4, IBV_WC_SUCCESS);
	done(&p.b, 3, IBV_WC_SUCCESS);
	post_recv(&p.b, 5, AT, LENGTH);
	post_recv(&p.b, 6, AT + LENGTH, LENGTH);
	SAME(to_state(p.b.qp, IBV_QPS_ERR), 0);
	memset(p.b.buffer, 7, BYTES);
	done(&p.b, 5, IBV_WC_WR_FLUSH_ERR);
	SAME(to_state(p.b.qp, IBV_QPS_RESET), 0);
	memset(p.b.buffer, 8, BYTES);
	close_pair(&p);
}

static void the_careless(void)
{
	finds("target-changed", before_the_message);
	SAME(lines_with("byte 50 of the memory of receive 0x1"), 1);
	SAME(lines_with("post_recv"), 1);
	finds("target-changed", behind_the_message);
	SAME(lines_with("byte 51 of the memory of receive 0x1"), 1);
	finds("target-changed", shared_receive);
	SAME(lines_with("post_shared"), 1);
	finds("target-changed", by_the_kernel);
	finds("target-changed", target_of_a_read);
	SAME(lines_with("byte 7 of the memory of send 0x1"), 1);
	finds("target-changed", target_of_an_unsignalled_read);
	finds("target-changed", result_of_an_atomic);
}

static void the_careful(void)
{
	innocent(posted_many_times);
	innocent(own_in_turn);
	innocent(shared_in_turn);
	innocent(written_by_the_peer);
	innocent(reads_into_one_place);
	innocent(atomics_into_one_place);
	innocent(out_of_reach);
}

static void both(void)
{
	the_careless();
	the_careful();
}

static void in_order(void)
{
	setenv("QUIPU_STRICT_ORDER", "off", 1);
	both();
	unsetenv("QUIPU_STRICT_ORDER");
}

static void over_a_stream(void)
{
	setenv("QUIPU_SAME_HOST", "never", 1);
	both();
	in_order();
	unsetenv("QUIPU_SAME_HOST");
}

static void of_a_datagram(void)
{
	finds("target-changed", datagram);
	SAME(lines_with("byte 99 of the memory of receive 0x2"), 1);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "both", both },
		{ "in_order", in_order },
		{ "over_a_stream", over_a_stream },
		{ "of_a_datagram", of_a_datagram },
		{ NULL, NULL },
	};
	return run_strictly(tests, argc, argv);
}
