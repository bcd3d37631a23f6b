/* Split-C: what every program includes. The compiler includes it by itself. */
#ifndef QUIPU_SPLIT_C_H
#define QUIPU_SPLIT_C_H

/* ---- Representation: a processor in the upper 16 bits, an address in the lower 48. ---- */

typedef struct { unsigned long quipu_bits; } quipu_gp;
typedef struct { unsigned long quipu_bits; } quipu_sp;

/* What the run-time library shows of itself. */
struct quipu_sc_state {
    int me, procs, procs_log;
    int budget;                 /* accesses until the next poll */
    int under_way;              /* gets or puts that sync has to wait for */
    int unused;
    unsigned long heap;         /* the symmetric memory: the same address in every process */
    unsigned long heap_size;
    char *const *window;        /* where this process maps the memory of each, or NULL */
};
extern struct quipu_sc_state *quipu_sc;

#define MYPROC (quipu_sc->me)
#define PROCS (quipu_sc->procs)
#define PROCSLOG (quipu_sc->procs_log)
#define on_one if (MYPROC == 0)
#define on_proc(p) if (MYPROC == (p))
#define for_my_1d(i, n) for ((i) = MYPROC; (i) < (n); (i) += PROCS)
#define for_my_2d(i, j, l, n, m) \
    for ((l) = MYPROC; (i) = (l) / (m), (j) = (l) % (m), (l) < (n) * (m); (l) += PROCS)
#define FOR_MY_1D for_my_1d
#define FOR_MY_2D for_my_2d

/* ---- The run-time library. ---- */

void quipu_sc_poll(void);
void quipu_sc_read_far(void *to, unsigned long from, unsigned long size);
void quipu_sc_write_far(unsigned long to, const void *from, unsigned long size);
void quipu_sc_get_far(void *to, unsigned long from, unsigned long size);
void quipu_sc_put_far(unsigned long to, const void *from, unsigned long size);
void quipu_sc_bulk_put_far(unsigned long to, const void *from, unsigned long size);
void quipu_sc_store_far(unsigned long to, const void *from, unsigned long size);
long quipu_sc_atomic_call(void (*f)(), unsigned long at, long a, long b, long c, long d);
double quipu_sc_atomic_call_double(void (*f)(), unsigned long at, long a, long b, long c, long d);
unsigned long quipu_sc_spread_malloc(long count, unsigned long size);
void quipu_sc_spread_free(unsigned long at);
unsigned long quipu_sc_malloc_at(int proc, unsigned long size);
unsigned long quipu_sc_stack_push(long count, unsigned long size);
void quipu_sc_stack_pop(void);
void quipu_sc_at_start(void (*allocate)(void));
long quipu_sc_reduce_long(int op, long value, int how);
double quipu_sc_reduce_double(int op, double value, int how);
void quipu_sc_broadcast(void *at, unsigned long size);
void quipu_sc_abort(int code);

void barrier(void);
void sync(void);
int is_sync(void);
void store_sync(int bytes);
int is_store_sync(int bytes);
void reset_store_sync(void);
void all_store_sync(void);
double get_seconds(void);

/* ---- Pointers. ---- */

#define QUIPU_INLINE static inline __attribute__((always_inline, unused))
#define QUIPU_ADDRESS 0xffffffffffffUL

