/*
 * Two ranks measure what `quipu bench` measures of Quipu: half the round trip of a message, and how
 * many messages a second go one way. Arguments are tests, KIND:SIZE:COUNT with KIND "latency" or
 * "stream"; the first rank prints "KIND SIZE NANOSECONDS" per message for each. The processors to
 * run on are in BENCH_CPU0 and BENCH_CPU1.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 128
/* Messages before the first test: what connects, and learns, at first is in no contender's numbers. */
#define FIRST_MESSAGES 5000

static char *outgoing, *incoming;
static int rank, depth = MAX_DEPTH;

static void pin(void)
{
	const char *cpu = getenv(rank == 0 ? "BENCH_CPU0" : "BENCH_CPU1");
	cpu_set_t set;

	if (!cpu)
		return;
	CPU_ZERO(&set);
	CPU_SET(atoi(cpu), &set);
	if (sched_setaffinity(0, sizeof set, &set) != 0)
		perror("sched_setaffinity");
}

static void ping_pong(int size, long count)
{
	for (long i = 0; i < count; i++) {
		if (rank == 0) {
			MPI_Send(outgoing, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
			MPI_Recv(incoming, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(incoming, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(outgoing, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
		}
	}
}

/* Rank 0 sends and rank 1 receives, always `depth` in flight; then a byte comes back. */
static void one_way(int size, long count)
{
	MPI_Request requests[MAX_DEPTH];
	char word = 0;

	for (int i = 0; i < depth; i++)
		requests[i] = MPI_REQUEST_NULL;
	for (long i = 0; i < count; i++) {
		MPI_Request *request = &requests[i % depth];

		MPI_Wait(request, MPI_STATUS_IGNORE);
		if (rank == 0)
			MPI_Isend(outgoing, size, MPI_BYTE, 1, 2, MPI_COMM_WORLD, request);
		else
			MPI_Irecv(incoming, size, MPI_BYTE, 0, 2, MPI_COMM_WORLD, request);
	}
	MPI_Waitall(depth, requests, MPI_STATUSES_IGNORE);
	if (rank == 0)
		MPI_Recv(&word, 1, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	else
		MPI_Send(&word, 1, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
}

static int measure(const char *spec)
{
	void (*test)(int, long);
	char kind[16];
	int size;
	long count;
	double start, took;

	if (sscanf(spec, "%15[a-z]:%d:%ld", kind, &size, &count) != 3 || size < 1 || count < 1)
		return -1;
	test = strcmp(kind, "latency") == 0 ? ping_pong : one_way;
	outgoing = malloc(size);
	incoming = malloc(size);
	if (!outgoing || !incoming)
		return -1;
	memset(outgoing, 1, size);
	memset(incoming, 2, size);
	test(size, count / 10 + 1);
	MPI_Barrier(MPI_COMM_WORLD);
	start = MPI_Wtime();
	test(size, count);
	took = MPI_Wtime() - start;
	if (test == ping_pong)
		took /= 2;
	if (rank == 0)
		printf("%s %d %.3f\n", kind, size, took * 1e9 / count);
	free(outgoing);
	free(incoming);
	return 0;
}

int main(int argc, char **argv)
{
	const char *wanted = getenv("BENCH_DEPTH");
	int ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (wanted && atoi(wanted) >= 1 && atoi(wanted) <= MAX_DEPTH)
		depth = atoi(wanted);
	if (ranks != 2) {
		fprintf(stderr, "there must be two ranks\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	pin();
	ping_pong(0, FIRST_MESSAGES);
	for (int i = 1; i < argc; i++) {
		if (measure(argv[i]) != 0) {
			fprintf(stderr, "cannot measure %s\n", argv[i]);
			MPI_Abort(MPI_COMM_WORLD, 1);
		}
	}
	MPI_Finalize();
	return 0;
}
