/* Every event of an error and every refused call of rdma_cm, through plans of faults (docs/faults.md). Each
 * plan is that of a process of its own. */
#include "newer.h"

#include <stdarg.h>
#include <sys/wait.h>

static char plan_file[64];

/* Runs a test in a process with that plan. */
static void under(void (*run)(const void *), const void *argument, const char *words, ...)
{
	FILE *file = fopen(plan_file, "w");
	va_list rest;
	int status;
	pid_t child;
	CHECK(file);
	fputs("[[fault]]\n", file);
	va_start(rest, words);
	vfprintf(file, words, rest);
	va_end(rest);
	CHECK(fclose(file) == 0);
	fflush(NULL);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		setenv("QUIPU_FAULTS", plan_file, 1);
		setenv("QUIPU_FAULT_LOG", "/dev/null", 1);
		run(argument);
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	if (status != 0) {
		fprintf(stderr, "under the plan:\n");
		va_start(rest, words);
		vfprintf(stderr, words, rest);
		va_end(rest);
		exit(1);
	}
}

/* The next event is this one, with that status. */
static void meets(struct rdma_event_channel *channel, int type, int status)
{
	struct rdma_cm_event *event = expect(channel, type);
	if (event->status != status)
		fprintf(stderr, "status %d, not %d\n", event->status, status);
	CHECK(event->status == status);
	CHECK(rdma_ack_cm_event(event) == 0);
}

/* What the tests need: channels, a listener, and what a connection is asked for with. */
static struct rdma_event_channel *here, *there;
static struct rdma_cm_id *listening;
static struct rdma_conn_param param = { .qp_num = 5, .retry_count = 7, .rnr_retry_count = 7 };

static struct sockaddr *group(struct sockaddr_in *in)
{
	loopback(in, 0);
	in->sin_addr.s_addr = inet_addr("239.1.2.3");
	return (struct sockaddr *)in;
}

static int begin(void)
{
	int port;
	here = rdma_create_event_channel();
	there = rdma_create_event_channel();
	CHECK(here && there);
	listening = listener(there, RDMA_PS_TCP, &port);
	return port;
}

static struct rdma_cm_id *with_address(int ps, int port)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(here, &id, NULL, ps) == 0);
	CHECK(rdma_resolve_addr(id, NULL, loopback(&in, port), 2000) == 0);
	return id;
}

static struct rdma_cm_id *requested(void)
{
	struct rdma_cm_event *event = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *child = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	return child;
}

/* Asks the listener for a connection. */
static struct rdma_cm_id *connecting(int port)
{
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port);
	CHECK(rdma_connect(active, &param) == 0);
	return active;
}

/* Takes what was asked for; the other end. */
static struct rdma_cm_id *established(struct rdma_cm_id *active)
{
	struct rdma_cm_id *passive = requested();
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_CONNECT_RESPONSE);
	CHECK(rdma_establish(active) == 0);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	return passive;
}

/* Everything goes on after a failure: the identifier can be destroyed, and another one connects. */
static void ends(struct rdma_cm_id *id)
{
	CHECK(rdma_destroy_id(id) == 0);
}

static void connects(int port)
{
	struct rdma_cm_id *active = connecting(port), *passive = established(active);
	ends(active);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	ends(passive);
}

/* --- events ------------------------------------------------------------------------------------ */

struct failure {
	const char *event;
	int type, status;
};

static void address_fails(const void *argument)
{
	const struct failure *failure = argument;
	int port = begin();
	struct rdma_cm_id *id = with_address(RDMA_PS_TCP, port);
	meets(here, failure->type, failure->status);
	CHECK(rdma_resolve_route(id, 2000) == -1);
	ends(id);
	connects(port);
}

