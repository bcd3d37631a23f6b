/* repoll_*: sets of r* sockets and of descriptors of the system. */
#include "newer.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>

static int (*create)(int);
static int (*control)(int, int, int, struct epoll_event *);
static int (*wait_in)(int, struct epoll_event *, int, int);

static struct epoll_event said[16];

static void put(int set, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };
	CHECK(control(set, op, fd, &event) == 0);
}

static void add(int set, int fd, uint32_t events, uint64_t data)
{
	put(set, EPOLL_CTL_ADD, fd, events, data);
}

/* Exactly this comes, soon. */
static void meets(int set, uint32_t events, uint64_t data)
{
	int got = wait_in(set, said, 16, 10000);
	if (got != 1 || said[0].events != events || said[0].data.u64 != data)
		fprintf(stderr, "%d events, the first %#x of %#lx, not %#x of %#lx\n", got,
			said[0].events, (long)said[0].data.u64, events, (long)data);
	CHECK(got == 1 && said[0].events == events && said[0].data.u64 == data);
}

static void nothing(int set)
{
	CHECK(wait_in(set, said, 16, 20) == 0);
}

static int bound(struct sockaddr_in *in)
{
	socklen_t length = sizeof *in;
	int rs = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	CHECK(rs > 2 && rbind(rs, loopback(in, 0), sizeof *in) == 0 && rlisten(rs, 64) == 0);
	CHECK(rgetsockname(rs, (struct sockaddr *)in, &length) == 0 && in->sin_port != 0);
	return rs;
}

