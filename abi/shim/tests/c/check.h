/* What the programs of these tests share. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);      \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

/* Checks that a call fails, and how. */
#define FAILS(call, error)                                                                         \
    do {                                                                                           \
        errno = 0;                                                                                 \
        CHECK((call) == -1 && errno == (error));                                                   \
    } while (0)

static int failures;

#define DEVICES "/sys/class/infiniband"
#define DEVICE DEVICES "/quipu0"

/* How many entries are left of a folder, and whether one of them has the name. */
__attribute__((unused)) static int entries(DIR *folder, const char *name, int *found)
{
    int count = 0;
    *found = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        count += entry->d_name[0] != '.';
        *found |= strcmp(entry->d_name, name) == 0;
    }
    return count;
}

/* Whether a descriptor gives this text. */
__attribute__((unused)) static int reads(int fd, const char *text)
{
    char got[256] = {0};
    ssize_t length = read(fd, got, sizeof got - 1);
    return length == (ssize_t)strlen(text) && strcmp(got, text) == 0;
}
