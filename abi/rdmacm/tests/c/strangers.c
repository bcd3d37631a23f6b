/* Requests of strangers: those that cannot be shown to the program are refused, and it hears nothing of them. */
#include "common.h"

#include <sys/socket.h>
#include <sys/wait.h>

/* The request of specs/quipu-cm.md, 3, in a start-up frame; without private data, one of plain iWARP. */
static const unsigned char request[] =
	"MPA ID Req Frame\x40\x01\x00\x35"
	"QUCM\x01\x01\x00\x05\x01\x06\x02\x00\x00\x12\x34\x56"
	"\x00\xab\xcd\xef\x10\x10\x07\x07\x05\x00\x12\x00\x00\x00\x00\x00"
	"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x00\x00\x01quipu";
static const unsigned char plain[] = "MPA ID Req Frame\x40\x01\x00\x00";

/* A stranger who asks; its socket. */
static int asks(int port, const unsigned char *bytes, ssize_t length)
{
	struct sockaddr_in in;
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(fd > 2 && connect(fd, loopback(&in, port), sizeof in) == 0);
	CHECK(send(fd, bytes, length, 0) == length);
	return fd;
}

/* And is refused, for this reason. */
static void refused(int fd, int reason)
{
	unsigned char reply[28];
	CHECK(recv(fd, reply, sizeof reply, MSG_WAITALL) == sizeof reply);
	CHECK(memcmp(reply, "MPA ID Rep Frame", 16) == 0 && reply[16] & 0x20);
	CHECK(memcmp(reply + 20, "QUCM\x01\x03", 6) == 0 && reply[26] == reason);
	close(fd);
}

/* A listener at every address, which has no device before its first request. */
static struct rdma_cm_id *anywhere(struct rdma_event_channel *channel)
{
	struct sockaddr_in in = { .sin_family = AF_INET };
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&in) == 0 && rdma_listen(id, 4) == 0);
	CHECK(id->verbs == NULL);
	return id;
}

/* Programs that do not see quipu0 have no device for requests of other Quipus. */
static void of_a_device_that_is_not_shown(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listening = anywhere(channel);
	struct rdma_cm_event *event;
	int fd;
	refused(asks(rdma_get_src_port(listening), request, sizeof request - 1), 8);
	fd = asks(rdma_get_src_port(listening), plain, sizeof plain - 1);
	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(strcmp(ibv_get_device_name(event->id->verbs->device), "quipu_iw0") == 0);
	CHECK(rdma_destroy_id(event->id) == 0 && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_destroy_id(listening) == 0);
	close(fd);
	rdma_destroy_event_channel(channel);
}

/* Where the device of a request cannot be had, the next one may be luckier. */
static void of_a_device_that_fails(void)
{
	char plan[64];
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr init = queues();
	struct rdma_cm_id *listening, *id;
	struct pollfd ready = { .events = POLLIN };
	int fds[2];

	snprintf(plan, sizeof plan, "/tmp/quipu-strangers-%d.toml", (int)getpid());
	FILE *file = fopen(plan, "w");
	CHECK(file && fputs("[[fault]]\ninject = 'refuse'\ncall = 'alloc_pd'\nerrno = 'ENOMEM'\n", file) > 0);
	CHECK(fclose(file) == 0);
	setenv("QUIPU_FAULTS", plan, 1);
	setenv("QUIPU_FAULT_LOG", "/dev/null", 1);
	CHECK(rdma_getaddrinfo(NULL, "0", &hints, &res) == 0);
	CHECK(rdma_create_ep(&listening, res, NULL, &init) == 0 && rdma_listen(listening, 0) == 0);
	CHECK(unlink(plan) == 0 && listening->verbs == NULL);
	rdma_freeaddrinfo(res);
	ready.fd = listening->channel->fd;
	fds[0] = asks(rdma_get_src_port(listening), request, sizeof request - 1);
	CHECK(poll(&ready, 1, 30000) == 1);
	fds[1] = asks(rdma_get_src_port(listening), request, sizeof request - 1);
	CHECK(rdma_get_request(listening, &id) == 0);
	CHECK(id->verbs && id->pd && id->qp && id->port_num == 1);
	refused(fds[0], 28);
	CHECK(rdma_reject(id, NULL, 0) == 0);
	refused(fds[1], 28);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listening);
}

static struct rdma_cm_id *moving, *child;
static struct rdma_event_channel *from;
static struct rdma_cm_event *taken;
static volatile int stopped;
static __thread int stops;

extern void *__libc_calloc(size_t count, size_t size);

/* The list of devices is made by it: there a thread that has taken a request waits until its listener has
   moved, if it is not in the way of that. */
void *calloc(size_t count, size_t size)
{
	struct pollfd ready = { .events = POLLIN };
	if (stops && (ready.fd = from->fd, poll(&ready, 1, 0) == 0)) {
		stops = 0;
		stopped = 1;
		for (int n = 0; n < 500 && *(struct rdma_event_channel *volatile *)&moving->channel == from; n++)
			usleep(1000);
	}
	return __libc_calloc(count, size);
}

/* Takes the first request, for which all devices are opened. */
static void *takes(void *channel)
{
	stops = 1;
	if (channel) {
		taken = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		child = taken->id;
	} else {
		CHECK(rdma_get_request(moving, &child) == 0);
	}
	return NULL;
}

static void *is_moved(void *to)
{
	CHECK(rdma_migrate_id(moving, to) == 0);
	return NULL;
}

/* A request belongs where it was taken, though its listener goes elsewhere before it is understood. */
static void of_a_listener_that_moves(int to_none)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct pollfd ready = { .events = POLLIN };
	pthread_t threads[2];
	int fd, own;

	moving = anywhere(to_none ? channel : NULL);
	from = moving->channel;
	ready.fd = own = from->fd;
	fd = asks(rdma_get_src_port(moving), request, sizeof request - 1);
	CHECK(poll(&ready, 1, 30000) == 1);
	CHECK(pthread_create(&threads[0], NULL, takes, to_none ? channel : NULL) == 0);
	while (!stopped)
		usleep(1000);
	CHECK(pthread_create(&threads[1], NULL, is_moved, to_none ? NULL : channel) == 0);
	CHECK(pthread_join(threads[0], NULL) == 0);
	CHECK((child->channel == channel) == to_none && (to_none || child->channel->fd != own));
	CHECK(rdma_reject(child, NULL, 0) == 0);
	refused(fd, 28);
	if (to_none)
		CHECK(rdma_ack_cm_event(taken) == 0);
	CHECK(rdma_destroy_id(child) == 0 && pthread_join(threads[1], NULL) == 0);
	CHECK((moving->channel == channel) != to_none && rdma_destroy_id(moving) == 0);
	rdma_destroy_event_channel(channel);
}

/* In a process of its own, in which no device is open yet. */
static void in_another(void (*does)(int), int how)
{
	int status;
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(60);
		does(how);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

int main(void)
{
	/* What hangs fails. */
	alarm(60);
	if (strcmp(getenv("QUIPU_DEVICES"), "quipu_iw0") == 0) {
		of_a_device_that_is_not_shown();
		return 0;
	}
	in_another(of_a_listener_that_moves, 1);
	in_another(of_a_listener_that_moves, 0);
	of_a_device_that_fails();
	return 0;
}
