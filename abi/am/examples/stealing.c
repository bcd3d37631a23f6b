/* Work stealing: tasks make further tasks, and a process that has none takes half of another's.
 *
 *   cc stealing.c -o stealing $(pkg-config --cflags --libs am)
 *   quipu spmd -n 4 -- ./stealing [DEPTH]        or        ./stealing 4 L [DEPTH]
 *
 * The tasks are the nodes of a tree that follows from the number of its root, so each process could count them
 * alone; process 0 does, and compares. */
#include "check.h"
#include <string.h>

enum { STEAL = 1, LOOT, REPORT, STOP, SUM };
enum { MOST = 1 << 16, SHARE = 64 };

struct task {
    uint64_t number;
    uint64_t depth;
};

static struct task tasks[MOST];
static int count, is_asking, is_over, is_announced;
static uint64_t done, checksum;
/* At process 0: tasks that are done everywhere, and the sums of the others. */
static uint64_t all_done, all_checksum;
static int sums;

static void push(struct task task) {
    EXPECT(count < MOST);
    tasks[count++] = task;
}

/* The children of a task. */
static int children(struct task task, struct task *out) {
    if (task.depth == 0)
        return 0;
    int n = 1 + (int)(mixed(task.number) % 3);
    for (int i = 0; i < n; i++)
        out[i] = (struct task){mixed(task.number * 4 + (unsigned)i + 1), task.depth - 1};
    return n;
}

/* Gives away the older half: those are nearest to the root, with the most below them. */
static void steal(void *token) {
    int share = count / 2 < SHARE ? count / 2 : SHARE;
    struct task loot[SHARE];
    memcpy(loot, tasks, (size_t)share * sizeof *tasks);
    memmove(tasks, tasks + share, (size_t)(count - share) * sizeof *tasks);
    count -= share;
    CHECK(AM_ReplyI0(token, LOOT, loot, share * (int)sizeof *tasks));
}

static void take(void *token, void *loot, int nbytes) {
    (void)token;
    for (int at = 0; at < nbytes; at += (int)sizeof(struct task)) {
        struct task task;
        memcpy(&task, (char *)loot + at, sizeof task);
        push(task);
    }
    is_asking = 0;
}

static void report(void *token, int number) {
    (void)token;
    all_done += (unsigned)number;
}

static void stop(void *token) {
    (void)token;
    is_over = 1;
}

static void add(void *token, int high, int low) {
    (void)token;
    all_checksum += (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
    sums++;
}

static uint64_t walk(struct task task, uint64_t *sum) {
    struct task below[3];
    int n = children(task, below);
    uint64_t nodes = 1;
    *sum += task.number;
    for (int i = 0; i < n; i++)
        nodes += walk(below[i], sum);
    return nodes;
}

int main(int argc, char **argv) {
    eb_t bundle;
    ep_t ep;
    CHECK(AMX_SPMDStartup(&argc, &argv, 0, NULL, &bundle, &ep));
    struct task root = {7, (uint64_t)(argc > 1 ? atoi(argv[1]) : 12)};
    int processes = AMX_SPMDNumProcs(), me = AMX_SPMDMyProc();
    CHECK(AM_SetHandler(ep, STEAL, steal));
    CHECK(AM_SetHandler(ep, LOOT, take));
    CHECK(AM_SetHandler(ep, REPORT, report));
    CHECK(AM_SetHandler(ep, STOP, stop));
    CHECK(AM_SetHandler(ep, SUM, add));
    uint64_t expected_sum = 0, expected = me == 0 ? walk(root, &expected_sum) : 0;
    if (me == 0)
        push(root);
    CHECK(AMX_SPMDBarrier());

    uint64_t reported = 0, random = (unsigned)me;
    while (!is_over) {
        CHECK(AM_Poll(bundle));
        if (count > 0) {
            struct task task = tasks[--count], below[3];
            int n = children(task, below);
            for (int i = 0; i < n; i++)
                push(below[i]);
            done++;
            checksum += task.number;
        } else if (done > reported) {
            CHECK(AM_Request1(ep, 0, REPORT, (int)(done - reported)));
            reported = done;
        } else if (!is_asking && processes > 1) {
            random = mixed(random + 1);
            int victim = (int)(random % (unsigned)processes);
            if (victim != me) {
                is_asking = 1;
                CHECK(AM_Request0(ep, victim, STEAL));
            }
        }
        if (me == 0 && all_done == expected && !is_announced) {
            is_announced = 1;
            for (int process = 0; process < processes; process++)
                CHECK(AM_Request0(ep, process, STOP));
        }
    }
    /* A request that nobody has handled comes back when its receiver ends: each is answered before that. */
    while (is_asking)
        CHECK(AM_Poll(bundle));
    EXPECT(count == 0);
    CHECK(AM_Request2(ep, 0, SUM, (int)(checksum >> 32), (int)checksum));
    if (me == 0) {
        while (sums < processes)
            CHECK(AM_Poll(bundle));
        EXPECT(all_done == expected && all_checksum == expected_sum);
        printf("%d processes have done %llu tasks, each once\n", processes, (unsigned long long)all_done);
    }
    CHECK(AMX_SPMDBarrier());
    return AMX_SPMDExit(0);
}
