/* What must not harm a connection, or only as it harms one of TCP.
 *
 * faults MODE: prints "done" if all went well. Modes: killed, stopped, receiver-killed, receiver-stopped,
 * stranger, children, descriptors, low, closed, proxy, printed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* Where complaints go: a copy of standard error that stays when that is closed. */
static int complaints = 2;

static void must(int holds, const char *what)
{
    if (!holds) {
        dprintf(complaints, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static unsigned char octet(uint64_t at)
{
    return (at * 0x9e3779b97f4a7c15ul) >> 56;
}

static struct sockaddr_in address;

static int listen_somewhere(void)
{
    socklen_t size = sizeof address;
    address = (struct sockaddr_in) { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(listener >= 0, "socket");
    must(bind(listener, (struct sockaddr *)&address, size) == 0, "bind");
    must(listen(listener, 100) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    return listener;
}

static int connect_there(void)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    must(fd >= 0, "socket");
    must(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    return fd;
}

static void receive(int fd, void *buffer, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t got = recv(fd, (char *)buffer + at, len - at, 0);
        must(got > 0, "recv");
        at += got;
    }
}

/* Sends numbers, and wants each back. */
static void ask(int fd, uint32_t first, uint32_t count)
{
    for (uint32_t number = first; number < first + count; number++) {
        uint32_t came;
        must(send(fd, &number, sizeof number, 0) == sizeof number, "send");
        receive(fd, &came, sizeof came);
        must(came == number, "another number");
    }
}

/* Sends back so many numbers, or all until the end. */
static void answer(int fd, long count)
{
    uint32_t number;
    for (; count != 0; count--) {
        ssize_t got = recv(fd, &number, sizeof number, MSG_WAITALL);
        if (got == 0 && count < 0)
            return;
        must(got == sizeof number, "recv");
        must(send(fd, &number, sizeof number, 0) == sizeof number, "send");
    }
}

static void wait_for(pid_t child)
{
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "a child");
}

/* Sends a stream, and counts in shared memory what calls have accepted. */
static void stream(int fd, volatile uint64_t *accepted, uint64_t total)
{
    static unsigned char buffer[30000];
    for (uint64_t turn = 0; *accepted < total; turn++) {
        size_t len = turn % 3 == 0 ? sizeof buffer : 1 + turn % 1000;
        for (size_t at = 0; at < len; at++)
            buffer[at] = octet(*accepted + at);
        ssize_t sent = send(fd, buffer, len, 0);
        must(sent > 0, "send");
        *accepted += sent;
    }
}

/* Receives a stream until its end, and gives its length. */
static uint64_t drain(int fd)
{
    static unsigned char buffer[50000];
    for (uint64_t at = 0;;) {
        ssize_t got = recv(fd, buffer, sizeof buffer, 0);
        if (got == 0)
            return at;
        must(got > 0, "recv of the stream");
        for (ssize_t i = 0; i < got; i++)
            must(buffer[i] == octet(at + i), "another octet");
        at += got;
    }
}

/* The sender is killed, or stopped for a while, at some point: all that its calls have accepted arrives. */
static void interrupt(int signal, int turn)
{
    volatile uint64_t *accepted =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    volatile uint64_t *has_asked = accepted + 1;
    int listener = listen_somewhere();
    pid_t sender = fork();
    if (sender == 0) {
        int fd = connect_there();
        ask(fd, 0, 20);
        *has_asked = 1;
        stream(fd, accepted, signal == SIGKILL ? UINT64_MAX : 4000000);
        _exit(0);
    }
    int fd = accept(listener, NULL, NULL);
    must(fd >= 0, "accept");
    answer(fd, 20);
    pid_t killer = fork();
    if (killer == 0) {
        /* The end of a process that has not read all that came resets its connections. */
        while (!*has_asked)
            usleep(20);
        usleep(turn * turn * 200);
        kill(sender, signal);
        usleep(30000);
        kill(sender, SIGCONT);
        _exit(0);
    }
    uint64_t came = drain(fd);
    int status;
    must(waitpid(killer, NULL, 0) == killer, "the killer");
    must(waitpid(sender, &status, 0) == sender, "the sender");
    /* The call that was interrupted may have sent what it had not counted. */
    must(came >= *accepted && came <= *accepted + 30000, "octets are lost");
    must(signal == SIGKILL || (status == 0 && came >= 4000000), "the stream is not complete");
    close(fd);
    close(listener);
}

/* The receiver is killed, or stopped for a while, about when the connection is raised: the sender gets an error
 * as from TCP, or everything arrives. */
static void interrupt_receiver(int number, int turn)
{
    enum { TOTAL = 2000000 };
    volatile uint64_t *shared =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    volatile uint64_t *accepted = shared, *is_known = shared + 1;
    int listener = listen_somewhere();
    pid_t receiver = fork();
    if (receiver == 0) {
        int fd = accept(listener, NULL, NULL);
        must(fd >= 0, "accept");
        answer(fd, number == SIGKILL ? 8 : 12);
        _exit(drain(fd) != TOTAL);
    }
    /* It has no copy of the connection. */
    pid_t killer = fork();
    if (killer == 0) {
        while (!*is_known)
            usleep(20);
        usleep(turn * turn * 60);
        kill(receiver, number);
        usleep(30000);
        kill(receiver, SIGCONT);
        _exit(0);
    }
    int fd = connect_there();
    ask(fd, 0, 8);
    *is_known = 1;
    if (number == SIGKILL) {
        static unsigned char buffer[3000];
        uint64_t sent = 0;
        must(signal(SIGPIPE, SIG_IGN) != SIG_ERR, "signal");
        alarm(60);
        for (ssize_t some = 0; some >= 0; sent += some) {
            for (size_t at = 0; at < sizeof buffer; at++)
                buffer[at] = octet(sent + at);
            some = send(fd, buffer, sizeof buffer, 0);
        }
        must(errno == EPIPE || errno == ECONNRESET, "another error than TCP's");
        alarm(0);
    } else {
        ask(fd, 8, 4);
        while (*accepted < TOTAL) {
            unsigned char buffer[1000];
            for (size_t at = 0; at < sizeof buffer; at++)
                buffer[at] = octet(*accepted + at);
            must(send(fd, buffer, sizeof buffer, 0) == sizeof buffer, "send");
            *accepted += sizeof buffer;
        }
    }
    close(fd);
    close(listener);
    int status;
    must(waitpid(killer, NULL, 0) == killer, "the killer");
    must(waitpid(receiver, &status, 0) == receiver, "the receiver");
    must(number == SIGKILL || status == 0, "the stream is not complete");
    munmap((void *)shared, 4096);
}

static uint64_t cookie_of(int fd)
{
    uint64_t cookie;
    socklen_t size = sizeof cookie;
    must(getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0, "SO_COOKIE");
    return cookie;
}

static void put(unsigned char *to, uint64_t number, int len)
{
    for (int at = 0; at < len; at++)
        to[at] = number >> 8 * (len - 1 - at);
}

/* A process of another user takes the name at which the ends of a connection meet, and offers memory to the
 * one that connects there, as specs/quipu-sockets.md says. Whether one accepted. */
static int lies_in_wait(int cookies, int ready)
{
    enum { RING = 256 * 1024, LEN = 4096 + 2 * RING };
    uint64_t pair[2];
    must(setgid(65534) == 0 && setuid(65534) == 0, "setuid");
    for (int at = 0; at < 2; at++)
        must(read(cookies, &pair[at], sizeof pair[at]) == sizeof pair[at], "read");
    if (pair[0] > pair[1]) {
        uint64_t larger = pair[0];
        pair[0] = pair[1];
        pair[1] = larger;
    }
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    int len = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "quipu-sk-%lx-%lx",
        (long)pair[0], (long)pair[1]);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    must(bind(listener, (struct sockaddr *)&name, sizeof name.sun_family + 1 + len) == 0, "bind");
    must(listen(listener, 8) == 0, "listen");
    must(write(ready, "r", 1) == 1, "write");
    struct pollfd waits = { listener, POLLIN, 0 };
    int is_preloaded = getenv("LD_PRELOAD") != NULL;
    /* Without the library nobody comes. */
    int came = poll(&waits, 1, is_preloaded ? 10000 : 100);
    must(came == is_preloaded, "an end that asks");
    if (!came)
        return 0;
    int victim = accept(listener, NULL, NULL);
    must(victim >= 0, "accept");
    int memory = memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    must(ftruncate(memory, LEN) == 0, "ftruncate");
    must(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "seals");
    unsigned char offer[40] = "quipu-sk";
    put(offer + 8, 1, 4);
    put(offer + 12, RING, 4);
    put(offer + 16, pair[0], 8);
    put(offer + 24, pair[1], 8);
    struct iovec vector = { offer, sizeof offer };
    char control[CMSG_SPACE(sizeof memory)] = { 0 };
    struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1,
        .msg_control = control, .msg_controllen = sizeof control };
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr) { CMSG_LEN(sizeof memory), SOL_SOCKET, SCM_RIGHTS };
    memcpy(CMSG_DATA(header), &memory, sizeof memory);
    must(sendmsg(victim, &message, MSG_NOSIGNAL) == sizeof offer, "the offer");
    struct pollfd answers = { victim, POLLIN, 0 };
    must(poll(&answers, 1, 10000) == 1, "an end that closes");
    return read(victim, offer, sizeof offer) > 0;
}

