/* Sample sort: processor 0 sorts samples of all keys and picks splitters, which say to which processor each key
   goes. The keys are stored there all at once, and sorted. */
#include "check.h"

#define SAMPLES 64

int arrived[PROCS]::;

splitc_main(int argc, char **argv)
{
    int n = argument(argc, argv, 1, 3000), room = 4 * n + 1024, i, p, at;
    double began = get_seconds();
    unsigned samples[PROCS]::[SAMPLES];
    unsigned splitters[PROCS];
    unsigned *keys = (unsigned *)malloc(n * sizeof(unsigned)), *sorted;
    unsigned (*spread target)[room];
    unsigned long state = 7 * MYPROC + 1;
    int most;

    target = all_spread_malloc(PROCS, room * sizeof(unsigned));
    for (i = 0; i < n; i++) {
        /* Far from uniform. */
        unsigned key = next_random(&state);

        keys[i] = key & next_random(&state);
    }
    for (i = 0; i < SAMPLES; i++)
        samples[MYPROC][i] = keys[next_random(&state) % n];
    barrier();
    on_one {
        unsigned *all = (unsigned *)malloc(PROCS * SAMPLES * sizeof(unsigned));

        for (p = 0; p < PROCS; p++)
            bulk_get(all + p * SAMPLES, samples[p], SAMPLES * sizeof(unsigned));
        sync();
        qsort(all, PROCS * SAMPLES, sizeof(unsigned), by_value);
        for (p = 0; p < PROCS; p++)
            splitters[p] = p == PROCS - 1 ? 0xffffffffU : all[(p + 1) * SAMPLES];
        free(all);
    }
    all_bcast_buffer(splitters, PROCS * sizeof(unsigned));
    qsort(keys, n, sizeof(unsigned), by_value);
    for (p = at = 0; p < PROCS; p++) {
        int end = at, place;

        while (end < n && (p == PROCS - 1 || keys[end] < splitters[p]))
            end++;
        place = fetch_and_add((int *global)(arrived + p), end - at);
        require(place + end - at <= room, "the splitters are too uneven");
        if (end > at)
            bulk_store(&target[p][place], keys + at, (end - at) * sizeof(unsigned));
        at = end;
    }
    all_store_sync();
    sorted = (unsigned *)tolocal(target + MYPROC);
    qsort(sorted, arrived[MYPROC], sizeof(unsigned), by_value);
    most = all_reduce_to_all_max(arrived[MYPROC]);
    on_one printf("sample sort: at most %.2f times the average\n", (double)most / n);
    require_sorted(sorted, arrived[MYPROC], keys, n);
    done("sample sort", began);
}
