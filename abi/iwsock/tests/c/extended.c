/* Two processes that switch a connection to iWARP: messages, writes, reads, events, errors. With arguments
 * it measures instead: "latency" or "bandwidth", gather, progress, CRC, bytes, count. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <quipu/sockets.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LEN 300000

static struct iwarp_mode mode;
static char *memory;
static const char *side = "server";

static void must(int ok, const char *what) {
    if (ok) return;
    printf("FAILED: %s: %s, errno %d (gather %d, progress %d, no_crc %d)\n", side, what, errno, mode.gather,
           mode.progress, mode.no_crc);
    fflush(stdout);
    _exit(1);
}

static void fill(char *at, int len, int seed) {
    for (int place = 0; place < len; place++) at[place] = (char)((place * 31 >> 2) ^ seed);
}

static int same(const char *at, int len, int seed) {
    for (int place = 0; place < len; place++)
        if (at[place] != (char)((place * 31 >> 2) ^ seed)) return 0;
    return 1;
}

static void read_all(int fd, void *into, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t some = read(fd, (char *)into + done, len - done);
        must(some > 0, "read");
        done += some;
    }
}

/* Waits by poll(2), then takes one completion, which must be of this work. */
static void done(int fd, int receives, uint64_t id, uint32_t length, int status) {
    struct iwarp_completion it = {0};
    for (int turn = 0; turn < 10000; turn++) {
        int count = (receives ? iwarp_recv_done : iwarp_send_done)(fd, &it, 1, 0);
        must(count >= 0, "a completion");
        if (count == 1) {
            must(it.id == id && it.length == length && it.status == status, "another completion");
            return;
        }
        struct pollfd entry = {.fd = fd, .events = POLLIN};
        /* A send may wait for room only: then nothing can be read. */
        must(poll(&entry, 1, receives ? 10000 : 1) >= 0, "poll");
    }
    must(0, "no completion");
}

struct place {
    uint64_t address;
    uint32_t stag, read_only;
};

static void serve(int fd) {
    struct place place = {.address = (uintptr_t)memory};
    must(setsockopt(fd, SOL_IWARP, IWARP_MODE, &mode, sizeof mode) == 0, "IWARP_MODE");
    must(iwarp_register(fd, memory, LEN, IWARP_REMOTE_READ | IWARP_REMOTE_WRITE, &place.stag) == 0, "register");
    must(iwarp_register(fd, memory, LEN, IWARP_REMOTE_READ, &place.read_only) == 0, "register");
    struct iovec parts[2] = {{memory + 400000, 1000}, {memory + 500000, LEN}};
    must(iwarp_post_recv(fd, parts, 2, 70) == 0, "post_recv");
    must(write(fd, &place, sizeof place) == sizeof place, "write");
    done(fd, 1, 70, LEN, IWARP_SUCCESS);
    must(same(memory + 400000, 1000, 1), "the first part");
    char whole[LEN];
    memcpy(whole, memory + 400000, 1000);
    memcpy(whole + 1000, memory + 500000, LEN - 1000);
    must(same(whole, LEN, 1), "the message");
    char word[6];
    read_all(fd, word, 6);
    must(memcmp(word, "after", 6) == 0 && same(memory + 7, LEN - 7, 2), "what was written");
    /* The client violates the read-only region; then the connection is over. */
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    must(poll(&entry, 1, 10000) == 1 && read(fd, word, 6) == 0, "the end of the stream");
    must(iwarp_post_send(fd, parts, 1, 1) == -1 && errno == EPROTO, "a send after the end");
    must(close(fd) == 0, "close");
}

static void use(int fd) {
    int on = 0;
    socklen_t len = sizeof on;
    side = "client";
    must(setsockopt(fd, SOL_IWARP, IWARP_MODE, &mode, sizeof mode) == 0, "IWARP_MODE");
    must(getsockopt(fd, SOL_IWARP, IWARP_MODE, &on, &len) == 0 && on == 1, "getsockopt");
    must(setsockopt(fd, SOL_IWARP, IWARP_MODE, &mode, sizeof mode) == -1 && errno == EISCONN, "twice");
    struct sockaddr_in peer;
    len = sizeof peer;
    must(getpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_family == AF_INET, "getpeername");
    struct place place;
    read_all(fd, &place, sizeof place);
    fill(memory, LEN, 1);
    struct iovec parts[3] = {{memory, 10}, {memory + 10, 200000}, {memory + 200010, LEN - 200010}};
    must(iwarp_post_send(fd, parts, 3, 1) == 0, "post_send");
    done(fd, 0, 1, LEN, IWARP_SUCCESS);
    fill(memory, LEN, 2);
    struct iovec part = {memory, LEN - 7};
    uint32_t sink;
    must(iwarp_post_read(fd, memory + 400000, LEN, place.stag, place.address, 9) == -1 && errno == EFAULT,
         "a read to memory that is not registered");
    must(iwarp_register(fd, memory + 400000, LEN, 0, &sink) == 0, "register");
    must(iwarp_post_write(fd, &part, 1, place.stag, place.address + 7, 2) == 0, "post_write");
    must(iwarp_post_read(fd, memory + 400000, LEN - 7, place.stag, place.address + 7, 3) == 0, "post_read");
    done(fd, 0, 2, LEN - 7, IWARP_SUCCESS);
    done(fd, 0, 3, LEN - 7, IWARP_SUCCESS);
    must(same(memory + 400000, LEN - 7, 2), "what was read");
    must(write(fd, "after", 6) == 6, "write");
    must(iwarp_post_write(fd, &part, 1, place.read_only, place.address, 4) == 0, "post_write");
    /* A write is complete when TCP has it. A later read hears of the fault, unless the Terminate came first. */
    int posted = 1;
    if (iwarp_post_read(fd, memory + 400000, 8, place.stag, place.address, 5) == 0) posted = 2;
    else must(errno == EREMOTEIO, "post_read after a fault");
    struct iwarp_completion it[2];
    for (int count = 0; count < posted;) {
        int some = iwarp_send_done(fd, it + count, posted - count, 10000);
        must(some > 0, "the last completions");
        count += some;
    }
    must(it[0].id == 4 && (posted == 1 || it[1].id == 5), "the order of completions");
    must(posted == 1 || it[0].status + it[1].status == IWARP_REMOTE_ACCESS + (it[0].status != 0), "the fault");
    must(iwarp_send_done(fd, it, 1, 1000) == -1 && errno == EREMOTEIO, "after a Terminate");
    must(close(fd) == 0, "close");
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void connect_both(int fds[2]) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(listen(listener, 1) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(fds[0], (struct sockaddr *)&address, len) == 0, "connect");
    fds[1] = accept(listener, NULL, NULL);
    must(fds[1] >= 0, "accept");
    close(listener);
}

