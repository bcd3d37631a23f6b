/*
 * What `cargo xtask clients` runs over Open MPI. `mpi pingpong` has two ranks exchange messages of 1 byte
 * to 1 MB, of which the receiver checks every byte; `mpi allreduce` has all ranks add up vectors, and each
 * checks every sum. The first rank says in the end what was done; what is wrong ends all with status 1.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 1 << 20, ROUNDS = 4, LONGEST = 1 << 16, GUARD = 0xa5 };

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

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (argc == 2 && strcmp(argv[1], "pingpong") == 0)
		ping_pong();
	else if (argc == 2 && strcmp(argv[1], "allreduce") == 0)
		allreduce();
	else
		fail("number of arguments", 0, argc - 1, 1);
	MPI_Finalize();
	return 0;
}
