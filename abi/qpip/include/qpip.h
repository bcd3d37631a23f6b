/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * QPIP: queue pairs over the internet protocols. See qpip(7).
 *
 * A queue pair has a queue of sends and one of receives, and reports in completion queues what is done. Its
 * connection is TCP of the adapter's own, or it is bound to a UDP port; nothing else goes over the wire, so
 * that the peer may be another queue pair or any socket.
 *
 * Calls that return a pointer return NULL, all others -1, where they fail. Then errno says why in a number,
 * and qpip_error() in words: what happened, why, and what to do about it. Any thread may call anything; two
 * must not destroy one object, nor may one be used while it is destroyed.
 */
#ifndef QPIP_H
#define QPIP_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An adapter: a packet link and the addresses on it. */
typedef struct qpip_adapter qpip_adapter;
/* Memory that work requests may name. */
typedef struct qpip_memory qpip_memory;
/* A completion queue. */
typedef struct qpip_cq qpip_cq;
/* A queue pair. */
typedef struct qpip_qp qpip_qp;
/* A TCP port that is watched. */
typedef struct qpip_listener qpip_listener;

/* ---- adapters ------------------------------------------------------------------------------------------ */

/* Opens an adapter. `link`: "tap:NAME", "packet:INTERFACE", "xdp:INTERFACE", "ns:NAME",
 * "udp:ADDRESS:PORT" or "share:NAME"; NULL: what QUIPU_QPIP_LINK says. `addresses`: such as
 * "10.9.0.2/24,fd09::2/64", or "" for none but what the link gives; NULL: what QUIPU_QPIP_ADDRESS says. */
qpip_adapter *qpip_open(const char *link, const char *addresses);

/* Closes an adapter. EBUSY while it has objects, or memory that was allocated from it. */
int qpip_close(qpip_adapter *adapter);

/* Own address number `index`, from 0 on, with port 0. ENOENT beyond the last. */
int qpip_address(qpip_adapter *adapter, unsigned index, struct sockaddr_storage *address);

/* ---- memory -------------------------------------------------------------------------------------------- */

/* Memory of `length` octets that can be registered with this adapter, whatever its link: one that another
 * process shares ("share:NAME") reaches no other. It is zero, and begins at a multiple of 128, or at a page if
 * it is as long as one. A child of fork(2) has a copy, but not of what is shared so. ENOMEM if there is not so
 * much. */
void *qpip_allocate(qpip_adapter *adapter, size_t length);

/* Gives memory back, by its first octet. It must not be used any more; what of it is registered stays until it
 * is deregistered, so that work under way does no harm. EINVAL if it was not allocated from this adapter. */
int qpip_free(qpip_adapter *adapter, void *start);

/* Registers memory: from now on work requests may name it by its key, and the adapter reads it (sends) and
 * writes it (receives) while they are under way. It must stay mapped until it is deregistered.
 * EFAULT for memory that is not there, or, with a shared adapter, not of qpip_allocate. */
qpip_memory *qpip_register(qpip_adapter *adapter, void *start, size_t length);

/* What work requests name memory by; 0 with errno if that is none. */
uint32_t qpip_key(const qpip_memory *memory);

/* Work requests that still name it fail. */
int qpip_deregister(qpip_memory *memory);

/* ---- completion queues --------------------------------------------------------------------------------- */

/* A queue for at least `entries` completions: make it as large as what is posted and not polled can be. One
 * more is lost, its queue pairs are in error, and when the queue is empty qpip_poll fails with EOVERFLOW. */
qpip_cq *qpip_cq_create(qpip_adapter *adapter, unsigned entries);

/* EBUSY while queue pairs use it. */
int qpip_cq_destroy(qpip_cq *cq);

/* ---- queue pairs --------------------------------------------------------------------------------------- */

enum qpip_type {
	QPIP_TCP = 1,
	QPIP_UDP = 2,
};

struct qpip_qp_init {
	uint32_t type;          /* enum qpip_type */
	uint32_t max_sends;     /* sends posted and not completed; 0: 128 */
	uint32_t max_receives;  /* receives posted and not completed; 0: 128 */
	uint32_t max_segments;  /* pieces of memory of a request; 0: 4 */
	qpip_cq *send_cq;
	qpip_cq *receive_cq;    /* may be the same */
	void *context;          /* comes back in events */
};

