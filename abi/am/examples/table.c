/* A hash table that lies in all processes: each key is at one of them, which inserts and finds it.
 *
 *   cc table.c -o table $(pkg-config --cflags --libs am)
 *   quipu spmd -n 4 -- ./table [KEYS]        or        ./table 4 L [KEYS]
 *
 * Half of the keys of a process are those of the next one, too, so the number of different ones is known. */
#include "check.h"

enum { INSERT = 1, INSERTED, FIND, FOUND, COUNT };

struct entry {
    struct entry *next;
    uint64_t key, value;
};

enum { BUCKETS = 4096 };
static struct entry *buckets[BUCKETS];
static int entries, duplicates, inserted, found, reports, all_entries, all_duplicates;
static ep_t ep;

static uint64_t number(int high, int low) {
    return (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
}

static struct entry *look_up(uint64_t key) {
    struct entry *at = buckets[mixed(key) >> 32 & (BUCKETS - 1)];
    while (at != NULL && at->key != key)
        at = at->next;
    return at;
}

static void insert(void *token, int key_high, int key_low, int value_high, int value_low) {
    uint64_t key = number(key_high, key_low);
    if (look_up(key) != NULL) {
        duplicates++;
    } else {
        struct entry **bucket = &buckets[mixed(key) >> 32 & (BUCKETS - 1)];
        struct entry *entry = malloc(sizeof *entry);
        EXPECT(entry != NULL);
        *entry = (struct entry){*bucket, key, number(value_high, value_low)};
        *bucket = entry;
        entries++;
    }
    CHECK(AM_Reply0(token, INSERTED));
}

static void is_inserted(void *token) {
    (void)token;
    inserted++;
}

static void find(void *token, int key_high, int key_low) {
    struct entry *entry = look_up(number(key_high, key_low));
    uint64_t value = entry == NULL ? 0 : entry->value;
    CHECK(AM_Reply4(token, FOUND, key_high, key_low, (int)(value >> 32), (int)value));
}

static void is_found(void *token, int key_high, int key_low, int value_high, int value_low) {
    (void)token;
    EXPECT(number(value_high, value_low) == mixed(number(key_high, key_low) + 1));
    found++;
}

static void count(void *token, int here, int again) {
    (void)token;
    all_entries += here;
    all_duplicates += again;
    reports++;
}

/* The process that a key is at. */
static int owner(uint64_t key) {
    return (int)(mixed(key) % (unsigned)AMX_SPMDNumProcs());
}

int main(int argc, char **argv) {
    eb_t bundle;
    CHECK(AMX_SPMDStartup(&argc, &argv, 0, NULL, &bundle, &ep));
    int keys = (argc > 1 ? atoi(argv[1]) : 10000) / 2 * 2;
    int processes = AMX_SPMDNumProcs(), me = AMX_SPMDMyProc();
    CHECK(AM_SetHandler(ep, INSERT, insert));
    CHECK(AM_SetHandler(ep, INSERTED, is_inserted));
    CHECK(AM_SetHandler(ep, FIND, find));
    CHECK(AM_SetHandler(ep, FOUND, is_found));
    CHECK(AM_SetHandler(ep, COUNT, count));
    CHECK(AMX_SPMDBarrier());

    uint64_t first = 1 + (uint64_t)me * (unsigned)keys / 2;
    for (uint64_t key = first; key < first + (unsigned)keys; key++) {
        uint64_t value = mixed(key + 1);
        CHECK(AM_Request4(ep, owner(key), INSERT, (int)(key >> 32), (int)key, (int)(value >> 32), (int)value));
    }
    while (inserted < keys)
        CHECK(AM_Poll(bundle));
    CHECK(AMX_SPMDBarrier());

    for (uint64_t key = first; key < first + (unsigned)keys; key++)
        CHECK(AM_Request2(ep, owner(key), FIND, (int)(key >> 32), (int)key));
    while (found < keys)
        CHECK(AM_Poll(bundle));

    CHECK(AM_Request2(ep, 0, COUNT, entries, duplicates));
    if (me == 0) {
        while (reports < processes)
            CHECK(AM_Poll(bundle));
        EXPECT(all_entries == (processes + 1) * (keys / 2));
        EXPECT(all_duplicates == (processes - 1) * (keys / 2));
        printf("%d processes have inserted and found %d keys each, %d different ones\n", processes, keys,
               all_entries);
    }
    CHECK(AMX_SPMDBarrier());
    return AMX_SPMDExit(0);
}
