/* Two connected r* sockets, with the one that listened; and the time. */
#include "common.h"
#include <time.h>

struct pair {
	int listening, here, there;
};

static inline struct pair connected(void)
{
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	struct pair pair = { .listening = rsocket(AF_INET, SOCK_STREAM, 0) };
	struct pollfd fds = { .events = POLLOUT };

	CHECK(rbind(pair.listening, loopback(&in, 0), sizeof in) == 0 && rlisten(pair.listening, 5) == 0);
	CHECK(rgetsockname(pair.listening, (struct sockaddr *)&in, &length) == 0);
	CHECK((fds.fd = pair.here = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
	CHECK(rfcntl(pair.here, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rconnect(pair.here, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	CHECK((pair.there = raccept(pair.listening, NULL, NULL)) > 2);
	CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLOUT);
	CHECK(rfcntl(pair.here, F_SETFL, 0) == 0);
	return pair;
}

static inline void closed(struct pair pair)
{
	CHECK(rclose(pair.here) == 0 && rclose(pair.there) == 0 && rclose(pair.listening) == 0);
}

static inline double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}
