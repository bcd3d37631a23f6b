/* A sockets program that knows nothing of SDP: a server that sends back what comes, in several ways, and a client
 * that checks it. `serve WAY PORT`. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CLIENTS 3
#define TOTAL 300000

static const char *way;

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s: line %d: %s: %s\n", way, __LINE__, #what, strerror(errno));       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static int is(const char *name) { return strcmp(way, name) == 0; }

/* Each server process ends with its connection. */
static int ends_itself(void)
{
    return is("exec") || is("cloexec") || is("killed") || is("alarm") || is("exit") || is("atexit");
}

static void serve_plain(int fd)
{
    char buffer[7000];
    ssize_t len;
    while ((len = read(fd, buffer, sizeof buffer)) > 0)
        for (ssize_t sent = 0, more; sent < len; sent += more)
            CHECK((more = write(fd, buffer + sent, len - sent)) > 0);
    CHECK(len == 0);
}

/* The C library has closed the connection: another file that gets its number is none. */
static int is_no_connection(int fd)
{
    struct sockaddr_in peer;
    socklen_t len = sizeof peer;
    return fd >= 0 && getpeername(fd, (struct sockaddr *)&peer, &len) < 0 && errno == ENOTSOCK;
}

static void serve_stdio(int fd)
{
    FILE *in = fdopen(dup(fd), "r"), *out = fdopen(fd, "w");
    int c;
    CHECK(in && out);
    while ((c = getc(in)) != EOF)
        CHECK(putc(c, out) != EOF);
    CHECK(fclose(out) == 0 && fclose(in) == 0);
    int null = open("/dev/null", O_RDONLY);
    CHECK(null <= fd && is_no_connection(null) && close(null) == 0);
}

static void serve_many(int fd)
{
    static char buffer[2][5000];
    struct iovec pieces[2];
    struct mmsghdr list[2];
    memset(list, 0, sizeof list);
    for (;;) {
        for (int i = 0; i < 2; i++) {
            pieces[i] = (struct iovec){buffer[i], sizeof buffer[i]};
            list[i].msg_hdr.msg_iov = &pieces[i];
            list[i].msg_hdr.msg_iovlen = 1;
        }
        int count = recvmmsg(fd, list, 2, MSG_WAITFORONE, NULL);
        CHECK(count >= 1);
        int filled = 0;
        while (filled < count && list[filled].msg_len > 0) {
            pieces[filled].iov_len = list[filled].msg_len;
            filled++;
        }
        if (filled > 0)
            CHECK(sendmmsg(fd, list, filled, 0) == filled);
        if (filled < count)
            return;
    }
}

static void serve_splice(int fd)
{
    int pipes[2];
    ssize_t len;
    CHECK(pipe(pipes) == 0);
    while ((len = splice(fd, NULL, pipes[1], NULL, 30000, 0)) > 0)
        while (len > 0) {
            ssize_t more = splice(pipes[0], NULL, fd, NULL, len, 0);
            CHECK(more > 0);
            len -= more;
        }
    CHECK(len == 0);
}

/* dprintf has no way to say a zero but %c. */
static void serve_dprintf(int fd)
{
    char buffer[7000];
    ssize_t len;
    while ((len = read(fd, buffer, sizeof buffer)) > 0)
        for (ssize_t sent = 0; sent < len;) {
            int text = strnlen(buffer + sent, len - sent);
            CHECK(text > 0 ? dprintf(fd, "%.*s", text, buffer + sent) == text
                           : dprintf(fd, "%c", 0) == 1);
            sent += text > 0 ? text : 1;
        }
    CHECK(len == 0);
}

/* The connection is descriptor 0. */
static void serve_zero(int fd)
{
    char buffer[1000];
    size_t len;
    CHECK(fd == 0);
    while ((len = fread(buffer, 1, sizeof buffer, stdin)) > 0)
        CHECK(write(0, buffer, len) == (ssize_t)len);
    CHECK(freopen("/dev/null", "r", stdin) && is_no_connection(0));
}

