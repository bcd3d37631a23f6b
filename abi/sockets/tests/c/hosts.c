/* One end of a connection between two hosts: echoes of many lengths, then a stream in each direction.
 *
 * hosts serve|fetch ADDRESS PORT: prints "done REASON OCTETS": why the connection is not raised, as a number
 * of the report or -1, and the octets that went through memory.
 */
#define _GNU_SOURCE
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST 100000
#define ECHOES 100
#define PARTS 200

static unsigned char buffer[MOST];

static void must(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static void fill(size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++)
        buffer[i] = (i * 7 + seed) >> 3;
}

static void check(size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++)
        must(buffer[i] == (unsigned char)((i * 7 + seed) >> 3), "another octet");
}

static void send_all(int fd, size_t len)
{
    must(send(fd, buffer, len, 0) == (ssize_t)len, "send");
}

static void receive(int fd, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t got = recv(fd, buffer + at, len - at, 0);
        must(got > 0, "recv");
        at += got;
    }
}

static int connected(int serves, const char *host, const char *port)
{
    struct addrinfo hints = { .ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM }, *found;
    must(getaddrinfo(host, port, &hints, &found) == 0, "getaddrinfo");
    for (int attempt = 0; attempt < 200; attempt++) {
        int fd = socket(found->ai_family, SOCK_STREAM, 0), one = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (serves) {
            must(bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1) == 0, "listen");
            return accept(fd, NULL, NULL);
        }
        if (connect(fd, found->ai_addr, found->ai_addrlen) == 0)
            return fd;
        close(fd);
        usleep(50000);
    }
    must(0, "connect");
    return -1;
}

int main(int argc, char **argv)
{
    must(argc == 4, "serve|fetch ADDRESS PORT");
    int serves = argv[1][0] == 's', fd = connected(serves, argv[2], argv[3]);
    for (unsigned turn = 0; turn < ECHOES; turn++) {
        size_t len = 1 + turn * turn * 9;
        fill(len, turn);
        if (!serves)
            send_all(fd, len);
        receive(fd, len);
        check(len, turn);
        if (serves)
            send_all(fd, len);
    }
    for (int direction = 0; direction < 2; direction++)
        for (unsigned part = 0; part < PARTS; part++) {
            fill(MOST, part);
            if (serves == direction) {
                send_all(fd, MOST);
            } else {
                receive(fd, MOST);
                check(MOST, part);
            }
        }
    usleep(400000);
    char path[100], line[400];
    int reason = -1, number;
    long octets = 0, sent, received;
    snprintf(path, sizeof path, "/dev/shm/quipu-sockets-%d/%d", (int)geteuid(), (int)getpid());
    FILE *report = fopen(path, "r");
    while (report != NULL && fgets(line, sizeof line, report) != NULL)
        if (sscanf(line, "%*d %*s %*s %d %ld %*d %ld", &number, &sent, &received) == 3) {
            reason = number;
            octets += sent + received;
        }
    printf("done %d %ld\n", reason, octets);
    return 0;
}
