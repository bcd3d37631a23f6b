/* Two ranks: half the round trip of 16 bytes, and a barrier. Prints one line of nanoseconds for each. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static void ping_pong(int rank, long count)
{
	char bytes[16] = { 0 };

	for (long i = 0; i < count; i++) {
		if (rank == 0)
			MPI_Send(bytes, sizeof bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
		MPI_Recv(bytes, sizeof bytes, MPI_BYTE, 1 - rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		if (rank == 1)
			MPI_Send(bytes, sizeof bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
	}
}

static void barriers(int rank, long count)
{
	(void)rank;
	for (long i = 0; i < count; i++)
		MPI_Barrier(MPI_COMM_WORLD);
}

static double nanoseconds(void (*work)(int, long), int rank, long count)
{
	double began;

	work(rank, count / 10 + 1);
	MPI_Barrier(MPI_COMM_WORLD);
	began = MPI_Wtime();
	work(rank, count);
	return (MPI_Wtime() - began) * 1e9 / count;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 1;
	double trip, barrier;
	int rank;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	trip = nanoseconds(ping_pong, rank, count);
	barrier = nanoseconds(barriers, rank, count);
	if (rank == 0)
		printf("half %.1f\nbarrier %.1f\n", trip / 2, barrier);
	MPI_Finalize();
	return 0;
}
