/* The process at the other end writes into the memory that both share. Calls of this end that must not block
 * stay short: hostile MODE prints "done" if they do. Modes: flips, early, locks.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#include "octets.h"

/* The words of a direction, and of an end: see specs/quipu-sockets.md. */
struct direction {
    _Atomic uint64_t written, from, base, unused[5], read, wish, more[6];
};
struct end {
    /* Here was the lock to send. */
    _Atomic uint32_t unused_now, closed;
    _Atomic uint64_t sent;
    uint64_t unused[6];
};
struct header {
    struct direction directions[2];
    struct end ends[2];
};

static const char *mode;
static int fd;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/* The memory, if the connection is raised. */
static struct header *find(void)
{
    char line[500];
    unsigned long at = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    must(maps != NULL, "maps");
    while (fgets(line, sizeof line, maps) != NULL)
        if (strstr(line, "memfd:quipu-sockets") != NULL)
            sscanf(line, "%lx", &at);
    fclose(maps);
    return (struct header *)at;
}

static void echo(int turns, int first)
{
    uint32_t number = 0;
    for (int turn = 0; turn < turns; turn++) {
        if (first)
            must(send(fd, &number, 4, 0) == 4, "send");
        must(recv(fd, &number, 4, MSG_WAITALL) == 4, "recv");
        if (!first)
            must(send(fd, &number, 4, 0) == 4, "send");
    }
}

static uint64_t open_to(uint64_t position)
{
    return position << 2 | 2;
}

static void attack(void)
{
    struct header *memory = find();
    int own = memory->ends[1].sent > memory->ends[0].sent;
    struct direction *in = &memory->directions[own];
    if (strcmp(mode, "flips") == 0) {
        uint64_t at = in->read >> 10;
        in->from = in->base = 0;
        in->written = open_to(at + 200000);
        for (uint64_t turn = 0;; turn++) {
            in->from = in->base = 0;
            in->written = open_to(at + 200000);
            in->read = at << 10 | (turn % 500) << 1;
            for (volatile int wait = 0; wait < 2000; wait++)
                ;
        }
    }
    if (strcmp(mode, "early") == 0) {
        uint64_t at = in->read >> 10;
        for (;;) {
            in->from = at + 1000000;
            in->read = at << 10;
        }
    }
    if (strcmp(mode, "locks") == 0)
        for (;;)
            memory->ends[1 - own].unused_now = 1;
}

static void suffer(void)
{
    static char room[200000];
    double begun = now();
    int calls = 0;
    while (now() - begun < 2) {
        if (strcmp(mode, "flips") == 0 || strcmp(mode, "early") == 0)
            recv(fd, room, sizeof room, MSG_DONTWAIT);
        else
            send(fd, room, 100, MSG_DONTWAIT | MSG_NOSIGNAL);
        calls++;
        usleep(1000);
    }
    must(calls > 150, "calls take long");
}

int main(int count, char **arguments)
{
    must(count == 2, "a mode");
    mode = arguments[1];
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fd, (struct sockaddr *)&address, size) == 0, "connect");
        send(fd, "more", 4, 0);
    } else {
        fd = accept(listener, NULL, NULL);
        char more[4];
        recv(fd, more, 4, MSG_WAITALL);
    }
    echo(20000, child == 0);
    if (child == 0) {
        must(find() != NULL, "raised");
        attack();
    }
    usleep(100000);
    suffer();
    kill(child, SIGKILL);
    puts("done");
}