static void route_fails(const void *argument)
{
	const struct failure *failure = argument;
	int port = begin();
	struct rdma_cm_id *id = with_address(RDMA_PS_TCP, port);
	pass(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(rdma_resolve_route(id, 2000) == 0);
	meets(here, failure->type, failure->status);
	FAILS(rdma_connect(id, &param), EINVAL);
	/* It may be tried again. */
	CHECK(rdma_resolve_route(id, 2000) == 0);
	pass(here, RDMA_CM_EVENT_ROUTE_RESOLVED);
	ends(id);
	connects(port);
}

static void connecting_fails(const void *argument)
{
	const struct failure *failure = argument;
	int port = begin();
	struct rdma_cm_id *id = connecting(port);
	meets(here, failure->type, failure->status);
	FAILS(rdma_connect(id, &param), EINVAL);
	ends(id);
	connects(port);
}

static void accepting_fails(const void *argument)
{
	const struct failure *failure = argument;
	int port = begin();
	struct rdma_cm_id *active = connecting(port), *passive;
	passive = requested();
	CHECK(rdma_accept(passive, &param) == 0);
	meets(there, failure->type, failure->status);
	meets(here, RDMA_CM_EVENT_REJECTED, 28);
	ends(passive);
	ends(active);
	connects(port);
}

static void joining_fails(const void *argument)
{
	const struct failure *failure = argument;
	struct sockaddr_in in;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	begin();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	CHECK(rdma_join_multicast(id, group(&in), (void *)0x5a) == 0);
	event = expect(here, failure->type);
	CHECK(event->status == failure->status && event->param.ud.private_data == (void *)0x5a);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_leave_multicast(id, group(&in)) == 0);
	CHECK(rdma_join_multicast(id, group(&in), NULL) == 0);
	pass(here, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(rdma_leave_multicast(id, group(&in)) == 0);
	ends(id);
}

/* Events that come beside what was asked for. */
static void address_changes(const void *argument)
{
	const struct failure *failure = argument;
	int port = begin();
	struct rdma_cm_id *active = connecting(port), *passive;
	meets(here, failure->type, failure->status);
	passive = requested();
	CHECK(rdma_reject(passive, NULL, 0) == 0);
	pass(here, RDMA_CM_EVENT_REJECTED);
	ends(passive);
	ends(active);
}

static void wait_is_over(const void *argument)
{
	const struct failure *failure = argument;
	int port = begin();
	struct rdma_cm_id *active = connecting(port), *passive = established(active);
	CHECK(rdma_disconnect(active) == 0);
	meets(here, failure->type, failure->status);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	ends(passive);
	pass(here, RDMA_CM_EVENT_DISCONNECTED);
	ends(active);
}

static void names(const void *argument)
{
	int (*ask)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *) =
		versioned("rdma_resolve_addrinfo", "RDMACM_1.4");
	struct rdma_cm_id *id;
	begin();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	if (argument) {
		const struct failure *failure = argument;
		CHECK(ask(id, "127.0.0.1", "1", NULL) == 0);
		meets(here, failure->type, failure->status);
	} else {
		FAILS(ask(id, "127.0.0.1", "1", NULL), ENOMEM);
	}
	CHECK(ask(id, "127.0.0.1", "1", NULL) == 0);
	pass(here, ADDRINFO_RESOLVED);
	ends(id);
}

static void every_event(void)
{
	static const struct {
		void (*run)(const void *);
		struct failure failure;
		const char *more; /* of the plan */
	} cases[] = {
		{ address_fails, { "addr_error", RDMA_CM_EVENT_ADDR_ERROR, -EHOSTUNREACH }, "" },
		{ address_fails, { "addr_error", RDMA_CM_EVENT_ADDR_ERROR, -ENODEV }, "errno = 'ENODEV'" },
		{ route_fails, { "route_error", RDMA_CM_EVENT_ROUTE_ERROR, -ETIMEDOUT }, "" },
		{ connecting_fails, { "connect_error", RDMA_CM_EVENT_CONNECT_ERROR, -EHOSTUNREACH }, "" },
		{ connecting_fails, { "unreachable", RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT }, "" },
		{ connecting_fails, { "rejected", RDMA_CM_EVENT_REJECTED, 28 }, "" },
		{ connecting_fails, { "rejected", RDMA_CM_EVENT_REJECTED, -ECONNREFUSED },
		  "errno = 'ECONNREFUSED'" },
		{ accepting_fails, { "connect_error", RDMA_CM_EVENT_CONNECT_ERROR, -EIO },
		  "call = 'rdma_accept'\nerrno = 'EIO'" },
		{ accepting_fails, { "unreachable", RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT },
		  "call = 'accept'" },
		{ joining_fails, { "multicast_error", RDMA_CM_EVENT_MULTICAST_ERROR, -EHOSTUNREACH }, "" },
		{ names, { "addrinfo_error", ADDRINFO_ERROR, -ENOENT }, "" },
		{ address_changes, { "addr_change", RDMA_CM_EVENT_ADDR_CHANGE, 0 }, "" },
		{ wait_is_over, { "timewait_exit", RDMA_CM_EVENT_TIMEWAIT_EXIT, 0 }, "" },
	};
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		under(cases[i].run, &cases[i].failure, "inject = 'cm_event'\nevent = '%s'\n%s\n",
		      cases[i].failure.event, cases[i].more);
}