QUIPU_INLINE quipu_gp quipu_gp_make(int proc, const void *at)
{
    quipu_gp p;
    p.quipu_bits = at ? (unsigned long)proc << 48 | ((unsigned long)at & QUIPU_ADDRESS) : 0;
    return p;
}
QUIPU_INLINE quipu_gp quipu_gp_here(const void *at) { return quipu_gp_make(MYPROC, at); }
QUIPU_INLINE int quipu_gp_proc(quipu_gp p) { return (int)(p.quipu_bits >> 48); }
QUIPU_INLINE void *quipu_gp_local(quipu_gp p) { return (void *)(p.quipu_bits & QUIPU_ADDRESS); }
QUIPU_INLINE quipu_gp quipu_gp_of_sp(quipu_sp p) { quipu_gp q; q.quipu_bits = p.quipu_bits; return q; }
QUIPU_INLINE quipu_sp quipu_sp_of_gp(quipu_gp p) { quipu_sp q; q.quipu_bits = p.quipu_bits; return q; }
QUIPU_INLINE quipu_gp quipu_gp_add(quipu_gp p, long bytes) { p.quipu_bits += bytes; return p; }
QUIPU_INLINE quipu_sp quipu_sp_add(quipu_sp p, long i, unsigned long size)
{
    long procs = PROCS, linear = (long)(p.quipu_bits >> 48) + i;
    long row = linear / procs, proc = linear % procs;
    if (proc < 0) {
        proc += procs;
        row -= 1;
    }
    p.quipu_bits = (unsigned long)proc << 48
        | (((p.quipu_bits & QUIPU_ADDRESS) + row * (long)size) & QUIPU_ADDRESS);
    return p;
}
QUIPU_INLINE int quipu_gp_true(quipu_gp p) { return (p.quipu_bits & QUIPU_ADDRESS) != 0; }
QUIPU_INLINE int quipu_sp_true(quipu_sp p) { return (p.quipu_bits & QUIPU_ADDRESS) != 0; }
/* All pointers with the address 0 are equal. */
QUIPU_INLINE int quipu_gp_equal(quipu_gp a, quipu_gp b)
{
    return a.quipu_bits == b.quipu_bits || (!quipu_gp_true(a) && !quipu_gp_true(b));
}
QUIPU_INLINE int quipu_sp_equal(quipu_sp a, quipu_sp b)
{
    return quipu_gp_equal(quipu_gp_of_sp(a), quipu_gp_of_sp(b));
}
QUIPU_INLINE int quipu_gp_order(quipu_gp a, quipu_gp b)
{
    unsigned long x = a.quipu_bits & QUIPU_ADDRESS, y = b.quipu_bits & QUIPU_ADDRESS;
    return x < y ? -1 : x > y;
}
QUIPU_INLINE int quipu_sp_order(quipu_sp a, quipu_sp b)
{
    int order = quipu_gp_order(quipu_gp_of_sp(a), quipu_gp_of_sp(b));
    unsigned long x = a.quipu_bits >> 48, y = b.quipu_bits >> 48;
    return order ? order : x < y ? -1 : x > y;
}
QUIPU_INLINE long quipu_gp_diff(quipu_gp a, quipu_gp b, unsigned long size)
{
    return (long)((a.quipu_bits & QUIPU_ADDRESS) - (b.quipu_bits & QUIPU_ADDRESS)) / (long)size;
}
QUIPU_INLINE long quipu_sp_diff(quipu_sp a, quipu_sp b, unsigned long size)
{
    long rows = (long)((a.quipu_bits & QUIPU_ADDRESS) - (b.quipu_bits & QUIPU_ADDRESS)) / (long)size;
    return (long)(a.quipu_bits >> 48) - (long)(b.quipu_bits >> 48) + PROCS * rows;
}
QUIPU_INLINE quipu_gp quipu_gp_pre(quipu_gp *p, long bytes) { return *p = quipu_gp_add(*p, bytes); }
QUIPU_INLINE quipu_gp quipu_gp_post(quipu_gp *p, long bytes)
{
    quipu_gp old = *p;
    *p = quipu_gp_add(old, bytes);
    return old;
}
QUIPU_INLINE quipu_sp quipu_sp_pre(quipu_sp *p, long i, unsigned long size)
{
    return *p = quipu_sp_add(*p, i, size);
}
QUIPU_INLINE quipu_sp quipu_sp_post(quipu_sp *p, long i, unsigned long size)
{
    quipu_sp old = *p;
    *p = quipu_sp_add(old, i, size);
    return old;
}

/* ---- Accesses. Memory that this process maps is read and written at once. ---- */

typedef unsigned char quipu_1 __attribute__((may_alias));
typedef unsigned short quipu_2 __attribute__((may_alias, aligned(1)));
typedef unsigned int quipu_4 __attribute__((may_alias, aligned(1)));
typedef unsigned long quipu_8 __attribute__((may_alias, aligned(1)));

QUIPU_INLINE char *quipu_sc_map(unsigned long bits)
{
    struct quipu_sc_state *state = quipu_sc;
    unsigned long at = bits & QUIPU_ADDRESS, offset = at - state->heap, proc = bits >> 48;
    char *window = state->window[proc];
    if (offset < state->heap_size && window)
        return window + offset;
    return proc == (unsigned long)state->me ? (char *)at : (char *)0;
}
QUIPU_INLINE void quipu_sc_tick(void)
{
    if (--quipu_sc->budget < 0)
        quipu_sc_poll();
}
QUIPU_INLINE void quipu_sc_copy_in(void *to, const char *from, unsigned long size)
{
    if (size == 8)
        *(quipu_8 *)to = *(const volatile quipu_8 *)from;
    else if (size == 4)
        *(quipu_4 *)to = *(const volatile quipu_4 *)from;
    else if (size == 2)
        *(quipu_2 *)to = *(const volatile quipu_2 *)from;
    else if (size == 1)
        *(quipu_1 *)to = *(const volatile quipu_1 *)from;
    else
        __builtin_memcpy(to, from, size);
}
QUIPU_INLINE void quipu_sc_copy_out(char *to, const void *from, unsigned long size)
{
    if (size == 8)
        *(volatile quipu_8 *)to = *(const quipu_8 *)from;
    else if (size == 4)
        *(volatile quipu_4 *)to = *(const quipu_4 *)from;
    else if (size == 2)
        *(volatile quipu_2 *)to = *(const quipu_2 *)from;
    else if (size == 1)
        *(volatile quipu_1 *)to = *(const quipu_1 *)from;
    else
        __builtin_memmove(to, from, size);
}
#define QUIPU_FENCE __asm__ __volatile__("" ::: "memory")

