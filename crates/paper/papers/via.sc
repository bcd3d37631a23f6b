/* Times of accesses to the last processor's memory, and bandwidth by size, as JSON: the first processor measures,
   the others serve. */
#include <stdio.h>
#include <stdlib.h>

double word[PROCS]::;
char block[PROCS]::[1 << 20];
static char from[1 << 20];
static double rounds[5];

/* The median of the rounds. */
static double median()
{
    int i, j;
    double swap;

    for (i = 0; i < 5; i++)
        for (j = i + 1; j < 5; j++)
            if (rounds[j] < rounds[i]) {
                swap = rounds[i];
                rounds[i] = rounds[j];
                rounds[j] = swap;
            }
    return rounds[2];
}

splitc_main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 1000, i, round, size, count;
    double *global p = (double *global)(word + (PROCS - 1));
    char *global to = (char *global)(block + (PROCS - 1));
    double x = 0, into[16], began;

    barrier();
    if (MYPROC == 0) {
        for (round = 0; round < 5; round++) {
            began = get_seconds();
            for (i = 0; i < n; i++)
                x += *p;
            rounds[round] = (get_seconds() - began) / n * 1e9;
        }
        printf("{\"read\": %.1f, ", median());
        for (round = 0; round < 5; round++) {
            began = get_seconds();
            for (i = 0; i < n; i++)
                *p = i;
            rounds[round] = (get_seconds() - began) / n * 1e9;
        }
        printf("\"write\": %.1f, ", median());
        for (round = 0; round < 5; round++) {
            began = get_seconds();
            for (i = 0; i < n; i++)
                into[i & 15] := *p;
            sync();
            rounds[round] = (get_seconds() - began) / n * 1e9;
        }
        printf("\"get\": %.1f, ", median());
        for (round = 0; round < 5; round++) {
            began = get_seconds();
            for (i = 0; i < n; i++)
                *p := x;
            sync();
            rounds[round] = (get_seconds() - began) / n * 1e9;
        }
        printf("\"put\": %.1f, ", median());
    }
    for (round = 0; round < 5; round++) {
        barrier();
        began = get_seconds();
        if (MYPROC == 0)
            for (i = 0; i < n; i++)
                *p :- x;
        all_store_sync();
        rounds[round] = (get_seconds() - began) / n * 1e9;
    }
    if (MYPROC == 0) {
        printf("\"store\": %.1f, \"bandwidth\": [", median());
        for (size = 4; size <= 1 << 20; size *= 2) {
            count = (4 << 20) / size;
            count = count > n ? n : count < 8 ? 8 : count;
            for (round = 0; round < 5; round++) {
                began = get_seconds();
                for (i = 0; i < count; i++)
                    bulk_put(to, from, size);
                sync();
                rounds[round] = (get_seconds() - began) / count;
            }
            printf("%s[%d, %.1f]", size > 4 ? ", " : "", size, size / median() / 1e6);
        }
        printf("], \"ignore\": %.1f}\n", into[0] * 0);
    }
    barrier();
}
