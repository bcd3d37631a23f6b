/* What programs written for TCP count on, and r* sockets do as the system's. */
#define _GNU_SOURCE
#include "pair.h"
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>

static int listening(struct sockaddr_in *in)
{
	socklen_t length = sizeof *in;
	int rs = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rs > 2 && rbind(rs, loopback(in, 0), sizeof *in) == 0 && rlisten(rs, 5) == 0);
	CHECK(rgetsockname(rs, (struct sockaddr *)in, &length) == 0);
	return rs;
}

static int option(int rs, int level, int name)
{
	int value = -1;
	socklen_t length = sizeof value;
	CHECK(rgetsockopt(rs, level, name, &value, &length) == 0);
	return value;
}

static int events(int rs, int asked, int limit)
{
	struct pollfd fds = { .fd = rs, .events = asked };
	int ready = rpoll(&fds, 1, limit);
	CHECK(ready == (fds.revents != 0));
	return fds.revents;
}

/* A thread that makes a blocking call. */
struct caller {
	pthread_t thread;
	struct sockaddr_in in;
	int rs, result, number;
};

static void *connects(void *argument)
{
	struct caller *caller = argument;
	caller->result = rconnect(caller->rs, (struct sockaddr *)&caller->in, sizeof caller->in);
	caller->number = errno;
	return NULL;
}

static void *accepts(void *argument)
{
	struct caller *caller = argument;
	caller->result = raccept(caller->rs, NULL, NULL);
	caller->number = errno;
	return NULL;
}

static void begin(struct caller *caller, void *(*body)(void *))
{
	CHECK(pthread_create(&caller->thread, NULL, body, caller) == 0);
}

static void join(struct caller *caller)
{
	CHECK(pthread_join(caller->thread, NULL) == 0);
}

/* Queues that are longer than the device's are as long as those. */
static void long_queues(void)
{
	struct caller client = { .rs = rsocket(AF_INET, SOCK_STREAM, 0) };
	int rs = listening(&client.in), size = 65536, peer;
	char byte;
	for (int name = RDMA_SQSIZE; name <= RDMA_RQSIZE; name++) {
		CHECK(rsetsockopt(rs, SOL_RDMA, name, &size, sizeof size) == 0);
		CHECK(rsetsockopt(client.rs, SOL_RDMA, name, &size, sizeof size) == 0);
	}
	begin(&client, connects);
	CHECK((peer = raccept(rs, NULL, NULL)) > 2);
	join(&client);
	CHECK(client.result == 0);
	CHECK(option(peer, SOL_RDMA, RDMA_SQSIZE) < size && option(client.rs, SOL_RDMA, RDMA_RQSIZE) < size);
	CHECK(rsend(peer, "q", 1, 0) == 1 && rrecv(client.rs, &byte, 1, 0) == 1 && byte == 'q');
	CHECK(rclose(peer) == 0 && rclose(client.rs) == 0 && rclose(rs) == 0);
}

