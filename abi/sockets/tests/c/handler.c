/* A signal handler sends on the socket on which the interrupted thread is sending: it cannot have the lock of
 * the ring, so the connection returns to TCP. TCP_NODELAY, which the library had set, is the program's again. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LEN 60000
/* Reason::Resources in a process's report. */
#define RESOURCES 8

static int fd[2];
static char octets[LEN];

static void must(int ok, const char *what) {
    if (ok) return;
    printf("FAILED: %s\n", what);
    fflush(stdout);
    _exit(1);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void *receive(void *argument) {
    static char room[LEN];
    while (recv(fd[1], room, sizeof room, 0) > 0) {
    }
    return argument;
}

static void on_alarm(int number) {
    (void)number;
    send(fd[0], octets, 1, MSG_DONTWAIT);
}

/* Whether this process's report says that a connection has left its ring since the lock was not to be had. */
static int has_left(void) {
    char path[100], line[400];
    int found = 0;
    snprintf(path, sizeof path, "/dev/shm/quipu-sockets-%d/%d", (int)geteuid(), (int)getpid());
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        int reason = -1;
        if (sscanf(line, "%*d %*s %*s %d", &reason) == 1 && reason == RESOURCES) found = 1;
    }
    if (file != NULL) fclose(file);
    return found;
}

static int nodelay(void) {
    int value = -1;
    socklen_t len = sizeof value;
    must(getsockopt(fd[0], IPPROTO_TCP, TCP_NODELAY, &value, &len) == 0, "getsockopt");
    return value;
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(listen(listener, 1) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &len);
    fd[0] = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(fd[0], (struct sockaddr *)&address, len) == 0, "connect");
    fd[1] = accept(listener, NULL, NULL);
    must(fd[1] >= 0, "accept");
    for (int round = 0; round < 40; round++) {
        for (int end = 0; end < 2; end++) {
            char octet = 0;
            must(write(fd[end], &octet, 1) == 1 && read(fd[1 - end], &octet, 1) == 1, "ping-pong");
        }
        usleep(2000);
    }
    pthread_t reader;
    must(pthread_create(&reader, NULL, receive, NULL) == 0, "pthread_create");
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    double begin = seconds(), looked = begin;
    int left = 0;
    while (!left && seconds() - begin < 10) {
        must(send(fd[0], octets, sizeof octets, 0) > 0, "send");
        if (seconds() - looked > 0.1) {
            left = has_left();
            looked = seconds();
        }
    }
    setitimer(ITIMER_REAL, &never, NULL);
    must(nodelay() == 0, "TCP_NODELAY is the library's");
    shutdown(fd[0], SHUT_WR);
    pthread_join(reader, NULL);
    printf("%s\ndone\n", left ? "left" : "stayed");
    return 0;
}
