/* Connected components of a random mesh: each processor has some rows, and joins them by union and find; then
   roots of different processors are hooked to each other through global pointers, until nothing changes. */
#include "check.h"

struct vertex {
    struct vertex *global up; /* towards the root, which points to itself */
    int name;
};

int width, rows, percent;

/* Whether there is an edge from a vertex to the right (0) or down (1). */
static int has_edge(int row, int col, int down)
{
    unsigned long state = ((unsigned long)row * width + col) * 2 + down;

    next_random(&state);
    return (int)(next_random(&state) % 100) < percent;
}

/* The root, over the network if need be. */
static struct vertex *global root(struct vertex *global v)
{
    struct vertex *global up = v->up;

    while (up != v) {
        v = up;
        up = v->up;
    }
    return v;
}

/* Runs at the owner: hooks a root to another vertex, unless it is a root no more. */
static int hook(struct vertex *v, int proc, long at)
{
    struct vertex *global to = toglobal(proc, (struct vertex *)at);

    if (v->up != toglobal(MYPROC, v))
        return 0;
    v->up = to;
    return 1;
}

static void join(struct vertex *global a, struct vertex *global b)
{
    for (;;) {
        struct vertex *global x = root(a), *global y = root(b);
        int name_x, name_y;

        if (x == y)
            return;
        /* Names decide, so that no two hook each other. */
        name_x = x->name;
        name_y = y->name;
        if (name_x < name_y) {
            if (i_atomic(hook, y, toproc(x), (long)tolocal(x)))
                return;
        } else if (i_atomic(hook, x, toproc(y), (long)tolocal(y)))
            return;
    }
}

static int sequential(int *labels, int n, int height)
{
    int i, row, col, changed = 1, count = 0;

    for (i = 0; i < n; i++)
        labels[i] = i;
    while (changed) {
        changed = 0;
        for (row = 0; row < height; row++)
            for (col = 0; col < width; col++) {
                int v = row * width + col, down;

                for (down = 0; down < 2; down++) {
                    int w = down ? v + width : v + 1;

                    if ((down ? row + 1 < height : col + 1 < width) && has_edge(row, col, down) && labels[v] != labels[w]) {
                        labels[v] = labels[w] = labels[v] < labels[w] ? labels[v] : labels[w];
                        changed = 1;
                    }
                }
            }
    }
    for (i = 0; i < n; i++)
        count += labels[i] == i;
    return count;
}

static void run(void)
{
    struct vertex (*spread mesh)[rows][width];
    struct vertex (*mine)[width];
    int row, col, height = rows * PROCS, roots = 0, count, *labels;

    mesh = all_spread_malloc(PROCS, rows * width * sizeof(struct vertex));
    mine = *tolocal(mesh + MYPROC);
    for (row = 0; row < rows; row++)
        for (col = 0; col < width; col++) {
            mine[row][col].up = &mine[row][col];
            mine[row][col].name = (MYPROC * rows + row) * width + col;
        }
    barrier();
    for (row = 0; row < rows; row++)
        for (col = 0; col < width; col++) {
            int y = MYPROC * rows + row;
            struct vertex *global here = &mine[row][col];

            if (col + 1 < width && has_edge(y, col, 0))
                join(here, &mine[row][col + 1]);
            if (y + 1 < height && has_edge(y, col, 1))
                join(here, &(*(mesh + (y + 1) / rows))[(y + 1) % rows][col]);
        }
    barrier();
    labels = (int *)malloc(height * width * sizeof(int));
    count = sequential(labels, height * width, height);
    for (row = 0; row < rows; row++)
        for (col = 0; col < width; col++) {
            int name = root(&mine[row][col])->name;

            /* Hooking goes to the smaller name, so a root has the smallest one of its component. */
            require(name == labels[(MYPROC * rows + row) * width + col], "a vertex is in the wrong component");
            roots += tolocal(mine[row][col].up) == &mine[row][col] && toproc(mine[row][col].up) == MYPROC;
        }
    require(all_reduce_to_all_add(roots) == count, "the number of components is wrong");
    on_one printf("components: %d of %d vertices\n", count, height * width);
}

splitc_main(int argc, char **argv)
{
    double began = get_seconds();

    width = argument(argc, argv, 1, 24);
    rows = argument(argc, argv, 2, 12);
    percent = argument(argc, argv, 3, 45);
    run();
    done("connected components", began);
}
