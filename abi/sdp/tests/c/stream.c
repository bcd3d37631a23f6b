/* A sockets program that knows nothing of SDP, but for its first argument: the address family. Two
 * processes send each other a pattern in pieces of many sizes, wait in several ways, end the stream in
 * order, and check every octet. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define TOTAL (12 << 20)
#define MOST (1 << 20)

static const char *way;
static int family;

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s: line %d: %s: %s\n", way, __LINE__, #what, strerror(errno));       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static unsigned char octet(size_t at) { return (unsigned char)((at * 2654435761u) >> 24); }

/* Waits until a descriptor is ready, in the way that the program was told. */
static void wait_for(int fd, int set, int writes)
{
    if (!strcmp(way, "poll")) {
        struct pollfd entry = {fd, writes ? POLLOUT : POLLIN, 0};
        CHECK(poll(&entry, 1, 20000) == 1);
    } else if (!strcmp(way, "select")) {
        fd_set ready;
        struct timeval limit = {20, 0};
        FD_ZERO(&ready);
        FD_SET(fd, &ready);
        CHECK(select(fd + 1, writes ? NULL : &ready, writes ? &ready : NULL, NULL, &limit) == 1);
    } else if (!strcmp(way, "epoll")) {
        struct epoll_event event = {writes ? EPOLLOUT : EPOLLIN, {.fd = fd}};
        CHECK(epoll_ctl(set, EPOLL_CTL_MOD, fd, &event) == 0);
        CHECK(epoll_wait(set, &event, 1, 20000) == 1);
    } else if (!strcmp(way, "edges")) {
        struct epoll_event event;
        CHECK(epoll_wait(set, &event, 1, 20000) == 1);
    }
}

static int urgent_fd;
static volatile sig_atomic_t urgent_byte;

/* The byte is there when the signal comes. */
static void on_urgent(int signal)
{
    char byte;
    (void)signal;
    if (recv(urgent_fd, &byte, 1, MSG_OOB) == 1)
        urgent_byte = byte;
}

/* SIGURG comes to the owner, also while no call is at the socket. */
static void get_signals(int fd)
{
    struct sigaction action = {.sa_handler = on_urgent, .sa_flags = SA_RESTART};
    pid_t self = getpid();
    char in[2];
    urgent_fd = fd;
    CHECK(sigaction(SIGURG, &action, NULL) == 0);
    for (int round = 0; round < 2; round++) {
        CHECK(fcntl(fd, F_SETOWN, 0) == 0 && fcntl(fd, F_GETOWN) == 0);
        if (round == 0)
            CHECK(fcntl(fd, F_SETOWN, self) == 0);
        else
            CHECK(ioctl(fd, SIOCSPGRP, &self) == 0);
        CHECK(fcntl(fd, F_GETOWN) == self);
        urgent_byte = 0;
        /* The peer is as far, too. */
        CHECK(send(fd, "r", 1, 0) == 1 && recv(fd, in, 1, 0) == 1 && in[0] == 'r');
        CHECK(send(fd, "xyU", 3, MSG_OOB) == 3);
        for (int tries = 0; !urgent_byte && tries < 10000; tries++)
            usleep(1000);
        CHECK(urgent_byte == 'U');
        CHECK(recv(fd, in, 2, MSG_WAITALL) == 2 && !memcmp(in, "xy", 2));
        CHECK(recv(fd, in, 1, MSG_OOB) == -1 && errno == EINVAL);
    }
    /* With nobody to get it, none comes. */
    CHECK(fcntl(fd, F_SETOWN, 0) == 0);
}

static volatile sig_atomic_t signals, signalled_thread;

static void on_signal(int signal)
{
    (void)signal;
    signals++;
    signalled_thread = gettid();
}

