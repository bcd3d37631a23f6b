/* Several threads that wait for one r* socket, each in a call of its own kind: each hears of what it waits for,
 * whoever of them takes what has woken all. */
#include "newer.h"
#include "pair.h"
#include <sys/epoll.h>
#include <sys/resource.h>

/* What nobody may wait longer for, in seconds; a wait that is lost takes LIMIT milliseconds. */
enum { SOON = 4, LIMIT = 15000 };

static int (*create)(int);
static int (*control)(int, int, int, struct epoll_event *);
static int (*wait_in)(int, struct epoll_event *, int, int);

struct reader {
	pthread_t thread;
	int fd;
	ssize_t end;
	volatile int over;
};

/* The bytes that all readers have got. */
static volatile long got;

static void *reads(void *argument)
{
	struct reader *reader = argument;
	char byte;
	while ((reader->end = rrecv(reader->fd, &byte, 1, 0)) == 1)
		__sync_fetch_and_add(&got, 1);
	reader->over = 1;
	return NULL;
}

static void begin(struct reader *reader, int fd)
{
	*reader = (struct reader){ .fd = fd };
	CHECK(pthread_create(&reader->thread, NULL, reads, reader) == 0);
}

static void ended(struct reader *reader)
{
	CHECK(pthread_join(reader->thread, NULL) == 0 && reader->end == 0);
}

struct poller {
	pthread_t thread;
	struct pollfd fds;
	int limit, told;
	double took;
	volatile int stops;
};

static void *polls(void *argument)
{
	struct poller *poller = argument;
	double begun = now();
	poller->told = rpoll(&poller->fds, 1, poller->limit);
	poller->took = now() - begun;
	return NULL;
}

/* Does so again and again. */
static void *keeps_polling(void *argument)
{
	struct poller *poller = argument;
	while (!poller->stops)
		polls(poller);
	return NULL;
}

static void ask(struct poller *poller, void *(*body)(void *), int fd, int events, int limit)
{
	*poller = (struct poller){ .fds = { fd, events, 0 }, .limit = limit };
	CHECK(pthread_create(&poller->thread, NULL, body, poller) == 0);
}

/* It was told of exactly this, and not because its time was over. */
static void told(struct poller *poller, int events)
{
	CHECK(pthread_join(poller->thread, NULL) == 0);
	CHECK(poller->told == 1 && poller->fds.revents == events && poller->took < SOON);
}

