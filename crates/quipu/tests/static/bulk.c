/* Sends or receives a stream whose octets are known from their positions, by reads and writes of random or of
 * fixed lengths.
 *
 * bulk receive|send FLAGS SEED OCTETS LENGTH PORT
 *
 * FLAGS: n does not block, s uses send and recv, t interrupts itself every millisecond, f has a child of
 * fork(2) do the same before. LENGTH: 0 for random ones. The receiver prints its port
 * (PORT is 0), then both print "done SECONDS".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST (3u << 20)

static const char *flags;
static uint64_t state;
static unsigned char *buffer;
static volatile sig_atomic_t interrupts;

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static int has(char flag)
{
	return strchr(flags, flag) != NULL;
}

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static unsigned char octet(uint64_t at)
{
	return (at * 0x9e3779b97f4a7c15ull) >> 56;
}

static void interrupted(int number)
{
	(void)number;
	interrupts = interrupts + 1;
}

static void wait_for(int fd, short events)
{
	struct pollfd entry = { fd, events, 0 };
	while (poll(&entry, 1, -1) < 0)
		if (errno != EINTR)
			fail("poll");
}

/* One call, repeated where it would block or a signal came. */
static size_t move(int fd, int sends, unsigned char *at, size_t len)
{
	for (;;) {
		ssize_t moved;
		if (has('s'))
			moved = sends ? send(fd, at, len, 0) : recv(fd, at, len, 0);
		else
			moved = sends ? write(fd, at, len) : read(fd, at, len);
		if (moved >= 0) {
			/* A call that blocks sends less than all only if a signal came. */
			if (sends && !has('n') && !has('t') && (size_t)moved != len)
				fail("short send");
			return moved;
		}
		if (errno == EAGAIN && has('n'))
			wait_for(fd, sends ? POLLOUT : POLLIN);
		else if (errno != EINTR || !has('t'))
			fail(sends ? "send" : "receive");
	}
}

static size_t length(size_t fixed)
{
	if (fixed)
		return fixed;
	uint64_t kind = next() % 4;
	return 1 + next() % (kind == 0 ? 2000 : kind == 1 ? 200000 : MOST);
}

static void send_all(int fd, uint64_t octets, size_t fixed)
{
	for (uint64_t sent = 0; sent < octets;) {
		size_t len = length(fixed);
		if (len > octets - sent)
			len = octets - sent;
		if (!fixed)
			for (size_t i = 0; i < len; i++)
				buffer[i] = octet(sent + i);
		for (size_t done = 0; done < len;)
			done += move(fd, 1, buffer + done, len - done);
		sent += len;
	}
}

static void receive_all(int fd, uint64_t octets, size_t fixed)
{
	for (uint64_t received = 0; received < octets;) {
		size_t len = length(fixed);
		len = move(fd, 0, buffer, len < octets - received ? len : octets - received);
		if (!len)
			fail("early end");
		for (size_t i = 0; !fixed && i < len; i++)
			if (buffer[i] != octet(received + i)) {
				fprintf(stderr, "octet %llu\n", (unsigned long long)(received + i));
				exit(1);
			}
		received += len;
	}
}

static int open_socket(int sends, int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	socklen_t len = sizeof address;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (sends) {
		if (connect(fd, (struct sockaddr *)&address, len))
			fail("connect");
		return fd;
	}
	if (bind(fd, (struct sockaddr *)&address, len) || listen(fd, 1))
		fail("listen");
	getsockname(fd, (struct sockaddr *)&address, &len);
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	return accept(fd, NULL, NULL);
}

int main(int argc, char **argv)
{
	if (argc != 7)
		return 2;
	int sends = argv[1][0] == 's';
	flags = argv[2];
	state = strtoull(argv[3], NULL, 10) * 2 + 0x9e3779b97f4a7c15ull;
	uint64_t octets = strtoull(argv[4], NULL, 10);
	size_t fixed = strtoull(argv[5], NULL, 10);
	buffer = malloc(fixed > MOST ? fixed : MOST);
	memset(buffer, 1, fixed > MOST ? fixed : MOST);
	int fd = open_socket(sends, atoi(argv[6]));
	if (has('n') && fcntl(fd, F_SETFL, O_NONBLOCK))
		fail("fcntl");
	if (has('t')) {
		struct sigaction action = { .sa_handler = interrupted };
		struct itimerval time = { { 0, 1000 }, { 0, 1000 } };
		sigaction(SIGALRM, &action, NULL);
		setitimer(ITIMER_REAL, &time, NULL);
	}
	struct timespec begin, end;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	if (has('f')) {
		/* The child has the socket, too, and does the same first. */
		pid_t child = fork();
		int status;
		if (child == 0) {
			if (sends)
				send_all(fd, octets, fixed);
			else
				receive_all(fd, octets, fixed);
			exit(0);
		}
		while (waitpid(child, &status, 0) < 0)
			;
		if (status)
			fail("child");
	}
	if (sends)
		send_all(fd, octets, fixed);
	else
		receive_all(fd, octets, fixed);
	/* Each waits for the other's last octet, so that nothing is left over. */
	if (sends) {
		unsigned char last;
		while (read(fd, &last, 1) != 1)
			if (errno == EAGAIN)
				wait_for(fd, POLLIN);
		shutdown(fd, SHUT_WR);
	} else {
		while (write(fd, buffer, 1) != 1)
			;
		while (read(fd, buffer, 1) != 0)
			if (errno == EAGAIN)
				wait_for(fd, POLLIN);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("done %f\n", end.tv_sec - begin.tv_sec + (end.tv_nsec - begin.tv_nsec) / 1e9);
	return 0;
}
