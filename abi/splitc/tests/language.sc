/* Every construct of the language once, each with a check. */
#include "check.h"

int cnt[PROCS]::;
double g[PROCS]::[6];
static int own;                     /* private, at one address everywhere */
struct pair { int a; double b; char c[5]; struct pair *global next; };
struct pair table[4];
typedef int *global gint;
extern int later[PROCS]::[2];
int later[PROCS]::[2];

double half(double *p, int by) { *p /= by; return *p; }
void bump(int *p) { (*p)++; }
int bump_by(int *p, int by, int times) { *p += by * times; return *p; }

/* Old style, implicit int, falls off its end. */
set(p, q, v)
int *global p;
int *spread q;
{
    *p = v;
    *q = v + 1;
}

int *global give(int proc, int *at) { return toglobal(proc, at); }

static int is_own(int v, int w, int q, int X[v][w]::[q])
{
    int *mine = tolocal(X[MYPROC / w][MYPROC % w]), i, sum = 0;

    for (i = 0; i < q; i++)
        mine[i] = MYPROC + i;
    barrier();
    for (i = 0; i < v * w; i++)
        sum += X[i / w][i % w][q - 1];
    barrier();
    return sum == PROCS * (PROCS - 1) / 2 + PROCS * (q - 1);
}

static void pointers(void)
{
    int *spread s = cnt, *spread t, *global p, *local;
    void *global v;
    int next = (MYPROC + 1) % PROCS;

    require(s == cnt && s != NULL && s, "a spread pointer");
    t = s + PROCS;
    require(toproc(t) == 0 && t - s == PROCS && t > s && tolocal(t) - tolocal(s) == 1, "spread arithmetic");
    t--;
    require(toproc(t) == PROCS - 1 && t - s == PROCS - 1, "a step back");
    t = s - 1;
    require(toproc(t) == PROCS - 1 && s - t == 1, "floor");
    t += 2;
    require(t == &cnt[1 % PROCS] || PROCS == 1, "the address of an element");
    require(toproc(t++) == 1 % PROCS && toproc(--t) == 1 % PROCS, "steps in expressions");
    p = (int *global)(s + next);
    require(toproc(p) == next && toproc(p + 5) == next && p + 5 - 5 == p, "global arithmetic");
    require(p < p + 1 && !(p + 1 <= p) && p == &cnt[next], "global order");
    v = p;
    require(v == p && (int *global)v == p, "void");
    local = &own;
    p = local;
    require(toproc(p) == MYPROC && tolocal(p) == &own, "a local one becomes global");
    p = 0;
    require(!p && p == NULL && (p ? 0 : 1), "null");
    p = next ? (int *global)(s + next) : &own;
    require(toproc(p) == next || next == 0, "a conditional");
    require(sizeof *p == sizeof(int) && sizeof p == 8 && sizeof(g[0]) == 6 * sizeof(double), "sizes");
    require(tolocal(g[MYPROC]) == (double *)tolocal(g + MYPROC), "a block");
    require(give(next, &own) == toglobal(next, &own), "a function that returns one");
    require(tospread(cnt + next) == &cnt[next], "tospread");
}

static void accesses(void)
{
    int next = (MYPROC + 1) % PROCS, before = (MYPROC + PROCS - 1) % PROCS, i, x = 0;
    int *global p = (int *global)(cnt + next);
    struct pair one, *global q;
    double d[6];

    own = MYPROC;
    cnt[MYPROC] = -1;
    barrier();
    x = *p = 10 + MYPROC;
    barrier();
    require(x == 10 + MYPROC && cnt[MYPROC] == 10 + before, "a write");
    barrier();
    *p += 5;
    (*p)++;
    x = ++*p;
    require(x == 10 + MYPROC + 7 && (*p)-- == x && *p == x - 1, "changes");
    *p <<= 1;
    require(*p == 2 * (x - 1), "a shift");
    barrier();
    x := cnt[next];
    sync();
    require(x == 2 * (10 + MYPROC + 6), "a get");
    cnt[next] := x + 1;
    sync();
    barrier();
    require(cnt[MYPROC] == 2 * (10 + before + 6) + 1, "a put");
    barrier();
    x := 4;
    require(x == 4, "a get of a local value");
    reset_store_sync();
    barrier();
    p = (int *global)(later[next]);
    *(p++) :- 1;
    *(p++) :- 2;
    store_sync(8);
    require(later[MYPROC][0] == 1 && later[MYPROC][1] == 2 && p - 2 == &later[next][0], "stores");
    barrier();
    set((int *global)(cnt + next), cnt + MYPROC, 70);
    barrier();
    require(cnt[MYPROC] == 71 || cnt[MYPROC] == 70, "arguments of the old style");
    barrier();
    for (i = 0; i < 6; i++)
        d[i] = MYPROC + i / 8.0;
    bulk_put(g[next], d, sizeof d);
    sync();
    barrier();
    bulk_read(d, &g[MYPROC][1], 2 * sizeof(double));
    require(d[0] == before + 1 / 8.0 && d[1] == before + 2 / 8.0 && g[MYPROC][5] == before + 5 / 8.0, "bulk");
    barrier();
    /* Private variables of another process. */
    require(*toglobal(next, &own) == next, "a variable of another process");
    barrier();
    one.a = MYPROC;
    one.b = 0.5;
    one.next = toglobal(before, &table[1]);
    strcpy(one.c, "abcd");
    q = toglobal(next, table);
    q[2] = one;
    q->a = 3;
    q->c[2] = 'z';
    q[1] := one;
    sync();
    barrier();
    require(table[2].a == before && table[1].b == 0.5 && table[0].a == 3 && table[0].c[2] == 'z', "structures");
    require(q[2].next == toglobal(before, &table[1]) && q[2].next->a == ((before + PROCS - 1) % PROCS), "a chain");
    require(strcmp(table[2].c, "abcd") == 0, "an array in a structure");
    table[3] := q[2];
    sync();
    require(table[3].a == MYPROC, "a get of a structure");
    barrier();
}