/* Root's connection, and a process of another user. */
static void stranger(void)
{
    int cookies[2], ready[2];
    must(pipe(cookies) == 0 && pipe(ready) == 0, "pipe");
    pid_t other = fork();
    if (other == 0)
        _exit(lies_in_wait(cookies[0], ready[1]));
    int listener = listen_somewhere();
    pid_t server = fork();
    if (server == 0) {
        int fd = accept(listener, NULL, NULL);
        must(fd >= 0, "accept");
        uint64_t cookie = cookie_of(fd);
        must(write(cookies[1], &cookie, sizeof cookie) == sizeof cookie, "write");
        answer(fd, -1);
        _exit(0);
    }
    int fd = connect_there();
    uint64_t cookie = cookie_of(fd);
    must(write(cookies[1], &cookie, sizeof cookie) == sizeof cookie, "write");
    char octet;
    must(read(ready[0], &octet, 1) == 1, "read");
    ask(fd, 0, 5000);
    usleep(50000);
    ask(fd, 5000, 5000);
    close(fd);
    wait_for(server);
    int status;
    must(waitpid(other, &status, 0) == other, "the stranger");
    must(status == 0, "an end has accepted memory of another user");
}

/* A thousand children each take over a connection in the middle. */
static void children(void)
{
    enum { CHILDREN = 1000 };
    int listener = listen_somewhere();
    pid_t client = fork();
    if (client == 0) {
        for (int i = 0; i < CHILDREN; i++) {
            int fd = connect_there();
            ask(fd, i, 24);
            close(fd);
        }
        _exit(0);
    }
    for (int i = 0; i < CHILDREN; i++) {
        int fd = accept(listener, NULL, NULL);
        must(fd >= 0, "accept");
        answer(fd, 8 + i % 12);
        pid_t child = fork();
        if (child == 0) {
            answer(fd, 24 - 8 - i % 12);
            _exit(0);
        }
        close(fd);
        wait_for(child);
    }
    wait_for(client);
}

