/* EM3D: electromagnetic waves on an irregular bipartite graph. Nodes of the electric and the magnetic field take
   turns: each is changed by the weighted sum of its neighbours, some of which are on other processors. Five
   versions differ in how they get the remote values; all give bitwise the same as one processor alone. */
#include "check.h"

#define DEGREE 8

struct node {
    double value;
    double weight[DEGREE];
    double *global from[DEGREE];
    int place[DEGREE]; /* of the copy of a remote value */
};

int per_proc, steps, percent;

/* Where neighbour d of node i of a field is: the same on every processor that asks. */
static void neighbour(int field, int proc, int i, int d, int *to_proc, int *to, double *weight)
{
    unsigned long state = ((unsigned long)field << 60) + (unsigned long)(proc * per_proc + i) * 977 + d * 31 + 7;

    next_random(&state);
    *to = next_random(&state) % per_proc;
    *to_proc = proc;
    if ((int)(next_random(&state) % 100) < percent)
        *to_proc = (proc + 1 + next_random(&state) % 3) % PROCS;
    *weight = next_fraction(&state) / DEGREE;
}

static double first_value(int field, int proc, int i)
{
    unsigned long state = (unsigned long)(proc * per_proc + i) * 2 + field;

    next_random(&state);
    return next_fraction(&state);
}

static void build(int field, struct node *mine, struct node (*spread other)[per_proc])
{
    int i, d;

    for (i = 0; i < per_proc; i++) {
        mine[i].value = first_value(field, MYPROC, i);
        for (d = 0; d < DEGREE; d++) {
            int proc, to;

            neighbour(field, MYPROC, i, d, &proc, &to, &mine[i].weight[d]);
            mine[i].from[d] = &(*(other + proc))[to].value;
        }
    }
}

/* Each value is read where it is used. */
static void step_read(struct node *mine)
{
    int i, d;

    for (i = 0; i < per_proc; i++)
        for (d = 0; d < DEGREE; d++)
            mine[i].value -= mine[i].weight[d] * *mine[i].from[d];
}

/* Values of a node are fetched together, split-phase. */
static void step_get(struct node *mine)
{
    double got[DEGREE];
    int i, d;

    for (i = 0; i < per_proc; i++) {
        for (d = 0; d < DEGREE; d++)
            got[d] := *mine[i].from[d];
        sync();
        for (d = 0; d < DEGREE; d++)
            mine[i].value -= mine[i].weight[d] * got[d];
    }
}

/* All remote values are fetched into ghost nodes before the step. */
static void step_ghost(struct node *mine, double *ghost)
{
    int i, d, n = 0;

    for (i = 0; i < per_proc; i++)
        for (d = 0; d < DEGREE; d++)
            if (toproc(mine[i].from[d]) != MYPROC) {
                mine[i].place[d] = n;
                ghost[n++] := *mine[i].from[d];
            }
    sync();
    for (i = 0; i < per_proc; i++)
        for (d = 0; d < DEGREE; d++) {
            double *global from = mine[i].from[d];
            double value = toproc(from) == MYPROC ? *tolocal(from) : ghost[mine[i].place[d]];

            mine[i].value -= mine[i].weight[d] * value;
        }
}

/* Owners store their values into copies of whole fields; bulk: all at once. */
static void step_store(struct node *mine, struct node *other, double (*spread copies)[PROCS * per_proc], int bulk)
{
    double *here = tolocal(copies[MYPROC]);
    int i, d, p;

    if (bulk) {
        double values[per_proc];

        for (i = 0; i < per_proc; i++)
            values[i] = other[i].value;
        for (p = 0; p < PROCS; p++)
            bulk_store(&copies[p][MYPROC * per_proc], values, per_proc * sizeof(double));
        all_store_sync();
    } else {
        for (p = 0; p < PROCS; p++)
            for (i = 0; i < per_proc; i++)
                copies[p][MYPROC * per_proc + i] :- other[i].value;
        store_sync(PROCS * per_proc * sizeof(double));
    }
    for (i = 0; i < per_proc; i++)
        for (d = 0; d < DEGREE; d++) {
            double *global from = mine[i].from[d];
            int to = ((char *)tolocal(from) - (char *)other) / sizeof(struct node);

            mine[i].value -= mine[i].weight[d] * here[toproc(from) * per_proc + to];
        }
}

/* One processor alone, in the same order of operations. */
static void alone(double *e, double *h)
{
    int field, proc, i, d, step, to_proc, to;
    double weight;

    for (proc = 0; proc < PROCS; proc++)
        for (i = 0; i < per_proc; i++) {
            e[proc * per_proc + i] = first_value(0, proc, i);
            h[proc * per_proc + i] = first_value(1, proc, i);
        }
    for (step = 0; step < 2 * steps; step++) {
        double *mine = step % 2 ? h : e, *other = step % 2 ? e : h;

        field = step % 2;
        for (proc = 0; proc < PROCS; proc++)
            for (i = 0; i < per_proc; i++)
                for (d = 0; d < DEGREE; d++) {
                    neighbour(field, proc, i, d, &to_proc, &to, &weight);
                    mine[proc * per_proc + i] -= weight * other[to_proc * per_proc + to];
                }
    }
}

splitc_main(int argc, char **argv)
{
    static char *names[] = {"read", "get", "ghost", "store", "bulk store"};
    struct node (*spread e)[per_proc], (*spread h)[per_proc];
    double (*spread copies)[PROCS * per_proc];
    struct node *mine_e, *mine_h;
    double *ghost, *right_e, *right_h, began = get_seconds();
    int version, step, i;

    per_proc = argument(argc, argv, 1, 100);
    steps = argument(argc, argv, 2, 5);
    percent = argument(argc, argv, 3, 40);
    e = all_spread_malloc(PROCS, per_proc * sizeof(struct node));
    h = all_spread_malloc(PROCS, per_proc * sizeof(struct node));
    copies = all_spread_malloc(PROCS, PROCS * per_proc * sizeof(double));
    mine_e = (struct node *)tolocal(e + MYPROC);
    mine_h = (struct node *)tolocal(h + MYPROC);
    ghost = (double *)malloc(per_proc * DEGREE * sizeof(double));
    right_e = (double *)malloc(PROCS * per_proc * sizeof(double));
    right_h = (double *)malloc(PROCS * per_proc * sizeof(double));
    alone(right_e, right_h);
    for (version = 0; version < 5; version++) {
        double start;

        build(0, mine_e, h);
        build(1, mine_h, e);
        barrier();
        start = get_seconds();
        for (step = 0; step < 2 * steps; step++) {
            struct node *mine = step % 2 ? mine_h : mine_e, *other = step % 2 ? mine_e : mine_h;

            switch (version) {
            case 0: step_read(mine); break;
            case 1: step_get(mine); break;
            case 2: step_ghost(mine, ghost); break;
            default: step_store(mine, other, copies, version == 4);
            }
            barrier();
        }
        on_one printf("em3d, %s: %.6f s\n", names[version], get_seconds() - start);
        for (i = 0; i < per_proc; i++) {
            require(mine_e[i].value == right_e[MYPROC * per_proc + i], "an electric value is wrong");
            require(mine_h[i].value == right_h[MYPROC * per_proc + i], "a magnetic value is wrong");
        }
        barrier();
    }
    all_spread_free(copies);
    all_spread_free(h);
    all_spread_free(e);
    done("em3d", began);
}