/* --- the device ---------------------------------------------------------------------------------- */

/* Removed when the third identifier binds: a listener that is bound to the device, one that is not, both
 * ends of a connection, and a request that nobody has taken. */
static void removed(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *active, *passive, *wildcard, *waiting, *fresh;
	struct rdma_event_channel *idle = rdma_create_event_channel();
	struct rdma_cm_event *event;
	struct pollfd fds = { .fd = idle->fd, .events = POLLIN };
	int port = begin(), seen = 0;
	(void)argument;
	active = connecting(port);
	passive = established(active);
	waiting = connecting(port);
	fds.fd = there->fd;
	CHECK(poll(&fds, 1, 10000) == 1); /* the request, which is not taken */
	CHECK(rdma_create_id(idle, &wildcard, NULL, RDMA_PS_TCP) == 0);
	memset(&in, 0, sizeof in);
	in.sin_family = AF_INET;
	CHECK(rdma_bind_addr(wildcard, (struct sockaddr *)&in) == 0);
	CHECK(rdma_listen(wildcard, 1) == 0);

	CHECK(rdma_create_id(idle, &fresh, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_bind_addr(fresh, loopback(&in, 0)), EIO);
	/* The two that connect, and in any order the listener and the accepted one. */
	for (int i = 0; i < 2; i++) {
		event = expect(here, RDMA_CM_EVENT_DEVICE_REMOVAL);
		CHECK(event->status == 0 && (event->id == active || event->id == waiting));
		seen += event->id == active ? 1 : 10;
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	for (int i = 0; i < 2; i++) {
		event = expect(there, RDMA_CM_EVENT_DEVICE_REMOVAL);
		CHECK(event->status == 0 && (event->id == passive || event->id == listening));
		seen += event->id == passive ? 100 : 1000;
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	CHECK(seen == 1111);
	/* Who is not bound to the device hears nothing. */
	fds.fd = idle->fd;
	CHECK(poll(&fds, 1, 0) == 0);
	fds.fd = there->fd;
	CHECK(poll(&fds, 1, 0) == 0);
	CHECK(rdma_connect(active, &param) == -1 && rdma_listen(fresh, 1) == -1);
	CHECK(rdma_resolve_addr(fresh, NULL, loopback(&in, port), 100) == -1 && errno == EIO);
	/* All that is left is to let go. */
	ends(active);
	ends(passive);
	ends(waiting);
	ends(wildcard);
	ends(fresh);
	ends(listening);
	rdma_destroy_event_channel(idle);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

/* --- refused calls ------------------------------------------------------------------------------- */

struct refusal {
	const char *call;
	void (*run)(const void *);
};

static void create_channel(const void *argument)
{
	(void)argument;
	CHECK(!rdma_create_event_channel() && errno == ENOMEM);
	CHECK(rdma_create_event_channel());
}

static void create_id(const void *argument)
{
	struct rdma_cm_id *id;
	(void)argument;
	here = rdma_create_event_channel();
	FAILS(rdma_create_id(here, &id, NULL, RDMA_PS_TCP), ENOMEM);
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	ends(id);
}

static void bind_addr(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	(void)argument;
	here = rdma_create_event_channel();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_bind_addr(id, loopback(&in, 0)), ENOMEM);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	ends(id);
}

static void resolve_addr(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	int port = begin();
	(void)argument;
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_resolve_addr(id, NULL, loopback(&in, port), 100), ENOMEM);
	CHECK(rdma_resolve_addr(id, NULL, loopback(&in, port), 100) == 0);
	pass(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	ends(id);
}

static void resolve_route(const void *argument)
{
	int port = begin();
	struct rdma_cm_id *id = with_address(RDMA_PS_TCP, port);
	(void)argument;
	pass(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	FAILS(rdma_resolve_route(id, 100), ENOMEM);
	CHECK(rdma_resolve_route(id, 100) == 0);
	pass(here, RDMA_CM_EVENT_ROUTE_RESOLVED);
	ends(id);
}

static void refuse_listen(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	(void)argument;
	here = rdma_create_event_channel();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	FAILS(rdma_listen(id, 1), ENOMEM);
	CHECK(rdma_listen(id, 1) == 0);
	ends(id);
}

static void refuse_connect(const void *argument)
{
	int port = begin();
	struct rdma_cm_id *id = resolved(here, RDMA_PS_TCP, port), *passive;
	(void)argument;
	FAILS(rdma_connect(id, &param), ENOMEM);
	CHECK(rdma_connect(id, &param) == 0);
	passive = requested();
	ends(passive);
	pass(here, RDMA_CM_EVENT_REJECTED);
	ends(id);
}

static void create_qp(const void *argument)
{
	int port = begin();
	struct rdma_cm_id *id = resolved(here, RDMA_PS_TCP, port);
	struct ibv_qp_init_attr init = queues();
	(void)argument;
	FAILS(rdma_create_qp(id, NULL, &init), ENOMEM);
	CHECK(!id->qp && rdma_create_qp(id, NULL, &init) == 0 && id->qp);
	rdma_destroy_qp(id);
	ends(id);
}

static void answer(const void *argument)
{
	const struct refusal *refusal = argument;
	int port = begin(), accept = strcmp(refusal->call, "accept") == 0;
	struct rdma_cm_id *id = connecting(port), *passive;
	passive = requested();
	if (accept)
		FAILS(rdma_accept(passive, &param), ENOMEM);
	else
		FAILS(rdma_reject(passive, NULL, 0), ENOMEM);
	CHECK(rdma_reject(passive, NULL, 0) == 0);
	pass(here, RDMA_CM_EVENT_REJECTED);
	ends(passive);
	ends(id);
}

static void refuse_disconnect(const void *argument)
{
	int port = begin();
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	(void)argument;
	CHECK(rdma_connect(active, &param) == 0);
	passive = established(active);
	FAILS(rdma_disconnect(active), ENOMEM);
	CHECK(rdma_disconnect(active) == 0);
	pass(there, RDMA_CM_EVENT_DISCONNECTED);
	ends(passive);
	ends(active);
}

static void refuse_names(const void *argument)
{
	(void)argument;
	names(NULL);
}

static void get_names(const void *argument)
{
	struct rdma_addrinfo *found = NULL;
	(void)argument;
	FAILS(rdma_getaddrinfo("127.0.0.1", "7471", NULL, &found), ENOMEM);
	CHECK(!found && rdma_getaddrinfo("127.0.0.1", "7471", NULL, &found) == 0 && found);
	rdma_freeaddrinfo(found);
}

/* An identifier that can join groups. */
static struct rdma_cm_id *member(void)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	begin();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_UDP) == 0);
	CHECK(rdma_bind_addr(id, loopback(&in, 0)) == 0);
	return id;
}

static void join(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id = member();
	(void)argument;
	FAILS(rdma_join_multicast(id, group(&in), NULL), ENOMEM);
	CHECK(rdma_join_multicast(id, group(&in), NULL) == 0);
	pass(here, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(rdma_leave_multicast(id, group(&in)) == 0);
	ends(id);
}

static void leave(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id = member();
	(void)argument;
	CHECK(rdma_join_multicast(id, group(&in), NULL) == 0);
	pass(here, RDMA_CM_EVENT_MULTICAST_JOIN);
	FAILS(rdma_leave_multicast(id, group(&in)), ENOMEM);
	CHECK(rdma_leave_multicast(id, group(&in)) == 0);
	ends(id);
}

static void migrate(const void *argument)
{
	struct rdma_event_channel *other = rdma_create_event_channel();
	struct rdma_cm_id *id;
	(void)argument;
	here = rdma_create_event_channel();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_migrate_id(id, other), ENOMEM);
	CHECK(id->channel == here && rdma_migrate_id(id, other) == 0 && id->channel == other);
	ends(id);
}

static void set_option(const void *argument)
{
	struct rdma_cm_id *id;
	uint8_t tos = 32;
	(void)argument;
	here = rdma_create_event_channel();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1), ENOMEM);
	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1) == 0);
	ends(id);
}

