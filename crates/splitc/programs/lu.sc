/* LU decomposition of a dense matrix in blocks, which go round the processors. The owner of a diagonal block
   factors it; the blocks of its row and column follow; then everybody updates the blocks that it has. */
#include "check.h"

int b, nb; /* numbers in a row of a block, blocks in a row of the matrix */

static double element(int i, int j)
{
    unsigned long state = (unsigned long)i * 7919 + j;

    next_random(&state);
    return next_fraction(&state) + (i == j ? nb * b : 0);
}

static void factor(double a[b][b])
{
    int i, j, k;

    for (k = 0; k < b; k++)
        for (i = k + 1; i < b; i++) {
            a[i][k] /= a[k][k];
            for (j = k + 1; j < b; j++)
                a[i][j] -= a[i][k] * a[k][j];
        }
}

/* x := inverse of the lower half of d times x. */
static void solve_row(double d[b][b], double x[b][b])
{
    int i, j, k;

    for (k = 0; k < b; k++)
        for (i = k + 1; i < b; i++)
            for (j = 0; j < b; j++)
                x[i][j] -= d[i][k] * x[k][j];
}

/* x := x times the inverse of the upper half of d. */
static void solve_column(double d[b][b], double x[b][b])
{
    int i, j, k;

    for (i = 0; i < b; i++)
        for (k = 0; k < b; k++) {
            x[i][k] /= d[k][k];
            for (j = k + 1; j < b; j++)
                x[i][j] -= x[i][k] * d[k][j];
        }
}

static void subtract(double a[b][b], double x[b][b], double y[b][b])
{
    int i, j, k;

    for (i = 0; i < b; i++)
        for (k = 0; k < b; k++)
            for (j = 0; j < b; j++)
                a[i][j] -= x[i][k] * y[k][j];
}

static void decompose(int v, int w, int q, double A[v][w]::[q][q])
{
    double diagonal[q][q], left[q][q], upper[q][q];
    int I, J, K, bytes = q * q * sizeof(double);

    for (K = 0; K < v; K++) {
        if (toproc(&A[K][K]) == MYPROC)
            factor(tolocal(A[K][K]));
        barrier();
        bulk_read(diagonal, A[K][K], bytes);
        for (I = K + 1; I < v; I++) {
            if (toproc(&A[K][I]) == MYPROC)
                solve_row(diagonal, tolocal(A[K][I]));
            if (toproc(&A[I][K]) == MYPROC)
                solve_column(diagonal, tolocal(A[I][K]));
        }
        barrier();
        for (I = K + 1; I < v; I++)
            for (J = K + 1; J < w; J++)
                if (toproc(&A[I][J]) == MYPROC) {
                    bulk_get(left, A[I][K], bytes);
                    bulk_get(upper, A[K][J], bytes);
                    sync();
                    subtract(tolocal(A[I][J]), left, upper);
                }
        barrier();
    }
}

splitc_main(int argc, char **argv)
{
    double began = get_seconds(), worst = 0, largest = 0;
    int i, j, k, I, J;

    b = argument(argc, argv, 1, 8);
    nb = argument(argc, argv, 2, 6);
    {
        double A[nb][nb]::[b][b];
        int n = b * nb;

        for_my_2d(I, J, k, nb, nb) {
            double (*a)[b] = tolocal(A[I][J]);

            for (i = 0; i < b; i++)
                for (j = 0; j < b; j++)
                    a[i][j] = element(I * b + i, J * b + j);
        }
        barrier();
        decompose(nb, nb, b, A);
        on_one {
            double (*lu)[n] = malloc(n * sizeof *lu);

            for (I = 0; I < n; I++)
                for (J = 0; J < n; J++)
                    lu[I][J] = A[I / b][J / b][I % b][J % b];
            for (i = 0; i < n; i++)
                for (j = 0; j < n; j++) {
                    double sum = i <= j ? lu[i][j] : 0;

                    for (k = 0; k < i && k <= j; k++)
                        sum += lu[i][k] * lu[k][j];
                    worst = fmax(worst, fabs(sum - element(i, j)));
                    largest = fmax(largest, fabs(element(i, j)));
                }
            require(worst <= n * largest * 1e-15, "L times U is not the matrix");
            printf("lu: %d x %d, largest error %g\n", n, n, worst);
            free(lu);
        }
        barrier();
    }
    done("lu", began);
}