/* What was set for a listener holds for what it accepts (socket(7), tcp(7)). */
static void inherited(void)
{
	struct caller client = { .rs = rsocket(AF_INET, SOCK_STREAM, 0) };
	struct linger linger = { .l_onoff = 1, .l_linger = 7 }, told = { 0 };
	socklen_t length = sizeof told;
	int rs = listening(&client.in), one = 1, peer;
	CHECK(rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	CHECK(rsetsockopt(rs, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one) == 0);
	begin(&client, connects);
	CHECK((peer = raccept(rs, NULL, NULL)) > 2);
	join(&client);
	CHECK(rgetsockopt(peer, SOL_SOCKET, SO_LINGER, &told, &length) == 0);
	CHECK(told.l_onoff == 1 && told.l_linger == 7 && option(peer, SOL_SOCKET, SO_KEEPALIVE) == 1);
	CHECK(rclose(peer) == 0 && rclose(client.rs) == 0 && rclose(rs) == 0);
}

/* A threaded server is stopped by shutdown(2) of its listener, which listens again when it is told to. */
static void listener_is_shut(void)
{
	struct caller server = { 0 }, client = { .rs = rsocket(AF_INET, SOCK_STREAM, 0) };
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	int peer;
	server.rs = listening(&client.in);
	CHECK(rshutdown(server.rs, SHUT_WR) == 0 && events(server.rs, POLLIN, 0) == 0);
	begin(&server, accepts);
	usleep(50000);
	CHECK(rshutdown(server.rs, SHUT_RDWR) == 0);
	join(&server);
	CHECK(server.result == -1 && server.number == EINVAL);
	CHECK(events(server.rs, POLLIN, 0) & POLLHUP);
	FAILS(rconnect(client.rs, (struct sockaddr *)&client.in, sizeof in), ECONNREFUSED);
	CHECK(rgetsockname(server.rs, (struct sockaddr *)&in, &length) == 0 && in.sin_port == client.in.sin_port);
	/* A client that waits in the backlog is refused. */
	CHECK(rlisten(server.rs, 5) == 0);
	begin(&client, connects);
	CHECK(events(server.rs, POLLIN, 10000) == POLLIN);
	CHECK(rshutdown(server.rs, SHUT_RD) == 0);
	join(&client);
	CHECK(client.result == -1 && client.number == ECONNREFUSED);
	/* And can try again, with the same socket. */
	CHECK(rlisten(server.rs, 5) == 0);
	begin(&client, connects);
	CHECK((peer = raccept(server.rs, NULL, NULL)) > 2);
	join(&client);
	CHECK(client.result == 0);
	CHECK(rclose(peer) == 0 && rclose(client.rs) == 0 && rclose(server.rs) == 0);
}

/* Without descriptors a request waits in the backlog. */
static void no_descriptors(void)
{
	struct caller client = { .rs = rsocket(AF_INET, SOCK_STREAM, 0) };
	int rs = listening(&client.in), free = dup(rs), peer;
	struct rlimit limit, few;
	CHECK(free > 2 && close(free) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0);
	begin(&client, connects);
	CHECK(events(rs, POLLIN, 10000) == POLLIN);
	/* Room for none, for one, for two. */
	for (int more = 0; more < 3; more++) {
		few = limit;
		CHECK((free = dup(rs)) > 2 && close(free) == 0);
		few.rlim_cur = free + more;
		CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
		FAILS(raccept(rs, NULL, NULL), EMFILE);
		CHECK(events(rs, POLLIN, 0) == POLLIN);
		CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	}
	CHECK((peer = raccept(rs, NULL, NULL)) > 2);
	join(&client);
	CHECK(client.result == 0);
	CHECK(rclose(peer) == 0 && rclose(client.rs) == 0 && rclose(rs) == 0);
}

/* Nor is one lost that has come before the device could be opened: the first that a listener at all addresses gets. */
static void no_device_yet(void)
{
	struct sockaddr_in in = { .sin_family = AF_INET };
	struct pollfd fds = { .events = POLLIN };
	struct rlimit limit, few;
	socklen_t length = sizeof in;
	int peer, rs, port[2], status;
	pid_t client;
	CHECK(pipe(port) == 0 && (client = fork()) != -1);
	if (client == 0) {
		CHECK(read(port[0], &in.sin_port, sizeof in.sin_port) == sizeof in.sin_port);
		in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		CHECK((rs = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
		CHECK(rconnect(rs, (struct sockaddr *)&in, sizeof in) == 0);
		_exit(rclose(rs) != 0);
	}
	CHECK((fds.fd = rs = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
	CHECK(rbind(rs, (struct sockaddr *)&in, sizeof in) == 0 && rlisten(rs, 5) == 0);
	CHECK(rgetsockname(rs, (struct sockaddr *)&in, &length) == 0);
	CHECK(write(port[1], &in.sin_port, sizeof in.sin_port) == sizeof in.sin_port);
	/* The request has come, and is not looked at yet. */
	CHECK(poll(&fds, 1, 20000) == 1);
	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	few = limit;
	CHECK((few.rlim_cur = dup(rs)) > 2 && close(few.rlim_cur) == 0);
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	FAILS(raccept(rs, NULL, NULL), EMFILE);
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	CHECK((peer = raccept(rs, NULL, NULL)) > 2 && rclose(peer) == 0);
	CHECK(waitpid(client, &status, 0) == client && status == 0);
	CHECK(rclose(rs) == 0 && close(port[0]) == 0 && close(port[1]) == 0);
}

static void *shuts(void *argument)
{
	struct caller *caller = argument;
	caller->result = rshutdown(caller->rs, SHUT_RDWR);
	caller->number = errno;
	return NULL;
}

/* Of several threads that shut a listener one does. */
static void shut_by_two(void)
{
	struct sockaddr_in in, told;
	socklen_t length = sizeof in;
	struct caller callers[2];
	int rs = listening(&in);
	for (int i = 0; i < 50; i++) {
		for (int j = 0; j < 2; j++) {
			callers[j].rs = rs;
			begin(&callers[j], shuts);
		}
		for (int j = 0; j < 2; j++) {
			join(&callers[j]);
			CHECK(callers[j].result == 0 || callers[j].number == ENOTCONN);
		}
		CHECK(rgetsockname(rs, (struct sockaddr *)&told, &length) == 0 && told.sin_port == in.sin_port);
		CHECK(rlisten(rs, 5) == 0);
	}
	CHECK(rclose(rs) == 0);
}

/* A socket that was bound to all addresses is so still, when another host is tried. */
static void bound_again(void)
{
	struct sockaddr_in in = { .sin_family = AF_INET }, nobody, told;
	socklen_t length = sizeof in;
	int rs = rsocket(AF_INET, SOCK_STREAM, 0), listens = listening(&nobody);
	/* In this order, or the port that is closed may be the one that it is bound to. */
	CHECK(rbind(rs, (struct sockaddr *)&in, sizeof in) == 0 && rclose(listens) == 0);
	CHECK(rgetsockname(rs, (struct sockaddr *)&in, &length) == 0 && in.sin_port != 0);
	for (int i = 0; i < 2; i++) {
		FAILS(rconnect(rs, (struct sockaddr *)&nobody, sizeof nobody), ECONNREFUSED);
		CHECK(rgetsockname(rs, (struct sockaddr *)&told, &length) == 0 && told.sin_port == in.sin_port);
	}
	/* An address at which nothing is sent: that fails at once, and the socket is bound again before. */
	nobody.sin_addr.s_addr = htonl(INADDR_BROADCAST);
	CHECK(rconnect(rs, (struct sockaddr *)&nobody, sizeof nobody) == -1);
	CHECK(rgetsockname(rs, (struct sockaddr *)&told, &length) == 0);
	CHECK(told.sin_port == in.sin_port && told.sin_addr.s_addr == INADDR_ANY);
	CHECK(rclose(rs) == 0);
}

static void ignore(int number)
{
	(void)number;
}

/* Signals that interrupt calls, again and again; or one at last, which ends the program. */
static void signals(int on)
{
	struct sigaction action = { .sa_handler = on ? ignore : SIG_DFL };
	struct itimerval often = { { 0, 20000 }, { 0, 20000 } }, last = { { 0, 0 }, { 100, 0 } };
	/* None of the frequent ones is left by the time that one would be fatal. */
	CHECK(setitimer(ITIMER_REAL, &last, NULL) == 0);
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	if (on)
		CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
}

/* A call that a signal has interrupted goes on when it is made again. */
static void interrupted_connect(void)
{
	struct sockaddr_in in;
	int rs = rsocket(AF_INET, SOCK_STREAM, 0), listens = listening(&in);
	struct caller server = { .rs = listens };

	signals(1);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINTR);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINTR);
	signals(0);
	begin(&server, accepts);
	CHECK(rconnect(rs, (struct sockaddr *)&in, sizeof in) == 0);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EISCONN);
	join(&server);
	CHECK(server.result > 2 && rclose(server.result) == 0 && rclose(rs) == 0);
	/* One that does not block asks until it is told. */
	CHECK((rs = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) > 2);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EALREADY);
	begin(&server, accepts);
	while (rconnect(rs, (struct sockaddr *)&in, sizeof in) != 0)
		CHECK(errno == EALREADY);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EISCONN);
	join(&server);
	CHECK(rclose(server.result) == 0 && rclose(rs) == 0);
	CHECK(rclose(listens) == 0);
}

