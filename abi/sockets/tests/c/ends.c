/* How calls and descriptors end while octets are in the ring. ends MODE prints "done" if they end as without
 * the library. Modes: cancel, limit, reuse, forked, late, shut, half, many.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "octets.h"

static int listener, fd[2];
static struct sockaddr_in address;

static void connect_pair(int pair[2])
{
    int small = 4096;
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    must(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0, "SO_SNDBUF");
    must(connect(pair[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    pair[1] = accept(listener, NULL, NULL);
    must(pair[1] >= 0, "accept");
}

static void *echo(void *endless)
{
    char octet;
    for (int turn = 0; endless != NULL || turn < 10000; turn++) {
        must(recv(fd[1], &octet, 1, 0) == 1, "recv");
        must(send(fd[1], &octet, 1, 0) == 1, "send");
    }
    return NULL;
}

static void ask(int count)
{
    char octet = 1;
    for (int turn = 0; turn < count; turn++) {
        must(send(fd[0], &octet, 1, 0) == 1, "send");
        must(recv(fd[0], &octet, 1, 0) == 1, "recv");
    }
}

static pthread_t begin(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    must(pthread_create(&thread, NULL, function, argument) == 0, "thread");
    return thread;
}

static char much[16 << 20];

/* Sends more than anything between the ends has room for. */
static void *send_much(void *unused)
{
    send(fd[0], much, sizeof much, MSG_NOSIGNAL);
    return unused;
}

/* A thread that is stuck in a call ends when it is cancelled. */
static void cancel(void)
{
    pthread_t sender = begin(send_much, NULL);
    usleep(300000);
    pthread_cancel(sender);
    void *result;
    must(pthread_join(sender, &result) == 0 && result == PTHREAD_CANCELED, "cancelled");
}

/* So does a call whose time is over. */
static void limit(void)
{
    struct timeval time = { .tv_usec = 300000 };
    must(setsockopt(fd[0], SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time) == 0, "SO_SNDTIMEO");
    ssize_t sent = 0;
    for (int turn = 0; turn < 20 && sent >= 0; turn++)
        sent = send(fd[0], much, sizeof much, 0);
    must(sent == -1 && errno == EAGAIN, "the last call");
}

/* What a thread is sending goes to no other connection whose descriptor has the same number. */
static void reuse(void)
{
    int other[2], number = fd[0];
    memset(much, 'x', sizeof much);
    begin(send_much, NULL);
    usleep(300000);
    close(fd[0]);
    connect_pair(other);
    must(other[0] == number, "the same number");
    char octet;
    for (int turn = 0; turn < 50; turn++) {
        usleep(10000);
        must(recv(other[1], &octet, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN, "nothing");
    }
}

/* A child of fork(2) makes new sockets whatever other threads of its parent do at that moment. */
static void forked(void)
{
    begin(echo, "for ever");
    for (int turn = 0; turn < 50; turn++) {
        ask(turn * 7);
        usleep(turn % 3 * 20);
        pid_t child = fork();
        if (child == 0) {
            alarm(5);
            close(fd[0]);
            close(fd[1]);
            close(listener);
            for (int count = 0; count < 5; count++)
                must(socket(AF_INET, SOCK_STREAM, 0) >= 0, "socket");
            _exit(0);
        }
        int status;
        must(waitpid(child, &status, 0) == child && status == 0, "the child");
    }
}

/* A descriptor that was closed past the library, with octets unread: the next of that number is as new. */
static void late(void)
{
#ifdef __x86_64__
    struct linger linger = { 1, 1 };
    socklen_t size = sizeof linger;
    long result, number = SYS_close;
    must(send(fd[0], much, 100, 0) == 100, "send");
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"((long)fd[1]) : "rcx", "r11", "memory");
    int next = socket(AF_INET, SOCK_STREAM, 0);
    must(next == fd[1], "the same number");
    must(getsockopt(next, SOL_SOCKET, SO_LINGER, &linger, &size) == 0, "SO_LINGER");
    must(linger.l_onoff == 0, "not to be reset when it is closed");
#endif
}

/* What was sent before shutdown(2) arrives, also where the receiver comes late. */
static void shut(void)
{
    ssize_t sent = 0, got, sum = 0;
    memset(much, 'x', sizeof much);
    sent = send(fd[0], much, 200000, MSG_DONTWAIT);
    must(sent > 0, "send");
    must(shutdown(fd[0], SHUT_WR) == 0, "shutdown");
    usleep(300000);
    while ((got = recv(fd[1], much, sizeof much, 0)) > 0)
        sum += got;
    must(got == 0, "the end");
    must(sum == sent, "all of it");
}

static void *send_more(void *place)
{
    for (int turn = 0; turn < 100; turn++)
        must(send(fd[0], (char *)place + turn * 1000, 1000, 0) == 1000, "send");
    must(shutdown(fd[0], SHUT_WR) == 0, "shutdown");
    return NULL;
}

/* The same by calls that only the kernel has. */
static void *send_many(void *place)
{
    for (int turn = 0; turn < 100; turn++) {
        struct iovec piece = { (char *)place + turn * 1000, 1000 };
        struct mmsghdr message = { .msg_hdr = { .msg_iov = &piece, .msg_iovlen = 1 } };
        must(sendmmsg(fd[0], &message, 1, 0) == 1 && message.msg_len == 1000, "sendmmsg");
    }
    must(shutdown(fd[0], SHUT_WR) == 0, "shutdown");
    return NULL;
}

/* The order stays when the other end has nothing to say any more, but reads on. */
static void half(int many)
{
    static char came[1 << 20];
    for (size_t at = 0; at < sizeof much; at++)
        much[at] = octet(at);
    ssize_t sent = send(fd[0], much, 50000, MSG_DONTWAIT), sum = 0, got;
    must(sent > 0, "send");
    usleep(50000);
    must(many || shutdown(fd[1], SHUT_WR) == 0, "shutdown");
    begin(many ? send_many : send_more, much + sent);
    usleep(300000);
    while ((got = recv(fd[1], came + sum, 1000, 0)) > 0) {
        sum += got;
        usleep(500);
    }
    must(got == 0 && sum == sent + 100000, "all of it");
    must(memcmp(came, much, sum) == 0, "in order");
}

int main(int count, char **arguments)
{
    must(count == 2, "a mode");
    const char *mode = arguments[1];
    socklen_t size = sizeof address;
    address = (struct sockaddr_in) { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    alarm(20);
    /* The kernel has less room than the ring. */
    int small = 4096;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    must(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0, "SO_RCVBUF");
    must(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 9) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    connect_pair(fd);
    pthread_t thread = begin(echo, NULL);
    ask(10000);
    pthread_join(thread, NULL);
    if (strcmp(mode, "cancel") == 0)
        cancel();
    if (strcmp(mode, "limit") == 0)
        limit();
    if (strcmp(mode, "reuse") == 0)
        reuse();
    if (strcmp(mode, "forked") == 0)
        forked();
    if (strcmp(mode, "late") == 0)
        late();
    if (strcmp(mode, "shut") == 0)
        shut();
    if (strcmp(mode, "half") == 0 || strcmp(mode, "many") == 0)
        half(mode[0] == 'm');
    puts("done");
}
