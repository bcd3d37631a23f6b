/* Two processes send a message back and forth, and one says how long that takes.
 *
 *   cc pingpong.c -o pingpong $(pkg-config --cflags --libs am) && ./pingpong [ROUNDS]
 *
 * The parent starts the child, and both tell each other the names of their endpoints through a socket. The
 * program checks that each reply carries what the request did, and ends with 0 if so. */
#include <amudp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PING = 1, PONG, STOP };

#define CHECK(call)                                                                                              \
    do {                                                                                                         \
        int failed = (call);                                                                                     \
        if (failed != AM_OK) {                                                                                   \
            fprintf(stderr, "%s: error %d\n", #call, failed);                                                    \
            exit(1);                                                                                             \
        }                                                                                                        \
    } while (0)

static int answer = -2, is_over;

static void ping(void *token, int round, int twice) {
    CHECK(AM_Reply2(token, PONG, round, round + twice));
}

static void pong(void *token, int round, int sum) {
    (void)token;
    if (sum != 3 * round) {
        fprintf(stderr, "round %d came back with %d\n", round, sum);
        exit(1);
    }
    answer = round;
}

static void stop(void *token) {
    (void)token;
    is_over = 1;
}

static void returned(int status, op_t opcode, void *token) {
    (void)token;
    fprintf(stderr, "a message came back: status %d, opcode %d\n", status, opcode);
    exit(1);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 100000;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
        perror("socketpair");
        return 1;
    }
    pid_t child = fork();
    int end = ends[child == 0];

    eb_t bundle;
    ep_t ep;
    en_t mine, theirs;
    CHECK(AM_Init());
    CHECK(AM_AllocateBundle(AM_SEQ, &bundle));
    CHECK(AM_AllocateEndpoint(bundle, &ep, &mine));
    if (write(end, &mine, sizeof mine) != sizeof mine || read(end, &theirs, sizeof theirs) != sizeof theirs) {
        fprintf(stderr, "the names could not be exchanged\n");
        return 1;
    }
    CHECK(AM_SetTag(ep, 42));
    CHECK(AM_SetHandler(ep, 0, returned));
    CHECK(AM_SetHandler(ep, PING, ping));
    CHECK(AM_SetHandler(ep, PONG, pong));
    CHECK(AM_SetHandler(ep, STOP, stop));
    CHECK(AM_Map(ep, 0, theirs, 42));

    if (child == 0) {
        while (!is_over)
            CHECK(AM_Poll(bundle));
        CHECK(AM_Terminate());
        return 0;
    }
    double began = 0;
    for (int round = -1; round < rounds; round++) {
        if (round == 0)
            began = seconds(); /* the first round trip makes the connection */
        CHECK(AM_Request2(ep, 0, PING, round, 2 * round));
        while (answer != round)
            CHECK(AM_Poll(bundle));
    }
    double each = (seconds() - began) / rounds / 2;
    CHECK(AM_Request0(ep, 0, STOP));
    int status = 1;
    while (waitpid(child, &status, WNOHANG) == 0)
        CHECK(AM_Poll(bundle));
    CHECK(AM_Terminate());
    printf("%d round trips, %.3f us each way\n", rounds, each * 1e6);
    return status != 0;
}