/* An urgent byte that comes now is the only thing that waits for this process. */
static void check_events(int fd)
{
    struct pollfd entry = {fd, POLLIN | POLLPRI, 0};
    struct epoll_event event = {EPOLLPRI, {.fd = fd}};
    struct timeval limit = {20, 0};
    int set = epoll_create1(0);
    fd_set in, except;
    char byte;
    CHECK(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
    CHECK(poll(&entry, 1, 20000) == 1 && entry.revents == POLLPRI);
    CHECK(epoll_wait(set, &event, 1, 20000) == 1 && event.events & EPOLLPRI);
    FD_ZERO(&in);
    FD_SET(fd, &in);
    except = in;
    CHECK(select(fd + 1, &in, NULL, &except, &limit) == 1);
    CHECK(FD_ISSET(fd, &except) && !FD_ISSET(fd, &in));
    CHECK(recv(fd, &byte, 1, MSG_OOB | MSG_PEEK) == 1 && byte == 'U');
    CHECK(poll(&entry, 1, 0) == 1 && entry.revents == POLLPRI);
    CHECK(recv(fd, &byte, 1, MSG_OOB) == 1 && byte == 'U');
    CHECK(epoll_wait(set, &event, 1, 0) == 0);
    CHECK(poll(&entry, 1, 0) == 0);
    close(set);
}

static void *idle(void *thread)
{
    *(volatile pid_t *)thread = gettid();
    for (;;)
        pause();
    return NULL;
}

/* Waits for a signal: one for each urgent byte. */
static void check_signal(void)
{
    for (int tries = 0; !signals && tries < 10000; tries++)
        usleep(1000);
    CHECK(signals == 1);
    signals = 0;
}

/* The peer sends an urgent byte at each step and waits. */
static void hear_urgent(int fd)
{
    static volatile pid_t thread;
    struct f_owner_ex owner;
    pthread_t made;
    char in[2];
    CHECK(pthread_create(&made, NULL, idle, (void *)&thread) == 0);
    while (!thread)
        usleep(1000);
    for (int step = 0; step < 4; step++) {
        signals = 0;
        /* Nobody, this thread's process, a group of processes, and a thread. */
        if (step == 1)
            CHECK(fcntl(fd, F_SETOWN, getpid()) == 0);
        if (step == 2)
            CHECK(fcntl(fd, F_SETOWN, -getpgrp()) == 0);
        owner = (struct f_owner_ex){F_OWNER_TID, thread};
        if (step == 3)
            CHECK(fcntl(fd, F_SETOWN_EX, &owner) == 0);
        CHECK(send(fd, "k", 1, 0) == 1);
        CHECK(recv(fd, in, 2, MSG_WAITALL) == 2 && !memcmp(in, "xy", 2));
        if (step > 0)
            check_signal();
        check_events(fd);
        CHECK(signals == 0);
        if (step == 3) {
            CHECK(signalled_thread == thread);
            CHECK(fcntl(fd, F_GETOWN_EX, &owner) == 0);
            CHECK(owner.type == F_OWNER_TID && owner.pid == thread);
        }
        CHECK(send(fd, "k", 1, 0) == 1);
    }
    CHECK(fcntl(fd, F_SETOWN, 0) == 0);
    CHECK(pthread_cancel(made) == 0 && pthread_join(made, NULL) == 0);
}

static void say_urgent(int fd)
{
    char in;
    for (int step = 0; step < 4; step++) {
        signals = 0;
        CHECK(recv(fd, &in, 1, 0) == 1 && in == 'k');
        CHECK(send(fd, "xyU", 3, MSG_OOB) == 3);
        CHECK(recv(fd, &in, 1, 0) == 1 && in == 'k');
        /* The group is that of both processes. */
        CHECK(signals == (step == 2));
    }
}

/* Sends one stretch, and receives one of the same length. */
static void talk(int fd, int is_client)
{
    static unsigned char out[MOST], in[MOST];
    size_t sent = 0, got = 0;
    unsigned seed = 7;
    int waits = strcmp(way, "blocking") != 0;
    int set = epoll_create1(0);
    struct epoll_event event = {EPOLLIN | EPOLLOUT, {.fd = fd}};
    if (!strcmp(way, "edges"))
        event.events |= EPOLLET;
    CHECK(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
    if (waits)
        CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
    while (sent < TOTAL || got < TOTAL) {
        size_t len = (size_t)rand_r(&seed) % (rand_r(&seed) % 4 ? 5000 : MOST) + 1;
        ssize_t done;
        int is_stuck = 1;
        if (sent < TOTAL) {
            if (len > TOTAL - sent)
                len = TOTAL - sent;
            for (size_t at = 0; at < len; at++)
                out[at] = octet(sent + at);
            done = send(fd, out, len, 0);
            CHECK(done > 0 || (waits && errno == EAGAIN));
            if (done > 0)
                sent += (size_t)done, is_stuck = 0;
        }
        /* A program that blocks must not wait for more than the other has sent: both send as much. */
        while (got < TOTAL && (waits || got < sent)) {
            size_t most = waits ? TOTAL - got : sent - got;
            done = recv(fd, in, most < MOST ? most : MOST, 0);
            if (done < 0 && waits && errno == EAGAIN)
                break;
            CHECK(done > 0);
            for (ssize_t at = 0; at < done; at++)
                CHECK(in[at] == octet(got + (size_t)at));
            got += (size_t)done, is_stuck = 0;
            if (!waits)
                continue;
        }
        if (waits && is_stuck)
            wait_for(fd, set, got >= TOTAL);
    }
    if (waits)
        CHECK(fcntl(fd, F_SETFL, 0) == 0);
    close(set);
    /* The octet that is urgent leaves the stream. */
    char byte;
    CHECK(send(fd, "abU", 3, MSG_OOB) == 3);
    CHECK(recv(fd, in, 2, MSG_WAITALL) == 2 && !memcmp(in, "ab", 2));
    CHECK(recv(fd, &byte, 1, MSG_OOB) == 1 && byte == 'U');
    get_signals(fd);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGURG, &action, NULL) == 0);
    for (int turn = 0; turn < 2; turn++)
        turn == is_client ? say_urgent(fd) : hear_urgent(fd);
    CHECK(send(fd, "end", 3, 0) == 3);
    CHECK(recv(fd, in, MOST, MSG_PEEK) > 0 && in[0] == 'e');
    CHECK(recv(fd, in, 3, MSG_WAITALL) == 3 && !memcmp(in, "end", 3));
    CHECK(shutdown(fd, SHUT_WR) == 0);
    CHECK(recv(fd, in, MOST, 0) == 0);
    CHECK(send(fd, "x", 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
}

static void nothing(int signal) { (void)signal; }

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    family = atoi(argv[1]);
    way = argv[2];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[3]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    alarm(60);
    CHECK(setpgid(0, 0) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    int fd;
    if (child == 0) {
        for (int tries = 0;; tries++) {
            fd = socket(family, SOCK_STREAM, 0);
            CHECK(fd >= 0);
            if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0)
                break;
            CHECK(errno == ECONNREFUSED && tries < 400);
            close(fd);
            usleep(50000);
        }
        struct sockaddr_in peer;
        socklen_t len = sizeof peer;
        CHECK(getpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_port == at.sin_port);
    } else {
        int one = 1, listener = socket(family, SOCK_STREAM, 0);
        CHECK(listener >= 0);
        CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
        CHECK(bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 5) == 0);
        /* Another socket has the port for IPv6, as in servers that serve both. */
        int six = socket(AF_INET6, SOCK_STREAM, 0);
        struct sockaddr_in6 all = {.sin6_family = AF_INET6, .sin6_port = at.sin_port};
        CHECK(six >= 0 && setsockopt(six, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one) == 0);
        CHECK(bind(six, (struct sockaddr *)&all, sizeof all) == 0 && listen(six, 5) == 0);
        struct pollfd entry = {listener, POLLIN, 0};
        CHECK(poll(&entry, 1, 30000) == 1);
        close(six);
        fd = accept(listener, NULL, NULL);
        CHECK(fd >= 0);
        close(listener);
        /* A copy of the descriptor is the same socket. */
        int copy = dup(fd);
        CHECK(copy >= 0 && close(fd) == 0);
        fd = copy;
        /* A signal without SA_RESTART ends a call that waits; the peer speaks when it hears of that. */
        if (!strcmp(way, "blocking")) {
            struct sigaction action = {.sa_handler = nothing};
            sigaction(SIGUSR1, &action, NULL);
            pid_t bell = fork();
            if (bell == 0) {
                for (int times = 0; times < 50; times++)
                    usleep(20000), kill(getppid(), SIGUSR1);
                _exit(0);
            }
            CHECK(recv(fd, &one, 1, 0) == -1 && errno == EINTR);
            kill(bell, SIGKILL);
            CHECK(waitpid(bell, NULL, 0) == bell);
            signal(SIGUSR1, SIG_IGN);
            CHECK(send(fd, "!", 1, 0) == 1);
        }
    }
    if (child == 0 && !strcmp(way, "blocking")) {
        char byte;
        CHECK(recv(fd, &byte, 1, 0) == 1 && byte == '!');
    }
    talk(fd, child == 0);
    CHECK(close(fd) == 0);
    if (child > 0) {
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        puts("done");
    }
    return 0;
}
