/* Heat on a square: in each step a point becomes the mean of its four neighbours. Each processor has some rows,
   and puts the outer ones into the ghost rows of its neighbours. Bitwise what one processor alone computes. */
#include "check.h"

int width, rows;

static double first_value(int row, int col)
{
    return row == 0 ? 100.0 : (row * 37 + col * 11) % 50;
}

static void relax(double *to, double *from, int first, int last)
{
    int i, j;

    for (i = first; i <= last; i++)
        for (j = 1; j < width - 1; j++)
            to[i * width + j] = 0.25 * (from[(i - 1) * width + j] + from[(i + 1) * width + j] + from[i * width + j - 1]
                + from[i * width + j + 1]);
}

splitc_main(int argc, char **argv)
{
    int steps, step, i, j, height, up = MYPROC - 1, down = MYPROC + 1, bytes;
    double (*spread grid)[2][rows + 2][width];
    double *now, *next, *alone, *other, *swap, before = 0, after = 0, began = get_seconds();

    width = argument(argc, argv, 1, 40);
    rows = argument(argc, argv, 2, 10);
    steps = argument(argc, argv, 3, 50);
    height = rows * PROCS + 2;
    bytes = width * sizeof(double);
    grid = all_spread_malloc(PROCS, 2 * (rows + 2) * width * sizeof(double));
    alone = (double *)malloc(height * width * sizeof(double));
    other = (double *)malloc(height * width * sizeof(double));
    for (i = 0; i < height; i++)
        for (j = 0; j < width; j++)
            alone[i * width + j] = other[i * width + j] = first_value(i, j);
    for (step = 0; step < 2; step++)
        for (i = 0; i < rows + 2; i++)
            for (j = 0; j < width; j++)
                grid[MYPROC][step][i][j] = first_value(MYPROC * rows + i, j);
    barrier();
    for (step = 0; step < steps; step++) {
        now = (double *)tolocal(grid[MYPROC][step % 2]);
        next = (double *)tolocal(grid[MYPROC][1 - step % 2]);
        relax(next, now, 1, rows);
        if (up >= 0)
            bulk_put(grid[up][1 - step % 2][rows + 1], next + width, bytes);
        if (down < PROCS)
            bulk_put(grid[down][1 - step % 2][0], next + rows * width, bytes);
        sync();
        barrier();
        relax(other, alone, 1, height - 2);
        swap = alone;
        alone = other;
        other = swap;
    }
    now = (double *)tolocal(grid[MYPROC][steps % 2]);
    for (i = 1; i <= rows; i++)
        for (j = 0; j < width; j++) {
            require(now[i * width + j] == alone[(MYPROC * rows + i) * width + j], "a point is wrong");
            before += first_value(MYPROC * rows + i, j) * first_value(MYPROC * rows + i, j);
            after += now[i * width + j] * now[i * width + j];
        }
    on_one printf("stencil: from %g to %g\n", before, after);
    done("stencil", began);
}
