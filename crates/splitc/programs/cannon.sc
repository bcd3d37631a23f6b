/* Cannon's matrix multiplication: processors form a square; blocks of A move left and blocks of B move up, after
   a first shift that lines them up. The product of small integers is exact; that of fractions is compared with
   a bound on the rounding. */
#include "check.h"

static double element(int which, int i, int j, int integers)
{
    unsigned long state = (unsigned long)which * 1000003 + (unsigned long)i * 5003 + j;

    next_random(&state);
    return integers ? (double)(next_random(&state) % 17) - 8 : next_fraction(&state);
}

static void multiply(int b, double *c, double *x, double *y)
{
    int i, j, k;

    for (i = 0; i < b; i++)
        for (k = 0; k < b; k++)
            for (j = 0; j < b; j++)
                c[i * b + j] += x[i * b + k] * y[k * b + j];
}

/* q * q processors, of which the others are idle; blocks of b * b numbers. */
static void cannon(int q, int b, int integers)
{
    double A[PROCS]::[2][b][b], B[PROCS]::[2][b][b];
    double C[b][b];
    int row = MYPROC / q, col = MYPROC % q, n = q * b, works = MYPROC < q * q, i, j, k, s, bytes = b * b * sizeof(double);
    double bound = integers ? 0 : n * 1e-15 * n;

    memset(C, 0, sizeof C);
    if (works) {
        double (*a)[b] = tolocal(A[MYPROC][0]), (*y)[b] = tolocal(B[MYPROC][0]);
        int shift = (row + col) % q;

        for (i = 0; i < b; i++)
            for (j = 0; j < b; j++) {
                a[i][j] = element(1, row * b + i, shift * b + j, integers);
                y[i][j] = element(2, shift * b + i, col * b + j, integers);
            }
    }
    barrier();
    for (s = 0; s < q; s++) {
        int now = s % 2, next = 1 - now;

        if (works) {
            int left = row * q + (col + q - 1) % q, up = (row + q - 1) % q * q + col;

            bulk_store(A[left][next], tolocal(A[MYPROC][now]), bytes);
            bulk_store(B[up][next], tolocal(B[MYPROC][now]), bytes);
            multiply(b, &C[0][0], (double *)tolocal(A[MYPROC][now]), (double *)tolocal(B[MYPROC][now]));
            store_sync(2 * bytes);
        }
        barrier();
    }
    for (i = 0; works && i < b; i++)
        for (j = 0; j < b; j++) {
            double sum = 0;

            for (k = 0; k < n; k++)
                sum += element(1, row * b + i, k, integers) * element(2, k, col * b + j, integers);
            require(fabs(sum - C[i][j]) <= bound, "an element of the product is wrong");
        }
}

splitc_main(int argc, char **argv)
{
    int b = argument(argc, argv, 1, 24), q = 1;
    double began = get_seconds();

    while ((q + 1) * (q + 1) <= PROCS)
        q++;
    cannon(q, b, 1);
    cannon(q, b, 0);
    done("cannon", began);
}
