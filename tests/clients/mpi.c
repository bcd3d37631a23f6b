/*
 * What `cargo xtask clients` runs over Open MPI. `mpi pingpong` has two ranks exchange messages of 1 byte
 * to 1 MB, of which the receiver checks every byte; `mpi allreduce` has all ranks add up vectors, and each
 * checks every sum; `mpi onesided` has every rank put into, add to and get from windows of all others. The
 * first rank says in the end what was done; what is wrong ends all with status 1.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 1 << 20, ROUNDS = 4, LONGEST = 1 << 16, ADDITIONS = 30, GUARD = 0xa5 };

static int rank, ranks;

static void fail(const char *what, long where, long long got, long long wanted)
{
	fprintf(stderr, "rank %d: %s %ld: %lld, not %lld\n", rank, what, where, got, wanted);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Byte `at` of a message: another one for every sender, size and round, so that neither an old message nor
 * one that is shifted passes. */
static uint8_t byte(int sender, int size, int round, int at)
{
	uint32_t x = (uint32_t)at * 2654435761u + (uint32_t)(size * 8 + round * 2 + sender) * 40503u;

	return (uint8_t)(x ^ x >> 8 ^ x >> 16 ^ x >> 24);
}

static void send_to(int peer, uint8_t *buffer, int size, int round)
{
	for (int i = 0; i < size; i++)
		buffer[i] = byte(rank, size, round, i);
	MPI_Send(buffer, size, MPI_BYTE, peer, round, MPI_COMM_WORLD);
}

static void receive_from(int peer, uint8_t *buffer, int size, int round)
{
	MPI_Status status;
	int count;

	memset(buffer, GUARD, (size_t)size + 1);
	MPI_Recv(buffer, size, MPI_BYTE, peer, round, MPI_COMM_WORLD, &status);
	MPI_Get_count(&status, MPI_BYTE, &count);
	if (count != size)
		fail("length of message", size, count, size);
	for (int i = 0; i < size; i++)
		if (buffer[i] != byte(peer, size, round, i))
			fail("byte", i, buffer[i], byte(peer, size, round, i));
	if (buffer[size] != GUARD)
		fail("byte behind a message of", size, buffer[size], GUARD);
}

static void ping_pong(void)
{
	uint8_t *buffer = malloc(LARGEST + 1);
	int messages = 0;

	if (!buffer)
		fail("memory for a message of", LARGEST, 0, LARGEST);
	if (ranks != 2)
		fail("number of ranks", 0, ranks, 2);
	for (int size = 1; size <= LARGEST; size *= 2)
		for (int round = 0; round < ROUNDS; round++, messages += 2) {
			if (rank == 0) {
				send_to(1, buffer, size, round);
				receive_from(1, buffer, size, round);
			} else {
				receive_from(0, buffer, size, round);
				send_to(0, buffer, size, round);
			}
		}
	free(buffer);
	if (rank == 0)
		printf("ping-pong: %d messages of 1 to %d bytes are right\n", messages, LARGEST);
}

static void allreduce(void)
{
	static int64_t mine[LONGEST], sum[LONGEST];
	/* 1 + 2 + ... + ranks */
	const int64_t all = (int64_t)ranks * (ranks + 1) / 2;
	int vectors = 0;

	for (int length = 1; length <= LONGEST; length *= 4, vectors++) {
		for (int i = 0; i < length; i++)
			mine[i] = (rank + 1) * (int64_t)(i + length);
		MPI_Allreduce(mine, sum, length, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
		for (int i = 0; i < length; i++)
			if (sum[i] != all * (i + length))
				fail("sum", i, sum[i], all * (i + length));
	}
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("allreduce: %d vectors of 1 to %d sums over %d ranks are right\n", vectors,
		       LONGEST, ranks);
}

/* Every rank has a window with a place for each rank, and a counter behind them. */
static void windows_of(int length)
{
	static int64_t mine[LONGEST], got[LONGEST];
	const int next = (rank + 1) % ranks;
	const MPI_Aint places = (MPI_Aint)length * ranks;
	/* 1 + 2 + ... + ranks */
	const int64_t added = (int64_t)ranks * (ranks + 1) / 2;
	const int64_t one = 1;
	const size_t size = (size_t)(places + 1) * sizeof(int64_t);
	/* Not by MPI_Win_allocate: MPICH would take memory that its ranks share, and reach it by itself. */
	int64_t *window = malloc(size), before;
	MPI_Win win;

	if (!window)
		fail("memory for a window of", length, 0, (long long)size);
	memset(window, 0, size);
	MPI_Win_create(window, (MPI_Aint)size, sizeof(*window), MPI_INFO_NULL, MPI_COMM_WORLD, &win);
	for (int i = 0; i < length; i++)
		mine[i] = (rank + 1) * (int64_t)(i + length);
	MPI_Win_fence(0, win);
	for (int to = 0; to < ranks; to++)
		MPI_Put(mine, length, MPI_INT64_T, to, (MPI_Aint)rank * length, length, MPI_INT64_T, win);
	MPI_Win_fence(0, win);
	for (int i = 0; i < places; i++)
		if (window[i] != (i / length + 1) * (int64_t)(i % length + length))
			fail("what was put at", i, window[i],
			     (i / length + 1) * (int64_t)(i % length + length));
	MPI_Win_fence(0, win);
	for (int to = 0; to < ranks; to++)
		MPI_Accumulate(mine, length, MPI_INT64_T, to, 0, length, MPI_INT64_T, MPI_SUM, win);
	MPI_Win_fence(0, win);
	for (int i = 0; i < length; i++)
		if (window[i] != (added + 1) * (i + length))
			fail("sum in a window", i, window[i], (added + 1) * (i + length));
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Win_lock(MPI_LOCK_SHARED, next, 0, win);
	MPI_Get(got, length, MPI_INT64_T, next, places - length, length, MPI_INT64_T, win);
	MPI_Win_unlock(next, win);
	for (int i = 0; i < length; i++)
		if (got[i] != ranks * (int64_t)(i + length))
			fail("what was got", i, got[i], ranks * (int64_t)(i + length));
	MPI_Win_lock_all(0, win);
	for (int i = 0; i < ADDITIONS; i++) {
		MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 0, places, MPI_SUM, win);
		MPI_Win_flush(0, win);
	}
	MPI_Win_unlock_all(win);
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, win);
	MPI_Get(&before, 1, MPI_INT64_T, 0, places, 1, MPI_INT64_T, win);
	MPI_Win_unlock(0, win);
	if (before != (int64_t)ranks * ADDITIONS)
		fail("counter of windows of", length, before, (int64_t)ranks * ADDITIONS);
	MPI_Win_free(&win);
	free(window);
}

static void one_sided(void)
{
	int windows = 0;

	for (int length = 2; length <= LONGEST; length *= 8, windows++)
		windows_of(length);
	if (rank == 0)
		printf("one-sided: %d windows of 2 to %d numbers for each of %d ranks are right\n",
		       windows, LONGEST, ranks);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (argc == 2 && strcmp(argv[1], "pingpong") == 0)
		ping_pong();
	else if (argc == 2 && strcmp(argv[1], "allreduce") == 0)
		allreduce();
	else if (argc == 2 && strcmp(argv[1], "onesided") == 0)
		one_sided();
	else
		fail("number of arguments", 0, argc - 1, 1);
	MPI_Finalize();
	return 0;
}