/* Two ends that do not block; the set tells how they come to be. */
static void connected(int ends[2])
{
	struct sockaddr_in in;
	int set = create(EPOLL_CLOEXEC), listening = bound(&in);
	CHECK(set > 2 && fcntl(set, F_GETFD) == FD_CLOEXEC);
	ends[0] = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	add(set, listening, EPOLLIN, 1);
	nothing(set);
	FAILS(rconnect(ends[0], (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	add(set, ends[0], EPOLLOUT | EPOLLET, 2);
	meets(set, EPOLLIN, 1);
	CHECK((ends[1] = raccept(listening, NULL, NULL)) > 2);
	CHECK(rfcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
	meets(set, EPOLLOUT, 2);
	nothing(set);
	CHECK(rclose(listening) == 0 && rclose(set) == 0);
	FAILS(rclose(set), EBADF);
}

static void finish(int ends[2], int set)
{
	CHECK(rclose(ends[0]) == 0 && rclose(ends[1]) == 0 && rclose(set) == 0);
}

static void refusals(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int ends[2], set = create(0), other = create(0), pipes[2];
	struct sockaddr_in in;

	connected(ends);
	CHECK(set > 2 && fcntl(set, F_GETFD) == 0 && pipe(pipes) == 0);
	FAILS(create(1 << 20), EINVAL);
	FAILS(control(-1, EPOLL_CTL_ADD, ends[0], &event), EBADF);
	FAILS(control(pipes[0], EPOLL_CTL_ADD, ends[0], &event), EBADF);
	FAILS(control(ends[0], EPOLL_CTL_ADD, ends[1], &event), EINVAL);
	FAILS(control(set, EPOLL_CTL_ADD, set, &event), EINVAL);
	FAILS(control(set, EPOLL_CTL_ADD, -1, &event), EBADF);
	FAILS(control(set, EPOLL_CTL_ADD, 1 << 20, &event), EBADF);
	FAILS(control(set, 9, ends[0], &event), EINVAL);
	for (int i = 0; i < 2; i++) {
		int fd = i ? pipes[0] : ends[0];
		FAILS(control(set, EPOLL_CTL_MOD, fd, &event), ENOENT);
		FAILS(control(set, EPOLL_CTL_DEL, fd, NULL), ENOENT);
		FAILS(control(set, EPOLL_CTL_ADD, fd, NULL), EFAULT);
		CHECK(control(set, EPOLL_CTL_ADD, fd, &event) == 0);
		FAILS(control(set, EPOLL_CTL_ADD, fd, &event), EEXIST);
		FAILS(control(set, EPOLL_CTL_MOD, fd, NULL), EFAULT);
		CHECK(control(other, EPOLL_CTL_ADD, fd, &event) == 0);
		CHECK(control(set, EPOLL_CTL_DEL, fd, NULL) == 0);
		FAILS(control(set, EPOLL_CTL_DEL, fd, NULL), ENOENT);
	}
	FAILS(wait_in(set, said, 0, 0), EINVAL);
	FAILS(wait_in(set, said, -1, 0), EINVAL);
	FAILS(wait_in(set, NULL, 1, 0), EFAULT);
	FAILS(wait_in(pipes[0], said, 1, 0), EBADF);
	FAILS(wait_in(ends[0], said, 1, 0), EINVAL);
	CHECK(wait_in(set, said, 16, 0) == 0);
	/* A set is no socket. */
	FAILS(rbind(set, loopback(&in, 0), sizeof in), ENOTSOCK);
	FAILS(rread(set, &event, sizeof event), ENOTSOCK);
	FAILS(raccept(set, NULL, NULL), EOPNOTSUPP);
	/* It may be closed with descriptors in it. */
	CHECK(rclose(other) == 0 && close(pipes[0]) == 0 && close(pipes[1]) == 0);
	finish(ends, set);
}

static void levels(void)
{
	int ends[2], set = create(0);
	char text[8];

	connected(ends);
	add(set, ends[1], EPOLLIN, 0xfedcba9876543210);
	nothing(set);
	CHECK(rwrite(ends[0], "abc", 3) == 3);
	meets(set, EPOLLIN, 0xfedcba9876543210);
	meets(set, EPOLLIN, 0xfedcba9876543210);
	CHECK(rread(ends[1], text, 2) == 2);
	meets(set, EPOLLIN, 0xfedcba9876543210);
	CHECK(rread(ends[1], text, 2) == 1);
	nothing(set);
	put(set, EPOLL_CTL_MOD, ends[1], EPOLLOUT, 5);
	meets(set, EPOLLOUT, 5);
	put(set, EPOLL_CTL_MOD, ends[1], 0, 5);
	CHECK(rwrite(ends[0], "abc", 3) == 3);
	nothing(set);
	put(set, EPOLL_CTL_MOD, ends[1], EPOLLIN, 6);
	meets(set, EPOLLIN, 6);
	CHECK(control(set, EPOLL_CTL_DEL, ends[1], NULL) == 0);
	nothing(set);
	add(set, ends[1], EPOLLIN | EPOLLRDHUP, 7);
	CHECK(rread(ends[1], text, 8) == 3);
	nothing(set);
	CHECK(rshutdown(ends[0], SHUT_WR) == 0);
	meets(set, EPOLLIN | EPOLLRDHUP, 7);
	/* A socket that is closed is in no set. */
	CHECK(rclose(ends[1]) == 0);
	nothing(set);
	ends[1] = rsocket(AF_INET, SOCK_STREAM, 0);
	add(set, ends[1], EPOLLIN, 8);
	meets(set, EPOLLHUP, 8);
	finish(ends, set);
}

static void edges(void)
{
	static char much[1 << 20];
	int ends[2], set = create(0), sent = 0;
	char text[8];
	ssize_t length;

	connected(ends);
	add(set, ends[0], EPOLLIN | EPOLLOUT | EPOLLET, 1);
	meets(set, EPOLLOUT, 1);
	nothing(set);
	/* Each arrival is an edge, also where something was left. */
	for (int i = 0; i < 3; i++) {
		CHECK(rwrite(ends[1], "abcd", 4) == 4);
		meets(set, EPOLLIN | EPOLLOUT, 1);
		nothing(set);
		CHECK(rread(ends[0], text, 2) == 2);
		nothing(set);
	}
	CHECK(rread(ends[0], text, 8) == 6);
	/* Room that there is again is one. */
	while ((length = rwrite(ends[0], much, sizeof much)) > 0)
		sent += length;
	CHECK(errno == EAGAIN && sent > 0);
	nothing(set);
	while (sent > 0) {
		if ((length = rread(ends[1], much, sizeof much)) > 0)
			sent -= length;
		else
			CHECK(errno == EAGAIN && rpoll(&(struct pollfd){ ends[1], POLLIN, 0 }, 1, 10000) == 1);
	}
	meets(set, EPOLLOUT, 1);
	/* So is a change, and the end. */
	put(set, EPOLL_CTL_MOD, ends[0], EPOLLOUT | EPOLLET, 2);
	meets(set, EPOLLOUT, 2);
	nothing(set);
	CHECK(rclose(ends[1]) == 0);
	CHECK(wait_in(set, said, 16, 10000) == 1 && (said[0].events & EPOLLOUT));
	ends[1] = rsocket(AF_INET, SOCK_STREAM, 0);
	finish(ends, set);
}

static void once(void)
{
	int ends[2], set = create(0);

	connected(ends);
	add(set, ends[1], EPOLLIN | EPOLLONESHOT, 1);
	CHECK(rwrite(ends[0], "a", 1) == 1);
	meets(set, EPOLLIN, 1);
	CHECK(rwrite(ends[0], "a", 1) == 1);
	nothing(set);
	put(set, EPOLL_CTL_MOD, ends[1], EPOLLIN | EPOLLONESHOT | EPOLLET, 2);
	meets(set, EPOLLIN, 2);
	nothing(set);
	CHECK(rclose(ends[0]) == 0);
	nothing(set);
	ends[0] = rsocket(AF_INET, SOCK_STREAM, 0);
	finish(ends, set);
}

/* Descriptors of the system, and datagrams, beside a socket; each gets its turn. */
static void mixed(void)
{
	int ends[2], set = create(0), bell = eventfd(0, EFD_NONBLOCK), seen[3] = { 0 };
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	int dgram = rsocket(AF_INET, SOCK_DGRAM, 0);
	uint64_t one = 1;
	char text[8];

	connected(ends);
	CHECK(rbind(dgram, loopback(&in, 0), sizeof in) == 0);
	CHECK(rgetsockname(dgram, (struct sockaddr *)&in, &length) == 0);
	add(set, ends[1], EPOLLIN, 0);
	add(set, bell, EPOLLIN, UINT64_MAX);
	add(set, dgram, EPOLLIN, 2);
	nothing(set);
	CHECK(write(bell, &one, 8) == 8);
	meets(set, EPOLLIN, UINT64_MAX);
	put(set, EPOLL_CTL_MOD, bell, EPOLLIN, 1);
	meets(set, EPOLLIN, 1);
	CHECK(rsendto(dgram, "d", 1, 0, (struct sockaddr *)&in, sizeof in) == 1);
	CHECK(rwrite(ends[0], "s", 1) == 1);
	CHECK(rpoll(&(struct pollfd){ ends[1], POLLIN, 0 }, 1, 10000) == 1);
	for (int i = 0; i < 30; i++) {
		CHECK(wait_in(set, said, 1, 10000) == 1 && said[0].data.u64 < 3);
		seen[said[0].data.u64]++;
	}
	CHECK(seen[0] > 5 && seen[1] > 5 && seen[2] > 5);
	CHECK(wait_in(set, said, 16, 10000) == 3);
	CHECK(read(bell, &one, 8) == 8 && rrecv(dgram, text, 8, 0) == 1);
	meets(set, EPOLLIN, 0);
	CHECK(rread(ends[1], text, 8) == 1);
	/* Edges of the system are its own. */
	put(set, EPOLL_CTL_MOD, bell, EPOLLIN | EPOLLET, 3);
	CHECK(write(bell, &one, 8) == 8);
	meets(set, EPOLLIN, 3);
	nothing(set);
	/* And closed descriptors leave the set. */
	CHECK(close(bell) == 0 && rclose(dgram) == 0);
	bell = eventfd(1, EFD_NONBLOCK);
	nothing(set);
	add(set, bell, EPOLLIN, 4);
	meets(set, EPOLLIN, 4);
	CHECK(close(bell) == 0);
	finish(ends, set);
}

struct sleeper {
	int set, fd, got;
};

static void *sleep_in(void *argument)
{
	struct sleeper *sleeper = argument;
	struct epoll_event event;
	sleeper->got = wait_in(sleeper->set, &event, 1, 10000);
	return NULL;
}

/* Another call takes the bytes off the queue pair before the set does, and leaves them. */
static void *peek(void *argument)
{
	struct sleeper *sleeper = argument;
	struct timespec pause = { .tv_nsec = 1000000 };
	char text[8];
	while (rrecv(sleeper->fd, text, 8, MSG_PEEK) < 0)
		nanosleep(&pause, NULL);
	return NULL;
}

static void threads(void)
{
	int ends[2], set = create(0);
	pthread_t sleeping[3], peeking;
	struct sleeper sleepers[3];

	connected(ends);
	for (int i = 0; i < 50; i++) {
		char text[8];
		if (i == 0)
			add(set, ends[1], EPOLLIN, 1);
		for (int k = 0; k < 3; k++) {
			sleepers[k] = (struct sleeper){ set, ends[1], 0 };
			CHECK(pthread_create(&sleeping[k], NULL, sleep_in, &sleepers[k]) == 0);
		}
		CHECK(pthread_create(&peeking, NULL, peek, &sleepers[0]) == 0);
		usleep(i % 7 * 500);
		CHECK(rwrite(ends[0], "abc", 3) == 3);
		/* All hear of what nobody takes. */
		for (int k = 0; k < 3; k++)
			CHECK(pthread_join(sleeping[k], NULL) == 0 && sleepers[k].got == 1);
		CHECK(pthread_join(peeking, NULL) == 0);
		CHECK(rread(ends[1], text, 8) == 3);
	}
	/* A change wakes who sleeps, too. */
	put(set, EPOLL_CTL_MOD, ends[1], 0, 1);
	CHECK(pthread_create(&sleeping[0], NULL, sleep_in, &sleepers[0]) == 0);
	usleep(20000);
	put(set, EPOLL_CTL_MOD, ends[1], EPOLLOUT, 1);
	CHECK(pthread_join(sleeping[0], NULL) == 0 && sleepers[0].got == 1);
	finish(ends, set);
}

static long cpu_ms(void)
{
	struct timespec time;
	CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Who waits for nothing takes no processor, whatever lies there that nobody has asked for. */
static void asleep(void)
{
	struct sockaddr_in in;
	int ends[2], set = create(0), listening = bound(&in), callers[40];
	long before;

	connected(ends);
	for (int i = 0; i < 40; i++) {
		callers[i] = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		FAILS(rconnect(callers[i], (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	}
	CHECK(rwrite(ends[0], "abc", 3) == 3);
	add(set, listening, EPOLLIN | EPOLLET, 1);
	add(set, ends[1], EPOLLIN | EPOLLONESHOT, 2);
	/* All that is to come comes, however late, and no more. */
	for (int i = 0;; i++) {
		CHECK(i < 100);
		before = cpu_ms();
		if (wait_in(set, said, 16, 600) == 0)
			break;
	}
	CHECK(cpu_ms() - before < 60);
	for (int i = 0; i < 40; i++)
		CHECK(rclose(callers[i]) == 0);
	CHECK(rclose(listening) == 0);
	finish(ends, set);
}

enum { CLIENTS = 8, BYTES = 400000 };

/* Sends, and gets back what it has sent. */
static void *client(void *address)
{
	static const int piece = 5000;
	char out[5000], back[5000];
	int rs = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rconnect(rs, address, sizeof(struct sockaddr_in)) == 0);
	for (int at = 0; at < BYTES; at += piece) {
		for (int i = 0; i < piece; i++)
			out[i] = (at + i) % 251;
		CHECK(rsend(rs, out, piece, 0) == piece);
		for (int got = 0; got < piece;) {
			ssize_t length = rrecv(rs, back + got, piece - got, 0);
			CHECK(length > 0);
			got += length;
		}
		CHECK(memcmp(out, back, piece) == 0);
	}
	CHECK(rshutdown(rs, SHUT_WR) == 0 && rrecv(rs, back, 1, 0) == 0);
	CHECK(rclose(rs) == 0);
	return NULL;
}

/* Echoes until there is nothing more; false at the end. */
static int echoed(int rs)
{
	static char text[3000];
	ssize_t length;
	while ((length = rrecv(rs, text, sizeof text, 0)) > 0)
		for (ssize_t at = 0, sent; at < length; at += sent > 0 ? sent : 0)
			CHECK((sent = rsend(rs, text + at, length - at, 0)) > 0 || errno == EAGAIN);
	CHECK(length == 0 || errno == EAGAIN);
	return length < 0;
}

/* A server of one thread, by edges. */
static void server(void)
{
	struct sockaddr_in in;
	int set = create(0), listening = bound(&in), left = CLIENTS, peer;
	pthread_t clients[CLIENTS];

	add(set, listening, EPOLLIN | EPOLLET, listening);
	for (int i = 0; i < CLIENTS; i++)
		CHECK(pthread_create(&clients[i], NULL, client, &in) == 0);
	while (left > 0) {
		int got = wait_in(set, said, 4, 20000);
		CHECK(got > 0);
		for (int i = 0; i < got; i++) {
			int fd = said[i].data.u64;
			if (fd != listening) {
				if (!echoed(fd)) {
					CHECK(rclose(fd) == 0);
					left--;
				}
				continue;
			}
			while ((peer = raccept(listening, NULL, NULL)) > 2) {
				CHECK(rfcntl(peer, F_SETFL, O_NONBLOCK) == 0);
				add(set, peer, EPOLLIN | EPOLLET | EPOLLRDHUP, peer);
			}
			CHECK(errno == EAGAIN);
		}
	}
	for (int i = 0; i < CLIENTS; i++)
		CHECK(pthread_join(clients[i], NULL) == 0);
	CHECK(rclose(listening) == 0 && rclose(set) == 0);
}

int main(void)
{
	alarm(120);
	create = versioned("repoll_create", "RDMACM_1.5");
	control = versioned("repoll_ctl", "RDMACM_1.5");
	wait_in = versioned("repoll_wait", "RDMACM_1.5");
	refusals();
	levels();
	edges();
	once();
	mixed();
	threads();
	asleep();
	server();
	return 0;
}