/* A client that sends many messages, with time to raise the connection in the middle. */
static pid_t ask_in_turns(void)
{
    pid_t client = fork();
    if (client == 0) {
        int fd = connect_there();
        for (int turn = 0; turn < 5; turn++) {
            ask(fd, turn, 50);
            usleep(20000);
        }
        _exit(0);
    }
    return client;
}

/* Many messages between two processes. */
static void exchange(void)
{
    int listener = listen_somewhere();
    pid_t client = ask_in_turns();
    int fd = accept(listener, NULL, NULL);
    must(fd >= 0, "accept");
    answer(fd, -1);
    wait_for(client);
    close(fd);
    close(listener);
}

/* No more descriptors can be made: what needs one fails as without Quipu, and the connection goes on. */
static void descriptors(void)
{
    int listener = listen_somewhere();
    pid_t client = fork();
    if (client == 0) {
        int fd = connect_there();
        ask(fd, 0, 1);
        int second = connect_there();
        ask(fd, 0, 100);
        usleep(50000);
        ask(fd, 0, 100);
        close(second);
        _exit(0);
    }
    int fd = accept(listener, NULL, NULL);
    must(fd >= 0, "accept");
    struct rlimit limit = { fd + 1, fd + 1 };
    must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    answer(fd, 50);
    must(accept(listener, NULL, NULL) == -1 && errno == EMFILE, "accept without room");
    must(socket(AF_INET, SOCK_STREAM, 0) == -1 && errno == EMFILE, "socket without room");
    answer(fd, -1);
    wait_for(client);
}

