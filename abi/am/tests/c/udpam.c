/* The older dialect: known ports, names made by hand, a peer that starts late, gets, what comes back. */
#define AM_DIALECT_U
#include <am.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expect.h"

#define LOOPBACK 0x7f000001ul

static int replies, gets, returned;
static double got;
static char segment[256];

static void request(void *token, int low, int high, int a2, int a3) {
    EXPECT(a2 == 2 && a3 == 3);
    DONE(AM_Reply4(token, 2, low, high, 0, 0));
}

static void reply(void *token, int low, int high, int a2, int a3) {
    (void)token;
    (void)a2;
    (void)a3;
    int words[] = {low, high};
    memcpy(&got, words, sizeof got);
    replies++;
}

static void has_got(void *token, void *buf, int nbytes, int a0, int a1, int a2, int a3) {
    (void)token;
    EXPECT(buf == segment + 10 && nbytes == 6 && memcmp(buf, "treasu", 6) == 0);
    EXPECT(a0 + a1 + a2 + a3 == 10);
    gets++;
}

static void comes_back(int status, op_t opcode, ArgBlock *message) {
    EXPECT(status == EBADHANDLER && opcode == (AM_REQUEST | AM_MSG_8));
    EXPECT(message->handler == 77 && message->arg0 == 10 && message->arg7 == 17);
    returned++;
}

static eb_t bundle;
static ea_t ea;

static void open_endpoint(int port) {
    en_t *name = NULL;
    DONE(AM_Init());
    DONE(AM_AllocateBundle(AM_PAR, &bundle));
    DONE(AM_SetEventMask(bundle, AM_NOTEMPTY));
    DONE(AM_AllocateKnownEndpoint(bundle, &ea, &name, port));
    EXPECT(name != NULL && name->ip_addr == LOOPBACK && (port == 0 || name->port == port));
    free(name);
    DONE(AM_SetTag(ea, 1234));
    DONE(AM_SetHandler(ea, 0, comes_back));
    DONE(AM_SetHandler(ea, 1, request));
    EXPECT(AM_SetHandler(ea, 1, request) == AM_ERR_IN_USE);
    DONE(AM_SetHandler(ea, 2, reply));
    DONE(AM_SetHandler(ea, 3, has_got));
    DONE(AM_SetSeg(ea, segment, sizeof segment));
}

/* A port that is free now. */
static int free_port(void) {
    en_t *name;
    ea_t other;
    DONE(AM_Init());
    DONE(AM_AllocateBundle(AM_SEQ, &bundle));
    DONE(AM_AllocateEndpoint(bundle, &other, &name));
    int port = name->port;
    free(name);
    DONE(AM_Terminate());
    return port;
}

int main(void) {
    int pipes[2];
    EXPECT(pipe(pipes) == 0);
    pid_t child = fork();
    if (child == 0) {
        int port;
        EXPECT(read(pipes[0], &port, sizeof port) == sizeof port);
        sleep(1); /* the peer has mapped it, and sends already */
        open_endpoint(port);
        strcpy(segment + 100, "treasure");
        for (;;) {
            DONE(AM_SetEventMask(bundle, AM_NOTEMPTY));
            DONE(AM_Wait(bundle));
            EXPECT(AM_GetEventMask(bundle) == AM_NOEVENTS);
            DONE(AM_Poll(bundle));
        }
    }
    int port = free_port();
    EXPECT(write(pipes[1], &port, sizeof port) == sizeof port);
    open_endpoint(0);
    en_t there = {(unsigned short)port, LOOPBACK};
    DONE(AM_Map(ea, 5, there, 1234));
    EXPECT(AM_Map(ea, 5, there, 1234) == AM_ERR_IN_USE);
    EXPECT(AM_Request4(ea, 6, 1, 0, 0, 0, 0) == AM_ERR_BAD_ARG);

    double value = 2.5;
    int words[2];
    memcpy(words, &value, sizeof value);
    DONE(AM_Request4(ea, 5, 1, words[0], words[1], 2, 3));
    while (replies == 0)
        DONE(AM_Poll(bundle));
    EXPECT(got == 2.5);
    DONE(AM_GetXfer4(ea, 5, 100, 3, 10, 6, 1, 2, 3, 4));
    while (gets == 0)
        DONE(AM_Poll(bundle));
    DONE(AM_Request8(ea, 5, 77, 10, 11, 12, 13, 14, 15, 16, 17));
    while (returned == 0)
        DONE(AM_Poll(bundle));
    kill(child, 9);
    waitpid(child, NULL, 0);
    DONE(AM_Terminate());
    return 0;
}