/* Nothing is lost: what was to be taken comes with the next call. */
static void take_event(const void *argument)
{
	struct sockaddr_in in;
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	(void)argument;
	here = rdma_create_event_channel();
	CHECK(rdma_create_id(here, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, loopback(&in, 7471), 1000) == 0);
	FAILS(rdma_get_cm_event(here, &event), ENOMEM);
	pass(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	ends(id);
}

static void take_request(const void *argument)
{
	struct rdma_cm_id *listener, *active, *passive;
	struct sockaddr_in in;
	(void)argument;
	CHECK(rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, loopback(&in, 0)) == 0);
	CHECK(rdma_listen(listener, 1) == 0);
	here = rdma_create_event_channel();
	active = resolved(here, RDMA_PS_TCP, rdma_get_src_port(listener));
	CHECK(rdma_connect(active, &param) == 0);
	FAILS(rdma_get_request(listener, &passive), ENOMEM);
	CHECK(rdma_get_request(listener, &passive) == 0);
	CHECK(rdma_reject(passive, NULL, 0) == 0);
	pass(here, RDMA_CM_EVENT_REJECTED);
	ends(passive);
	ends(active);
	ends(listener);
}

static void establish(const void *argument)
{
	int port = begin();
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	(void)argument;
	CHECK(rdma_connect(active, &param) == 0);
	passive = requested();
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_CONNECT_RESPONSE);
	FAILS(rdma_establish(active), ENOMEM);
	CHECK(rdma_establish(active) == 0);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	ends(active);
	ends(passive);
}

