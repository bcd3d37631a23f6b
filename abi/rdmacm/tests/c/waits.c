/* What ends the waits of r* sockets but what they wait for: signals, times, closing, the peer's end; and what a
 * forked child has of them. */
#include "pair.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/wait.h>

/* The calls that wait, of which none finds what it waits for. */
static ssize_t receives(struct pair *pair)
{
	char byte;
	return rrecv(pair->here, &byte, 1, 0);
}

static ssize_t accepts(struct pair *pair)
{
	return raccept(pair->listening, NULL, NULL);
}

static ssize_t polls(struct pair *pair)
{
	struct pollfd fds[2] = { { .fd = pair->here, .events = POLLIN }, { .fd = pair->there, .events = POLLIN } };
	return rpoll(fds, 2, -1);
}

static ssize_t selects(struct pair *pair)
{
	fd_set read;
	FD_ZERO(&read);
	FD_SET(pair->here, &read);
	return rselect(pair->here + 1, &read, NULL, NULL, NULL);
}

/* More than the peer, which takes nothing, has room for. */
static ssize_t sends(struct pair *pair)
{
	static char bytes[1 << 20];
	for (;;)
		if (rsend(pair->here, bytes, sizeof bytes, 0) < 0)
			return -1;
}

static ssize_t (*const CALLS[])(struct pair *) = { receives, accepts, polls, selects, sends };
enum { RECEIVES, ACCEPTS, POLLS, SELECTS, SENDS, COUNT };

struct waiter {
	pthread_t thread;
	struct pair *pair;
	ssize_t (*call)(struct pair *);
	volatile ssize_t result;
	volatile int number, over;
};

static void *wait_in(void *argument)
{
	struct waiter *waiter = argument;
	errno = 0;
	waiter->result = waiter->call(waiter->pair);
	waiter->number = errno;
	waiter->over = 1;
	pthread_testcancel();
	return NULL;
}

/* A thread that waits, and has begun to sleep by now. */
static void begin(struct waiter *waiter, struct pair *pair, int call)
{
	*waiter = (struct waiter){ .pair = pair, .call = CALLS[call] };
	CHECK(pthread_create(&waiter->thread, NULL, wait_in, waiter) == 0);
	usleep(50000);
	CHECK(!waiter->over);
}

static void ended(struct waiter *waiter)
{
	CHECK(pthread_join(waiter->thread, NULL) == 0);
}

static volatile int handled;

static void handle(int number)
{
	handled += number == SIGUSR1;
}

static void interrupted(struct waiter *waiter)
{
	int before = handled;
	CHECK(pthread_kill(waiter->thread, SIGUSR1) == 0);
	/* What was sent before is told by the result, and the next call is interrupted; and a thread that did not
	 * sleep yet runs the handler before it does. */
	for (int again = 0; !waiter->over && again < 100; again++) {
		usleep(20000);
		pthread_kill(waiter->thread, SIGUSR1);
	}
	ended(waiter);
	CHECK(handled > before && waiter->result == -1 && waiter->number == EINTR);
}

/* After a handler with SA_RESTART a call goes on, as recv(2) does. */
static void restarted(struct pair *pair)
{
	struct waiter waiters[2];
	signal(SIGUSR2, handle);
	for (int i = 0; i < 2; i++)
		begin(&waiters[i], pair, RECEIVES);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_kill(waiters[i].thread, SIGUSR2) == 0);
	usleep(50000);
	CHECK(!waiters[0].over && !waiters[1].over);
	CHECK(rsend(pair->there, "ab", 2, 0) == 2);
	for (int i = 0; i < 2; i++) {
		ended(&waiters[i]);
		CHECK(waiters[i].result == 1);
	}
}

/* Whether a thread waits alone, or on behalf of another, or another does so for it. */
static void signals(struct pair *pair)
{
	struct sigaction action = { .sa_handler = handle };
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	for (int call = 0; call < COUNT; call++) {
		struct waiter waiter, other;
		begin(&waiter, pair, call);
		begin(&other, pair, call);
		interrupted(&other);
		interrupted(&waiter);
	}
}

static void times(struct pair *pair)
{
	struct pollfd fds[2] = { { .fd = pair->here, .events = POLLIN }, { .fd = pair->listening, .events = POLLIN } };
	struct timeval soon = { .tv_usec = 30000 };
	fd_set read;
	double begun = now();
	CHECK(rpoll(fds, 2, 0) == 0 && now() - begun < 5);
	begun = now();
	CHECK(rpoll(fds, 2, 400) == 0);
	CHECK(now() - begun >= 0.4 && now() - begun < 10);
	FD_ZERO(&read);
	FD_SET(pair->here, &read);
	begun = now();
	CHECK(rselect(pair->here + 1, &read, NULL, NULL, &soon) == 0);
	CHECK(now() - begun >= 0.03 && now() - begun < 10);
}

