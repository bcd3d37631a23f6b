/* A peer that is killed, or does not poll for a while. */
#include <amudp.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PING = 1, PONG };
enum { REQUESTS = 2000 };

#define CHECK(call)                                                                                              \
    do {                                                                                                         \
        int failed = (call);                                                                                     \
        if (failed != AM_OK) {                                                                                   \
            fprintf(stderr, "line %d: %s: error %d\n", __LINE__, #call, failed);                                 \
            exit(1);                                                                                             \
        }                                                                                                        \
    } while (0)

static int replies, returned, wrong;

static void ping(void *token, int number) {
    CHECK(AM_Reply1(token, PONG, number));
}

static void pong(void *token, int number) {
    (void)token;
    (void)number;
    replies++;
}

static void comes_back(int status, op_t opcode, void *token) {
    /* It cannot be replied to. */
    if (status != EUNREACHABLE || opcode != AM_REQUEST_M || AM_Reply0(token, PONG) == AM_OK)
        wrong++;
    returned++;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static int exchange(int end, en_t mine, en_t *theirs) {
    return write(end, &mine, sizeof mine) == sizeof mine && read(end, theirs, sizeof *theirs) == sizeof *theirs;
}

int main(int argc, char **argv) {
    int is_slow = argc > 1 && strcmp(argv[1], "slow") == 0;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 2;
    pid_t child = fork();
    eb_t bundle;
    ep_t ep;
    en_t mine, theirs;
    CHECK(AM_Init());
    CHECK(AM_AllocateBundle(AM_SEQ, &bundle));
    CHECK(AM_AllocateEndpoint(bundle, &ep, &mine));
    if (!exchange(ends[child == 0], mine, &theirs))
        return 3;
    CHECK(AM_SetTag(ep, 42));
    CHECK(AM_SetHandler(ep, 0, comes_back));
    CHECK(AM_SetHandler(ep, PING, ping));
    CHECK(AM_SetHandler(ep, PONG, pong));
    CHECK(AM_Map(ep, 0, theirs, 42));
    if (child == 0) {
        if (is_slow)
            sleep(2); /* it computes, and does not poll */
        for (;;)
            CHECK(AM_Poll(bundle));
    }

    double began = seconds();
    int sent = 0;
    for (; sent < REQUESTS; sent++) {
        if (!is_slow && sent == REQUESTS / 2)
            kill(child, SIGKILL);
        CHECK(AM_Request1(ep, 0, PING, sent));
    }
    while (replies + returned < sent && seconds() - began < 60)
        CHECK(AM_Poll(bundle));
    fprintf(stderr, "%d sent, %d replies, %d came back, %d of them wrong, %.2f s\n", sent, replies, returned, wrong,
            seconds() - began);
    if (replies + returned != sent || wrong != 0 || (returned == 0) != is_slow)
        return 4;
    if (!is_slow) {
        /* Nobody is waited for any more. */
        double again = seconds();
        CHECK(AM_Request1(ep, 0, PING, sent));
        CHECK(AM_Poll(bundle));
        if (replies + returned != sent + 1 || seconds() - again > 1)
            return 5;
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(AM_Terminate());
    return 0;
}
