/* Errors of descriptors on a connection, and what each reliability level does about them. */
#include <pthread.h>
#include <signal.h>

#include "check.h"

static struct side a, b;
static volatile int empty_queues, losses;

static void *accept_one(void *name)
{
	serve(&b, name);
	return NULL;
}

static void join(int level)
{
	static int run;
	char name[96];
	pthread_t thread;
	snprintf(name, sizeof name, "%s %d", name_of_run("errors"), run++);
	a.attributes.ReliabilityLevel = b.attributes.ReliabilityLevel = level;
	a.attributes.EnableRdmaRead = b.attributes.EnableRdmaRead = level != VIP_SERVICE_UNRELIABLE;
	OK(VipSetViAttributes(a.vi, &a.attributes));
	OK(VipSetViAttributes(b.vi, &b.attributes));
	CHECK(pthread_create(&thread, NULL, accept_one, name) == 0);
	OK(request(&a, name));
	CHECK(pthread_join(thread, NULL) == 0);
}

static void drain(struct side *side)
{
	VIP_DESCRIPTOR *done;
	OK(VipDisconnect(side->vi));
	do
		VipSendDone(side->vi, &done);
	while (done);
	do
		VipRecvDone(side->vi, &done);
	while (done);
}

static void part(void)
{
	drain(&a);
	drain(&b);
}

