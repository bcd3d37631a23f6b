/* pingpong.c - latency and bandwidth of sends between two VIs.
 *
 *     pingpong                        both ends on this machine: starts the other one itself
 *     pingpong server                 waits for a client
 *     pingpong client HOST            asks the server on HOST
 *
 * Options before these: -n ROUNDS (10000), -l LEVEL (1, 2 or 4: unreliable, reliable delivery, reliable
 * reception; 2). Each line of the result is one message size: bytes, half a round trip in microseconds,
 * and megabytes (10^6 bytes) a second with a window of messages under way.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <vipl.h>

enum { LARGEST = 1 << 20, WINDOW = 16, SLOT = 64 };

static const unsigned sizes[] = { 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, LARGEST };
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static VIP_NIC_HANDLE nic;
static VIP_NIC_ATTRIBUTES nic_attributes;
static VIP_VI_HANDLE vi;
static VIP_MEM_HANDLE handle;
static char *memory;
static unsigned rounds = 10000;

static void check(VIP_RETURN returned, const char *what)
{
	if (returned == VIP_SUCCESS)
		return;
	fprintf(stderr, "%s failed with %d\n", what, returned);
	exit(1);
}

#define DO(call) check(call, #call)

static double now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

/* The descriptors of receives, then those of sends, then the data. */
static VIP_DESCRIPTOR *descriptor(int at, unsigned length)
{
	VIP_DESCRIPTOR *out = (VIP_DESCRIPTOR *)(memory + at * SLOT);
	memset(out, 0, SLOT);
	out->CS.SegCount = 1;
	out->CS.Length = length;
	out->DS[0].Local.Data.Address = memory + 4096 + (at < WINDOW ? 0 : LARGEST);
	out->DS[0].Local.Handle = handle;
	out->DS[0].Local.Length = length;
	return out;
}

static void receive(int at, unsigned length)
{
	DO(VipPostRecv(vi, descriptor(at, length), handle));
}

static void send_message(int at, unsigned length)
{
	DO(VipPostSend(vi, descriptor(WINDOW + at, length), handle));
}

static void await(VIP_RETURN (*done)(VIP_VI_HANDLE, VIP_DESCRIPTOR **))
{
	VIP_DESCRIPTOR *descriptor;
	VIP_RETURN returned;
	while ((returned = done(vi, &descriptor)) == VIP_NOT_DONE)
		;
	check(returned, "a descriptor");
}

static unsigned rounds_of(unsigned size)
{
	unsigned fewer = rounds / (1 + size / 4096);
	return fewer < 20 ? 20 : fewer;
}

/* Half a round trip in microseconds. */
static double latency(unsigned size, int is_client)
{
	unsigned count = rounds_of(size);
	double begun = now_us();
	for (unsigned n = 0; n < count; n++) {
		if (is_client)
			send_message(0, size);
		await(VipRecvDone);
		receive(n % WINDOW, LARGEST);
		if (!is_client)
			send_message(0, size);
		await(VipSendDone);
	}
	return (now_us() - begun) / count / 2;
}

/* Megabytes a second: the client sends, the server answers every half window. */
static double bandwidth(unsigned size, int is_client)
{
	unsigned half = WINDOW / 2, windows = rounds_of(size) / half + 2;
	double begun = now_us();
	for (unsigned window = 0; window < windows; window++) {
		for (unsigned n = 0; n < half; n++) {
			if (is_client) {
				send_message(n, size);
			} else {
				await(VipRecvDone);
				receive((window * half + n) % WINDOW, LARGEST);
			}
		}
		if (is_client) {
			for (unsigned n = 0; n < half; n++)
				await(VipSendDone);
			/* The answer to the window before: one is always under way. */
			if (window > 0) {
				await(VipRecvDone);
				receive(window % WINDOW, LARGEST);
			}
		} else {
			send_message(0, 0);
			await(VipSendDone);
		}
	}
	if (is_client) {
		await(VipRecvDone);
		receive(0, LARGEST);
	}
	return (double)windows * half * size / (now_us() - begun);
}

static VIP_NET_ADDRESS *address(unsigned char *room, const char *discriminator)
{
	VIP_NET_ADDRESS *out = (VIP_NET_ADDRESS *)room;
	out->HostAddressLen = nic_attributes.NicAddressLen;
	out->DiscriminatorLen = strlen(discriminator);
	memcpy(room + 4, nic_attributes.LocalNicAddress, out->HostAddressLen);
	memcpy(room + 4 + out->HostAddressLen, discriminator, out->DiscriminatorLen);
	return out;
}