/* One turn of a measurement: sends or receives a message, in the mode or, if "plain", without. */
static int plain;

static void put(int fd, size_t size) {
    struct iovec parts[2] = {{memory, size / 2}, {memory + size / 2, size - size / 2}};
    struct iwarp_completion it;
    if (plain) {
        for (size_t sent = 0; sent < size;) {
            ssize_t some = write(fd, memory + sent, size - sent);
            must(some > 0, "write");
            sent += some;
        }
        return;
    }
    must(iwarp_post_send(fd, parts, 2, 1) == 0, "post_send");
    must(iwarp_send_done(fd, &it, 1, -1) == 1, "send_done");
}

static void get(int fd, size_t size) {
    struct iovec part = {memory, size};
    struct iwarp_completion it;
    if (plain) return read_all(fd, memory, size);
    must(iwarp_post_recv(fd, &part, 1, 2) == 0, "post_recv");
    must(iwarp_recv_done(fd, &it, 1, -1) == 1 && it.status == IWARP_SUCCESS, "recv_done");
}

static int measure(char **args) {
    int fds[2], is_latency = strcmp(args[1], "latency") == 0;
    plain = strcmp(args[2], "plain") == 0;
    mode = (struct iwarp_mode){.gather = atoi(args[2]), .progress = atoi(args[3]), .no_crc = !atoi(args[4])};
    size_t size = strtoul(args[5], NULL, 0);
    long count = atol(args[6]);
    connect_both(fds);
    int one = 1;
    for (int end = 0; end < 2; end++) setsockopt(fds[end], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pid_t child = fork();
    int fd = fds[child == 0];
    close(fds[child != 0]);
    if (!plain) must(setsockopt(fd, SOL_IWARP, IWARP_MODE, &mode, sizeof mode) == 0, "IWARP_MODE");
    double begin = now();
    for (long turn = 0; turn < count; turn++) {
        if (child == 0) get(fd, size);
        else put(fd, size);
        if (is_latency && child == 0) put(fd, size);
        else if (is_latency) get(fd, size);
    }
    /* The last message has arrived when the answer comes. */
    if (!is_latency && child == 0) put(fd, 1);
    else if (!is_latency) get(fd, 1);
    double took = now() - begin;
    close(fd);
    if (child == 0) _exit(0);
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the other process failed");
    if (is_latency) printf("%.3f\n", took / count / 2);
    else printf("%.3f\n", size * 8.0 * count / took);
    return 0;
}

int main(int count, char **args) {
    must((memory = calloc(1, 1 << 21)) != NULL, "memory");
    alarm(60);
    if (count == 7) return measure(args);
    int fds[2], one = 1;
    connect_both(fds);
    must(setsockopt(fds[0], SOL_IWARP, 77, &one, sizeof one) == -1 && errno == ENOPROTOOPT, "another option");
    must(iwarp_post_send(fds[0], NULL, 0, 0) == -1 && errno == ENOTCONN, "a socket without the mode");
    must(setsockopt(1, SOL_IWARP, IWARP_MODE, &one, sizeof one) == -1, "no socket");
    for (int end = 0; end < 2; end++) close(fds[end]);
    for (int what = 0; what < 12; what++) {
        mode = (struct iwarp_mode){.gather = what / 4, .progress = what & 1, .no_crc = what >> 1 & 1};
        connect_both(fds);
        if (what == 0) {
            /* A socket that has not yet been switched is an ordinary one. */
            char octet;
            must(write(fds[0], "x", 1) == 1 && read(fds[1], &octet, 1) == 1 && octet == 'x', "before the mode");
        }
        pid_t child = fork();
        if (child == 0) {
            close(fds[1]);
            use(fds[0]);
            _exit(0);
        }
        close(fds[0]);
        serve(fds[1]);
        int status;
        must(waitpid(child, &status, 0) == child && status == 0, "the client failed");
    }
    printf("done\n");
    return 0;
}
