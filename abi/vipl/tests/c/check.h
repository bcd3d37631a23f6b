/* What the tests of libvipl share: two processes with a VI each, and registered memory.
 *
 * A test is one program. It forks: the child is the server. Both end with 0 if all was right. */
#ifndef CHECK_H
#define CHECK_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <vipl.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			exit(1); \
		} \
	} while (0)

/* Notes that a call returned a code, for the matrix in docs/vipl.md: once, in the file VIPL_TEST_LOG. */
static inline void record(const char *call, VIP_RETURN code)
{
	static struct { const char *call; VIP_RETURN code; } seen[512];
	static int count;
	const char *file = getenv("VIPL_TEST_LOG");
	char line[96];
	for (int n = 0; n < count; n++)
		if (seen[n].call == call && seen[n].code == code)
			return;
	if (count < 512) {
		seen[count].call = call;
		seen[count++].code = code;
	}
	if (!file || strncmp(call, "Vip", 3))
		return;
	int length = snprintf(line, sizeof line, "%.*s %d\n", (int)strcspn(call, "("), call, code);
	int fd = open(file, O_WRONLY | O_CREAT | O_APPEND, 0644);
	CHECK(fd >= 0 && write(fd, line, length) == length);
	close(fd);
}

/* That a call returns a code. */
#define EXPECT(call, code) \
	do { \
		VIP_RETURN got_ = (call); \
		record(#call, got_); \
		if (got_ != (code)) { \
			fprintf(stderr, "%s:%d: %s returned %d, not %s\n", __FILE__, __LINE__, #call, \
				got_, #code); \
			exit(1); \
		} \
	} while (0)

#define OK(call) EXPECT(call, VIP_SUCCESS)

enum { MEMORY = 1 << 20, DESCRIPTORS = 64, DATA = 1 << 16, TIMEOUT_MS = 20000 };

/* What a process has. The memory begins with the descriptors; data follow. */
struct side {
	VIP_NIC_HANDLE nic;
	VIP_NIC_ATTRIBUTES nic_attributes;
	VIP_PROTECTION_HANDLE ptag;
	char *memory;
	VIP_MEM_HANDLE handle;
	VIP_VI_ATTRIBUTES attributes;
	VIP_VI_HANDLE vi;
};

typedef union {
	VIP_NET_ADDRESS address;
	unsigned char room[4 + 16 + 64];
} net_address;

static inline void *aligned_memory(size_t size)
{
	void *memory;
	CHECK(posix_memalign(&memory, 4096, size) == 0);
	memset(memory, 0, size);
	return memory;
}

static inline void open_side(struct side *side, int level)
{
	memset(side, 0, sizeof *side);
	OK(VipOpenNic("VINIC", &side->nic));
	OK(VipQueryNic(side->nic, &side->nic_attributes));
	OK(VipCreatePtag(side->nic, &side->ptag));
	side->memory = aligned_memory(MEMORY);
	VIP_MEM_ATTRIBUTES memory = { side->ptag, VIP_TRUE, VIP_TRUE };
	OK(VipRegisterMem(side->nic, side->memory, MEMORY, &memory, &side->handle));
	CHECK(side->handle != 0);
	side->attributes.ReliabilityLevel = level;
	side->attributes.MaxTransferSize = 1 << 18;
	side->attributes.Ptag = side->ptag;
	side->attributes.EnableRdmaWrite = VIP_TRUE;
	side->attributes.EnableRdmaRead = level != VIP_SERVICE_UNRELIABLE;
	OK(VipCreateVi(side->nic, &side->attributes, NULL, NULL, &side->vi));
}

static inline VIP_NET_ADDRESS *address_of(struct side *side, net_address *out, const char *name)
{
	VIP_NET_ADDRESS *address = &out->address;
	address->HostAddressLen = side->nic_attributes.NicAddressLen;
	address->DiscriminatorLen = strlen(name);
	memcpy(out->room + 4, side->nic_attributes.LocalNicAddress, address->HostAddressLen);
	memcpy(out->room + 4 + address->HostAddressLen, name, address->DiscriminatorLen);
	return address;
}

/* Waits for one request and accepts it. */
static inline void serve(struct side *side, const char *name)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	VIP_CONN_HANDLE connection;
	OK(VipConnectWait(side->nic, address_of(side, &local, name), TIMEOUT_MS, &remote.address,
		&theirs, &connection));
	CHECK(theirs.ReliabilityLevel == side->attributes.ReliabilityLevel);
	OK(VipConnectAccept(connection, side->vi));
}

/* Asks for a connection until somebody waits at the other end. */
static inline VIP_RETURN request(struct side *side, const char *name)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	VIP_RETURN returned = VIP_NO_MATCH;
	for (int tries = 0; returned == VIP_NO_MATCH && tries < 4000; tries++) {
		returned = VipConnectRequest(side->vi, address_of(side, &local, "a client"),
			address_of(side, &remote, name), TIMEOUT_MS, &theirs);
		if (returned == VIP_NO_MATCH)
			usleep(5000);
	}
	record("VipConnectRequest(", returned);
	return returned;
}