QUIPU_INLINE void quipu_sc_read(void *to, quipu_gp from, unsigned long size)
{
    char *at = quipu_sc_map(from.quipu_bits);
    QUIPU_FENCE;
    if (at)
        quipu_sc_copy_in(to, at, size);
    else
        quipu_sc_read_far(to, from.quipu_bits, size);
    QUIPU_FENCE;
    quipu_sc_tick();
}
QUIPU_INLINE void quipu_sc_write(quipu_gp to, const void *from, unsigned long size)
{
    char *at = quipu_sc_map(to.quipu_bits);
    QUIPU_FENCE;
    if (at)
        quipu_sc_copy_out(at, from, size);
    else
        quipu_sc_write_far(to.quipu_bits, from, size);
    QUIPU_FENCE;
    quipu_sc_tick();
}
QUIPU_INLINE void quipu_sc_get(void *to, quipu_gp from, unsigned long size)
{
    char *at = quipu_sc_map(from.quipu_bits);
    QUIPU_FENCE;
    if (at)
        quipu_sc_copy_in(to, at, size);
    else
        quipu_sc_get_far(to, from.quipu_bits, size);
    QUIPU_FENCE;
    quipu_sc_tick();
}
QUIPU_INLINE void quipu_sc_put(quipu_gp to, const void *from, unsigned long size)
{
    char *at = quipu_sc_map(to.quipu_bits);
    QUIPU_FENCE;
    if (at)
        quipu_sc_copy_out(at, from, size);
    else
        quipu_sc_put_far(to.quipu_bits, from, size);
    QUIPU_FENCE;
    quipu_sc_tick();
}
/* As a put, from memory that the program leaves alone until the next sync. */
QUIPU_INLINE void quipu_sc_bulk_put(quipu_gp to, const void *from, unsigned long size)
{
    char *at = quipu_sc_map(to.quipu_bits);
    QUIPU_FENCE;
    if (at)
        quipu_sc_copy_out(at, from, size);
    else
        quipu_sc_bulk_put_far(to.quipu_bits, from, size);
    QUIPU_FENCE;
    quipu_sc_tick();
}
QUIPU_INLINE void quipu_sc_sync(void)
{
    if (quipu_sc->under_way)
        sync();
    QUIPU_FENCE;
}
/* The first word of a process's symmetric memory counts the bytes that were stored there. */
QUIPU_INLINE void quipu_sc_store(quipu_gp to, const void *from, unsigned long size)
{
    char *at = quipu_sc_map(to.quipu_bits);
    char *window = quipu_sc->window[to.quipu_bits >> 48];
    QUIPU_FENCE;
    if (at && window) {
        quipu_sc_copy_out(at, from, size);
        __atomic_fetch_add((unsigned long *)window, size, __ATOMIC_RELEASE);
    } else {
        quipu_sc_store_far(to.quipu_bits, from, size);
    }
    QUIPU_FENCE;
    quipu_sc_tick();
}
QUIPU_INLINE void quipu_sc_spread_array(quipu_sp *array, long count, unsigned long size)
{
    /* Several files may define one array, as headers of the time do. */
    if (!quipu_sp_true(*array))
        array->quipu_bits = quipu_sc_spread_malloc(count, size);
}
QUIPU_INLINE quipu_sp quipu_sc_push(long count, unsigned long size)
{
    quipu_sp p;
    p.quipu_bits = quipu_sc_stack_push(count, size);
    return p;
}
QUIPU_INLINE void quipu_sc_pop(quipu_sp *array)
{
    (void)array;
    quipu_sc_stack_pop();
}

/* ---- What programs call. Global pointers are passed as the structures above. ---- */

QUIPU_INLINE void quipu_sc_atomic(void (*f)(), quipu_gp at, long a, long b, long c, long d)
{
    quipu_sc_atomic_call(f, at.quipu_bits, a, b, c, d);
}
QUIPU_INLINE int quipu_sc_atomic_int(void (*f)(), quipu_gp at, long a, long b, long c, long d)
{
    return (int)quipu_sc_atomic_call(f, at.quipu_bits, a, b, c, d);
}
QUIPU_INLINE double quipu_sc_atomic_double(void (*f)(), quipu_gp at, long a, long b, long c, long d)
{
    return quipu_sc_atomic_call_double(f, at.quipu_bits, a, b, c, d);
}

