/* Identifiers without a channel, made by rdma_create_ep, and the calls of rdma_verbs.h. */
#include "common.h"
#include <sys/socket.h>

static struct rdma_addrinfo *address(const char *port, int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *res;
	CHECK(rdma_getaddrinfo("127.0.0.1", port, &hints, &res) == 0);
	return res;
}

static void *serve(void *listening)
{
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	char text[64];
	CHECK(rdma_get_request(listening, &id) == 0);
	CHECK(id->qp && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK((mr = rdma_reg_msgs(id, text, sizeof text)) != NULL);
	CHECK(rdma_post_recv(id, NULL, text, sizeof text, mr) == 0);
	CHECK(rdma_accept(id, NULL) == 0);
	CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(strcmp(text, "ping") == 0);
	CHECK(rdma_post_send(id, NULL, "pong", 5, NULL, IBV_SEND_INLINE) == 0);
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_disconnect(id) == 0);
	CHECK(rdma_dereg_mr(mr) == 0);
	rdma_destroy_ep(id);
	return NULL;
}

static void *gets_one(void *listening)
{
	struct rdma_cm_id *id;
	CHECK(rdma_get_request(listening, &id) == 0);
	CHECK(id->verbs == id->pd->context);
	CHECK(rdma_reject(id, NULL, 0) == 0);
	rdma_destroy_ep(id);
	return NULL;
}

/* What comes for another device than that of the program's objects is refused, and not the program's affair. */
static void of_another_device(void)
{
	struct rdma_addrinfo *res = address("0", RAI_PASSIVE);
	struct ibv_qp_init_attr init = queues();
	unsigned char frame[20] = "MPA ID Req Frame", reply[20];
	struct ibv_context **devices = rdma_get_devices(NULL);
	struct ibv_pd *pd = ibv_alloc_pd(devices[0]);
	struct rdma_cm_id *listening, *id;
	struct sockaddr_in in;
	char port[16];
	pthread_t thread;
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(pd && strcmp(ibv_get_device_name(devices[0]->device), "quipu0") == 0);
	CHECK(rdma_create_ep(&listening, res, pd, &init) == 0 && listening->pd == pd);
	CHECK(rdma_listen(listening, 0) == 0 && listening->pd == pd);
	rdma_freeaddrinfo(res);
	CHECK(pthread_create(&thread, NULL, gets_one, listening) == 0);
	frame[17] = 1;
	CHECK(connect(fd, loopback(&in, rdma_get_src_port(listening)), sizeof in) == 0);
	CHECK(send(fd, frame, 20, 0) == 20 && recv(fd, reply, 20, MSG_WAITALL) == 20);
	CHECK(memcmp(reply, "MPA ID Rep Frame", 16) == 0 && reply[16] & 0x20);
	close(fd);

	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listening)));
	res = address(port, 0);
	init = queues();
	CHECK(rdma_create_ep(&id, res, NULL, &init) == 0);
	FAILS(rdma_connect(id, NULL), ECONNREFUSED);
	CHECK(pthread_join(thread, NULL) == 0);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listening);
	rdma_freeaddrinfo(res);
	CHECK(ibv_dealloc_pd(pd) == 0);
	rdma_free_devices(devices);
}

/* A service of datagrams that is looked up: the answer ends the request, and the listener may go. */
static void looked_up(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_UDP }, *res;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = { .qp_num = 5 };
	struct rdma_cm_id *listening, *id, *child;
	struct rdma_cm_event *event;

	CHECK(channel && rdma_getaddrinfo("127.0.0.1", "0", &hints, &res) == 0);
	CHECK(rdma_create_ep(&listening, res, NULL, NULL) == 0 && rdma_listen(listening, 0) == 0);
	rdma_freeaddrinfo(res);
	id = resolved(channel, RDMA_PS_UDP, rdma_get_src_port(listening));
	CHECK(rdma_connect(id, NULL) == 0);
	CHECK(rdma_get_request(listening, &child) == 0);
	CHECK(child->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_accept(child, &param) == 0 && child->event == NULL);
	rdma_destroy_ep(listening);
	event = expect(channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->param.ud.qp_num == 5 && rdma_ack_cm_event(event) == 0);
	rdma_destroy_ep(child);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
}

int main(void)
{
	struct ibv_qp_init_attr init = queues();
	struct rdma_addrinfo *res = address("0", RAI_PASSIVE);
	struct rdma_cm_id *listening, *id;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	char text[64] = "ping", port[16];
	pthread_t thread;

	init.cap.max_inline_data = 16;
	CHECK(rdma_create_ep(&listening, res, NULL, &init) == 0);
	rdma_freeaddrinfo(res);
	CHECK(rdma_listen(listening, 0) == 0);
	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listening)));
	FAILS(rdma_get_request(listening, NULL), EINVAL);
	FAILS(rdma_migrate_id(listening, NULL), EINVAL);
	CHECK(pthread_create(&thread, NULL, serve, listening) == 0);

	res = address(port, 0);
	init = queues();
	FAILS(rdma_create_ep(NULL, res, NULL, &init), EINVAL);
	CHECK(rdma_create_ep(&id, res, NULL, &init) == 0);
	CHECK((mr = rdma_reg_msgs(id, text, sizeof text)) != NULL);
	CHECK(rdma_connect(id, NULL) == 0);
	CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_post_recv(id, NULL, text + 32, 32, mr) == 0);
	CHECK(rdma_post_send(id, (void *)5, text, 5, mr, 0) == 0);
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(strcmp(text + 32, "pong") == 0);
	/* The second time there is nothing to wait for. */
	CHECK(rdma_disconnect(id) == 0 && rdma_disconnect(id) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(rdma_dereg_mr(mr) == 0);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listening);
	rdma_freeaddrinfo(res);

	/* Nobody listens. A port that nobody is given by chance. */
	res = address("1", 0);
	init = queues();
	CHECK(rdma_create_ep(&id, res, NULL, &init) == 0);
	FAILS(rdma_connect(id, NULL), ECONNREFUSED);
	CHECK(id->event->event == RDMA_CM_EVENT_REJECTED);
	rdma_destroy_ep(id);
	rdma_freeaddrinfo(res);
	of_another_device();
	looked_up();
	return 0;
}