/* Each of several threads hears of what is its own, whichever of them waits on behalf of all. */
static void several(struct pair *pair)
{
	struct pair other = connected();
	struct waiter waiters[4];
	char byte = 0;
	for (int round = 0; round < 3; round++) {
		begin(&waiters[0], pair, RECEIVES);
		begin(&waiters[1], &other, RECEIVES);
		begin(&waiters[2], pair, ACCEPTS);
		CHECK(rsend(other.there, "o", 1, 0) == 1);
		ended(&waiters[1]);
		CHECK(waiters[1].result == 1 && !waiters[0].over && !waiters[2].over);
		CHECK(rsend(pair->there, "p", 1, 0) == 1);
		ended(&waiters[0]);
		CHECK(waiters[0].result == 1 && !waiters[2].over);
		begin(&waiters[3], pair, POLLS);
		CHECK(rsend(pair->here, "q", 1, 0) == 1);
		ended(&waiters[3]);
		CHECK(waiters[3].result == 1 && rrecv(pair->there, &byte, 1, 0) == 1 && byte == 'q');
		interrupted(&waiters[2]);
	}
	/* One polls the socket that another receives from. */
	for (int round = 0; round < 6; round++) {
		begin(&waiters[0], pair, round % 2 ? POLLS : RECEIVES);
		begin(&waiters[1], pair, round % 2 ? RECEIVES : POLLS);
		CHECK(rsend(pair->there, "r", 1, 0) == 1);
		ended(&waiters[round % 2]);
		CHECK(waiters[round % 2].result == 1);
		if (!waiters[!(round % 2)].over)
			CHECK(rsend(pair->there, "s", 1, 0) == 1);
		ended(&waiters[!(round % 2)]);
		while (rrecv(pair->here, &byte, 1, MSG_DONTWAIT) == 1)
			;
	}
	closed(other);
}

/* A thread that is cancelled while it waits ends there or when it has what it waits for, and holds nothing that
 * others need. */
static void cancelled(struct pair *pair)
{
	for (int call = 0; call < COUNT; call++) {
		struct waiter waiter;
		void *result;
		char byte = 0;
		if (call == ACCEPTS || call == SENDS)
			continue;
		begin(&waiter, pair, call);
		CHECK(pthread_cancel(waiter.thread) == 0);
		CHECK(rsend(pair->there, "c", 1, 0) == 1);
		CHECK(pthread_join(waiter.thread, &result) == 0 && result == PTHREAD_CANCELED);
		CHECK(rsend(pair->there, "d", 1, 0) == 1);
		while (byte != 'd')
			CHECK(rrecv(pair->here, &byte, 1, 0) == 1);
	}
}

