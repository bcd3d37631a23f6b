/* Fast Fourier transform of complex numbers: in the cyclic layout the first log(n / P) stages are local; one
   exchange of all with all brings the blocked layout, in which the others are. Checked with an impulse, a single
   tone, Parseval's equation and the inverse. P is a power of two, and P * P divides n. */
#include "check.h"

#define PI 3.14159265358979323846

struct complex { double re, im; };

int n, m; /* numbers in all, and on each processor */

static struct complex root(long k, long of, int sign)
{
    struct complex w;

    w.re = cos(2 * PI * k / of);
    w.im = sign * sin(2 * PI * k / of);
    return w;
}

/* One butterfly: decimation in frequency. */
static void butterfly(struct complex *a, struct complex *b, struct complex w)
{
    struct complex sum, diff;

    sum.re = a->re + b->re;
    sum.im = a->im + b->im;
    diff.re = a->re - b->re;
    diff.im = a->im - b->im;
    *a = sum;
    b->re = diff.re * w.re - diff.im * w.im;
    b->im = diff.re * w.im + diff.im * w.re;
}

/* From the cyclic layout in X to the blocked layout in Y, in bit-reversed order. */
static void transform(struct complex (*spread X)[m], struct complex (*spread Y)[m], int sign)
{
    struct complex *x = (struct complex *)tolocal(X + MYPROC), *y = (struct complex *)tolocal(Y + MYPROC);
    long half, i;

    /* Local index i is number i * PROCS + MYPROC. */
    for (half = n / 2; half >= PROCS; half /= 2)
        for (i = 0; i < m; i++) {
            long at = i * PROCS + MYPROC;

            if ((at & half) == 0)
                butterfly(x + i, x + i + half / PROCS, root(at & half - 1, 2 * half, sign));
        }
    barrier();
    for (i = 0; i < m; i++) {
        long at = i * PROCS + MYPROC;

        Y[at / m][at % m] := x[i];
    }
    sync();
    barrier();
    for (; half >= 1; half /= 2)
        for (i = 0; i < m; i++)
            if ((i & half) == 0)
                butterfly(y + i, y + i + half, root(i & half - 1, 2 * half, sign));
    barrier();
}

static long reversed(long i)
{
    long r = 0, bit;

    for (bit = 1; bit < n; bit *= 2)
        r = r * 2 + (i & bit ? 1 : 0);
    return r;
}

splitc_main(int argc, char **argv)
{
    struct complex (*spread X)[m], (*spread Y)[m], *x, *y;
    double began = get_seconds(), before = 0, after = 0, far = 0, tolerance;
    unsigned long state = 99 + MYPROC;
    struct complex *kept;
    long i, tone = 5;

    n = argument(argc, argv, 1, 4096);
    m = n / PROCS;
    require(PROCSLOG >= 0 && m * PROCS == n && m % PROCS == 0 && (n & n - 1) == 0, "n does not fit the processors");
    tolerance = 1e-12 * log(n);
    X = all_spread_malloc(PROCS, m * sizeof(struct complex));
    Y = all_spread_malloc(PROCS, m * sizeof(struct complex));
    x = (struct complex *)tolocal(X + MYPROC);
    y = (struct complex *)tolocal(Y + MYPROC);
    kept = (struct complex *)malloc(m * sizeof(struct complex));

    memset(x, 0, m * sizeof(struct complex));
    on_one x[0].re = 1;
    transform(X, Y, -1);
    for (i = 0; i < m; i++)
        require(y[i].re == 1 && y[i].im == 0, "the transform of an impulse is not constant");

    for (i = 0; i < m; i++)
        x[i] = root((i * PROCS + MYPROC) * tone % n, n, 1);
    transform(X, Y, -1);
    for (i = 0; i < m; i++) {
        double right = reversed(MYPROC * (long)m + i) == tone ? n : 0;

        require(fabs(y[i].re - right) + fabs(y[i].im) < tolerance * n, "the transform of a tone is not one line");
    }

    for (i = 0; i < m; i++) {
        x[i].re = kept[i].re = next_fraction(&state) - 0.5;
        x[i].im = kept[i].im = next_fraction(&state) - 0.5;
        before += x[i].re * x[i].re + x[i].im * x[i].im;
    }
    transform(X, Y, -1);
    for (i = 0; i < m; i++)
        after += y[i].re * y[i].re + y[i].im * y[i].im;
    before = all_reduce_to_all_dadd(before);
    after = all_reduce_to_all_dadd(after);
    require(fabs(after / n - before) < tolerance * n, "Parseval's equation does not hold");
    /* Back: from bit-reversed order to the cyclic layout, and through again. */
    for (i = 0; i < m; i++) {
        long at = reversed(MYPROC * (long)m + i);

        X[at % PROCS][at / PROCS] := y[i];
    }
    sync();
    barrier();
    transform(X, Y, 1);
    for (i = 0; i < m; i++) {
        long at = reversed(MYPROC * (long)m + i);

        X[at % PROCS][at / PROCS] := y[i];
    }
    sync();
    barrier();
    for (i = 0; i < m; i++)
        far = fmax(far, fabs(x[i].re / n - kept[i].re) + fabs(x[i].im / n - kept[i].im));
    require(all_reduce_to_all_dmax(far) < tolerance, "the inverse does not give back what was transformed");
    done("fft", began);
}
