/* Parallel search: in how many ways do N queens stand on a board without a threat? Process 0 gives out beginnings of
 * boards, a few rows each, to whichever process asks.
 *
 *   cc search.c -o search $(pkg-config --cflags --libs am)
 *   quipu spmd -n 4 -- ./search [QUEENS]        or        ./search 4 L [QUEENS]
 */
#include "check.h"

enum { NEXT = 1, WORK, SOLVED };
enum { NONE = -1 };

/* The known answers. */
static const int solutions[] = {1, 1, 0, 0, 2, 10, 4, 40, 92, 352, 724, 2680, 14200};

static int queens, next_start, finished, all_ways;
static int work, is_answered;

static void next(void *token) {
    int starts = queens * queens;
    CHECK(AM_Reply1(token, WORK, next_start < starts ? next_start++ : NONE));
}

static void take(void *token, int start) {
    (void)token;
    work = start;
    is_answered = 1;
}

static void solved(void *token, int ways) {
    (void)token;
    all_ways += ways;
    finished++;
}

/* Ways to go on from a row, with the columns and diagonals that are taken as sets. */
static int place(unsigned columns, unsigned left, unsigned right, int row, eb_t bundle) {
    if (row == queens)
        return 1;
    /* Others may want the next beginning meanwhile. */
    if (row == 4)
        CHECK(AM_Poll(bundle));
    int ways = 0;
    for (unsigned free = ~(columns | left | right) & ((1u << queens) - 1); free != 0; free &= free - 1) {
        unsigned queen = free & -free;
        ways += place(columns | queen, (left | queen) << 1, (right | queen) >> 1, row + 1, bundle);
    }
    return ways;
}

/* A beginning is the places of the first two queens. */
static int solve(int start, eb_t bundle) {
    unsigned first = 1u << start / queens, second = 1u << start % queens;
    if (second & (first | first << 1 | first >> 1))
        return 0;
    return place(first | second, (first << 1 | second) << 1, (first >> 1 | second) >> 1, 2, bundle);
}

int main(int argc, char **argv) {
    eb_t bundle;
    ep_t ep;
    CHECK(AMX_SPMDStartup(&argc, &argv, 0, NULL, &bundle, &ep));
    queens = argc > 1 ? atoi(argv[1]) : 10;
    EXPECT(queens >= 3 && queens < (int)(sizeof solutions / sizeof *solutions));
    int processes = AMX_SPMDNumProcs(), me = AMX_SPMDMyProc();
    CHECK(AM_SetHandler(ep, NEXT, next));
    CHECK(AM_SetHandler(ep, WORK, take));
    CHECK(AM_SetHandler(ep, SOLVED, solved));
    CHECK(AMX_SPMDBarrier());

    int ways = 0;
    for (;;) {
        is_answered = 0;
        CHECK(AM_Request0(ep, 0, NEXT));
        while (!is_answered)
            CHECK(AM_Poll(bundle));
        if (work == NONE)
            break;
        ways += solve(work, bundle);
    }
    CHECK(AM_Request1(ep, 0, SOLVED, ways));
    if (me == 0) {
        while (finished < processes)
            CHECK(AM_Poll(bundle));
        EXPECT(all_ways == solutions[queens]);
        printf("%d queens stand in %d ways, as %d processes have found\n", queens, all_ways, processes);
    }
    CHECK(AMX_SPMDBarrier());
    return AMX_SPMDExit(0);
}
