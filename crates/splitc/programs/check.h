/* What the programs share: random numbers that are the same everywhere, and checks. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A generator of Lehmer's kind; two of them give one number. */
static unsigned long next_random(unsigned long *state)
{
    *state = *state * 6364136223846793005UL + 1442695040888963407UL;
    return *state >> 33;
}

static double next_fraction(unsigned long *state)
{
    return (double)next_random(state) / 2147483648.0;
}

/* Mixes the bits of a number, for checksums that do not depend on the order. */
static unsigned mixed(unsigned x)
{
    x ^= x >> 16;
    x *= 0x7feb352dU;
    x ^= x >> 15;
    x *= 0x846ca68bU;
    return x ^ x >> 16;
}

static void require(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "processor %d: %s\n", MYPROC, what);
        splitc_abort(1);
    }
}

static int argument(int argc, char **argv, int number, int otherwise)
{
    return argc > number ? atoi(argv[number]) : otherwise;
}

static void done(const char *name, double began)
{
    barrier();
    on_one printf("%s: right on %d processors, %.3f s\n", name, PROCS, get_seconds() - began);
}

static int by_value(const void *a, const void *b)
{
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;
    return x < y ? -1 : x > y;
}

/* Whether keys are sorted, within processors and across them, and are those that there were. */
static void require_sorted(unsigned *keys, int count, unsigned *before, int count_before)
{
    unsigned low[PROCS]::, high[PROCS]::;
    int counts[PROCS]::;
    unsigned sum = 0, bits = 0;
    int i, p;

    for (i = 0; i < count; i++) {
        sum += mixed(keys[i]);
        bits ^= mixed(keys[i] + 1);
        require(i == 0 || keys[i - 1] <= keys[i], "its keys are not sorted");
    }
    for (i = 0; i < count_before; i++) {
        sum -= mixed(before[i]);
        bits ^= mixed(before[i] + 1);
    }
    require(all_reduce_to_all_add(count - count_before) == 0, "keys were lost or doubled");
    require(all_reduce_to_all_add((int)sum) == 0, "the keys are others than before");
    require(all_reduce_to_all_xor((int)bits) == 0, "the keys are others than before");
    counts[MYPROC] = count;
    if (count > 0) {
        low[MYPROC] = keys[0];
        high[MYPROC] = keys[count - 1];
    }
    barrier();
    for (p = MYPROC - 1; p >= 0 && count > 0; p--) {
        if (counts[p] > 0) {
            require(high[p] <= keys[0], "its keys are smaller than those of the one before");
            break;
        }
    }
    barrier();
}
