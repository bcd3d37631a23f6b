/* What the programs that count octets share. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void must(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

/* The octet at a place of a stream. */
static inline unsigned char octet(unsigned long at)
{
    return (at * 0x9e3779b97f4a7c15ul) >> 56;
}

/* Prints how many octets of this process went through memory, by its report. */
static inline void print_octets(void)
{
    char path[100], line[400];
    long sum = 0;
    snprintf(path, sizeof path, "/dev/shm/quipu-sockets-%d/%d", (int)geteuid(), (int)getpid());
    usleep(400000);
    FILE *report = fopen(path, "r");
    while (report != NULL && fgets(line, sizeof line, report) != NULL) {
        long octets = 0;
        if (sscanf(line, "%*d %*s %*s %*d %ld", &octets) == 1)
            sum += octets;
    }
    printf("by memory %ld\n", sum);
}
