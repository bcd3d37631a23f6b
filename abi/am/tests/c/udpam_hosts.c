/* The older dialect between two hosts: each endpoint has a port that both know, and neither waits for the other to
 * start. Called with a role, the own address and that of the peer. */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <udpam.h>
#include <unistd.h>

#include "expect.h"

#define PORT 61114
#define ROUNDS 200

static int is_client, requests, replies;
static en_t own, peer;
static char segment[8192], pattern[8192];

static void request(void *token, int a0, int a1, int a2, int a3) {
    en_t source;
    DONE(AM_GetSourceEndpoint(token, &source));
    EXPECT(source.port == peer.port && source.ip_addr == peer.ip_addr);
    EXPECT(a1 == 1 && a2 == 2 && a3 == 3);
    requests++;
    DONE(AM_Reply4(token, 2, a0 + 1, 4, 5, 6));
}

static void reply(void *token, int a0, int a1, int a2, int a3) {
    (void)token;
    EXPECT(a0 == replies + 1 && a1 == 4 && a2 == 5 && a3 == 6);
    replies++;
}

static void bulk(void *token, void *buf, int nbytes, int a0, int a1, int a2, int a3) {
    (void)a1;
    (void)a2;
    (void)a3;
    EXPECT(buf == segment && nbytes == (int)sizeof segment && memcmp(buf, pattern, sizeof segment) == 0);
    requests++;
    DONE(AM_Reply4(token, 2, a0 + 1, 4, 5, 6));
}

static void comes_back(int status, op_t opcode, ArgBlock *message) {
    fprintf(stderr, "a message to handler %d came back: status %#x, operation %#x\n", message->handler, status,
            opcode);
    exit(1);
}

int main(int argc, char **argv) {
    EXPECT(argc == 4);
    is_client = strcmp(argv[1], "client") == 0;
    own.ip_addr = ntohl(inet_addr(argv[2]));
    peer.ip_addr = ntohl(inet_addr(argv[3]));
    own.port = (unsigned short)(PORT + is_client);
    peer.port = (unsigned short)(PORT + !is_client);
    for (int at = 0; at < (int)sizeof pattern; at++)
        pattern[at] = (char)(at * 7);
    if (!is_client)
        usleep(300000); /* the client sends already */

    eb_t bundle;
    ea_t ea;
    en_t *name;
    DONE(AM_Init());
    DONE(AM_AllocateBundle(AM_SEQ, &bundle));
    DONE(AM_AllocateKnownEndpoint(bundle, &ea, &name, own.port));
    EXPECT(name->port == own.port && name->ip_addr == own.ip_addr);
    ea_t second;
    EXPECT(AM_AllocateKnownEndpoint(bundle, &second, &name, own.port) == AM_ERR_RESOURCE);
    DONE(AM_SetTag(ea, 1234));
    DONE(AM_SetSeg(ea, segment, sizeof segment));
    DONE(AM_SetHandler(ea, 0, comes_back));
    DONE(AM_SetHandler(ea, 1, request));
    DONE(AM_SetHandler(ea, 2, reply));
    DONE(AM_SetHandler(ea, 3, bulk));
    DONE(AM_Map(ea, 0, peer, 1234));
    for (int round = 0; round < ROUNDS; round++) {
        if (round % 10 == 9)
            DONE(AM_RequestXfer4(ea, 0, 0, 3, pattern, sizeof pattern, round, 1, 2, 3));
        else
            DONE(AM_Request4(ea, 0, 1, round, 1, 2, 3));
        while (replies <= round)
            DONE(AM_Poll(bundle));
    }
    while (requests < ROUNDS) {
        DONE(AM_SetEventMask(bundle, AM_NOTEMPTY));
        DONE(AM_Wait(bundle));
        DONE(AM_Poll(bundle));
    }
    /* The peer may still wait for its last reply, or for an acknowledgement. */
    for (time_t end = time(NULL) + 2; time(NULL) < end; usleep(1000))
        DONE(AM_Poll(bundle));
    DONE(AM_Terminate());
    return 0;
}