/* A queue pair. Receives can be posted at once. */
qpip_qp *qpip_create(qpip_adapter *adapter, const struct qpip_qp_init *init);

/* In any state. Posted requests vanish without a completion; a peer sees a reset. */
int qpip_destroy(qpip_qp *qp);

/* ---- connections and ports ----------------------------------------------------------------------------- */

enum qpip_mode {
	QPIP_MESSAGES = 0,      /* the peer is a queue pair: one send is one receive */
	QPIP_STREAM = 1,        /* the peer may be any socket: boundaries mean nothing */
};

/* Watches a TCP port, 0 for any that is free. `backlog`: connections that may wait for a queue pair. */
qpip_listener *qpip_listen(qpip_adapter *adapter, uint16_t port, enum qpip_mode mode, unsigned backlog);

/* The port that is watched; 0 if that is no listener. */
uint16_t qpip_listener_port(const qpip_listener *listener);

/* Offers an idle queue pair: the next connection is mated with it (QPIP_CONNECTED). Its receives are the
 * peer's window, so post some first. */
int qpip_offer(qpip_listener *listener, qpip_qp *qp);

/* Connections that have a queue pair stay. */
int qpip_unlisten(qpip_listener *listener);

/* Starts to connect a TCP queue pair; an event reports the result. `port`: the own one, 0 for any. */
int qpip_connect(qpip_qp *qp, const struct sockaddr *peer, socklen_t length, uint16_t port,
                 enum qpip_mode mode);

enum qpip_settings_flags {
	QPIP_NO_ECN = 1,        /* only loss signals congestion */
};

/* How a TCP connection is to be. Zeros are what qpip_listen and qpip_connect give it; times are milliseconds. */
struct qpip_settings {
	uint32_t size;          /* sizeof(struct qpip_settings): there may be more members some day */
	uint32_t flags;         /* enum qpip_settings_flags */
	uint32_t traffic_class; /* of what is sent, as IP_TOS and IPV6_TCLASS: the bits of ECN, 3, stay 0 */
	uint32_t hop_limit;     /* of what is sent, 1 to 255; 0: what routers recommend, or 64 */
	uint32_t user_timeout;  /* how long sends may go unacknowledged; 0: two minutes */
	uint32_t connect_timeout; /* how long a peer may not answer qpip_connect; 0: three minutes */
	uint32_t keep_alive_idle; /* how long nothing has come before the peer is probed; 0: it never is */
	uint32_t keep_alive_interval; /* from probe to probe; 0: 75 seconds */
	uint32_t keep_alive_probes; /* unanswered ones after which the peer is given up, up to 255; 0: 9 */
};

/* As qpip_listen, with settings for the connections that come to the port. EINVAL for what cannot be. */
qpip_listener *qpip_listen_with(qpip_adapter *adapter, uint16_t port, enum qpip_mode mode, unsigned backlog,
                                const struct qpip_settings *settings);

/* As qpip_connect, with settings. */
int qpip_connect_with(qpip_qp *qp, const struct sockaddr *peer, socklen_t length, uint16_t port,
                      enum qpip_mode mode, const struct qpip_settings *settings);

/* Ends sending: the peer sees the end after everything that is posted, and may continue to send. */
int qpip_finish(qpip_qp *qp);

/* Ends a connection at once, by a reset. */
int qpip_abort(qpip_qp *qp);

/* Both ends of a connection; either may be NULL. ENOTCONN without one. */
int qpip_ends(qpip_qp *qp, struct sockaddr_storage *own, struct sockaddr_storage *peer);

/* Binds a UDP queue pair to a port, 0 for any that is free. The port, or -1. */
int qpip_bind(qpip_qp *qp, uint16_t port);

/* How what a queue pair sends is carried from now on: its datagrams, or the segments of its connection (EBADFD
 * without one). Values as those of struct qpip_settings. */
int qpip_set_carriage(qpip_qp *qp, uint32_t traffic_class, uint32_t hop_limit);