/* Another process gets the connection in a message. */
static void serve_passed(int fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    char byte = 0;
    int pair[2], status;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(close(fd) == 0 && close(pair[0]) == 0 && recvmsg(pair[1], &message, 0) == 1);
        memcpy(&fd, CMSG_DATA(&control.head), sizeof fd);
        serve_plain(fd);
        _exit(0);
    }
    control.head.cmsg_level = SOL_SOCKET;
    control.head.cmsg_type = SCM_RIGHTS;
    control.head.cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    CHECK(sendmsg(pair[0], &message, 0) == 1 && close(pair[0]) == 0 && close(pair[1]) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static int copy_to(int fd, int to)
{
    if (is("dup2"))
        return dup2(fd, to);
    if (is("dup3"))
        return dup3(fd, to, 0);
    CHECK(close(to) == 0);
    return is("dup") ? dup(fd) : fcntl(fd, F_DUPFD, to);
}

/* Descriptors 0 and 1 are the connection for a while, of which a part was read and sent before. */
static void serve_standard(int fd)
{
    char first[1000];
    int in = fcntl(0, F_DUPFD, 10), out = fcntl(1, F_DUPFD, 10), c;
    CHECK(in >= 0 && out >= 0 && recv(fd, first, sizeof first, MSG_WAITALL) == sizeof first);
    CHECK(write(fd, first, sizeof first) == sizeof first);
    usleep(100000);
    CHECK(copy_to(fd, 0) == 0 && copy_to(fd, 1) == 1);
    while ((c = getchar()) != EOF)
        CHECK(putchar(c) != EOF);
    CHECK(fflush(stdout) == 0);
    clearerr(stdin);
    CHECK(dup2(in, 0) == 0 && dup2(out, 1) == 1 && close(in) == 0 && close(out) == 0);
}

/* Another program is the server, which gets the connection in some way. */
static void serve_by_program(int fd)
{
    extern char **environ;
    char *args[] = {"cat", NULL};
    const char *command = "exec cat <&9 >&9";
    posix_spawn_file_actions_t actions;
    pid_t child = 0;
    int status = 0;
    /* Shells know descriptors of one digit. */
    CHECK(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0);
    if (!is("vfork") && !is("spawn"))
        CHECK(dup2(fd, 9) == 9);
    if (is("vfork")) {
        if ((child = vfork()) == 0) {
            if (dup2(fd, 0) == 0 && dup2(fd, 1) == 1) {
                /* As subprocess of Python does. */
                close_range(3, ~0U, 0);
                execvp("cat", args);
            }
            _exit(1);
        }
    } else if (is("vinherit")) {
        if ((child = vfork()) == 0) {
            close_range(3, 8, 0);
            close_range(10, ~0U, 0);
            execl("/bin/sh", "sh", "-c", command, (char *)0);
            _exit(1);
        }
    } else if (is("inherit")) {
        if ((child = fork()) == 0) {
            for (int i = 3; i < 2000; i++)
                if (i != 9)
                    close(i);
            execl("/bin/sh", "sh", "-c", command, (char *)0);
            _exit(1);
        }
    } else if (is("spawn")) {
        CHECK(posix_spawn_file_actions_init(&actions) == 0);
        CHECK(posix_spawn_file_actions_adddup2(&actions, fd, 0) == 0);
        CHECK(posix_spawn_file_actions_adddup2(&actions, fd, 1) == 0);
        CHECK(posix_spawnp(&child, "cat", &actions, NULL, args, environ) == 0);
        posix_spawn_file_actions_destroy(&actions);
    } else if (is("system")) {
        CHECK(system(command) == 0);
    } else {
        FILE *said = popen(command, "r");
        CHECK(said && getc(said) == EOF && pclose(said) == 0);
    }
    CHECK(child >= 0 && (child == 0 || (waitpid(child, &status, 0) == child && status == 0)));
    if (!is("vfork") && !is("spawn"))
        CHECK(close(9) == 0);
}

static int waits_in_thread;

static void *receive_in_thread(void *got)
{
    char byte;
    CHECK(recv(waits_in_thread, &byte, 1, 0) == 1);
    *(char *)got = byte;
    return NULL;
}

/* A thread waits for the answer to what dprintf sends. The client sends back what it gets. */
static void serve_thread(int fd)
{
    pthread_t thread;
    char got = 0, answer[7];
    waits_in_thread = fd;
    CHECK(recv(fd, answer, 1, 0) == 1);
    CHECK(pthread_create(&thread, NULL, receive_in_thread, &got) == 0);
    usleep(100000);
    CHECK(dprintf(fd, "question") == 8);
    CHECK(pthread_join(thread, NULL) == 0 && got == 'q');
    CHECK(recv(fd, answer, 7, MSG_WAITALL) == 7 && memcmp(answer, "uestion", 7) == 0);
    CHECK(recv(fd, answer, 1, 0) == 0);
}

#define LONG 8000000

static unsigned char octet(size_t at) { return (at * 2654435761u) >> 24; }

static void *send_in_thread(void *fd)
{
    static unsigned char out[200000];
    unsigned seed = getpid();
    for (size_t at = 0, len; at < LONG; at += len) {
        len = 1 + rand_r(&seed) % sizeof out;
        if (len > LONG - at)
            len = LONG - at;
        for (size_t i = 0; i < len; i++)
            out[i] = octet(at + i);
        CHECK(send(*(int *)fd, out, len, 0) == (ssize_t)len);
    }
    CHECK(shutdown(*(int *)fd, SHUT_WR) == 0);
    return NULL;
}

static void *check_in_thread(void *fd)
{
    static unsigned char in[100000];
    unsigned seed = getpid() + 1;
    size_t got = 0;
    ssize_t len;
    while ((len = recv(*(int *)fd, in, 1 + rand_r(&seed) % sizeof in, rand_r(&seed) % 4 ? 0 : MSG_WAITALL)) > 0)
        for (ssize_t i = 0; i < len; i++)
            CHECK(in[i] == octet(got++));
    CHECK(len == 0 && got == LONG);
    return NULL;
}

/* The relay begins while two threads send and receive what the client sends back. */
static void serve_midway(int fd)
{
    static unsigned delay;
    pthread_t threads[2];
    CHECK(pthread_create(&threads[0], NULL, check_in_thread, &fd) == 0);
    CHECK(pthread_create(&threads[1], NULL, send_in_thread, &fd) == 0);
    usleep(delay += 5000);
    CHECK(dprintf(fd, "%s", "") == 0);
    CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
}

static volatile int is_over;

static void *call_in_thread(void *fd)
{
    char byte;
    while (!is_over)
        CHECK(recv(*(int *)fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1 || errno == EAGAIN);
    return NULL;
}

/* Children begin while threads are in the library: they find no lock held for ever. */
static void serve_forks(int fd)
{
    pthread_t threads[2];
    struct sockaddr_in peer;
    socklen_t len = sizeof peer;
    int status;
    is_over = 0;
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, call_in_thread, &fd) == 0);
    for (int i = 0; i < 300; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(getpeername(fd, (struct sockaddr *)&peer, &len) != 0);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    is_over = 1;
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    serve_plain(fd);
}

static void fork_at_exit(void)
{
    struct pollfd none = {.fd = 1000, .events = POLLIN};
    pid_t child = fork();
    int status;
    if (child == 0)
        _exit(poll(&none, 1, 0) == 1 ? 0 : 5);
    CHECK(poll(&none, 1, 0) == 1 && waitpid(child, &status, 0) == child);
    _exit(status == 0 ? 3 : 6);
}

/* The program forks and polls when variables of its threads are gone. */
static void serve_atexit(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, NULL, 0) == child && poll(&ready, 1, -1) == 1);
    serve_plain(fd);
    CHECK(atexit(fork_at_exit) == 0);
    exit(0);
}

