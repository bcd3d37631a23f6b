/* Queues that identifiers share or name, and the calls of rdma_verbs.h that read, write and send datagrams. */
#include "common.h"

static struct rdma_event_channel *here, *there;

/* Accepts the next request, with the queue pair that `init` says. */
static struct rdma_cm_id *accepted(struct ibv_qp_init_attr_ex *init, struct ibv_srq_init_attr *srq)
{
	struct rdma_conn_param param = { .responder_resources = 2, .initiator_depth = 2, .rnr_retry_count = 7 };
	struct rdma_cm_event *event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	if (srq)
		CHECK(rdma_create_srq(child, NULL, srq) == 0 && child->srq);
	CHECK(rdma_create_qp_ex(child, init) == 0);
	CHECK(rdma_accept(child, &param) == 0);
	return child;
}

/* The identifier's receives are those of its shared queue. */
static void shared(int port)
{
	struct rdma_conn_param param = { .responder_resources = 2, .initiator_depth = 2, .retry_count = 7,
		.rnr_retry_count = 7 };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr init = queues();
	struct ibv_qp_init_attr_ex extended = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	char text[2][64] = { "to the shared queue" };
	struct ibv_mr *mr, *target;
	struct ibv_wc wc;

	FAILS(rdma_create_srq(active, NULL, NULL), EINVAL);
	FAILS(rdma_create_srq_ex(active, NULL), EINVAL);
	/* Of no type. */
	struct ibv_srq_init_attr_ex untyped = { .attr = srq.attr };
	FAILS(rdma_create_srq_ex(active, &untyped), EINVAL);
	FAILS(rdma_create_qp_ex(active, NULL), EINVAL);
	CHECK(rdma_create_qp(active, NULL, &init) == 0 && rdma_connect(active, &param) == 0);
	passive = accepted(&extended, &srq);
	CHECK(extended.srq == passive->srq && passive->qp->srq == passive->srq && srq.attr.max_wr >= 8);
	FAILS(rdma_create_srq(passive, NULL, &srq), EINVAL);
	pass(here, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	FAILS(rdma_notify(passive, IBV_EVENT_QP_FATAL), EINVAL);
	CHECK((mr = rdma_reg_msgs(active, text[0], 64)) && (target = rdma_reg_write(passive, text[1], 64)));
	CHECK(rdma_post_recv(passive, (void *)7, text[1], 64, target) == 0);
	CHECK(rdma_post_send(active, (void *)8, text[0], 20, mr, 0) == 0);
	CHECK(rdma_get_send_comp(active, &wc) == 1 && wc.wr_id == 8 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(passive, &wc) == 1 && wc.wr_id == 7 && wc.byte_len == 20);
	CHECK(strcmp(text[0], text[1]) == 0);

	/* Memory that the peer may write, and then read. */
	uint64_t addr = (uintptr_t)text[1];
	strcpy(text[0], "written");
	CHECK(rdma_post_write(active, NULL, text[0], 8, mr, 0, addr, target->rkey) == 0);
	CHECK(rdma_get_send_comp(active, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(strcmp(text[1], "written") == 0 && rdma_dereg_mr(target) == 0);
	CHECK((target = rdma_reg_read(passive, text[1], 64)));
	struct ibv_sge places[] = { { (uintptr_t)text[0] + 16, 4, mr->lkey } };
	CHECK(rdma_post_read(active, NULL, text[0] + 32, 8, mr, 0, addr, target->rkey) == 0);
	CHECK(rdma_get_send_comp(active, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_post_readv(active, NULL, places, 1, 0, addr, target->rkey) == 0);
	CHECK(rdma_get_send_comp(active, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(strcmp(text[0] + 32, "written") == 0 && memcmp(text[0] + 16, "writ", 4) == 0);
	CHECK(rdma_dereg_mr(mr) == 0 && rdma_dereg_mr(target) == 0);

	parted(here, active, there, passive);
	CHECK(passive->srq);
	rdma_destroy_srq(passive);
	CHECK(!passive->srq);
	rdma_destroy_srq(passive);
	CHECK(rdma_destroy_id(active) == 0 && rdma_destroy_id(passive) == 0);
}

/* Messages name the shared queue of an identifier, which has its own domain and completions (as of rdma_xserver). */
static void named(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_IB,
		.ai_qp_type = IBV_QPT_XRC_RECV }, *res;
	struct ibv_qp_init_attr receives = { .qp_type = IBV_QPT_XRC_RECV }, sends = queues();
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct rdma_cm_id *listening, *active;
	struct rdma_cm_event *event;
	char text[2][16] = { "by number" }, port[16];
	uint32_t number = 0;
	struct ibv_wc wc;

	CHECK(rdma_getaddrinfo("127.0.0.1", "0", &hints, &res) == 0);
	CHECK(rdma_create_ep(&listening, res, NULL, NULL) == 0);
	rdma_freeaddrinfo(res);
	CHECK(listening->qp_type == IBV_QPT_XRC_RECV && rdma_migrate_id(listening, there) == 0);
	CHECK(rdma_create_srq(listening, NULL, &srq) == 0 && listening->recv_cq && listening->recv_cq_channel);
	CHECK(ibv_get_srq_num(listening->srq, &number) == 0 && number != 0);
	/* It has a queue for what it receives, and takes no other. */
	sends.qp_type = IBV_QPT_RC;
	CHECK((sends.recv_cq = ibv_create_cq(listening->verbs, 4, NULL, NULL, 0)));
	FAILS(rdma_create_qp(listening, NULL, &sends), EINVAL);
	CHECK(ibv_destroy_cq(sends.recv_cq) == 0);
	sends.recv_cq = NULL;
	struct ibv_mr *mr = rdma_reg_msgs(listening, text[1], 16);
	CHECK(mr && rdma_post_recv(listening, NULL, text[1], 16, mr) == 0);
	CHECK(rdma_listen(listening, 0) == 0);

	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listening)));
	hints.ai_flags = 0;
	hints.ai_qp_type = sends.qp_type = IBV_QPT_XRC_SEND;
	sends.cap.max_recv_wr = sends.cap.max_recv_sge = 0;
	sends.cap.max_inline_data = 16;
	CHECK(rdma_getaddrinfo("127.0.0.1", port, &hints, &res) == 0);
	CHECK(rdma_create_ep(&active, res, NULL, &sends) == 0 && active->qp->qp_type == IBV_QPT_XRC_SEND);
	rdma_freeaddrinfo(res);
	CHECK(rdma_migrate_id(active, here) == 0 && rdma_connect(active, NULL) == 0);
	event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *passive = event->id;
	CHECK(rdma_ack_cm_event(event) == 0 && passive->qp_type == IBV_QPT_XRC_RECV);
	CHECK(rdma_create_qp(passive, NULL, &receives) == 0 && !passive->recv_cq);
	CHECK(rdma_accept(passive, NULL) == 0);
	pass(here, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);

	struct ibv_sge sge = { (uintptr_t)text[0], 10, 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED, .qp_type.xrc.remote_srqn = number }, *bad;
	CHECK(ibv_post_send(active->qp, &wr, &bad) == 0);
	CHECK(rdma_get_send_comp(active, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(listening, &wc) == 1 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 10);
	CHECK(strcmp(text[1], "by number") == 0);

	parted(here, active, there, passive);
	CHECK(rdma_dereg_mr(mr) == 0);
	rdma_destroy_ep(active);
	rdma_destroy_ep(passive);
	rdma_destroy_ep(listening);
}

/* Identifiers of RDMA_PS_TCP may have queue pairs of any type, whatever they were made for (libfabric's XRC). */
static void of_type(int port, int asks, int serves)
{
	struct rdma_conn_param param = { .responder_resources = 2, .initiator_depth = 2, .retry_count = 7,
		.rnr_retry_count = 7 };
	struct ibv_qp_init_attr init = queues();
	struct ibv_qp_init_attr_ex extended = { .qp_type = serves, .cap = init.cap };
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	struct ibv_qp_attr attr;

	init.qp_type = asks;
	if (asks == IBV_QPT_XRC_SEND)
		init.cap.max_recv_wr = init.cap.max_recv_sge = 0;
	CHECK(rdma_create_qp(active, NULL, &init) == 0 && rdma_connect(active, &param) == 0);
	passive = accepted(&extended, NULL);
	pass(here, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(ibv_query_qp(active->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_RTS);
	CHECK(attr.dest_qp_num == passive->qp->qp_num && init.qp_type == (unsigned)asks);
	CHECK(ibv_query_qp(passive->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_RTS);
	CHECK(attr.dest_qp_num == active->qp->qp_num && init.qp_type == (unsigned)serves);
	parted(here, active, there, passive);
	CHECK(rdma_destroy_id(active) == 0 && rdma_destroy_id(passive) == 0);
}

/* A service of datagrams is looked up, and gets one by what the answer says. */
static void datagrams(void)
{
	int port;
	struct rdma_cm_id *listening = listener(there, RDMA_PS_UDP, &port), *server;
	struct rdma_cm_id *client = resolved(here, RDMA_PS_UDP, port);
	struct ibv_qp_init_attr init = queues();
	struct rdma_conn_param param = { 0 };
	char text[128] = "datagram";
	struct ibv_ah *ah;
	struct ibv_wc wc;

	CHECK(rdma_get_local_addr(client)->sa_family == AF_INET && client->qp_type == IBV_QPT_UD);
	init.qp_type = IBV_QPT_UD;
	CHECK(rdma_create_qp(client, NULL, &init) == 0 && rdma_connect(client, &param) == 0);
	struct rdma_cm_event *event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	server = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	init = queues();
	init.qp_type = IBV_QPT_UD;
	CHECK(rdma_create_qp(server, NULL, &init) == 0);
	struct ibv_mr *to = rdma_reg_msgs(server, text + 16, 112), *from = rdma_reg_msgs(client, text, 16);
	CHECK(to && from && rdma_post_recv(server, NULL, text + 16, 112, to) == 0);
	param.qp_num = server->qp->qp_num;
	CHECK(rdma_accept(server, &param) == 0);
	event = expect(here, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->param.ud.qp_num == server->qp->qp_num && event->param.ud.qkey == RDMA_UDP_QKEY);
	CHECK((ah = ibv_create_ah(client->pd, &event->param.ud.ah_attr)));
	uint32_t number = event->param.ud.qp_num;
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_post_ud_send(client, NULL, text, 9, from, 0, ah, number) == 0);
	CHECK(rdma_get_send_comp(client, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(server, &wc) == 1 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 49);
	CHECK(strcmp(text + 16 + 40, "datagram") == 0 && wc.src_qp == client->qp->qp_num);
	CHECK(ibv_destroy_ah(ah) == 0 && rdma_dereg_mr(to) == 0 && rdma_dereg_mr(from) == 0);
	rdma_destroy_qp(client);
	rdma_destroy_qp(server);
	CHECK(rdma_destroy_id(client) == 0 && rdma_destroy_id(server) == 0 && rdma_destroy_id(listening) == 0);
}

int main(void)
{
	int port;
	CHECK((here = rdma_create_event_channel()) && (there = rdma_create_event_channel()));
	struct rdma_cm_id *listening = listener(there, RDMA_PS_TCP, &port);
	shared(port);
	of_type(port, IBV_QPT_XRC_SEND, IBV_QPT_XRC_RECV);
	of_type(port, IBV_QPT_UC, IBV_QPT_UC);
	CHECK(rdma_destroy_id(listening) == 0);
	named();
	datagrams();
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
	return 0;
}
