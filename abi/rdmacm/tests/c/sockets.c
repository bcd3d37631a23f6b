/* Streams of rsocket.h between threads of one process. */
#include "common.h"
#include <netinet/tcp.h>

enum { TOTAL = 3000000, CHUNK = 70001 };

static unsigned char value(int at)
{
	return at * 31 + at / 257;
}

/* Sends back what comes, in odd pieces, until the end. */
static void *echo(void *listening)
{
	static unsigned char buffer[CHUNK];
	int rs = raccept(*(int *)listening, NULL, NULL);
	ssize_t got;
	CHECK(rs > 2);
	while ((got = rrecv(rs, buffer, 1 + rand() % CHUNK, 0)) > 0)
		CHECK(rsend(rs, buffer, got, 0) == got);
	CHECK(got == 0);
	CHECK(rshutdown(rs, SHUT_WR) == 0);
	FAILS(rsend(rs, buffer, 1, 0), EPIPE);
	CHECK(rclose(rs) == 0);
	return NULL;
}

static void *feed(void *socket)
{
	static unsigned char buffer[CHUNK];
	int rs = *(int *)socket;
	for (int sent = 0; sent < TOTAL;) {
		int length = 1 + rand() % CHUNK;
		if (length > TOTAL - sent)
			length = TOTAL - sent;
		for (int i = 0; i < length; i++)
			buffer[i] = value(sent + i);
		CHECK(rsend(rs, buffer, length, 0) == length);
		sent += length;
	}
	CHECK(rshutdown(rs, SHUT_WR) == 0);
	return NULL;
}

static int bound(struct sockaddr_in *in)
{
	socklen_t length = sizeof *in;
	int rs = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rs > 2);
	CHECK(rbind(rs, loopback(in, 0), sizeof *in) == 0);
	CHECK(rlisten(rs, 50) == 0);
	CHECK(rgetsockname(rs, (struct sockaddr *)in, &length) == 0 && in->sin_port != 0);
	return rs;
}

/* Two threads on one socket, one for each direction. */
static void both_ways(void)
{
	static unsigned char buffer[CHUNK];
	struct sockaddr_in in;
	int listening = bound(&in), rs = rsocket(AF_INET, SOCK_STREAM, 0), got = 0;
	pthread_t server, feeder;
	struct iovec pieces[2] = { { buffer, 1000 }, { buffer + 1000, CHUNK - 1000 } };
	ssize_t length;

	CHECK(pthread_create(&server, NULL, echo, &listening) == 0);
	CHECK(rconnect(rs, (struct sockaddr *)&in, sizeof in) == 0);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EISCONN);
	CHECK(pthread_create(&feeder, NULL, feed, &rs) == 0);
	while ((length = rreadv(rs, pieces, 2)) > 0) {
		for (ssize_t i = 0; i < length; i++)
			CHECK(buffer[i] == value(got + i));
		got += length;
	}
	CHECK(length == 0 && got == TOTAL);
	CHECK(pthread_join(feeder, NULL) == 0 && pthread_join(server, NULL) == 0);
	CHECK(rclose(rs) == 0 && rclose(listening) == 0);
	FAILS(rclose(rs), EBADF);
}

static void without_blocking(void)
{
	struct sockaddr_in in;
	int listening = bound(&in), rs = rsocket(AF_INET, SOCK_STREAM, 0), peer, number;
	struct pollfd fds = { .fd = rs, .events = POLLOUT };
	socklen_t length = sizeof number;
	char text[8] = "";

	CHECK(rfcntl(rs, F_SETFL, O_NONBLOCK) == 0 && (rfcntl(rs, F_GETFL) & O_NONBLOCK));
	CHECK(rfcntl(listening, F_SETFL, O_NONBLOCK) == 0);
	CHECK(rfcntl(rs, F_SETFD, 0) == 0 && rfcntl(rs, F_GETFD) == 0);
	CHECK(rfcntl(rs, F_SETFD, FD_CLOEXEC) == 0 && rfcntl(rs, F_GETFD) == FD_CLOEXEC);
	FAILS(rfcntl(rs, F_DUPFD, 0), EOPNOTSUPP);
	FAILS(raccept(listening, NULL, NULL), EAGAIN);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	FAILS(rrecv(rs, text, 1, 0), EAGAIN);
	fds.fd = listening;
	fds.events = POLLIN;
	CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLIN);
	CHECK((peer = raccept(listening, NULL, NULL)) > 2);
	fds.fd = rs;
	fds.events = POLLOUT;
	CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLOUT);
	CHECK(rgetsockopt(rs, SOL_SOCKET, SO_ERROR, &number, &length) == 0 && number == 0);
	fds.events = POLLIN;
	CHECK(rpoll(&fds, 1, 20) == 0);
	FAILS(rrecv(rs, text, 1, 0), EAGAIN);
	CHECK(rwrite(peer, "abcdef", 7) == 7);
	CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLIN);
	CHECK(rrecv(rs, text, 3, MSG_PEEK) == 3 && memcmp(text, "abc", 3) == 0);
	CHECK(rrecv(rs, text, 8, 0) == 7 && strcmp(text, "abcdef") == 0);
	CHECK(rclose(peer) == 0);
	CHECK(rpoll(&fds, 1, 10000) == 1 && (fds.revents & POLLIN));
	CHECK(rrecv(rs, text, 1, 0) == 0);
	CHECK(rclose(rs) == 0 && rclose(listening) == 0);
}