/* Takes what comes, now and then, until the end. */
static void *drains(void *fd)
{
	static char bytes[1 << 16];
	ssize_t length = -1;
	while (length != 0) {
		usleep(3000);
		while ((length = rrecv(*(int *)fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0)
			;
		CHECK(length == 0 || errno == EAGAIN);
	}
	return NULL;
}

/* As much as goes now. */
static void fill(int fd)
{
	static char bytes[1 << 20];
	while (rsend(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
		;
	CHECK(errno == EAGAIN);
}

struct watcher {
	pthread_t thread;
	int set;
	volatile int stops;
};

static void *watches(void *argument)
{
	struct watcher *watcher = argument;
	struct epoll_event event;
	while (!watcher->stops)
		CHECK(wait_in(watcher->set, &event, 1, 100) >= 0);
	return NULL;
}

static void watch(struct watcher *watcher, int fd, int events)
{
	struct epoll_event event = { .events = events };
	*watcher = (struct watcher){ .set = create(0) };
	CHECK(watcher->set > 2 && control(watcher->set, EPOLL_CTL_ADD, fd, &event) == 0);
	CHECK(pthread_create(&watcher->thread, NULL, watches, watcher) == 0);
}

static void leave(struct watcher *watcher)
{
	watcher->stops = 1;
	CHECK(pthread_join(watcher->thread, NULL) == 0 && rclose(watcher->set) == 0);
}

/* One polls for room while others receive. */
static void room(int count)
{
	struct pair pair = connected();
	struct reader readers[2];
	pthread_t draining;

	for (int i = 0; i < count; i++)
		begin(&readers[i], pair.here);
	CHECK(pthread_create(&draining, NULL, drains, &pair.there) == 0);
	usleep(20000);
	for (int i = 0; i < 100; i++) {
		struct pollfd fds = { pair.here, POLLOUT, 0 };
		double begun = now();
		fill(pair.here);
		CHECK(rpoll(&fds, 1, LIMIT) == 1 && now() - begun < SOON);
	}
	CHECK(rshutdown(pair.here, SHUT_WR) == 0);
	CHECK(pthread_join(draining, NULL) == 0 && rshutdown(pair.there, SHUT_WR) == 0);
	for (int i = 0; i < count; i++)
		ended(&readers[i]);
	closed(pair);
}

/* One polls for bytes while others come and wait for room, of which there is none: another poll, or a set. */
static void bytes_beside_room(int of_set)
{
	struct pair pair = connected(), other = connected();
	struct reader company;
	struct poller first, second;
	struct watcher watcher;
	char byte;

	/* This one keeps the engine from letting one thread alone make its progress. */
	begin(&company, other.here);
	for (int i = 0; i < 50; i++, usleep(1000))
		fill(pair.here);
	for (int i = 0; i < 400; i++) {
		ask(&first, polls, pair.here, POLLIN, LIMIT);
		usleep(1000);
		if (i == 0 && of_set)
			watch(&watcher, pair.here, EPOLLOUT);
		else if (i == 0)
			ask(&second, keeps_polling, pair.here, POLLOUT, LIMIT);
		usleep(1000);
		CHECK(rsend(pair.there, "x", 1, 0) == 1);
		told(&first, POLLIN);
		CHECK(rrecv(pair.here, &byte, 1, 0) == 1);
	}
	second.stops = 1;
	CHECK(rclose(pair.there) == 0 && rclose(other.there) == 0);
	ended(&company);
	CHECK(rclose(other.here) == 0 && rclose(other.listening) == 0);
	if (of_set)
		leave(&watcher);
	else
		CHECK(pthread_join(second.thread, NULL) == 0);
	CHECK(rclose(pair.here) == 0 && rclose(pair.listening) == 0);
}

/* One waits until a connection stands that another looks after. */
static void connections(void)
{
	for (int i = 0; i < 10; i++) {
		int listening = rsocket(AF_INET, SOCK_STREAM, 0), rs = rsocket(AF_INET, SOCK_STREAM, 0), peer;
		struct sockaddr_in in;
		socklen_t length = sizeof in;
		struct poller first, second;
		CHECK(rbind(listening, loopback(&in, 0), sizeof in) == 0 && rlisten(listening, 5) == 0);
		CHECK(rgetsockname(listening, (struct sockaddr *)&in, &length) == 0);
		CHECK(rfcntl(rs, F_SETFL, O_NONBLOCK) == 0);
		FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
		ask(&first, polls, rs, POLLOUT, LIMIT);
		usleep(2000);
		ask(&second, keeps_polling, rs, POLLOUT, 0);
		CHECK((peer = raccept(listening, NULL, NULL)) > 2);
		told(&first, POLLOUT);
		second.stops = 1;
		CHECK(pthread_join(second.thread, NULL) == 0);
		CHECK(rclose(rs) == 0 && rclose(peer) == 0 && rclose(listening) == 0);
	}
}

/* Who polls hears of a request that the one who accepts has left. */
static void *accepts(void *listening)
{
	int peer = raccept(*(int *)listening, NULL, NULL);
	CHECK(peer > 2);
	return (void *)(long)peer;
}

static void requests(void)
{
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	int listening = rsocket(AF_INET, SOCK_STREAM, 0);

	CHECK(rbind(listening, loopback(&in, 0), sizeof in) == 0 && rlisten(listening, 5) == 0);
	CHECK(rgetsockname(listening, (struct sockaddr *)&in, &length) == 0);
	for (int i = 0; i < 10; i++) {
		struct poller poller;
		pthread_t accepting;
		int callers[2], peer;
		void *first;
		CHECK(pthread_create(&accepting, NULL, accepts, &listening) == 0);
		usleep(2000);
		ask(&poller, polls, listening, POLLIN, LIMIT);
		usleep(2000);
		for (int k = 0; k < 2; k++) {
			CHECK((callers[k] = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) > 2);
			/* Who accepts may be quicker. */
			CHECK(rconnect(callers[k], (struct sockaddr *)&in, sizeof in) == 0 || errno == EINPROGRESS);
		}
		CHECK(pthread_join(accepting, &first) == 0);
		told(&poller, POLLIN);
		CHECK((peer = raccept(listening, NULL, NULL)) > 2);
		CHECK(rclose(callers[0]) == 0 && rclose(callers[1]) == 0);
		CHECK(rclose(peer) == 0 && rclose((long)first) == 0);
	}
	CHECK(rclose(listening) == 0);
}

/* The bytes come to those who receive, however many others wait for the socket: no set takes the event of a
 * thread that sleeps, and no reader that of a set. */
static void sets(int pollers)
{
	struct pair pair = connected(), other = connected();
	struct reader readers[3];
	struct watcher watchers[2];
	struct poller poller;
	long sent = got;

	/* This one keeps the engine from letting one thread alone make its progress. */
	begin(&readers[0], other.here);
	usleep(20000);
	begin(&readers[1], pair.here);
	begin(&readers[2], pair.here);
	watch(&watchers[0], pair.here, EPOLLRDHUP | EPOLLET);
	watch(&watchers[1], pair.here, EPOLLRDHUP);
	if (pollers)
		ask(&poller, keeps_polling, pair.here, POLLPRI, LIMIT);
	usleep(20000);
	for (double begun = now(); now() - begun < 3; usleep(100)) {
		double asked = now();
		CHECK(rsend(pair.there, "x", 1, 0) == 1);
		for (sent++; got < sent; usleep(20))
			CHECK(now() - asked < SOON);
	}
	if (pollers)
		poller.stops = 1;
	CHECK(rclose(pair.there) == 0 && rclose(other.there) == 0);
	for (int i = 0; i < 3; i++)
		ended(&readers[i]);
	leave(&watchers[0]);
	leave(&watchers[1]);
	if (pollers)
		CHECK(pthread_join(poller.thread, NULL) == 0);
	CHECK(rclose(pair.here) == 0 && rclose(pair.listening) == 0);
	CHECK(rclose(other.here) == 0 && rclose(other.listening) == 0);
}

/* A change that one thread makes is heard of by the others, though nothing comes. */
static void changes(void)
{
	struct pair pair = connected();
	struct reader readers[2];
	struct poller poller;
	struct pollfd fds = { pair.here, POLLRDHUP, 0 };
	double begun;
	char byte;

	/* That these were the last bytes. */
	ask(&poller, polls, pair.here, 0, LIMIT);
	CHECK(rsend(pair.there, "x", 1, 0) == 1 && rshutdown(pair.there, SHUT_WR) == 0);
	CHECK(rshutdown(pair.here, SHUT_WR) == 0 && rpoll(&fds, 1, LIMIT) == 1);
	usleep(20000);
	CHECK(rrecv(pair.here, &byte, 1, 0) == 1);
	told(&poller, POLLHUP);
	closed(pair);
	/* That nothing more is read. */
	pair = connected();
	begin(&readers[0], pair.here);
	begin(&readers[1], pair.here);
	ask(&poller, polls, pair.here, POLLIN, LIMIT);
	usleep(20000);
	begun = now();
	CHECK(rshutdown(pair.here, SHUT_RD) == 0);
	ended(&readers[0]);
	ended(&readers[1]);
	CHECK(now() - begun < SOON);
	told(&poller, POLLIN);
	closed(pair);
}

int main(void)
{
	alarm(180);
	create = versioned("repoll_create", "RDMACM_1.5");
	control = versioned("repoll_ctl", "RDMACM_1.5");
	wait_in = versioned("repoll_wait", "RDMACM_1.5");
	room(1);
	room(2);
	bytes_beside_room(0);
	bytes_beside_room(1);
	connections();
	requests();
	changes();
	sets(0);
	sets(1);
	return 0;
}
