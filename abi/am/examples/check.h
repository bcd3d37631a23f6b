/* What the examples share. */
#ifndef CHECK_H
#define CHECK_H

#include <amudp.h>
#include <amudp_spmd.h>

/* Calls of Active Messages return AM_OK, or the example ends. */
#define CHECK(call)                                                                                              \
    do {                                                                                                         \
        int failed = (call);                                                                                     \
        if (failed != AM_OK) {                                                                                   \
            fprintf(stderr, "%s: error %d\n", #call, failed);                                                    \
            AMX_SPMDExit(1);                                                                                     \
        }                                                                                                        \
    } while (0)

/* Something that must be so. */
#define EXPECT(holds)                                                                                            \
    do {                                                                                                         \
        if (!(holds)) {                                                                                          \
            fprintf(stderr, "process %d: %s is not so\n", AMX_SPMDMyProc(), #holds);                             \
            AMX_SPMDExit(1);                                                                                     \
        }                                                                                                        \
    } while (0)

/* A number that depends on another in no simple way. */
static inline uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#endif
