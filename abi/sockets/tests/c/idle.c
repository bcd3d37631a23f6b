/* Many connections between two processes, each of which carries some messages and is then idle.
 *
 * idle CONNECTIONS SHORT LONG LENGTH RAISED MEMORY: SHORT messages of one octet are sent back on each
 * connection. Then the server waits until RAISED connections are raised, LONG messages of LENGTH octets follow,
 * and it waits until both processes use no more than MEMORY octets, with their page tables. It waits for no
 * longer than SECONDS each time. Prints "raised COUNT" and "memory OCTETS". Pages of files do not count: how
 * many of a library are mapped depends on what lies in the page cache.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void must(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static void receive(int fd, char *buffer, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t got = recv(fd, buffer + at, len - at, 0);
        must(got > 0, "recv");
        at += got;
    }
}

static void send_all(int fd, const char *buffer, size_t len)
{
    must(send(fd, buffer, len, 0) == (ssize_t)len, "send");
}

/* The value of a line in a file of /proc, in KB. */
static long value(pid_t process, const char *file, const char *name)
{
    char path[60], line[200];
    long sum = 0, number;
    snprintf(path, sizeof path, "/proc/%d/%s", process, file);
    FILE *data = fopen(path, "r");
    must(data != NULL, path);
    while (fgets(line, sizeof line, data) != NULL)
        if (strncmp(line, name, strlen(name)) == 0 && sscanf(line + strlen(name), "%ld", &number) == 1)
            sum += number;
    fclose(data);
    return sum;
}

enum { SECONDS = 30, STEP_US = 20000 };

static int raised(void)
{
    char path[100], line[400];
    int sum = 0, reason;
    snprintf(path, sizeof path, "/dev/shm/quipu-sockets-%d/%d", (int)geteuid(), (int)getpid());
    FILE *report = fopen(path, "r");
    while (report != NULL && fgets(line, sizeof line, report) != NULL)
        if (sscanf(line, "totals %*d %d", &reason) == 1)
            sum = reason;
    return sum;
}

/* Octets that both processes use. */
static long memory(pid_t child)
{
    long sum = 0;
    pid_t both[2] = { getpid(), child };
    for (int i = 0; i < 2; i++)
        sum += value(both[i], "smaps_rollup", "Pss_Anon:") + value(both[i], "smaps_rollup", "Pss_Shmem:") +
               value(both[i], "status", "VmPTE:");
    return sum * 1024;
}

/* The client sends messages, which the server sends back. */
static void exchange(int is_client, const int *fds, int count, int messages, char *buffer, size_t len)
{
    for (int turn = 0; turn < messages; turn++)
        for (int i = 0; i < count; i++) {
            if (is_client)
                send_all(fds[i], buffer, len);
            receive(fds[i], buffer, len);
            if (!is_client)
                send_all(fds[i], buffer, len);
        }
}

int main(int argc, char **argv)
{
    must(argc == 7, "CONNECTIONS SHORT LONG LENGTH RAISED MEMORY");
    int count = atoi(argv[1]), messages = atoi(argv[2]);
    int long_messages = atoi(argv[3]), needed = atoi(argv[5]);
    size_t len = strtoul(argv[4], NULL, 10);
    long most = atol(argv[6]);
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    must(limit.rlim_cur > (rlim_t)count + 20, "too few descriptors");
    char *buffer = malloc(len);
    memset(buffer, 1, len);
    int *fds = calloc(count, sizeof *fds), channel[2];
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&address, size) == 0, "bind");
    must(listen(listener, 100) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    must(pipe(channel) == 0, "pipe");
    pid_t child = fork();
    for (int i = 0; i < count; i++) {
        if (child == 0) {
            fds[i] = socket(AF_INET, SOCK_STREAM, 0);
            must(connect(fds[i], (struct sockaddr *)&address, size) == 0, "connect");
        } else {
            fds[i] = accept(listener, NULL, NULL);
            must(fds[i] >= 0, "accept");
        }
    }
    exchange(child == 0, fds, count, messages, buffer, 1);
    for (int waited = 0; child != 0 && raised() < needed && waited < SECONDS * 1000000; waited += STEP_US)
        usleep(STEP_US);
    exchange(child == 0, fds, count, long_messages, buffer, len);
    if (child == 0) {
        close(channel[1]);
        must(read(channel[0], buffer, 1) == 0, "the other process");
        return 0;
    }
    long used = memory(child);
    for (int waited = 0; used > most && waited < SECONDS * 1000000; waited += STEP_US) {
        usleep(STEP_US);
        used = memory(child);
    }
    printf("raised %d\nmemory %ld\n", raised(), used);
    close(channel[0]);
    close(channel[1]);
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the client");
    return 0;
}