static void every_refusal(void)
{
	static const struct refusal cases[] = {
		{ "create_event_channel", create_channel },
		{ "create_id", create_id },
		{ "bind_addr", bind_addr },
		{ "resolve_addr", resolve_addr },
		{ "resolve_route", resolve_route },
		{ "getaddrinfo", get_names },
		{ "resolve_addrinfo", refuse_names },
		{ "listen", refuse_listen },
		{ "connect", refuse_connect },
		{ "create_qp", create_qp },
		{ "accept", answer },
		{ "reject", answer },
		{ "disconnect", refuse_disconnect },
		{ "join_multicast", join },
		{ "leave_multicast", leave },
		{ "migrate_id", migrate },
		{ "set_option", set_option },
		{ "establish", establish },
		{ "get_cm_event", take_event },
		{ "get_request", take_request },
	};
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		under(cases[i].run, &cases[i], "inject = 'refuse'\ncall = '%s'\nerrno = 'ENOMEM'\n",
		      cases[i].call);
}

/* While the port is down nobody is reached, and afterwards everybody is. */
static void port_goes_down(const void *argument)
{
	int port = begin(), resolves = argument != NULL;
	struct rdma_cm_id *id = resolves ? with_address(RDMA_PS_TCP, port) : connecting(port);
	if (resolves)
		meets(here, RDMA_CM_EVENT_ADDR_ERROR, -EHOSTUNREACH);
	else
		meets(here, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
	ends(id);
	for (int tries = 0;; tries++) {
		struct rdma_cm_event *event;
		CHECK(tries < 1000);
		id = with_address(RDMA_PS_TCP, port);
		CHECK(rdma_get_cm_event(here, &event) == 0);
		int up = event->event == RDMA_CM_EVENT_ADDR_RESOLVED;
		CHECK(rdma_ack_cm_event(event) == 0);
		ends(id);
		if (up)
			break;
		usleep(10000);
	}
	connects(port);
}

/* The device of a connection goes, and the connection and its queue pairs with it: there is nothing to end. */
static void device_goes(const void *argument)
{
	int port = begin();
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_cm_id *active = resolved(here, RDMA_PS_TCP, port), *passive;
	(void)argument;
	CHECK(rdma_create_qp(active, NULL, &init) == 0);
	CHECK(rdma_connect(active, &param) == 0);
	passive = requested();
	CHECK(rdma_create_qp(passive, NULL, &init) == 0);
	CHECK(rdma_accept(passive, &param) == 0);
	pass(here, RDMA_CM_EVENT_ESTABLISHED);
	pass(there, RDMA_CM_EVENT_ESTABLISHED);
	errno = 0;
	CHECK(!ibv_alloc_mw(active->pd, IBV_MW_TYPE_1) && errno == EIO);
	pass(here, RDMA_CM_EVENT_DEVICE_REMOVAL);
	FAILS(rdma_disconnect(active), EIO);
	rdma_destroy_qp(active);
	rdma_destroy_qp(passive);
	ends(active);
	ends(passive);
}

/* A stream goes on behind what was sent when something could not be. */
static void stream(const void *pieces)
{
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	int listens = rsocket(AF_INET, SOCK_STREAM, 0), rs = rsocket(AF_INET, SOCK_STREAM, 0), peer;
	static char bytes[131072];
	char text[8] = "";
	ssize_t sent;
	CHECK(rbind(listens, loopback(&in, 0), sizeof in) == 0 && rlisten(listens, 1) == 0);
	CHECK(rgetsockname(listens, (struct sockaddr *)&in, &length) == 0);
	CHECK(rfcntl(rs, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	CHECK((peer = raccept(listens, NULL, NULL)) > 2);
	CHECK(rfcntl(rs, F_SETFL, 0) == 0);
	if (pieces) {
		/* The first has gone, and is not to be sent again. */
		CHECK((sent = rsend(rs, bytes, sizeof bytes, 0)) > 0);
		CHECK(rrecv(peer, bytes, sent, MSG_WAITALL) == sent);
	} else {
		CHECK(rsend(rs, "one", 3, 0) == 3);
		FAILS(rsend(rs, "two", 3, 0), ENOMEM);
		CHECK(rrecv(peer, text, 3, MSG_WAITALL) == 3 && strcmp(text, "one") == 0);
	}
	CHECK(rsend(rs, "six", 3, 0) == 3);
	CHECK(rrecv(peer, text, 8, 0) == 3 && strcmp(text, "six") == 0);
	CHECK(rclose(rs) == 0 && rclose(peer) == 0 && rclose(listens) == 0);
}

int main(void)
{
	snprintf(plan_file, sizeof plan_file, "/tmp/quipu-cm-plan-%d.toml", (int)getpid());
	every_event();
	under(removed, NULL, "inject = 'device_removal'\ncall = 'bind_addr'\nnth = 3\n");
	under(device_goes, NULL, "inject = 'device_removal'\ncall = 'alloc_mw'\n");
	under(port_goes_down, plan_file, "inject = 'port_down'\ncall = 'resolve_addr'\ntime = '30ms'\n");
	under(port_goes_down, NULL, "inject = 'port_down'\ncall = 'connect'\ntime = '30ms'\n");
	every_refusal();
	under(stream, "", "inject = 'refuse'\ncall = 'post_send'\nnth = 2\nerrno = 'ENOMEM'\n");
	under(stream, NULL, "inject = 'refuse'\ncall = 'post_send'\nnth = 2\nerrno = 'ENOMEM'\n");
	unlink(plan_file);
	return 0;
}
