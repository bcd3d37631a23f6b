/* A program that sends with a time limit to a peer that does not read for a while. Prints how many octets the calls
 * say that they have sent, how many have come, and how many calls there were until one gave EAGAIN. */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

enum { LIMIT_MS = 200, LARGE = 4 << 20, MOST_CALLS = 20 };

/* What octet number `at` of the stream is. */
static unsigned char octet(size_t at) { return (at * 2654435761u) >> 24; }

static void server(int listener, int go)
{
    static unsigned char buffer[100000];
    int fd = accept(listener, NULL, NULL);
    size_t got = 0;
    ssize_t len;
    char byte;
    if (fd < 0 || read(go, &byte, 1) != 1)
        fail("accept");
    while ((len = recv(fd, buffer, sizeof buffer, 0)) > 0)
        for (ssize_t at = 0; at < len; at++)
            if (buffer[at] != octet(got++)) {
                fprintf(stderr, "octet %zu differs\n", got - 1);
                exit(1);
            }
    if (len < 0)
        fail("recv");
    printf("received %zu\n", got);
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(argc > 1 ? atoi(argv[1]) : 0);
    int go[2], ready[2], calls = 0, status;
    if (pipe(go) || pipe(ready))
        fail("pipe");
    alarm(60);
    pid_t child = fork();
    if (child == 0) {
        int listener = socket(27, SOCK_STREAM, 0);
        alarm(60);
        if (bind(listener, (void *)&at, sizeof at) || listen(listener, 2) || write(ready[1], "", 1) != 1)
            fail("listen");
        server(listener, go[0]);
        return 0;
    }
    char byte;
    static unsigned char buffer[LARGE];
    struct timeval limit = {.tv_usec = LIMIT_MS * 1000};
    int fd = socket(27, SOCK_STREAM, 0);
    if (read(ready[0], &byte, 1) != 1 || connect(fd, (void *)&at, sizeof at))
        fail("connect");
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit))
        fail("SO_SNDTIMEO");
    size_t sent = 0;
    ssize_t len;
    do {
        for (size_t i = 0; i < LARGE; i++)
            buffer[i] = octet(sent + i);
        double began = now_ms();
        len = send(fd, buffer, LARGE, 0);
        double took = now_ms() - began;
        if (took > LIMIT_MS + 2000)
            fprintf(stderr, "a call took %.0f ms\n", took);
        if (len > 0)
            sent += len;
        if (len < LARGE && took < LIMIT_MS - 1)
            fprintf(stderr, "a call ended after %.0f ms\n", took);
    } while (++calls < MOST_CALLS && len > 0);
    if (len >= 0 || errno != EAGAIN)
        fail("no EAGAIN");
    /* From now on there is a reader. What is sent now goes on where the calls ended. */
    if (write(go[1], "", 1) != 1)
        fail("write");
    for (size_t i = 0; i < LARGE; i++)
        buffer[i] = octet(sent + i);
    for (size_t more = 0; more < LARGE; more += len)
        if ((len = send(fd, buffer + more, LARGE - more, 0)) < 0 && errno != EAGAIN)
            fail("send");
        else if (len < 0)
            len = 0;
    sent += LARGE;
    if (close(fd) || waitpid(child, &status, 0) != child || status != 0)
        fail("the server");
    printf("sent %zu\n", sent);
    return 0;
}