static void serve(int fd)
{
    struct sockaddr_in peer;
    socklen_t len = sizeof peer;
    CHECK(getpeername(fd, (struct sockaddr *)&peer, &len) == 0);
    CHECK(peer.sin_family == AF_INET && peer.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    if (is("stdio"))
        serve_stdio(fd);
    else if (is("many"))
        serve_many(fd);
    else if (is("splice"))
        serve_splice(fd);
    else if (is("dprintf"))
        serve_dprintf(fd);
    else if (is("dup2") || is("dup3") || is("dup") || is("dupfd"))
        serve_standard(fd);
    else if (is("vfork") || is("vinherit") || is("inherit") || is("spawn") || is("system") || is("popen"))
        serve_by_program(fd);
    else if (is("thread"))
        serve_thread(fd);
    else if (is("midway"))
        serve_midway(fd);
    else if (is("forks"))
        serve_forks(fd);
    else if (is("zero"))
        serve_zero(fd);
    else if (is("passed"))
        serve_passed(fd);
    else
        serve_plain(fd);
}

/* Children that accept by themselves. They are ended when the clients have. */
static void serve_by_children(int listener, pid_t clients)
{
    pid_t children[2];
    int status;
    if (is("prepoll"))
        CHECK(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK((children[i] = fork()) >= 0);
        for (alarm(60); children[i] == 0;) {
            struct pollfd ready = {.fd = listener, .events = POLLIN};
            struct sockaddr_in peer;
            socklen_t len = sizeof peer;
            if (is("prepoll"))
                CHECK(poll(&ready, 1, -1) == 1);
            int fd = accept(listener, (struct sockaddr *)&peer, &len);
            if (fd < 0 && errno == EAGAIN && is("prepoll"))
                continue;
            CHECK(fd >= 0 && peer.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
            serve(fd);
            CHECK(close(fd) == 0);
        }
    }
    CHECK(waitpid(clients, &status, 0) == clients && status == 0);
    for (int i = 0; i < 2; i++)
        CHECK(kill(children[i], SIGKILL) == 0 && waitpid(children[i], NULL, 0) == children[i]);
}

static void server(int listener)
{
    for (int i = 0; i < CLIENTS; i++) {
        if (is("zero"))
            close(0);
        int fd = accept(listener, NULL, NULL);
        CHECK(fd >= 0);
        if (is("fork") || is("keep") || is("late")) {
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) {
                close(listener);
                /* The parent has closed its descriptor by now. */
                if (is("late"))
                    usleep(200000);
                serve(fd);
                _exit(0);
            }
            if (is("keep"))
                CHECK(waitpid(child, NULL, 0) == child);
        } else {
            serve(fd);
        }
        close(fd);
    }
    while (wait(NULL) > 0)
        ;
}

static void *nothing(void *argument) { return argument; }

/* Processes that have the listening socket themselves, and become another program with the connection, or end
 * with octets in the buffer of stdio. */
static void server_that_ends(struct sockaddr_in at, int ready)
{
    for (int i = 0; i < CLIENTS; i++) {
        int status, one = 1, c;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child > 0) {
            CHECK(waitpid(child, &status, 0) == child);
            /* The status is that of the program. */
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
            continue;
        }
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
        CHECK(bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 5) == 0);
        CHECK(write(ready, "", 1) == 1);
        int fd = accept(listener, NULL, NULL);
        CHECK(fd >= 0 && close(listener) == 0);
        if (is("atexit"))
            serve_atexit(fd);
        if (is("cloexec")) {
            serve_plain(fd);
            CHECK(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0);
            execl("/bin/sh", "sh", "-c", "exit 3", (char *)0);
        }
        CHECK(dup2(fd, 0) == 0 && dup2(fd, 1) == 1);
        CHECK(close(fd) == 0);
        if (is("exec")) {
            pid_t own = getpid();
            CHECK(execl("/nowhere", "nothing", (char *)0) < 0 && errno == ENOENT);
            CHECK(execlp("nothing.of-that-name", "nothing", (char *)0) < 0 && errno == ENOENT);
            CHECK(getpid() == own);
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
            execl("/bin/sh", "sh", "-c", "cat; exit 3", (char *)0);
        }
        if (is("killed") || is("alarm")) {
            alarm(is("alarm"));
            execl("/bin/sh", "sh", "-c", "trap 'echo bye; exit 3' TERM ALRM; [ $1 = alarm ] || kill $PPID; "
                  "while :; do sleep 0.05; done", "sh", way, (char *)0);
        }
        while ((c = getchar()) != EOF)
            putchar(c);
        exit(3);
    }
}

