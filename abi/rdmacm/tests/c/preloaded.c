/* A program of sockets, of which librspreload, loaded in front, makes r* sockets. */
#include "common.h"
#include <sys/stat.h>

static int listening;

/* Echoes what one peer sends. */
static void *serve(void *unused)
{
	char byte;
	int peer = accept(listening, NULL, NULL);
	CHECK(peer > 2);
	while (recv(peer, &byte, 1, 0) == 1)
		CHECK(send(peer, &byte, 1, 0) == 1);
	CHECK(close(peer) == 0);
	return unused;
}

int main(void)
{
	struct sockaddr_in in;
	socklen_t length = sizeof in;
	struct stat file;
	pthread_t server;
	const char *text = "quipu";
	struct pollfd fds = { .events = POLLOUT };
	char byte;
	int sock, stands;

	/* What could go wrong is that the adapter waits for itself. */
	alarm(30);
	CHECK((listening = socket(AF_INET, SOCK_STREAM, 0)) > 2);
	CHECK(fstat(listening, &file) == 0 && !S_ISSOCK(file.st_mode));
	CHECK(bind(listening, loopback(&in, 0), sizeof in) == 0 && listen(listening, 4) == 0);
	CHECK(getsockname(listening, (struct sockaddr *)&in, &length) == 0 && in.sin_port != 0);
	CHECK(pthread_create(&server, NULL, serve, NULL) == 0);
	CHECK((sock = socket(AF_INET, SOCK_STREAM, 0)) > 2);
	/* As redis-cli does: it asks again what has become of it. librspreload takes an error for a sign to leave. */
	CHECK(fcntl(sock, F_SETFL, O_NONBLOCK) == 0);
	/* On a busy machine it may stand before the call is over. */
	stands = connect(sock, (struct sockaddr *)&in, sizeof in) == 0;
	CHECK(stands || errno == EINPROGRESS);
	fds.fd = sock;
	CHECK(poll(&fds, 1, 10000) == 1 && fds.revents == POLLOUT);
	CHECK(stands || connect(sock, (struct sockaddr *)&in, sizeof in) == 0);
	CHECK(fstat(sock, &file) == 0 && !S_ISSOCK(file.st_mode) && fcntl(sock, F_SETFL, 0) == 0);
	for (; *text; text++) {
		CHECK(send(sock, text, 1, 0) == 1);
		CHECK(recv(sock, &byte, 1, 0) == 1 && byte == *text);
	}
	CHECK(shutdown(sock, SHUT_WR) == 0);
	CHECK(recv(sock, &byte, 1, 0) == 0);
	CHECK(pthread_join(server, NULL) == 0);
	CHECK(close(sock) == 0 && close(listening) == 0);
	return 0;
}
