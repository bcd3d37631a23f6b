/* rdma_resolve_addrinfo and its answers, and events that programs write. */
#include "newer.h"
#include <netdb.h>

#define RAI_SA_FLAG 0x10
#define RAI_DNS_FLAG 0x20

static int (*resolve_addrinfo)(struct rdma_cm_id *, const char *, const char *,
			       const struct rdma_addrinfo *);
static int (*query_addrinfo)(struct rdma_cm_id *, struct rdma_addrinfo **);
static int (*write_cm_event)(struct rdma_cm_id *, int, int, uint64_t);

/* Given up while its names are looked up, and the memory that it was used for something else. */
static struct rdma_cm_id *doomed;

/* In front of the C library's. */
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
		struct addrinfo **found)
{
	int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
		dlsym(RTLD_NEXT, "getaddrinfo");
	if (doomed) {
		CHECK(rdma_destroy_id(doomed) == 0);
		doomed = NULL;
		for (size_t size = 16; size < 4096; size += 8) {
			void *memory = malloc(size);
			CHECK(memory);
			memset(memory, 1, size);
		}
	}
	return real(node, service, hints, found);
}

static void departures(struct rdma_event_channel *channel)
{
	const char *nodes[] = { "127.0.0.1", "no number" };
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST };

	for (int i = 0; i < 2; i++) {
		CHECK(rdma_create_id(channel, &doomed, NULL, RDMA_PS_TCP) == 0);
		FAILS(resolve_addrinfo(doomed, nodes[i], "1", &hints), EINVAL);
	}
}

/* The next event: this one, with its status, about an identifier. */
static uint64_t meets(struct rdma_event_channel *channel, struct rdma_cm_id *id, int type, int status)
{
	struct rdma_cm_event *event = expect(channel, type);
	uint64_t arg;
	CHECK(event->id == id && event->status == status && !event->listen_id);
	memcpy(&arg, &event->param, sizeof arg);
	CHECK(rdma_ack_cm_event(event) == 0);
	return arg;
}

static void answers(struct rdma_event_channel *channel)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *list;
	struct rdma_cm_id *id;
	struct sockaddr_in *in;

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(query_addrinfo(id, &list), ENOENT);
	CHECK(resolve_addrinfo(id, "127.0.0.1", "7471", NULL) == 0);
	FAILS(resolve_addrinfo(id, "127.0.0.1", "7471", NULL), EBUSY);
	meets(channel, id, ADDRINFO_RESOLVED, 0);
	FAILS(query_addrinfo(id, NULL), EINVAL);
	FAILS(query_addrinfo(NULL, &list), EINVAL);
	CHECK(query_addrinfo(id, &list) == 0);
	in = (struct sockaddr_in *)list->ai_dst_addr;
	CHECK(in->sin_family == AF_INET && ntohs(in->sin_port) == 7471);
	CHECK(ntohl(in->sin_addr.s_addr) == INADDR_LOOPBACK && !list->ai_next);
	FAILS(query_addrinfo(id, &list), ENOENT);
	rdma_freeaddrinfo(list);

	/* An answer that comes in vain is said by its event, after which one may ask again. */
	hints.ai_flags = RAI_NUMERICHOST | RAI_DNS_FLAG;
	CHECK(resolve_addrinfo(id, "no number", "7471", &hints) == 0);
	FAILS(query_addrinfo(id, &list), ENOENT);
	FAILS(resolve_addrinfo(id, "127.0.0.1", "7471", &hints), EBUSY);
	meets(channel, id, ADDRINFO_ERROR, -ENOENT);
	FAILS(query_addrinfo(id, &list), ENOENT);
	/* The answer is there before its event is taken, and goes with the identifier. */
	CHECK(resolve_addrinfo(id, "127.0.0.1", "7471", &hints) == 0);
	CHECK(query_addrinfo(id, &list) == 0);
	rdma_freeaddrinfo(list);
	CHECK(resolve_addrinfo(id, NULL, "7472", &hints) == 0);
	meets(channel, id, ADDRINFO_RESOLVED, 0);
	meets(channel, id, ADDRINFO_RESOLVED, 0);
	CHECK(rdma_destroy_id(id) == 0);
}

