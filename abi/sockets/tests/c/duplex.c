/* Two processes send each other a seeded stream over a connection, without blocking. What poll, select
 * or epoll reports must be true: a descriptor that was reported as readable gives octets, and one that
 * was reported as writable takes some. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static uint64_t state;
static int fd, epfd, mode, is_child, file;
static long sent, got, total;
static char buffer[1 << 20];

static unsigned draw(unsigned below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % below;
}

static void must(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "FAILED: %s, errno %d, mode %d; sent %ld, got %ld\n", what, errno, mode, sent, got);
    _exit(1);
}

static char octet(long at) {
    return (char)((at * 131 >> 3) ^ (at >> 11));
}

enum { POLL, SELECT, LEVEL, EDGE, MODES };

/* What is reported; with an edge-triggered set, what may be. */
static int wait_for(int events) {
    struct pollfd entry = {.fd = fd, .events = (short)events};
    struct epoll_event event = {.events = 0};
    struct timeval limit = {10, 0};
    fd_set reads, writes;
    switch (mode) {
    case POLL:
        must(poll(&entry, 1, 10000) == 1, "poll reports nothing");
        return entry.revents & (POLLIN | POLLOUT);
    case SELECT:
        FD_ZERO(&reads);
        FD_ZERO(&writes);
        FD_SET(fd, &reads);
        if (events & POLLOUT) FD_SET(fd, &writes);
        must(select(fd + 1, &reads, &writes, NULL, &limit) >= 1, "select reports nothing");
        return (FD_ISSET(fd, &reads) ? POLLIN : 0) | (FD_ISSET(fd, &writes) ? POLLOUT : 0);
    case LEVEL:
        event.events = EPOLLIN | (events & POLLOUT ? EPOLLOUT : 0);
        must(epoll_ctl(epfd, EPOLL_CTL_MOD, fd, &event) == 0, "epoll_ctl");
        break;
    }
    must(epoll_wait(epfd, &event, 1, 10000) == 1, "epoll reports nothing");
    return (event.events & EPOLLIN ? POLLIN : 0) | (event.events & EPOLLOUT ? POLLOUT : 0);
}

static int receive(void) {
    ssize_t len = recv(fd, buffer, 1 + draw(draw(2) ? 9000 : sizeof buffer), draw(2) ? MSG_DONTWAIT : 0);
    if (len < 0 && errno == EAGAIN) return 0;
    must(len > 0, "recv");
    for (ssize_t at = 0; at < len; at++) must(buffer[at] == octet(got + at), "the octets are wrong");
    got += len;
    return 1;
}

static int send_some(void) {
    static const unsigned most[] = {100, 5000, 100000, sizeof buffer};
    long len = 1 + draw(most[draw(4)]);
    if (len > total - sent) len = total - sent;
    for (long at = 0; at < len; at++) buffer[at] = octet(sent + at);
    off_t offset = sent;
    /* The file may end before the call has sent what it is asked for. */
    long more = draw(2) * 9000;
    ssize_t result = draw(3) ? send(fd, buffer, len, MSG_NOSIGNAL) : sendfile(fd, file, &offset, len + more);
    must(offset == sent || offset == sent + (result > 0 ? result : 0), "the offset is wrong");
    if (result < 0 && errno == EAGAIN) return 0;
    must(result > 0, "send");
    sent += result;
    must(sent <= total, "more was sent than the file has");
    return 1;
}

static void run(void) {
    while (sent < total || got < total) {
        /* One of them always wants to send, so that they do not wait for each other. */
        int sends = sent < total && (is_child || draw(4));
        int events = (got < total ? POLLIN : 0) | (sends ? POLLOUT : 0);
        /* One that has sent all waits for octets only, one that has them all for room. */
        if (events == 0) events = POLLOUT;
        int reported = wait_for(events);
        if (draw(300) == 0) usleep(draw(3000));
        if (mode == EDGE) {
            while (got < total && receive()) {
            }
            while (sent < total && send_some() && draw(8)) {
            }
            /* It stopped before the kernel said so: the next edge is asked for. */
            struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET};
            must(epoll_ctl(epfd, EPOLL_CTL_MOD, fd, &event) == 0, "epoll_ctl");
            continue;
        }
        if (reported & POLLIN && got < total) must(receive(), "recv of what is reported as readable");
        if (reported & POLLOUT && sent < total) must(send_some(), "send to what is reported as writable");
    }
}

static void start(void) {
    for (int round = 0; round < 12; round++) {
        buffer[0] = 0;
        must(send(fd, buffer, 1, 0) == 1 && recv(fd, buffer, 1, 0) == 1, "the first octets");
    }
    usleep(50000);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    epfd = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | (mode == EDGE ? EPOLLOUT | EPOLLET : 0)};
    must(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    run();
}

int main(int count, char **args) {
    uint64_t seed = count > 1 ? strtoul(args[1], NULL, 0) : 1;
    total = count > 2 ? atol(args[2]) : 4000000;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(listen(listener, 5) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    alarm(60);
    file = memfd_create("stream", MFD_CLOEXEC);
    for (long at = 0; at < total;) {
        long part = total - at < (long)sizeof buffer ? total - at : (long)sizeof buffer;
        for (long place = 0; place < part; place++) buffer[place] = octet(at + place);
        must(write(file, buffer, part) == part, "write");
        at += part;
    }
    pid_t child = fork();
    if (child == 0) {
        state = seed * 2 + 1;
        mode = draw(MODES);
        is_child = 1;
        fd = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fd, (struct sockaddr *)&address, len) == 0, "connect");
        start();
        return 0;
    }
    state = seed * 2;
    mode = draw(MODES);
    fd = accept(listener, NULL, NULL);
    must(fd >= 0, "accept");
    start();
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the other process failed");
    char path[100], line[400];
    snprintf(path, sizeof path, "/dev/shm/quipu-sockets-%d/%d", (int)geteuid(), (int)getpid());
    usleep(400000);
    FILE *report = fopen(path, "r");
    while (report != NULL && fgets(line, sizeof line, report) != NULL) {
        long octets = 0;
        if (sscanf(line, "%*d %*s %*s %*d %ld", &octets) == 1 && octets > 0) printf("by memory %ld\n", octets);
    }
    printf("done\n");
    return 0;
}