enum qpip_event_kind {
	QPIP_CONNECTED = 1,     /* the connection stands: sends can be posted */
	QPIP_PEER_FINISHED = 2, /* the peer sends nothing more; all that it sent has been received */
	QPIP_CLOSED = 3,        /* both ends have finished: the rest is flushed */
	QPIP_REFUSED = 4,       /* nobody watches the port, or the program there does not want the connection */
	QPIP_RESET = 5,         /* the peer has ended the connection */
	QPIP_TIMED_OUT = 6,     /* the peer does not answer */
	QPIP_ABORTED = 7,       /* this end has ended it */
	QPIP_UNREACHABLE = 8,   /* nothing leads to the peer: the next hop does not answer */
};

struct qpip_event {
	uint32_t kind;          /* enum qpip_event_kind */
	uint32_t reserved;
	qpip_qp *qp;
	void *context;          /* of the queue pair */
};

/* Takes the next event: 1, or 0 if there is none. Does not wait. What a peer sent before it finished has
 * completed when the event is taken, but perhaps after the last poll: take the event, then poll, then act. */
int qpip_event(qpip_adapter *adapter, struct qpip_event *event);

/* ---- work ---------------------------------------------------------------------------------------------- */

/* A piece of registered memory. */
struct qpip_segment {
	void *start;
	uint32_t length;
	uint32_t key;
};

enum qpip_send_flags {
	QPIP_SILENT = 1,        /* no completion unless it fails */
	QPIP_INLINE = 2,        /* copied now: up to 64 octets, of memory that need not be registered */
};

struct qpip_send {
	uint64_t id;            /* comes back in the completion */
	const struct qpip_segment *segments;
	uint32_t count;
	uint32_t flags;         /* enum qpip_send_flags */
	const struct sockaddr *to; /* UDP: where to; TCP: NULL */
	socklen_t to_length;
};

struct qpip_receive {
	uint64_t id;
	const struct qpip_segment *segments;
	uint32_t count;
	uint32_t reserved;
};

/* Posts a send. Over TCP it completes when the peer has acknowledged all of it: until then the memory must
 * not change. EINVAL for a request that cannot be carried (in QPIP_MESSAGES one without octets; one of more than
 * 2^31 octets, or a datagram that is too long; unknown memory is found later), ENOBUFS when the queue is full. */
int qpip_post_send(qpip_qp *qp, const struct qpip_send *send);

/* Posts a receive. A message that is longer ends the connection; a stream fills receives in order, and
 * completes one early where the peer pushes or finishes. */
int qpip_post_receive(qpip_qp *qp, const struct qpip_receive *receive);

enum qpip_status {
	QPIP_OK = 0,
	QPIP_FLUSHED = 1,       /* the connection was over first */
	QPIP_TOO_LONG = 2,      /* longer than the receive, or than the path carries */
	QPIP_BAD_MEMORY = 3,    /* the memory is not, or no longer, registered */
	QPIP_LOST = 4,          /* not acknowledged in time */
	QPIP_BROKEN = 5,        /* the peer has ended the connection */
	QPIP_FAILED = 6,
};

enum qpip_operation {
	QPIP_SENT = 1,
	QPIP_RECEIVED = 2,
};

struct qpip_completion {
	uint64_t id;
	uint32_t status;        /* enum qpip_status */
	uint32_t operation;     /* enum qpip_operation; where the status is QPIP_OK */
	uint32_t length;        /* octets received */
	uint32_t reserved;
	struct sockaddr_storage from; /* UDP, received: who sent it */
};

/* Takes up to `count` completions; how many. Whoever polls makes the adapter work, on the caller's core. */
int qpip_poll(qpip_cq *cq, struct qpip_completion *completions, unsigned count);

/* Waits until there is a completion in the queue or an event of its adapter: 1; 0 when `timeout` milliseconds
 * are over (-1: no end). Takes neither, so all threads that wait for it are woken, and each that does not find
 * it any more waits again. EINTR when a signal was caught. While it waits its thread can be cancelled. */
int qpip_wait(qpip_cq *cq, int timeout);

/* ---- words --------------------------------------------------------------------------------------------- */

/* What the last call that failed in this thread has to say; never NULL, valid until the next call. */
const char *qpip_error(void);

/* A status of a completion in words. */
const char *qpip_status_text(uint32_t status);

#ifdef __cplusplus
}
#endif

#endif