/* The n-th descriptor of the memory, cleared. */
static inline VIP_DESCRIPTOR *descriptor(struct side *side, int n)
{
	VIP_DESCRIPTOR *out = (VIP_DESCRIPTOR *)(side->memory + n * 128);
	CHECK(n < DESCRIPTORS * 4);
	memset(out, 0, 128);
	return out;
}

static inline char *data(struct side *side, int n)
{
	return side->memory + DATA + n;
}

/* One local segment. */
static inline VIP_DESCRIPTOR *local_segment(struct side *side, int n, void *at, unsigned length)
{
	VIP_DESCRIPTOR *out = descriptor(side, n);
	out->CS.SegCount = 1;
	out->CS.Length = length;
	out->DS[0].Local.Data.Address = at;
	out->DS[0].Local.Handle = side->handle;
	out->DS[0].Local.Length = length;
	return out;
}

/* An RDMA operation. */
static inline VIP_DESCRIPTOR *rdma(struct side *side, int n, int control, void *at,
	unsigned length, VIP_UINT64 remote, VIP_MEM_HANDLE remote_handle)
{
	VIP_DESCRIPTOR *out = descriptor(side, n);
	out->CS.SegCount = 2;
	out->CS.Control = control;
	out->CS.Length = length;
	out->DS[0].Remote.Data.AddressBits = remote;
	out->DS[0].Remote.Handle = remote_handle;
	out->DS[1].Local.Data.Address = at;
	out->DS[1].Local.Handle = side->handle;
	out->DS[1].Local.Length = length;
	return out;
}

static inline void post_send(struct side *side, VIP_DESCRIPTOR *descriptor)
{
	OK(VipPostSend(side->vi, descriptor, side->handle));
}

static inline void post_receive(struct side *side, VIP_DESCRIPTOR *descriptor)
{
	OK(VipPostRecv(side->vi, descriptor, side->handle));
}

static inline VIP_DESCRIPTOR *sent(struct side *side, VIP_RETURN code)
{
	VIP_DESCRIPTOR *done;
	EXPECT(VipSendWait(side->vi, TIMEOUT_MS, &done), code);
	CHECK(done && (done->CS.Status & VIP_STATUS_DONE));
	return done;
}

static inline VIP_DESCRIPTOR *received(struct side *side, VIP_RETURN code)
{
	VIP_DESCRIPTOR *done;
	EXPECT(VipRecvWait(side->vi, TIMEOUT_MS, &done), code);
	CHECK(done && (done->CS.Status & VIP_STATUS_DONE));
	return done;
}

static inline VIP_VI_STATE state_of(struct side *side)
{
	VIP_VI_STATE state;
	VIP_VI_ATTRIBUTES attributes;
	VIP_BOOLEAN send_empty, receive_empty;
	OK(VipQueryVi(side->vi, &state, &attributes, &send_empty, &receive_empty));
	return state;
}

/* Waits until the VI is in a state. */
static inline void await_state(struct side *side, VIP_VI_STATE state)
{
	for (int tries = 0; state_of(side) != state; tries++) {
		CHECK(tries < 4000);
		usleep(5000);
	}
}

/* Takes everything back, and ends. */
static inline void close_side(struct side *side)
{
	VIP_DESCRIPTOR *done;
	VIP_RETURN returned;
	OK(VipDisconnect(side->vi));
	CHECK(state_of(side) == VIP_STATE_IDLE);
	do
		returned = VipSendDone(side->vi, &done);
	while (returned == VIP_SUCCESS || (returned == VIP_DESCRIPTOR_ERROR && done));
	do
		returned = VipRecvDone(side->vi, &done);
	while (returned == VIP_SUCCESS || (returned == VIP_DESCRIPTOR_ERROR && done));
	OK(VipDestroyVi(side->vi));
	OK(VipDeregisterMem(side->nic, side->memory, side->handle));
	OK(VipDestroyPtag(side->nic, side->ptag));
	OK(VipCloseNic(side->nic));
	free(side->memory);
}

/* A name that only this run of a test has: both processes know it. */
static inline const char *name_of_run(const char *test)
{
	static char name[64];
	if (!name[0])
		snprintf(name, sizeof name, "%s %d", test, (int)getpid());
	return name;
}

/* Runs `server` in a child and `client` here. */
static inline int both(void (*server)(void), void (*client)(void))
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		server();
		exit(0);
	}
	client();
	int status;
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	return 0;
}

#endif
