/* A handler of a signal closes sockets of an epoll set while its thread is in calls of that set. closes any:
 * prints "done" if the thread goes on.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "octets.h"

#define MANY 400

static int fd[2], extra[MANY];
static volatile int closed;

static void *echo(void *unused)
{
    char octet;
    while (recv(fd[1], &octet, 1, 0) == 1)
        must(send(fd[1], &octet, 1, 0) == 1, "send");
    return unused;
}

static void on_alarm(int number)
{
    (void)number;
    if (closed < MANY)
        close(extra[closed++]);
}

static void add(int set, int socket)
{
    struct epoll_event event = { .events = EPOLLIN, .data.fd = socket };
    must(epoll_ctl(set, EPOLL_CTL_ADD, socket, &event) == 0, "epoll_ctl");
}

/* Waits for the echo of one octet. */
static void turn(int set)
{
    char octet = 1;
    must(send(fd[0], &octet, 1, 0) == 1, "send");
    do {
        struct epoll_event events[8];
        epoll_wait(set, events, 8, -1);
    } while (recv(fd[0], &octet, 1, MSG_DONTWAIT) != 1);
}

int main(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), set = epoll_create1(0);
    must(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 9) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    fd[0] = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(fd[0], (struct sockaddr *)&address, size) == 0, "connect");
    fd[1] = accept(listener, NULL, NULL);
    add(set, fd[0]);
    for (int index = 0; index < MANY; index++)
        add(set, extra[index] = socket(AF_INET, SOCK_STREAM, 0));
    pthread_t thread;
    must(pthread_create(&thread, NULL, echo, NULL) == 0, "thread");
    struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
    struct itimerval time = { { 0, 2000 }, { 0, 300000 } };
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &time, NULL);
    while (closed < MANY)
        turn(set);
    puts("done");
    fflush(stdout);
    _exit(0);
}