/* A descriptor of a that fails, and a message after it. At reliable levels the connection is broken. */
static void fails(VIP_DESCRIPTOR *wrong, unsigned expected, int level)
{
	post_receive(&b, local_segment(&b, 0, data(&b, 0), 8));
	post_send(&a, wrong);
	post_send(&a, local_segment(&a, 1, data(&a, 0), 8));
	VIP_DESCRIPTOR *done = sent(&a, VIP_DESCRIPTOR_ERROR);
	CHECK(done == wrong && (done->CS.Status & VIP_STATUS_ERROR_MASK) == expected);
	if (level == VIP_SERVICE_UNRELIABLE) {
		sent(&a, VIP_SUCCESS);
		received(&b, VIP_SUCCESS);
		CHECK(state_of(&a) == VIP_STATE_CONNECTED);
		return;
	}
	CHECK(sent(&a, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	CHECK(state_of(&a) == VIP_STATE_ERROR);
	CHECK(received(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	CHECK(state_of(&b) == VIP_STATE_ERROR);
	part();
	join(level);
}

static void malformed(int level)
{
	VIP_DESCRIPTOR *wrong;
	join(level);
	wrong = local_segment(&a, 0, data(&a, 0), 8);
	wrong->CS.Control = VIP_CONTROL_OP_RESERVED;
	fails(wrong, VIP_STATUS_FORMAT_ERROR, level);
	wrong = descriptor(&a, 0);
	wrong->CS.Control = VIP_CONTROL_OP_RDMAWRITE;
	fails(wrong, VIP_STATUS_FORMAT_ERROR, level);
	wrong = descriptor(&a, 0);
	wrong->CS.SegCount = 0xffff;
	fails(wrong, VIP_STATUS_FORMAT_ERROR, level);
	/* Longer than a transfer. */
	wrong = local_segment(&a, 0, data(&a, 0), a.attributes.MaxTransferSize + 1);
	fails(wrong, VIP_STATUS_FORMAT_ERROR, level);
	/* Inline: one byte too many, a read, memory that is not there. */
	wrong = local_segment(&a, 0, data(&a, 0), VIPX_Q_MAX_INLINE + 1);
	wrong->CS.Control = VIPX_Q_CONTROL_INLINE;
	fails(wrong, VIP_STATUS_FORMAT_ERROR, level);
	wrong = rdma(&a, 0, VIP_CONTROL_OP_RDMAREAD | VIPX_Q_CONTROL_INLINE, data(&a, 0), 8, 0, 0);
	fails(wrong, VIP_STATUS_FORMAT_ERROR, level);
	wrong = local_segment(&a, 0, (void *)64, 8);
	wrong->DS[0].Local.Handle = 0;
	wrong->CS.Control = VIPX_Q_CONTROL_INLINE;
	fails(wrong, VIP_STATUS_PROTECTION_ERROR, level);
	/* Memory that is not registered, not all of it, or no longer. */
	wrong = local_segment(&a, 0, data(&a, 0), 8);
	wrong->DS[0].Local.Handle ^= 0x4400;
	fails(wrong, VIP_STATUS_PROTECTION_ERROR, level);
	wrong = local_segment(&a, 0, a.memory + MEMORY - 4, 8);
	fails(wrong, VIP_STATUS_PROTECTION_ERROR, level);
	VIP_MEM_ATTRIBUTES attributes = { a.ptag, 0, 0 };
	VIP_MEM_HANDLE handle;
	char *memory = aligned_memory(4096);
	OK(VipRegisterMem(a.nic, memory, 4096, &attributes, &handle));
	OK(VipDeregisterMem(a.nic, memory, handle));
	wrong = local_segment(&a, 0, memory, 8);
	wrong->DS[0].Local.Handle = handle;
	fails(wrong, VIP_STATUS_PROTECTION_ERROR, level);
	/* Another tag. */
	VIP_PROTECTION_HANDLE ptag;
	OK(VipCreatePtag(a.nic, &ptag));
	attributes.Ptag = ptag;
	OK(VipRegisterMem(a.nic, memory, 4096, &attributes, &handle));
	wrong = local_segment(&a, 0, memory, 8);
	wrong->DS[0].Local.Handle = handle;
	fails(wrong, VIP_STATUS_PROTECTION_ERROR, level);
	/* Memory without a tag goes with every tag. */
	attributes.Ptag = NULL;
	OK(VipSetMemAttributes(a.nic, memory, handle, &attributes));
	wrong->CS.Status = 0;
	post_receive(&b, local_segment(&b, 0, data(&b, 0), 8));
	post_send(&a, wrong);
	sent(&a, VIP_SUCCESS);
	received(&b, VIP_SUCCESS);
	OK(VipDeregisterMem(a.nic, memory, handle));
	OK(VipDestroyPtag(a.nic, ptag));
	free(memory);
	part();
}

/* A receive that is longer than its memory takes messages that fit. */
static void beyond_the_region(int level)
{
	VIP_DESCRIPTOR *receive;
	join(level);
	for (int n = 0; n < 2; n++) {
		receive = local_segment(&b, n, b.memory + MEMORY - 8, 4096);
		receive->CS.SegCount = 2;
		receive->DS[1].Local.Data.Address = data(&b, 0);
		receive->DS[1].Local.Handle = b.handle;
		receive->DS[1].Local.Length = 8;
		post_receive(&b, receive);
	}
	memcpy(data(&a, 0), "12345678", 8);
	post_send(&a, local_segment(&a, 0, data(&a, 0), 8));
	sent(&a, VIP_SUCCESS);
	CHECK(received(&b, VIP_SUCCESS)->CS.Length == 8);
	CHECK(memcmp(b.memory + MEMORY - 8, "12345678", 8) == 0);
	post_send(&a, local_segment(&a, 0, data(&a, 0), 12));
	CHECK(received(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_LENGTH_ERROR);
	part();
}

/* A VI without a tag uses memory of every tag, locally; so programs do that give tags to memory only. */
static void without_tag(void)
{
	VIP_PROTECTION_HANDLE ptag, own = a.attributes.Ptag;
	VIP_MEM_HANDLE handle;
	OK(VipCreatePtag(a.nic, &ptag));
	VIP_MEM_ATTRIBUTES attributes = { ptag, 0, 0 };
	char *memory = aligned_memory(4096);
	OK(VipRegisterMem(a.nic, memory, 4096, &attributes, &handle));
	a.attributes.Ptag = NULL;
	join(VIP_SERVICE_RELIABLE_RECEPTION);
	for (int n = 0; n < 2; n++) {
		VIP_DESCRIPTOR *send = local_segment(&a, n, n ? memory : data(&a, 0), 8);
		send->DS[0].Local.Handle = n ? handle : a.handle;
		post_receive(&b, local_segment(&b, n, data(&b, 0), 8));
		post_send(&a, send);
		sent(&a, VIP_SUCCESS);
		received(&b, VIP_SUCCESS);
	}
	part();
	a.attributes.Ptag = own;
	OK(VipSetViAttributes(a.vi, &a.attributes));
	OK(VipDeregisterMem(a.nic, memory, handle));
	OK(VipDestroyPtag(a.nic, ptag));
	free(memory);
}

/* A message that is longer than the receive. */
static void too_long(int level)
{
	join(level);
	post_receive(&b, local_segment(&b, 0, data(&b, 0), 8));
	post_receive(&b, local_segment(&b, 1, data(&b, 0), 100));
	post_send(&a, local_segment(&a, 0, data(&a, 0), 9));
	if (level == VIP_SERVICE_UNRELIABLE) {
		/* It is dropped. */
		sent(&a, VIP_SUCCESS);
		post_send(&a, local_segment(&a, 1, data(&a, 0), 8));
		sent(&a, VIP_SUCCESS);
		received(&b, VIP_SUCCESS);
		CHECK(state_of(&a) == VIP_STATE_CONNECTED && state_of(&b) == VIP_STATE_CONNECTED);
	} else {
		CHECK(sent(&a, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_REMOTE_DESC_ERROR);
		CHECK(received(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_LENGTH_ERROR);
		CHECK(received(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
		CHECK(state_of(&a) == VIP_STATE_ERROR && state_of(&b) == VIP_STATE_ERROR);
	}
	part();
}

static void on_error(VIP_PVOID context, VIP_ERROR_DESCRIPTOR *error)
{
	(void)context;
	empty_queues += error->ErrorCode == VIP_ERROR_RECVQ_EMPTY;
	losses += error->ErrorCode == VIP_ERROR_CONN_LOST;
}

/* A message that meets no receive: it waits for one, or breaks the connection as on hardware. */
static void no_receive(int level, int breaks)
{
	empty_queues = losses = 0;
	OK(VipErrorCallback(b.nic, NULL, on_error));
	join(level);
	post_send(&a, local_segment(&a, 0, data(&a, 0), 8));
	if (level == VIP_SERVICE_UNRELIABLE) {
		sent(&a, VIP_SUCCESS);
		CHECK(state_of(&b) == VIP_STATE_CONNECTED);
	} else if (breaks) {
		CHECK(sent(&a, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_REMOTE_DESC_ERROR);
		await_state(&b, VIP_STATE_ERROR);
		for (int tries = 0; !empty_queues || !losses; tries++) {
			CHECK(tries < 4000);
			usleep(5000);
		}
	} else {
		VIP_DESCRIPTOR *done;
		EXPECT(VipSendWait(a.vi, 100, &done), VIP_TIMEOUT);
		EXPECT(VipSendDone(a.vi, &done), VIP_NOT_DONE);
		post_receive(&b, local_segment(&b, 0, data(&b, 0), 8));
		received(&b, VIP_SUCCESS);
		sent(&a, VIP_SUCCESS);
	}
	OK(VipErrorCallback(b.nic, NULL, NULL));
	part();
}

/* A peer that is killed: everything is flushed, and the program is told. */
static void death(void)
{
	int pipe_ends[2];
	char byte;
	const char *name = name_of_run("death");
	CHECK(pipe(pipe_ends) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct side side;
		open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
		serve(&side, name);
		CHECK(write(pipe_ends[1], "x", 1) == 1);
		for (;;)
			pause();
	}
	struct side side;
	losses = 0;
	open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
	OK(VipErrorCallback(side.nic, NULL, on_error));
	for (int n = 0; n < 3; n++)
		post_receive(&side, local_segment(&side, n, data(&side, 0), 8));
	OK(request(&side, name));
	CHECK(read(pipe_ends[0], &byte, 1) == 1);
	CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
	for (int n = 0; n < 3; n++)
		CHECK(received(&side, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	CHECK(state_of(&side) == VIP_STATE_ERROR);
	for (int tries = 0; !losses; tries++) {
		CHECK(tries < 4000);
		usleep(5000);
	}
	close_side(&side);
}

int main(void)
{
	int levels[] = { VIP_SERVICE_UNRELIABLE, VIP_SERVICE_RELIABLE_DELIVERY,
		VIP_SERVICE_RELIABLE_RECEPTION };
	const char *setting = getenv("QUIPU_VIPL_RNR");
	int breaks = setting && !strcmp(setting, "0");
	death();
	open_side(&a, VIP_SERVICE_RELIABLE_DELIVERY);
	open_side(&b, VIP_SERVICE_RELIABLE_DELIVERY);
	for (int n = 0; n < 3; n++) {
		no_receive(levels[n], breaks);
		if (!breaks) {
			malformed(levels[n]);
			too_long(levels[n]);
			if (levels[n] != VIP_SERVICE_UNRELIABLE)
				beyond_the_region(levels[n]);
		}
	}
	without_tag();
	close_side(&a);
	close_side(&b);
	return 0;
}
