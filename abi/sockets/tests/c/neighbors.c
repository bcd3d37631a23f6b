/* Two processes on one processor, which take turns: each waits for what the other sends.
 *
 * neighbors TRIPS: prints "by memory OCTETS" of one of them, "others PERCENT", the share of the time in which
 * neither had the processor, then "done".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "octets.h"

/* Stays on the first processor that it may use. */
static void choose_processor(void)
{
    cpu_set_t all, one;
    int first = 0;
    must(sched_getaffinity(0, sizeof all, &all) == 0, "sched_getaffinity");
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    must(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
}

static double seconds_of(int who)
{
    struct rusage used;
    must(getrusage(who, &used) == 0, "getrusage");
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec
        + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    must(argc == 2, "TRIPS");
    long trips = strtol(argv[1], NULL, 10);
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    choose_processor();
    double begun = now() - seconds_of(RUSAGE_SELF);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&address, size) == 0, "bind");
    must(listen(listener, 1) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    pid_t child = fork();
    unsigned char octet = 0;
    if (child == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fd, (struct sockaddr *)&address, size) == 0, "connect");
        while (recv(fd, &octet, 1, 0) == 1) {
            octet++;
            must(send(fd, &octet, 1, 0) == 1, "send");
        }
        return 0;
    }
    int fd = accept(listener, NULL, NULL);
    for (long i = 0; i < trips; i++) {
        octet = i;
        must(send(fd, &octet, 1, 0) == 1 && recv(fd, &octet, 1, 0) == 1, "a round trip");
        must(octet == (unsigned char)(i + 1), "another octet");
    }
    print_octets();
    close(fd);
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
    double had = seconds_of(RUSAGE_SELF) + seconds_of(RUSAGE_CHILDREN);
    printf("others %d\n", (int)(100 - 100 * had / (now() - begun)));
    printf("done\n");
    return 0;
}