static void collectives(void)
{
    int n = PROCS, sum = n * (n - 1) / 2, x = 7 * MYPROC;
    double d;
    static int counter;
    int spread_local[PROCS]::[2];
    gint pointer = toglobal(0, &counter);
    int *global fresh;

    require(all_reduce_to_all_add(MYPROC) == sum, "a sum");
    require(all_reduce_to_one_max(MYPROC) == n - 1 || MYPROC != 0, "a maximum for one");
    require(all_reduce_to_all_dmin(MYPROC + 0.5) == 0.5, "a minimum");
    require(all_scan_add(1) == MYPROC + 1 && all_dscan_max(-MYPROC) == 0, "scans");
    require(all_reduce_to_all_xor(1 << MYPROC) == (1 << n) - 1, "bits");
    require(all_bcast(x + 3) == 3 && all_bcast_d(MYPROC + 0.25) == 0.25, "broadcasts");
    on_one counter = 0;
    barrier();
    atomic(bump, pointer);
    i_atomic(bump_by, pointer, 2, 5);
    require(fetch_and_add(pointer, 100) >= 11, "fetch_and_add");
    barrier();
    on_one require(counter == 111 * n, "calls at the owner");
    require(*pointer == 111 * n, "calls at the owner, seen from afar");
    barrier();
    on_one counter = 0;
    barrier();
    x = test_and_set(pointer);
    require(all_reduce_to_all_add(x == 0) == 1, "one has set it");
    require(cmp_swap(pointer, 5, 6) == 1 && exchange(pointer, 1) == 1, "swaps");
    tolocal(spread_local[MYPROC])[0] = MYPROC;
    d = g[0][0];
    barrier();
    on_one {
        g[n - 1][0] = 64;
        require(d_atomic(half, &g[n - 1][0], 4) == 16, "a call with a fraction");
    }
    barrier();
    require(spread_local[(MYPROC + 1) % n][0] == (MYPROC + 1) % n, "an automatic spread array");
    barrier();
    fresh = g_malloc((MYPROC + 1) % n, 2 * sizeof(int));
    fresh[1] = 12;
    require(fresh[1] == 12 && toproc(fresh) == (MYPROC + 1) % n, "memory of another process");
    {
        int Y[1][PROCS]::[3];

        require(is_own(1, PROCS, 3, Y), "a spread array as a parameter");
    }
    require(is_sync() && get_seconds() >= 0, "the rest");
    on_proc(n - 1) own = n;
    require(MYPROC != n - 1 || own == n, "on_proc");
}

enum { LONGEST = 2500000 };
static unsigned char bytes[LONGEST];

static int has_bytes(unsigned char *at, int length, int seed)
{
    int i;

    for (i = 0; i < length; i++)
        if (at[i] != (unsigned char)(i * 7 + seed))
            return 0;
    return 1;
}

/* Blocks of all lengths into the symmetric memory: copied into messages, or written where they belong. */
static void blocks()
{
    static int lengths[] = {1, 16383, 16384, 65536, LONGEST};
    unsigned char *spread room = all_spread_malloc(PROCS, LONGEST + 16), *mine = tolocal(room + MYPROC);
    int next = (MYPROC + 1) % PROCS, before = (MYPROC + PROCS - 1) % PROCS, k, i;

    for (k = 0; k < 5; k++) {
        int length = lengths[k];
        unsigned char *global to = (unsigned char *global)(room + next) + 3;

        memset(mine, 255, LONGEST + 16);
        for (i = 0; i < length; i++)
            bytes[i] = i * 7 + MYPROC;
        barrier();
        bulk_put(to, bytes, length);
        sync();
        barrier();
        require(has_bytes(mine + 3, length, before) && mine[2] == 255 && mine[length + 3] == 255, "a block is put");
        barrier();
        /* From where the previous processor has put it. */
        bulk_write(to + 1, mine + 3, length > 20000 ? 20000 : 1);
        barrier();
        require(mine[4] == (unsigned char)((before + PROCS - 1) % PROCS), "a block is written");
        barrier();
        bulk_store(to, bytes, length);
        memset(bytes, 0, length);
        all_store_sync();
        require(has_bytes(mine + 3, length, before), "a block is stored");
        barrier();
    }
    all_spread_free(room);
}

/* C that has nothing to do with it. */
static int ordinary(register x, register char *text)
{
    int i = 0, list[] = {1, 2, [4] = 5}, y = x ? x :-1;
    struct pair p = {.a = 1, .next = 0}, *q = &p;

    switch (x) {
    case 1:-x;
        break;
    default:
        goto end;
    }
end:
    do
        i++;
    while (i < 3);
    for (int k = 0; k < 2; k++)
        ;
    y += sizeof(int[3]) == 12 ? list[4] :-3;
    return y + i + q->a + (int)strlen(text) + (text[1] == '\n');
}

splitc_main(int argc, char **argv)
{
    double began = get_seconds();
    int round;

    require(ordinary(1, "a
b") == 1 + 5 + 3 + 1 + 3 + 1, "C");
    for (round = 0; round < 3; round++) {
        pointers();
        accesses();
        collectives();
        barrier();
    }
    blocks();
    done("language", began);
}
