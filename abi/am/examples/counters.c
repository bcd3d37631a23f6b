/* Remote counters: every process adds numbers to counters of all processes, which are added up in the end.
 *
 *   cc counters.c -o counters $(pkg-config --cflags --libs am)
 *   quipu spmd -n 4 -- ./counters [ADDITIONS]        or        ./counters 4 L [ADDITIONS]
 */
#include "check.h"

enum { ADD = 1, ADDED, TOTAL };
enum { COUNTERS = 64 };

static uint64_t counters[COUNTERS];
static int answered, reports;
static uint64_t sum;

static void add(void *token, int counter, int amount) {
    counters[counter] += (unsigned)amount;
    CHECK(AM_Reply0(token, ADDED));
}

static void added(void *token) {
    (void)token;
    answered++;
}

/* No reply: the library acknowledges. */
static void total(void *token, int high, int low) {
    (void)token;
    sum += (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
    reports++;
}

/* The numbers that a process adds follow from its own number. */
static uint64_t drawn(int process, int round) {
    return mixed((uint64_t)process << 32 | (uint32_t)round);
}

int main(int argc, char **argv) {
    eb_t bundle;
    ep_t ep;
    CHECK(AMX_SPMDStartup(&argc, &argv, 0, NULL, &bundle, &ep));
    int additions = argc > 1 ? atoi(argv[1]) : 10000;
    int processes = AMX_SPMDNumProcs(), me = AMX_SPMDMyProc();
    CHECK(AM_SetHandler(ep, ADD, add));
    CHECK(AM_SetHandler(ep, ADDED, added));
    CHECK(AM_SetHandler(ep, TOTAL, total));
    CHECK(AMX_SPMDBarrier());

    for (int round = 0; round < additions; round++) {
        uint64_t random = drawn(me, round);
        CHECK(AM_Request2(ep, (int)(random % (unsigned)processes), ADD, (int)(random >> 20 & (COUNTERS - 1)),
                          (int)(random >> 40 & 1023)));
    }
    while (answered < additions)
        CHECK(AM_Poll(bundle));
    CHECK(AMX_SPMDBarrier());

    uint64_t mine = 0;
    for (int i = 0; i < COUNTERS; i++)
        mine += counters[i];
    CHECK(AM_Request2(ep, 0, TOTAL, (int)(mine >> 32), (int)mine));
    if (me == 0) {
        while (reports < processes) {
            CHECK(AM_SetEventMask(bundle, AM_NOTEMPTY));
            CHECK(AM_WaitSema(bundle));
        }
        uint64_t expected = 0;
        for (int process = 0; process < processes; process++)
            for (int round = 0; round < additions; round++)
                expected += drawn(process, round) >> 40 & 1023;
        EXPECT(sum == expected);
        printf("%d processes have added %d numbers each, %llu in all\n", processes, additions,
               (unsigned long long)sum);
    }
    CHECK(AMX_SPMDBarrier());
    return AMX_SPMDExit(0);
}
