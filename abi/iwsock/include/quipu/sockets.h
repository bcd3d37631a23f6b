/* The extended sockets interface: iWARP on a connected TCP socket.
 *
 * Link with -liwsock. A socket is an ordinary one until the program sets IWARP_MODE; the program at the
 * other end has to do the same, or be another implementation of iWARP (RFC 5040, 5041, 5044, 6581): the
 * end that called connect(2) sends the MPA request. From then on the connection carries messages, RDMA
 * writes and RDMA reads.
 *
 * Calls return 0 or a count, or -1 with errno. docs/extended-sockets.md has the details.
 */
#ifndef QUIPU_SOCKETS_H
#define QUIPU_SOCKETS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Level and name for setsockopt(2) and getsockopt(2). The value is an int that is 1, or a struct
 * iwarp_mode; getsockopt gives an int that is 1 in the mode. */
#define SOL_IWARP 0x4957
#define IWARP_MODE 1

/* How the parts of a message get to TCP. */
enum iwarp_gather {
    IWARP_GATHER_COPY = 0,   /* copied into one buffer, one send */
    IWARP_GATHER_WRITEV = 1, /* one send with a list */
    IWARP_GATHER_CORK = 2    /* a send for each part, between TCP_CORK on and off */
};

/* Who makes progress. */
enum iwarp_progress {
    IWARP_PROGRESS_CALLER = 0, /* the calls of this interface; poll(2) tells when to call */
    IWARP_PROGRESS_THREAD = 1  /* one thread of the process */
};

/* Which end sends the MPA request. */
enum iwarp_role {
    IWARP_ROLE_AUTO = 0, /* the one that called connect(2) */
    IWARP_ROLE_INITIATOR = 1,
    IWARP_ROLE_RESPONDER = 2
};

struct iwarp_mode {
    int gather;     /* enum iwarp_gather */
    int progress;   /* enum iwarp_progress */
    int no_crc;     /* 1: no CRC, unless the peer wants it */
    int role;       /* enum iwarp_role */
    int timeout_ms; /* for start-up; 0: 10,000 */
};

/* What the peer may do with registered memory. */
#define IWARP_REMOTE_READ 1
#define IWARP_REMOTE_WRITE 2

/* What a work did, and how it ended. */
enum iwarp_operation { IWARP_SEND = 0, IWARP_WRITE = 1, IWARP_READ = 2, IWARP_RECV = 3 };
enum iwarp_status {
    IWARP_SUCCESS = 0,
    IWARP_FLUSHED = 1,       /* the connection ended before */
    IWARP_REMOTE_ACCESS = 2, /* the peer does not allow the access */
    IWARP_REMOTE_INVALID = 3,
    IWARP_REMOTE_ERROR = 4
};

struct iwarp_completion {
    uint64_t id;     /* as given when the work was posted */
    uint32_t length; /* bytes */
    uint16_t operation;
    uint16_t status;
};

/* Registers memory for one socket. The peer needs the STag and the address. */
int iwarp_register(int fd, void *address, size_t length, int access, uint32_t *stag);
int iwarp_deregister(int fd, uint32_t stag);

/* Post a work. The memory stays the library's until the work is complete. EAGAIN: too many are posted.
 * iwarp_post_read needs registered memory. */
int iwarp_post_send(int fd, const struct iovec *parts, int count, uint64_t id);
int iwarp_post_recv(int fd, const struct iovec *parts, int count, uint64_t id);
int iwarp_post_write(int fd, const struct iovec *parts, int count, uint32_t stag, uint64_t to, uint64_t id);
int iwarp_post_read(int fd, void *address, size_t length, uint32_t stag, uint64_t to, uint64_t id);

/* Take completions: of sends, writes and reads, in the order in which they were posted; of receives.
 * timeout_ms: 0 does not wait, -1 waits without limit. How many there are, 0 if none came in time. */
int iwarp_send_done(int fd, struct iwarp_completion *done, int count, int timeout_ms);
int iwarp_recv_done(int fd, struct iwarp_completion *done, int count, int timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
