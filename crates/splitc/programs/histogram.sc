/* Histogram of an image: private counts, a transpose by bulk gets that gives each processor some of the levels,
   sums, and a gather. */
#include "check.h"

#define LEVELS 256

splitc_main(int argc, char **argv)
{
    int n = argument(argc, argv, 1, 10000), per = (LEVELS + PROCS - 1) / PROCS, i, p, total = 0;
    double began = get_seconds();
    int counts[PROCS]::[LEVELS], sums[PROCS]::[per], all[PROCS * per], right[LEVELS], part[per];
    int *mine = tolocal(counts[MYPROC]), *own = tolocal(sums[MYPROC]);

    memset(mine, 0, LEVELS * sizeof(int));
    memset(own, 0, per * sizeof(int));
    memset(right, 0, sizeof right);
    for (p = 0; p < PROCS; p++) {
        unsigned long state = p + 1;

        for (i = 0; i < n; i++) {
            int level = (next_random(&state) & next_random(&state)) % LEVELS;

            right[level]++;
            if (p == MYPROC)
                mine[level]++;
        }
    }
    barrier();
    for (p = 0; p < PROCS; p++) {
        int from = MYPROC * per, len = from >= LEVELS ? 0 : from + per > LEVELS ? LEVELS - from : per;

        if (len == 0)
            continue;
        bulk_get(part, &counts[(p + MYPROC) % PROCS][from], len * sizeof(int));
        sync();
        for (i = 0; i < len; i++)
            own[i] += part[i];
    }
    barrier();
    for (p = 0; p < PROCS; p++)
        bulk_get(all + p * per, sums[p], per * sizeof(int));
    sync();
    for (i = 0; i < LEVELS; i++) {
        require(all[i] == right[i], "a count is wrong");
        total += all[i];
    }
    require(total == n * PROCS, "pixels were lost");
    done("histogram", began);
}
