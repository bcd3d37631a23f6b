/* Times of the accesses, by the method of the paper on Split-C over VI (figure 2): processor 0 works on the memory of
   processor 1, which polls. Read and write are the mean of many; get and put of many and one sync; store of many,
   up to the wait at the target. In microseconds, the median of nine rounds. Needs two processors. */
#include "check.h"

#define ROUNDS 9

struct block { double numbers[512]; };

double room[PROCS]::[1024];
int flag[PROCS]::;
struct block blocks[PROCS]::[8];

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *times)
{
    qsort(times, ROUNDS, sizeof(double), by_size);
    return times[ROUNDS / 2] * 1e6;
}

/* A statement, count times, and a last one; on processor 0. The others wait in a barrier, where they poll. */
#define MEASURE(name, type, statement, last)                          \
    for (round = 0; round < ROUNDS; round++) {                        \
        double start;                                                 \
                                                                      \
        barrier();                                                    \
        start = get_seconds();                                        \
        on_one {                                                      \
            for (i = 0; i < count; i++) {                             \
                statement;                                            \
            }                                                         \
            last;                                                     \
        }                                                             \
        times[round] = (get_seconds() - start) / count;               \
        barrier();                                                    \
    }                                                                 \
    on_one printf("%-6s %-7s %9.4f us\n", name, #type, median(times));

#define TYPE(type)                                                                   \
    {                                                                                \
        type *global p = (type *global)(room + 1);                                   \
        type x = 1, sum = 0;                                                         \
                                                                                     \
        MEASURE("read", type, sum += p[i & 511], (void)0)                            \
        MEASURE("write", type, p[i & 511] = x, (void)0)                              \
        MEASURE("get", type, x := p[i & 511], sync())                                \
        MEASURE("put", type, p[i & 511] := x, sync())                                \
        MEASURE("store", type, p[i & 511] :- x, (void)0)                             \
        if (sum == (type)123.5) printf("%g\n", (double)sum);                         \
        all_store_sync();                                                            \
    }

splitc_main(int argc, char **argv)
{
    int count = argument(argc, argv, 1, 20000), i, round;
    double times[ROUNDS];
    struct block local;

    require(PROCS >= 2, "this takes two processors");
    memset(&local, 0, sizeof local);
    TYPE(char)
    TYPE(short)
    TYPE(int)
    TYPE(long)
    TYPE(float)
    TYPE(double)
    MEASURE("bulk", 4 KB put, bulk_put(&blocks[1][i & 7], &local, sizeof local), sync())
    MEASURE("bulk", 4 KB get, bulk_get(&local, &blocks[1][i & 7], sizeof local), sync())
    for (round = 0; round < ROUNDS; round++) {
        double start;

        barrier();
        start = get_seconds();
        for (i = 0; i < count; i++)
            barrier();
        times[round] = (get_seconds() - start) / count;
    }
    on_one printf("barrier of %d    %9.4f us\n", PROCS, median(times));
    done("times", get_seconds());
}