/* A lingering time of none is a reset, and a reset is an error, which is told once. */
static void reset(void)
{
	struct linger none = { .l_onoff = 1 };
	struct pair pair = connected();
	char byte;
	CHECK(rsetsockopt(pair.there, SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0);
	CHECK(rsend(pair.there, "abort", 5, 0) == 5 && rclose(pair.there) == 0);
	CHECK(events(pair.here, POLLRDHUP, 10000) & POLLRDHUP);
	CHECK(events(pair.here, POLLIN, 0) == (POLLIN | POLLERR) || events(pair.here, 0, 0) == (POLLERR | POLLHUP));
	CHECK(option(pair.here, SOL_SOCKET, SO_ERROR) == ECONNRESET);
	CHECK(option(pair.here, SOL_SOCKET, SO_ERROR) == 0 && !(events(pair.here, 0, 0) & POLLERR));
	while (rrecv(pair.here, &byte, 1, 0) == 1)
		;
	CHECK(errno == ECONNRESET);
	CHECK(rclose(pair.here) == 0 && rclose(pair.listening) == 0);
	/* An end is none. */
	pair = connected();
	CHECK(rsend(pair.there, "x", 1, 0) == 1 && rclose(pair.there) == 0);
	CHECK(events(pair.here, POLLRDHUP, 10000) & POLLRDHUP);
	CHECK(rrecv(pair.here, &byte, 1, 0) == 1 && rrecv(pair.here, &byte, 1, 0) == 0);
	CHECK(option(pair.here, SOL_SOCKET, SO_ERROR) == 0 && !(events(pair.here, 0, 0) & POLLERR));
	CHECK(rclose(pair.here) == 0 && rclose(pair.listening) == 0);
}

/* Bytes have one rank, and select(2) says nothing of what nobody asked. */
static void polled(void)
{
	struct pair pair = connected();
	struct timeval soon = { 0, 100000 };
	double begun;
	int pipes[2];
	fd_set set;
	CHECK(rsend(pair.there, "ranks", 5, 0) == 5);
	CHECK(events(pair.here, POLLRDNORM, 10000) == POLLRDNORM);
	CHECK(events(pair.here, POLLWRNORM, 0) == POLLWRNORM);
	CHECK(rclose(pair.there) == 0);
	CHECK(events(pair.here, POLLRDHUP, 10000) & POLLRDHUP);
	CHECK(pipe(pipes) == 0 && close(pipes[1]) == 0);
	for (int i = 0; i < 2; i++) {
		int fd = i == 0 ? pipes[0] : pair.here;
		FD_ZERO(&set);
		FD_SET(fd, &set);
		soon.tv_sec = 0;
		soon.tv_usec = 100000;
		begun = now();
		CHECK(rselect(fd + 1, NULL, NULL, &set, &soon) == 0 && !FD_ISSET(fd, &set));
		CHECK(now() - begun > 0.09);
	}
	CHECK(close(pipes[0]) == 0 && rclose(pair.here) == 0 && rclose(pair.listening) == 0);
}

/* What is not there is not read or written as something else. */
static void messages(void)
{
	struct pair pair = connected();
	struct sockaddr_in name;
	char byte, control[64];
	struct iovec piece = { &byte, 1 };
	struct msghdr msg = { .msg_name = &name, .msg_namelen = sizeof name, .msg_iov = &piece, .msg_iovlen = 1 };
	CHECK(rsend(pair.there, "ab", 2, 0) == 2 && events(pair.here, POLLIN, 10000) == POLLIN);
	FAILS(rrecv(pair.here, &byte, 1, MSG_OOB), EINVAL);
	FAILS(rrecv(pair.here, &byte, 1, MSG_ERRQUEUE), EAGAIN);
	FAILS(rsend(pair.here, "!", 1, MSG_OOB), EOPNOTSUPP);
	memset(&name, 0xaa, sizeof name);
	CHECK(rrecvmsg(pair.here, &msg, 0) == 1 && byte == 'a');
	CHECK(msg.msg_namelen == sizeof name && name.sin_family == AF_INET);
	CHECK(name.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
	msg.msg_controllen = sizeof control;
	CHECK(rsendmsg(pair.here, &msg, 0) == 1);
	msg.msg_control = control;
	FAILS(rsendmsg(pair.here, &msg, 0), EOPNOTSUPP);
	closed(pair);
}

/* close(2) in place of rclose leaves a socket behind, which is not in the way of the next one. */
static void closed_by_mistake(void)
{
	int rs = rsocket(AF_INET, SOCK_STREAM, 0), next;
	struct sockaddr_in in;
	CHECK(rs > 2 && close(rs) == 0);
	CHECK((next = rsocket(AF_INET, SOCK_STREAM, 0)) == rs);
	CHECK(fcntl(next, F_GETFD) != -1);
	CHECK(rbind(next, loopback(&in, 0), sizeof in) == 0 && rlisten(next, 1) == 0);
	CHECK(rclose(next) == 0);
}

/* A connection to a new socket, whose peer has mapped `memory` for it. */
static int mapping(const struct sockaddr_in *in, struct caller *server, char *memory, size_t len)
{
	int rs = rsocket(AF_INET, SOCK_STREAM, 0), maps = 1;
	char byte;
	CHECK(rs > 2 && rsetsockopt(rs, SOL_RDMA, RDMA_IOMAPSIZE, &maps, sizeof maps) == 0);
	begin(server, accepts);
	CHECK(rconnect(rs, (const struct sockaddr *)in, sizeof *in) == 0);
	join(server);
	CHECK(riomap(server->result, memory, len, PROT_WRITE, 0, 0) == 0);
	CHECK(rsend(server->result, "m", 1, 0) == 1 && rrecv(rs, &byte, 1, 0) == 1);
	return rs;
}

/* Who only writes to memory that the peer has mapped hears that the peer is gone. */
static void mapped(void)
{
	struct sockaddr_in in;
	int listens = listening(&in), wrote = 0;
	struct caller server = { .rs = listens };
	char memory[64];
	int rs = mapping(&in, &server, memory, sizeof memory);
	CHECK(riowrite(rs, "before", 7, 0, 0) == 7 && rclose(server.result) == 0);
	/* One that tells, once the news has come. */
	for (double begun = now(); (errno = 0, riowrite(rs, "behind", 7, 0, 0) == 7); wrote++) {
		CHECK(now() - begun < 10);
		usleep(20000);
	}
	CHECK(errno == EPIPE && wrote < 300);
	CHECK(rclose(rs) == 0);
	/* And nothing follows an end. */
	rs = mapping(&in, &server, memory, sizeof memory);
	CHECK(rshutdown(rs, SHUT_WR) == 0);
	FAILS((ssize_t)riowrite(rs, "behind", 7, 0, 0), EPIPE);
	CHECK(rclose(rs) == 0 && rclose(server.result) == 0 && rclose(listens) == 0);
}

int main(void)
{
	/* What hangs fails. */
	signals(0);
	no_device_yet();
	long_queues();
	inherited();
	listener_is_shut();
	no_descriptors();
	shut_by_two();
	bound_again();
	interrupted_connect();
	reset();
	polled();
	messages();
	closed_by_mistake();
	mapped();
	return 0;
}
