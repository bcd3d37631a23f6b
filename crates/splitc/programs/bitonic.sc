/* Bitonic sort: each processor sorts its keys; then, in log P (log P + 1) / 2 steps, pairs of processors exchange
   all their keys, and one keeps the smaller half, the other the larger. P is a power of two. */
#include "check.h"

static void keep(unsigned *keys, unsigned *other, unsigned *merged, int n, int smaller)
{
    int i, a = smaller ? 0 : n - 1, b = a, step = smaller ? 1 : -1;

    for (i = 0; i < n; i++) {
        int mine = smaller ? keys[a] <= other[b] : keys[a] > other[b];

        merged[smaller ? i : n - 1 - i] = mine ? keys[a] : other[b];
        if (mine)
            a += step;
        else
            b += step;
    }
    memcpy(keys, merged, n * sizeof(unsigned));
}

splitc_main(argc, argv)
int argc;
char **argv;
{
    register n = argument(argc, argv, 1, 2000), i, stage, step;
    double began = get_seconds();
    unsigned (*spread all)[n];
    unsigned *keys, *first, *other, *merged;
    unsigned long state = 1000 + MYPROC;

    require(PROCSLOG >= 0, "the number of processors is no power of two");
    all = all_spread_malloc(PROCS, n * sizeof(unsigned));
    keys = (unsigned *)(all + MYPROC);
    first = (unsigned *)malloc(n * sizeof(unsigned));
    other = (unsigned *)malloc(n * sizeof(unsigned));
    merged = (unsigned *)malloc(n * sizeof(unsigned));
    for (i = 0; i < n; i++)
        first[i] = keys[i] = next_random(&state);
    qsort(keys, n, sizeof(unsigned), by_value);
    for (stage = 0; stage < PROCSLOG; stage++)
        for (step = stage; step >= 0; step--) {
            int partner = MYPROC ^ 1 << step;
            int rising = (MYPROC >> stage + 1 & 1) == 0;

            barrier();
            bulk_read(other, all + partner, n * sizeof(unsigned));
            barrier();
            keep(keys, other, merged, n, (MYPROC < partner) == rising);
        }
    barrier();
    require_sorted(keys, n, first, n);
    done("bitonic sort", began);
}
