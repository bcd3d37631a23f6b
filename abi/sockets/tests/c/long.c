/* Messages of 4 MB, each in one call, to a receiver that sleeps when they begin; then one that is too long for a
 * receiver that closes.
 *
 * Prints "by memory OCTETS" of the sender, then "done".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "octets.h"

#define LEN (4ul << 20)
#define PIECES 40ul
#define MESSAGES 60

static unsigned char buffer[LEN];

static void receive_all(int fd, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t got = recv(fd, buffer + at, len - at, 0);
        must(got > 0, "recv");
        at += got;
    }
}

static void receive(int fd)
{
    for (int i = 0; i < 20; i++) {
        receive_all(fd, 1);
        must(send(fd, "r", 1, 0) == 1, "send");
    }
    for (int i = 0; i < MESSAGES; i++) {
        memset(buffer, 0, sizeof buffer);
        receive_all(fd, LEN);
        for (size_t at = 0; at < LEN; at++)
            must(buffer[at] == octet(at + i), "another octet");
        must(send(fd, "r", 1, 0) == 1, "send");
    }
    receive_all(fd, 1);
    usleep(50000);
    close(fd);
}

/* Lets TCP hold less than a message, so that the sender does not come to its end before the receiver wakes. */
static void shrink(int fd)
{
    int len = 128 << 10;
    must(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &len, sizeof len) == 0, "SO_SNDBUF");
    must(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &len, sizeof len) == 0, "SO_RCVBUF");
}

/* Sends a message in pieces of several lengths, all in one call. */
static void send_message(int fd)
{
    struct iovec pieces[PIECES];
    size_t at = 0;
    for (size_t i = 0; i < PIECES; i++) {
        size_t len = i < PIECES - 1 ? LEN / PIECES - 100 + (i * 37) % 200 : LEN - at;
        pieces[i] = (struct iovec){ buffer + at, len };
        at += len;
    }
    must(writev(fd, pieces, PIECES) == (ssize_t)LEN, "writev");
}

int main(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    shrink(listener);
    must(bind(listener, (struct sockaddr *)&address, size) == 0, "bind");
    must(listen(listener, 1) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    pid_t child = fork();
    if (child == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        shrink(fd);
        must(connect(fd, (struct sockaddr *)&address, size) == 0, "connect");
        receive(fd);
        return 0;
    }
    int fd = accept(listener, NULL, NULL);
    char answer;
    for (int i = 0; i < 20; i++) {
        usleep(10000);
        must(send(fd, "s", 1, 0) == 1 && recv(fd, &answer, 1, 0) == 1, "a round trip");
    }
    for (int i = 0; i < MESSAGES; i++) {
        for (size_t at = 0; at < LEN; at++)
            buffer[at] = octet(at + i);
        usleep(20000);
        send_message(fd);
        must(recv(fd, &answer, 1, 0) == 1, "recv");
    }
    print_octets();
    /* It gets no SIGPIPE for a call that has sent something, but an error for the next one. */
    unsigned char *much = calloc(1, 64 << 20);
    ssize_t sent = send(fd, much, 64 << 20, 0);
    must(sent > 0 && sent < 64l << 20, "a part");
    must(send(fd, much, 1, MSG_NOSIGNAL) == -1, "send");
    must(errno == ECONNRESET || errno == EPIPE, "the error");
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the receiver");
    printf("done\n");
    return 0;
}