static void client_of_thread(int fd)
{
    char byte;
    CHECK(write(fd, "!", 1) == 1);
    for (int i = 0; i < 8; i++)
        CHECK(read(fd, &byte, 1) == 1 && write(fd, &byte, 1) == 1);
    CHECK(shutdown(fd, SHUT_WR) == 0 && read(fd, &byte, 1) == 0 && close(fd) == 0);
}

static void client(struct sockaddr_in to)
{
    static unsigned char out[TOTAL], in[TOTAL + 1];
    if (is("zero"))
        close(0);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    size_t got = 0;
    ssize_t len;
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    if (is("thread"))
        return client_of_thread(fd);
    if (is("midway")) {
        serve_plain(fd);
        CHECK(close(fd) == 0);
        return;
    }
    if (is("killed") || is("alarm")) {
        CHECK(recv(fd, in, 5, MSG_WAITALL) == 4 && memcmp(in, "bye\n", 4) == 0);
        CHECK(close(fd) == 0);
        return;
    }
    for (size_t at = 0; at < TOTAL; at++)
        out[at] = (unsigned char)((at * 2654435761u) >> 24);
    for (size_t sent = 0; sent < TOTAL; sent += len)
        CHECK((len = write(fd, out + sent, TOTAL - sent)) > 0);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    if (is("zero")) {
        CHECK(fd == 0);
        got = fread(in, 1, sizeof in, stdin);
        clearerr(stdin);
    }
    while ((len = read(fd, in + got, sizeof in - got)) > 0)
        got += len;
    CHECK(len == 0 && got == TOTAL && memcmp(in, out, TOTAL) == 0);
    close(fd);
}

int main(int argc, char **argv)
{
    int ready[2], status;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    way = argc == 3 ? argv[1] : "?";
    CHECK(argc == 3 && pipe(ready) == 0);
    at.sin_port = htons(atoi(argv[2]));
    alarm(60);
    /* Before there is any socket: the client's are its own. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte;
        alarm(60);
        for (int i = 0; i < CLIENTS; i++) {
            if (i == 0 || ends_itself())
                CHECK(read(ready[0], &byte, 1) == 1);
            client(at);
        }
        exit(0);
    }
    if (ends_itself()) {
        server_that_ends(at, ready[1]);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        printf("done\n");
        return 0;
    }
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 5) == 0);
    CHECK(write(ready[1], "", 1) == 1);
    if (is("prefork") || is("prepoll"))
        serve_by_children(listener, child);
    else
        server(listener);
    CHECK(waitpid(child, &status, 0) < 0 || status == 0);
    printf("done\n");
    return 0;
}