static void refusals(struct rdma_event_channel *channel)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_SA_FLAG }, *list;
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(resolve_addrinfo(NULL, "127.0.0.1", "1", NULL), EINVAL);
	FAILS(resolve_addrinfo(id, NULL, NULL, NULL), EINVAL);
	FAILS(resolve_addrinfo(id, NULL, "storage", &hints), EOPNOTSUPP);
	FAILS(rdma_getaddrinfo(NULL, "storage", &hints, &list), ENOENT);
	FAILS(rdma_getaddrinfo("127.0.0.1", "storage", &hints, &list), EOPNOTSUPP);
	hints.ai_flags |= RAI_DNS_FLAG;
	FAILS(resolve_addrinfo(id, NULL, "storage", &hints), EOPNOTSUPP);
	FAILS(rdma_getaddrinfo(NULL, "storage", &hints, &list), EOPNOTSUPP);
	hints.ai_flags = 1 << 20;
	FAILS(resolve_addrinfo(id, "127.0.0.1", "1", &hints), EINVAL);
	FAILS(query_addrinfo(id, &list), ENOENT);
	FAILS(write_cm_event(NULL, USER, 0, 0), EINVAL);
	for (int type = -1; type < 22; type++)
		if (type != USER)
			FAILS(write_cm_event(id, type, 0, 0), EINVAL);
	/* Nothing of all this was an event. */
	CHECK(write_cm_event(id, USER, 0, 0) == 0);
	meets(channel, id, USER, 0);
	CHECK(rdma_destroy_id(id) == 0);
}

static void *write_soon(void *id)
{
	usleep(50000);
	CHECK(write_cm_event(id, USER, -7, 0x0123456789abcdef) == 0);
	return NULL;
}

static void own_events(struct rdma_event_channel *channel)
{
	struct rdma_event_channel *other = rdma_create_event_channel();
	struct pollfd ready = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_id *id;
	pthread_t thread;

	CHECK(other && rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(poll(&ready, 1, 0) == 0);
	CHECK(write_cm_event(id, USER, 0, 1) == 0);
	CHECK(write_cm_event(id, USER, 1, 2) == 0);
	CHECK(poll(&ready, 1, 1000) == 1);
	CHECK(meets(channel, id, USER, 0) == 1);
	/* Events go with their identifier. */
	CHECK(rdma_migrate_id(id, other) == 0);
	CHECK(meets(other, id, USER, 1) == 2);
	/* A thread that sleeps in the channel is woken. */
	CHECK(pthread_create(&thread, NULL, write_soon, id) == 0);
	CHECK(meets(other, id, USER, -7) == 0x0123456789abcdef);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(other);
}

/* Without a channel the call itself waits for the answer. */
static void synchronous(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST }, *list;
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(resolve_addrinfo(id, "no number", "1", &hints), ENOENT);
	CHECK((int)id->event->event == ADDRINFO_ERROR);
	CHECK(resolve_addrinfo(id, "::1", "1", &hints) == 0);
	CHECK((int)id->event->event == ADDRINFO_RESOLVED);
	CHECK(query_addrinfo(id, &list) == 0);
	CHECK(list->ai_dst_addr->sa_family == AF_INET6);
	rdma_freeaddrinfo(list);
	CHECK(rdma_destroy_id(id) == 0);
}

int main(void)
{
	alarm(60);
	struct rdma_event_channel *channel = rdma_create_event_channel();
	CHECK(channel);
	resolve_addrinfo = versioned("rdma_resolve_addrinfo", "RDMACM_1.4");
	query_addrinfo = versioned("rdma_query_addrinfo", "RDMACM_1.4");
	write_cm_event = versioned("rdma_write_cm_event", "RDMACM_1.4");
	answers(channel);
	refusals(channel);
	own_events(channel);
	synchronous();
	departures(channel);
	rdma_destroy_event_channel(channel);
	return 0;
}
