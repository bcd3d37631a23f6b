/* Radix sort: for each digit, processors count their keys, a scan over processors and digits gives every key its
   place, and the keys are stored there. */
#include "check.h"

#define BITS 8
#define RADIX (1 << BITS)

splitc_main(int argc, char **argv)
{
    int n = argument(argc, argv, 1, 2000), digit, i, p, d;
    double began = get_seconds();
    unsigned (*spread from)[n], (*spread to)[n];
    unsigned *keys, *first = (unsigned *)malloc(n * sizeof(unsigned));
    int counts[PROCS]::[RADIX];
    int all[PROCS][RADIX], place[RADIX];
    unsigned long state = 42 + MYPROC;

    from = all_spread_malloc(PROCS, n * sizeof(unsigned));
    to = all_spread_malloc(PROCS, n * sizeof(unsigned));
    keys = (unsigned *)tolocal(from + MYPROC);
    for (i = 0; i < n; i++)
        first[i] = keys[i] = next_random(&state) * 2 + next_random(&state) % 2;
    for (digit = 0; digit < 32 / BITS; digit++) {
        int *mine = tolocal(counts[MYPROC]);
        unsigned (*spread swap)[n];
        int sum = 0;

        keys = (unsigned *)tolocal(from + MYPROC);
        memset(mine, 0, RADIX * sizeof(int));
        for (i = 0; i < n; i++)
            mine[keys[i] >> digit * BITS & RADIX - 1]++;
        barrier();
        for (p = 0; p < PROCS; p++)
            bulk_get(all[p], counts[(p + MYPROC) % PROCS], RADIX * sizeof(int));
        sync();
        /* Keys with a smaller digit come first, then those of processors before. */
        for (d = 0; d < RADIX; d++)
            for (p = 0; p < PROCS; p++) {
                if (p == MYPROC)
                    place[d] = sum;
                sum += all[(p - MYPROC + PROCS) % PROCS][d];
            }
        barrier();
        for (i = 0; i < n; i++) {
            int at = place[keys[i] >> digit * BITS & RADIX - 1]++;

            to[at / n][at % n] :- keys[i];
        }
        store_sync(n * sizeof(unsigned));
        swap = from;
        from = to;
        to = swap;
        barrier();
    }
    require_sorted((unsigned *)tolocal(from + MYPROC), n, first, n);
    done("radix sort", began);
}
