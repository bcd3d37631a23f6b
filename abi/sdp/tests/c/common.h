/* What the programs of these tests share. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}