#ifdef __SPLITC__

QUIPU_INLINE void bulk_read(void *to, void *global from, int size) { quipu_sc_read(to, from, size); }
QUIPU_INLINE void bulk_get(void *to, void *global from, int size) { quipu_sc_get(to, from, size); }
QUIPU_INLINE void bulk_write(void *global to, void *from, int size) { quipu_sc_write(to, from, size); }
QUIPU_INLINE void bulk_put(void *global to, void *from, int size) { quipu_sc_bulk_put(to, from, size); }
QUIPU_INLINE void bulk_store(void *global to, void *from, int size) { quipu_sc_store(to, from, size); }

QUIPU_INLINE void *spread all_spread_malloc(int count, int size)
{
    quipu_sp p;
    p.quipu_bits = quipu_sc_spread_malloc(count, size);
    return p;
}
QUIPU_INLINE void all_spread_free(void *spread p) { quipu_sc_spread_free(p.quipu_bits); }
QUIPU_INLINE void *global g_malloc(int proc, int size)
{
    quipu_gp p;
    p.quipu_bits = quipu_sc_malloc_at(proc, size);
    return p;
}
QUIPU_INLINE void splitc_abort(int code) { quipu_sc_abort(code); }

int quipu_sc_fetch_and_add(void *at, long by);
int quipu_sc_exchange(void *at, long value);
int quipu_sc_compare_and_swap(void *at, long old, long value);
QUIPU_INLINE int fetch_and_add(int *global p, int by)
{
    return quipu_sc_atomic_int((void (*)())quipu_sc_fetch_and_add, p, by, 0, 0, 0);
}
QUIPU_INLINE int exchange(int *global p, int value)
{
    return quipu_sc_atomic_int((void (*)())quipu_sc_exchange, p, value, 0, 0, 0);
}
QUIPU_INLINE int cmp_swap(int *global p, int old, int value)
{
    return quipu_sc_atomic_int((void (*)())quipu_sc_compare_and_swap, p, old, value, 0, 0);
}
QUIPU_INLINE int test_and_set(int *global p)
{
    return quipu_sc_atomic_int((void (*)())quipu_sc_exchange, p, 1, 0, 0, 0);
}

/* Reductions: the operations by number, and for one process (0), all (1), or scans (2). */
#define QUIPU_REDUCE(type, letter, wide, name, op) \
    QUIPU_INLINE type all_reduce_to_one_##letter##name(type v) { return (type)quipu_sc_reduce_##wide(op, v, 0); } \
    QUIPU_INLINE type all_reduce_to_all_##letter##name(type v) { return (type)quipu_sc_reduce_##wide(op, v, 1); } \
    QUIPU_INLINE type all_##letter##scan_##name(type v) { return (type)quipu_sc_reduce_##wide(op, v, 2); }
#define QUIPU_REDUCE_NUMBER(type, letter, wide) \
    QUIPU_REDUCE(type, letter, wide, add, 0) QUIPU_REDUCE(type, letter, wide, mult, 1) \
    QUIPU_REDUCE(type, letter, wide, max, 2) QUIPU_REDUCE(type, letter, wide, min, 3)
#define QUIPU_REDUCE_BITS(type, letter) \
    QUIPU_REDUCE(type, letter, long, and, 4) QUIPU_REDUCE(type, letter, long, or, 5) \
    QUIPU_REDUCE(type, letter, long, xor, 6)
QUIPU_REDUCE_NUMBER(int, , long)
QUIPU_REDUCE_NUMBER(int, i, long)
QUIPU_REDUCE_NUMBER(long, l, long)
QUIPU_REDUCE_NUMBER(float, f, double)
QUIPU_REDUCE_NUMBER(double, d, double)
QUIPU_REDUCE_BITS(int, )
QUIPU_REDUCE_BITS(int, i)
QUIPU_REDUCE_BITS(long, l)

#define QUIPU_BROADCAST(name, type) \
    QUIPU_INLINE type name(type v) { quipu_sc_broadcast(&v, sizeof v); return v; }
QUIPU_BROADCAST(all_bcast, int)
QUIPU_BROADCAST(all_bcast_i, int)
QUIPU_BROADCAST(all_bcast_l, long)
QUIPU_BROADCAST(all_bcast_f, float)
QUIPU_BROADCAST(all_bcast_d, double)
QUIPU_INLINE void all_bcast_buffer(void *at, int size) { quipu_sc_broadcast(at, size); }

#endif
#endif