/* Passes octets on between two connections, in both directions, until one ends. */
static void pass_on(int a, int b)
{
    struct pollfd fds[2] = { { a, POLLIN, 0 }, { b, POLLIN, 0 } };
    char buffer[5000];
    for (;;) {
        must(poll(fds, 2, -1) > 0, "poll");
        for (int i = 0; i < 2; i++) {
            if (fds[i].revents == 0)
                continue;
            ssize_t got = read(fds[i].fd, buffer, sizeof buffer);
            if (got <= 0)
                exit(0);
            must(write(fds[1 - i].fd, buffer, got) == got, "write");
        }
    }
}

/* A proxy without Quipu lies between two ends that have it. */
static void proxy(const char *own)
{
    int back = listen_somewhere();
    char port[10];
    snprintf(port, sizeof port, "%d", ntohs(address.sin_port));
    int front = listen_somewhere();
    pid_t between = fork();
    if (between == 0) {
        char fd[10];
        snprintf(fd, sizeof fd, "%d", front);
        unsetenv("LD_PRELOAD");
        execl(own, own, "between", fd, port, NULL);
        _exit(1);
    }
    pid_t client = ask_in_turns();
    int fd = accept(back, NULL, NULL);
    must(fd >= 0, "accept");
    answer(fd, -1);
    wait_for(client);
    wait_for(between);
}

/* Text that goes to a socket by send, by dprintf, and by standard output that is the socket, in turns. */
static void printed(void)
{
    enum { TURNS = 500 };
    int listener = listen_somewhere();
    pid_t client = fork();
    if (client == 0) {
        int fd = connect_there();
        ask(fd, 0, 40);
        usleep(100000);
        ask(fd, 0, 40);
        for (int turn = 0; turn < 2 * TURNS; turn++) {
            char wanted[80], came[80];
            int len = snprintf(wanted, sizeof wanted, "send %d\nprint %d %d %d %d %.3f\n", turn, turn, 1, 2, 3,
                               turn / 8.0);
            receive(fd, came, len);
            must(memcmp(wanted, came, len) == 0, "other text");
        }
        _exit(0);
    }
    int fd = accept(listener, NULL, NULL);
    must(fd >= 0, "accept");
    answer(fd, 80);
    int output = -1;
    for (int turn = 0; turn < 2 * TURNS; turn++) {
        char text[40];
        int len = snprintf(text, sizeof text, "send %d\n", turn);
        must(send(fd, text, len, 0) == len, "send");
        if (turn == TURNS) {
            output = dup(1);
            must(dup2(fd, 1) == 1, "dup2");
        }
        len = turn < TURNS ? dprintf(fd, "print %d %d %d %d %.3f\n", turn, 1, 2, 3, turn / 8.0)
                           : printf("print %d %d %d %d %.3f\n", turn, 1, 2, 3, turn / 8.0);
        must(len > 0 && fflush(stdout) == 0, "print");
    }
    must(dup2(output, 1) == 1, "dup2");
    wait_for(client);
}

int main(int argc, char **argv)
{
    must(argc >= 2, "MODE");
    const char *mode = argv[1];
    if (strcmp(mode, "between") == 0) {
        int front = accept(atoi(argv[2]), NULL, NULL);
        address = (struct sockaddr_in) { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        address.sin_port = htons(atoi(argv[3]));
        pass_on(front, connect_there());
    }
    int killed = strcmp(mode, "killed") == 0;
    if (killed || strcmp(mode, "stopped") == 0)
        for (int turn = 0; turn < 16; turn++)
            interrupt(killed ? SIGKILL : SIGSTOP, turn);
    else if (strncmp(mode, "receiver-", 9) == 0)
        for (int turn = 0; turn < 16; turn++)
            interrupt_receiver(strcmp(mode, "receiver-killed") ? SIGSTOP : SIGKILL, turn);
    else if (strcmp(mode, "stranger") == 0)
        stranger();
    else if (strcmp(mode, "children") == 0)
        children();
    else if (strcmp(mode, "descriptors") == 0)
        descriptors();
    else if (strcmp(mode, "closed") == 0) {
        must(close_range(3, ~0u, 0) == 0, "close_range");
        exchange();
    } else if (strcmp(mode, "low") == 0) {
        complaints = fcntl(2, F_DUPFD_CLOEXEC, 100);
        int output = fcntl(1, F_DUPFD_CLOEXEC, 101);
        for (int fd = 0; fd < 3; fd++)
            close(fd);
        exchange();
        must(dup2(output, 1) == 1, "dup2");
    } else if (strcmp(mode, "proxy") == 0)
        proxy(argv[0]);
    else if (strcmp(mode, "printed") == 0)
        printed();
    else
        must(0, mode);
    puts("done");
    return 0;
}