static void mapped(void)
{
	struct sockaddr_in in;
	int listening = bound(&in), rs = rsocket(AF_INET, SOCK_STREAM, 0), peer, maps = 1;
	char memory[64] = "", byte;
	CHECK(rsetsockopt(rs, SOL_RDMA, RDMA_IOMAPSIZE, &maps, sizeof maps) == 0);
	CHECK(rfcntl(rs, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	CHECK((peer = raccept(listening, NULL, NULL)) > 2);
	CHECK(rfcntl(rs, F_SETFL, 0) == 0);
	/* The peer maps; this end, whose table has one entry, writes. */
	CHECK(riomap(peer, memory, sizeof memory, PROT_WRITE, 0, 1000) == 1000);
	FAILS(riomap(peer, memory, sizeof memory, PROT_WRITE, 0, 0), ENOMEM);
	CHECK(rsend(peer, "m", 1, 0) == 1 && rrecv(rs, &byte, 1, 0) == 1);
	FAILS((ssize_t)riowrite(rs, "x", 1, 999, 0), EINVAL);
	CHECK(riowrite(rs, "direct", 7, 1010, 0) == 7);
	CHECK(rsend(rs, "w", 1, 0) == 1 && rrecv(peer, &byte, 1, 0) == 1);
	CHECK(strcmp(memory + 10, "direct") == 0);
	/* What is mapped for this end alone takes no entry, and the peer does not reach it. */
	CHECK(riomap(peer, memory + 32, 16, PROT_NONE, 0, 5000) == 5000);
	CHECK(riomap(peer, memory + 48, 16, PROT_NONE, 0, -1) == (off_t)(memory + 48));
	CHECK(rsend(peer, "n", 1, 0) == 1 && rrecv(rs, &byte, 1, 0) == 1);
	FAILS((ssize_t)riowrite(rs, "x", 1, 5000, 0), EINVAL);
	FAILS((ssize_t)riowrite(rs, "x", 1, (off_t)(memory + 48), 0), EINVAL);
	CHECK(riounmap(peer, memory + 32, 16) == 0);
	FAILS(riounmap(peer, memory + 32, 16), EINVAL);
	CHECK(riounmap(peer, memory, sizeof memory) == 0);
	FAILS(riounmap(peer, memory, sizeof memory), EINVAL);
	CHECK(rsend(peer, "u", 1, 0) == 1 && rrecv(rs, &byte, 1, 0) == 1);
	FAILS((ssize_t)riowrite(rs, "x", 1, 1000, 0), EINVAL);
	CHECK(rclose(peer) == 0 && rclose(rs) == 0 && rclose(listening) == 0);
}

/* Peers that are no sockets, or leave before they are accepted, do a listener no harm. */
static void strangers(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = { .private_data = "GET /", .private_data_len = 6, .qp_num = 9 };
	struct rdma_cm_id *gone, *stranger;
	struct sockaddr_in in;
	int listening = bound(&in), rs[20], peers[20];
	struct pollfd fds = { .fd = listening, .events = POLLIN };
	char byte;

	gone = resolved(channel, RDMA_PS_TCP, in.sin_port);
	CHECK(rdma_connect(gone, &param) == 0);
	CHECK(rpoll(&fds, 1, 10000) == 1);
	CHECK(rdma_destroy_id(gone) == 0);
	stranger = resolved(channel, RDMA_PS_TCP, in.sin_port);
	CHECK(rdma_connect(stranger, &param) == 0);
	/* More than are taken from the backlog at once. */
	for (int i = 0; i < 20; i++) {
		CHECK((rs[i] = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
		CHECK(rfcntl(rs[i], F_SETFL, O_NONBLOCK) == 0);
		FAILS(rconnect(rs[i], (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	}
	for (int i = 0; i < 20; i++) {
		CHECK((peers[i] = raccept(listening, NULL, NULL)) > 2);
		CHECK(rsend(peers[i], "a", 1, 0) == 1);
	}
	pass(channel, RDMA_CM_EVENT_REJECTED);
	for (int i = 0; i < 20; i++) {
		fds.fd = rs[i];
		CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLIN);
		CHECK(rrecv(rs[i], &byte, 1, 0) == 1 && byte == 'a');
		CHECK(rclose(rs[i]) == 0 && rclose(peers[i]) == 0);
	}
	CHECK(rdma_destroy_id(stranger) == 0);
	rdma_destroy_event_channel(channel);
	CHECK(rclose(listening) == 0);
}

/* What programs of TCP ask for, which is the adapter's affair. */
static void options(void)
{
	struct sockaddr_in in;
	struct tcp_info info;
	struct pollfd fds = { .events = POLLOUT };
	struct linger linger = { 1, 5 };
	int listening, rs, peer, tos = 0x28, number;
	socklen_t length = sizeof number;
	char name[16];
	unsigned char byte;
	listening = bound(&in);
	CHECK((rs = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
	CHECK(rsetsockopt(rs, IPPROTO_IP, IP_TOS, &tos, sizeof tos) == 0);
	CHECK(rgetsockopt(rs, IPPROTO_IP, IP_TOS, &number, &length) == 0 && number == tos);
	byte = 0x10;
	CHECK(rsetsockopt(rs, IPPROTO_IP, IP_TOS, &byte, 1) == 0);
	CHECK(rgetsockopt(rs, IPPROTO_IP, IP_TOS, &number, &length) == 0 && number == 0x10);
	FAILS(rsetsockopt(rs, IPPROTO_IP, IP_TOS, &byte, 0), EINVAL);
	CHECK(rsetsockopt(rs, IPPROTO_TCP, TCP_CONGESTION, "bbr", 3) == 0);
	FAILS(rsetsockopt(rs, IPPROTO_TCP, TCP_CONGESTION, NULL, 3), EINVAL);
	length = sizeof name;
	CHECK(rgetsockopt(rs, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0);
	CHECK(length == sizeof name && strcmp(name, "rdma") == 0);
	memset(&info, 0xff, sizeof info);
	length = sizeof info;
	CHECK(rgetsockopt(rs, IPPROTO_TCP, TCP_INFO, &info, &length) == 0);
	CHECK(length == sizeof info && info.tcpi_state == TCP_CLOSE && !info.tcpi_total_retrans);
	CHECK(rfcntl(rs, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rconnect(rs, (struct sockaddr *)&in, sizeof in), EINPROGRESS);
	CHECK((peer = raccept(listening, NULL, NULL)) > 2);
	fds.fd = rs;
	CHECK(rpoll(&fds, 1, 10000) == 1 && fds.revents == POLLOUT);
	CHECK(rgetsockopt(rs, IPPROTO_TCP, TCP_INFO, &info, &length) == 0);
	CHECK(info.tcpi_state == TCP_ESTABLISHED && info.tcpi_snd_cwnd && !info.tcpi_rtt);
	length = 1;
	CHECK(rgetsockopt(rs, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && length == 1);
	CHECK(rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	length = sizeof linger;
	CHECK(rgetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, &length) == 0 && linger.l_linger == 5);
	length = 4;
	FAILS(rgetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, &length), EINVAL);
	CHECK(rclose(rs) == 0 && rclose(peer) == 0 && rclose(listening) == 0);
}

static void errors(void)
{
	struct sockaddr_in in;
	struct sockaddr_in6 six;
	int rs, one = 1, number;
	socklen_t length = sizeof number;
	char byte;
	FAILS(rsocket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
	FAILS(rsocket(AF_INET, SOCK_SEQPACKET, 0), EPROTONOSUPPORT);
	/* An address of zeros, as long as there is none. */
	CHECK((rs = rsocket(AF_INET6, SOCK_STREAM, 0)) > 2);
	length = sizeof six;
	CHECK(rgetsockname(rs, (struct sockaddr *)&six, &length) == 0 && length == sizeof six);
	CHECK(six.sin6_family == AF_INET6 && !six.sin6_port && IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr));
	CHECK(rclose(rs) == 0);
	length = sizeof number;
	CHECK((rs = rsocket(AF_INET, SOCK_STREAM, 0)) > 2);
	FAILS(rrecv(rs, &byte, 1, 0), ENOTCONN);
	FAILS(rsend(rs, &byte, 1, 0), ENOTCONN);
	FAILS(raccept(rs, NULL, NULL), EINVAL);
	FAILS(rshutdown(rs, SHUT_WR), ENOTCONN);
	FAILS(rbind(rs, loopback(&in, 0), 4), EINVAL);
	FAILS(rsetsockopt(rs, SOL_SOCKET, 9999, &one, sizeof one), ENOTSUP);
	FAILS(rgetsockopt(rs, SOL_SOCKET, 9999, &number, &length), ENOTSUP);
	FAILS(rgetpeername(rs, (struct sockaddr *)&in, &length), ENOTCONN);
	CHECK(rgetsockopt(rs, IPPROTO_TCP, TCP_NODELAY, &number, &length) == 0 && number == 1);
	CHECK(rsetsockopt(rs, IPPROTO_TCP, TCP_MAXSEG, &one, sizeof one) == 0);
	CHECK(rsetsockopt(rs, SOL_SOCKET, SO_RCVBUF, &one, sizeof one) == 0);
	CHECK(rgetsockopt(rs, SOL_SOCKET, SO_RCVBUF, &number, &length) == 0 && number == 4096);
	FAILS(rconnect(rs, loopback(&in, htons(1)), sizeof in), ECONNREFUSED);
	CHECK(rclose(rs) == 0);
}

int main(void)
{
	errors();
	options();
	both_ways();
	without_blocking();
	mapped();
	strangers();
	return 0;
}