/* A child has its parent's descriptors and none of its connections: its calls fail, and the parent's go on. */
static void forked(struct pair *pair)
{
	struct waiter waiter, accepting;
	int status;
	pid_t child;
	begin(&waiter, pair, RECEIVES);
	begin(&accepting, pair, ACCEPTS);
	CHECK((child = fork()) >= 0);
	if (child == 0) {
		char byte;
		struct pollfd fds = { .fd = pair->there, .events = POLLIN };
		alarm(20);
		if (rrecv(pair->there, &byte, 1, 0) >= 0 || rrecv(pair->here, &byte, 1, 0) >= 0)
			_exit(2);
		if (raccept(pair->listening, NULL, NULL) >= 0)
			_exit(3);
		rpoll(&fds, 1, 100);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(rsend(pair->there, "f", 1, 0) == 1);
	ended(&waiter);
	CHECK(waiter.result == 1);
	interrupted(&accepting);
}

/* Another thread closes a socket in which threads wait; and the peer ends while they do. */
static void closing(void)
{
	for (int call = 0; call < COUNT; call++) {
		struct pair pair = connected();
		struct waiter waiter;
		if (call == ACCEPTS)
			continue;
		begin(&waiter, &pair, call);
		if (call == SENDS) {
			struct linger linger = { .l_onoff = 1, .l_linger = 0 };
			CHECK(rsetsockopt(pair.here, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
		}
		CHECK(rclose(pair.here) == 0);
		ended(&waiter);
		CHECK(rclose(pair.there) == 0 && rclose(pair.listening) == 0);
	}
	for (int call = 0; call < COUNT; call++) {
		struct pair pair = connected();
		struct waiter waiter;
		if (call == ACCEPTS)
			continue;
		begin(&waiter, &pair, call);
		CHECK(rclose(pair.there) == 0);
		ended(&waiter);
		CHECK(call != RECEIVES || waiter.result == 0);
		CHECK(rclose(pair.here) == 0 && rclose(pair.listening) == 0);
	}
}

/* Calls that find at once what they want may do without a look at what came, but not for ever. */
static void repeated(void)
{
	struct pair pair = connected();
	struct pollfd fds = { .fd = pair.here, .events = POLLOUT };
	double begun = now();
	char bytes[2] = "";

	CHECK(rsend(pair.there, "1", 1, 0) == 1);
	CHECK(rrecv(pair.here, bytes, 2, MSG_PEEK) == 1);
	CHECK(rsend(pair.there, "2", 1, 0) == 1);
	while (rrecv(pair.here, bytes, 2, MSG_PEEK) < 2)
		CHECK(now() - begun < 20);
	CHECK(rrecv(pair.here, bytes, 2, 0) == 2 && bytes[0] == '1' && bytes[1] == '2');
	CHECK(rclose(pair.there) == 0);
	while (rpoll(&fds, 1, 0) == 1 && !(fds.revents & POLLHUP))
		CHECK(now() - begun < 20);
	CHECK(fds.revents & POLLHUP);
	while (rsend(pair.here, "3", 1, 0) == 1)
		CHECK(now() - begun < 20);
	CHECK(errno == EPIPE || errno == ECONNRESET);
	CHECK(rclose(pair.here) == 0 && rclose(pair.listening) == 0);
}

/* What was sent before an end arrives, and is received; who does not block does not wait for that. */
static void halves(void)
{
	struct pair pair = connected();
	struct pollfd fds = { .fd = pair.here, .events = POLLIN };
	int unconnected = rsocket(AF_INET, SOCK_STREAM, 0);
	size_t sent = 0;
	ssize_t length;
	char bytes[100];

	FAILS(rshutdown(unconnected, SHUT_WR), ENOTCONN);
	CHECK(rclose(unconnected) == 0);
	CHECK(rsend(pair.there, "ab", 2, 0) == 2 && rpoll(&fds, 1, 20000) == 1);
	CHECK(rshutdown(pair.here, SHUT_RD) == 0);
	CHECK(rrecv(pair.here, bytes, 1, 0) == 1 && rrecv(pair.here, bytes, sizeof bytes, 0) == 1);
	CHECK(rrecv(pair.here, bytes, sizeof bytes, 0) == 0);
	for (; (length = rsend(pair.here, bytes, sizeof bytes, MSG_DONTWAIT)) > 0; sent += length)
		;
	CHECK(errno == EAGAIN && rfcntl(pair.here, F_SETFL, O_NONBLOCK) == 0);
	CHECK(rshutdown(pair.here, SHUT_WR) == 0);
	FAILS(rsend(pair.here, bytes, 1, 0), EPIPE);
	for (; (length = rrecv(pair.there, bytes, sizeof bytes, 0)) > 0; sent -= length)
		rpoll(&fds, 1, 0);
	CHECK(length == 0 && sent == 0);
	closed(pair);
}

static void *sends_late(void *fd)
{
	usleep(50000);
	CHECK(rsend(*(int *)fd, "l", 1, 0) == 1);
	return NULL;
}

/* As many entries may be polled as descriptors may be open, and no more, whatever a socket takes. */
static void crowded(struct pair *pair)
{
	enum { MOST = 300, PLACE = 7 };
	struct pollfd fds[MOST + 1];
	struct rlimit limit, less;
	pthread_t sending;
	int pipes[2];
	double begun;
	char byte;

	CHECK(pipe(pipes) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (int i = 0; i <= MOST; i++)
		fds[i] = (struct pollfd){ i % 2 ? pipes[0] : -1, POLLIN, 0 };
	fds[PLACE].fd = pair->here;
	fds[MOST - 1].fd = pair->there;
	less = limit;
	less.rlim_cur = MOST;
	CHECK(setrlimit(RLIMIT_NOFILE, &less) == 0);
	FAILS(rpoll(fds, MOST + 1, 0), EINVAL);
	begun = now();
	CHECK(rpoll(fds, MOST, 100) == 0 && now() - begun >= 0.1);
	for (int i = 0; i < 3; i++) {
		CHECK(pthread_create(&sending, NULL, sends_late, &pair->there) == 0);
		begun = now();
		CHECK(rpoll(fds, MOST, 20000) == 1 && fds[PLACE].revents == POLLIN && now() - begun < 10);
		CHECK(pthread_join(sending, NULL) == 0 && rrecv(pair->here, &byte, 1, 0) == 1);
	}
	CHECK(write(pipes[1], "p", 1) == 1);
	CHECK(rpoll(fds, MOST, 20000) == MOST / 2 - 2 && fds[1].revents == POLLIN);
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	CHECK(close(pipes[0]) == 0 && close(pipes[1]) == 0);
}

int main(void)
{
	struct pair pair;
	alarm(120);
	pair = connected();
	restarted(&pair);
	signals(&pair);
	closed(pair);
	pair = connected();
	times(&pair);
	several(&pair);
	cancelled(&pair);
	forked(&pair);
	crowded(&pair);
	closed(pair);
	closing();
	halves();
	repeated();
	return 0;
}
