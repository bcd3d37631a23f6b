/* Starting a program as N processes that know each other, in the words of AMUDP. See am(7).
 *
 * The processes are started by `quipu spmd`, mpiexec, mpirun or srun. A program that none of these has started, and
 * whose first argument is a number, starts so many of itself on this machine and waits for them; a second argument
 * of L, S or C is left out, too. */
#ifndef QUIPU_AMUDP_SPMD_H
#define QUIPU_AMUDP_SPMD_H

#include <amudp.h>

#ifdef __cplusplus
extern "C" {
#endif

int AMX_SPMDStart(int *argc, char ***argv, uint64_t *network_pid, eb_t *bundle, ep_t *ep);

/* Gives this process a bundle and an endpoint, in whose translation table each process has the index of its number,
 * this one included. The depth of the network is chosen by the library. */
static inline int AMX_SPMDStartup(int *argc, char ***argv, int depth, uint64_t *network_pid, eb_t *bundle,
                                  ep_t *ep) {
    (void)depth;
    return AMX_SPMDStart(argc, argv, network_pid, bundle, ep);
}

/* The same as AMUDP had it: with a number of processes, and a function that starts them, which are not used. */
static inline int AMUDP_SPMDStartup(int *argc, char ***argv, int processes, int depth, void *spawn,
                                    uint64_t *network_pid, eb_t *bundle, ep_t *ep) {
    (void)processes;
    (void)spawn;
    return AMX_SPMDStartup(argc, argv, depth, network_pid, bundle, ep);
}

int AMX_SPMDIsWorker(char **argv);
int AMX_SPMDNumProcs(void);
int AMX_SPMDMyProc(void);
int AMX_SPMDBarrier(void);                                     /* polls the endpoint's bundle */
int AMX_SPMDAllGather(const void *from, void *to, size_t len); /* in the order of numbers */
int AMX_SPMDSetExitCallback(void (*function)(int));
int AMX_SPMDExit(int code); /* does not return; another code than 0 ends all processes */
void AMX_SPMDkillmyprocess(int code);
char *AMX_SPMDgetenvMaster(const char *name);

#define AMUDP_SPMDIsWorker AMX_SPMDIsWorker
#define AMUDP_SPMDNumProcs AMX_SPMDNumProcs
#define AMUDP_SPMDMyProc AMX_SPMDMyProc
#define AMUDP_SPMDBarrier AMX_SPMDBarrier
#define AMUDP_SPMDAllGather AMX_SPMDAllGather
#define AMUDP_SPMDSetExitCallback AMX_SPMDSetExitCallback
#define AMUDP_SPMDExit AMX_SPMDExit
#define AMUDP_SPMDkillmyprocess AMX_SPMDkillmyprocess
#define AMUDP_SPMDgetenvMaster AMX_SPMDgetenvMaster

#ifdef __cplusplus
}
#endif

#endif
