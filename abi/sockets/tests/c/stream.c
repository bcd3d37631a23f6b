/* A stream in one direction, by messages of one length: the receiver sends nothing before the end.
 *
 * stream LENGTH MESSAGES [file]: prints "by memory OCTETS" of the sender, then "done SECONDS". With "file", it
 * sends by sendfile(2).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "octets.h"

static void receive(int fd, unsigned char *buffer, size_t len, unsigned long total)
{
    for (unsigned long at = 0; at < total;) {
        ssize_t got = recv(fd, buffer, len, 0);
        must(got > 0, "recv");
        for (ssize_t i = 0; i < got; i++)
            must(buffer[i] == octet(at + i), "another octet");
        at += got;
    }
    must(send(fd, "e", 1, 0) == 1, "send");
    must(recv(fd, buffer, 1, 0) == 0, "the end");
}

/* Sends a message, by way of a file if there is one. */
static void send_message(int fd, int file, const unsigned char *buffer, size_t len)
{
    if (file < 0) {
        must(send(fd, buffer, len, 0) == (ssize_t)len, "send");
        return;
    }
    /* TCP refers to the pages of the file, so they must not change: each message has its own, in turn. */
    static off_t next;
    off_t at = next, offset = at;
    next = (next + len) % ((1 + (64 << 20) / len) * len);
    must(pwrite(file, buffer, len, at) == (ssize_t)len, "pwrite");
    must(sendfile(fd, file, &offset, len) == (ssize_t)len, "sendfile");
    must(offset == at + (off_t)len, "the offset");
}

int main(int argc, char **argv)
{
    must(argc == 3 || argc == 4, "LENGTH MESSAGES [file]");
    int file = argc == 4 ? memfd_create("message", 0) : -1;
    size_t len = strtoul(argv[1], NULL, 10);
    unsigned long total = len * strtoul(argv[2], NULL, 10);
    unsigned char *buffer = malloc(len);
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&address, size) == 0, "bind");
    must(listen(listener, 1) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    pid_t child = fork();
    if (child == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fd, (struct sockaddr *)&address, size) == 0, "connect");
        receive(fd, buffer, len, total);
        return 0;
    }
    int fd = accept(listener, NULL, NULL);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (unsigned long at = 0; at < total; at += len) {
        for (size_t i = 0; i < len; i++)
            buffer[i] = octet(at + i);
        send_message(fd, file, buffer, len);
    }
    must(recv(fd, buffer, 1, 0) == 1, "recv");
    clock_gettime(CLOCK_MONOTONIC, &end);
    print_octets();
    close(fd);
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the receiver");
    printf("done %f\n", end.tv_sec - begin.tv_sec + (end.tv_nsec - begin.tv_nsec) / 1e9);
    return 0;
}