static void connect_to(const char *host, const char *name)
{
	unsigned char local[84], remote[84];
	VIP_NET_ADDRESS *there = address(remote, name);
	VIP_VI_ATTRIBUTES theirs;
	VIP_RETURN returned = VIP_NO_MATCH;
	if (host) {
		DO(VipNSInit(nic, NULL));
		DO(VipNSGetHostByName(nic, (char *)host, there, 0));
	}
	for (int tries = 0; returned == VIP_NO_MATCH && tries < 1000; tries++) {
		returned = VipConnectRequest(vi, address(local, "client"), there, 10000, &theirs);
		if (returned == VIP_NO_MATCH)
			usleep(10000);
	}
	check(returned, "VipConnectRequest");
}

static void wait_for_client(const char *name)
{
	unsigned char local[84], remote[84];
	VIP_VI_ATTRIBUTES theirs;
	VIP_CONN_HANDLE connection;
	DO(VipConnectWait(nic, address(local, name), VIP_INFINITE, (VIP_NET_ADDRESS *)remote,
		&theirs, &connection));
	DO(VipConnectAccept(connection, vi));
}

static void open_vi(int level)
{
	VIP_PROTECTION_HANDLE ptag;
	DO(VipOpenNic("VINIC", &nic));
	DO(VipQueryNic(nic, &nic_attributes));
	DO(VipCreatePtag(nic, &ptag));
	if (posix_memalign((void **)&memory, 4096, 4096 + 2 * LARGEST))
		exit(1);
	memset(memory, 0, 4096 + 2 * LARGEST);
	VIP_MEM_ATTRIBUTES attributes = { ptag, VIP_FALSE, VIP_FALSE };
	DO(VipRegisterMem(nic, memory, 4096 + 2 * LARGEST, &attributes, &handle));
	VIP_VI_ATTRIBUTES vi_attributes = { level, LARGEST, NULL, ptag, VIP_FALSE, VIP_FALSE };
	DO(VipCreateVi(nic, &vi_attributes, NULL, NULL, &vi));
	for (int n = 0; n < WINDOW; n++)
		receive(n, LARGEST);
}

static void measure(int is_client)
{
	if (is_client)
		printf("%9s %12s %12s\n", "bytes", "us", "MB/s");
	for (int n = 0; n < SIZES; n++) {
		double us = latency(sizes[n], is_client);
		double mb = bandwidth(sizes[n], is_client);
		if (is_client)
			printf("%9u %12.2f %12.1f\n", sizes[n], us, mb);
	}
}

static int run(const char *host, const char *name, int level, int is_client)
{
	open_vi(level);
	if (is_client)
		connect_to(host, name);
	else
		wait_for_client(name);
	measure(is_client);
	/* The server leaves when the client has left: what it sent last has arrived then. */
	VIP_VI_STATE state = VIP_STATE_CONNECTED;
	VIP_VI_ATTRIBUTES attributes;
	VIP_BOOLEAN sends, receives;
	while (!is_client && state == VIP_STATE_CONNECTED) {
		usleep(1000);
		DO(VipQueryVi(vi, &state, &attributes, &sends, &receives));
	}
	DO(VipDisconnect(vi));
	DO(VipCloseNic(nic));
	return 0;
}

int main(int argc, char **argv)
{
	int option, level = VIP_SERVICE_RELIABLE_DELIVERY;
	while ((option = getopt(argc, argv, "n:l:")) != -1) {
		if (option == 'n')
			rounds = strtoul(optarg, NULL, 10);
		else if (option == 'l')
			level = atoi(optarg);
		else
			return 2;
	}
	argv += optind;
	if (!argv[0]) {
		char name[32];
		snprintf(name, sizeof name, "pingpong %d", (int)getpid());
		pid_t child = fork();
		if (child == 0)
			return run(NULL, name, level, 0);
		int status, failed = run(NULL, name, level, 1);
		waitpid(child, &status, 0);
		return failed || status != 0;
	}
	if (!strcmp(argv[0], "server"))
		return run(NULL, "pingpong", level, 0);
	if (!strcmp(argv[0], "client") && argv[1])
		return run(argv[1], "pingpong", level, 1);
	fprintf(stderr, "usage: pingpong [-n ROUNDS] [-l LEVEL] [server | client HOST]\n");
	return 2;
}
