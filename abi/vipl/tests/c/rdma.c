/* RDMA between two processes: writes, writes with immediate data, reads, fences; rights of regions and of
 * VIs, and how a refusal shows at both ends. */
#include "check.h"

enum { BIG = 200000 };

static const char *name;
static int level;
static volatile int refused_write, refused_read, lost;

/* What each side tells the other, by a send. */
struct memory {
	VIP_UINT64 address;
	VIP_MEM_HANDLE handle;
};

static void on_error(VIP_PVOID context, VIP_ERROR_DESCRIPTOR *error)
{
	struct side *side = context;
	CHECK(error->NicHandle == side->nic && error->ViHandle == side->vi);
	CHECK(error->ResourceCode == VIP_RESOURCE_VI);
	if (error->ErrorCode == VIP_ERROR_RDMAW_PROT) {
		CHECK(error->OpCode == VIP_CONTROL_OP_RDMAWRITE);
		refused_write++;
	} else if (error->ErrorCode == VIP_ERROR_RDMAR_PROT) {
		CHECK(error->OpCode == VIP_CONTROL_OP_RDMAREAD);
		refused_read++;
	} else {
		CHECK(error->ErrorCode == VIP_ERROR_CONN_LOST);
		lost++;
	}
}

static void wait_for(volatile int *flag)
{
	for (int tries = 0; !*flag; tries++) {
		CHECK(tries < 4000);
		usleep(5000);
	}
}

static void tell(struct side *side, void *at, VIP_MEM_HANDLE handle)
{
	struct memory *memory = (struct memory *)data(side, 0);
	memory->address = (VIP_UINT64)(unsigned long)at;
	memory->handle = handle;
	post_send(side, local_segment(side, 60, memory, sizeof *memory));
	sent(side, VIP_SUCCESS);
}

static struct memory hear(struct side *side)
{
	VIP_DESCRIPTOR *done = received(side, VIP_SUCCESS);
	struct memory memory;
	CHECK(done->CS.Length == sizeof memory);
	memcpy(&memory, done->DS[0].Local.Data.Address, sizeof memory);
	return memory;
}

static void post_hear(struct side *side)
{
	post_receive(side, local_segment(side, 40, data(side, 512), sizeof(struct memory)));
}

static void server(void)
{
	struct side side;
	open_side(&side, level);
	post_hear(&side);
	serve(&side, name);
	char *target = data(&side, 4096);
	tell(&side, target, side.handle);
	/* A write with immediate data takes a receive, whose own segments stay as they are. */
	memset(data(&side, 512), 0x55, 8);
	VIP_DESCRIPTOR *done = received(&side, VIP_SUCCESS);
	CHECK((done->CS.Status & VIP_STATUS_OP_MASK) == VIP_STATUS_OP_REMOTE_RDMA_WRITE);
	CHECK((done->CS.Status & VIP_STATUS_IMMEDIATE) && done->CS.ImmediateData == 0xfeedbeef);
	CHECK(done->CS.Length == BIG && data(&side, 512)[0] == 0x55);
	for (int n = 0; n < BIG; n++)
		CHECK(target[n] == (char)(n * 3));
	post_hear(&side);
	tell(&side, target, side.handle);
	hear(&side);
	close_side(&side);
}

static void client(void)
{
	struct side side;
	open_side(&side, level);
	post_hear(&side);
	OK(request(&side, name));
	struct memory remote = hear(&side);
	char *source = data(&side, 4096), *back = data(&side, 4096 + BIG);
	for (int n = 0; n < BIG; n++)
		source[n] = (char)(n * 3);
	/* Posted before the peer can answer: at the unreliable level its answer would be lost. */
	post_hear(&side);
	/* A small write goes first: what the larger one brings replaces it. */
	post_send(&side, rdma(&side, 0, VIP_CONTROL_OP_RDMAWRITE, source + 7, 100, remote.address,
		remote.handle));
	VIP_DESCRIPTOR *done = sent(&side, VIP_SUCCESS);
	CHECK((done->CS.Status & VIP_STATUS_OP_MASK) == VIP_STATUS_OP_RDMA_WRITE);
	CHECK(done->CS.Length == 100);
	VIP_DESCRIPTOR *write = rdma(&side, 1, VIP_CONTROL_OP_RDMAWRITE | VIP_CONTROL_IMMEDIATE,
		source, BIG, remote.address, remote.handle);
	write->CS.ImmediateData = 0xfeedbeef;
	post_send(&side, write);
	sent(&side, VIP_SUCCESS);
	hear(&side);
	if (level != VIP_SERVICE_UNRELIABLE) {
		/* The fenced send starts after the read. */
		post_send(&side, rdma(&side, 2, VIP_CONTROL_OP_RDMAREAD, back, BIG, remote.address,
			remote.handle));
		VIP_DESCRIPTOR *last = local_segment(&side, 3, data(&side, 0), sizeof remote);
		last->CS.Control = VIP_CONTROL_QFENCE;
		post_send(&side, last);
		done = sent(&side, VIP_SUCCESS);
		CHECK((done->CS.Status & VIP_STATUS_OP_MASK) == VIP_STATUS_OP_RDMA_READ);
		CHECK(done->CS.Length == BIG && memcmp(source, back, BIG) == 0);
		CHECK(sent(&side, VIP_SUCCESS) == last);
	} else {
		/* There are no reads at this level; the VI stays connected. */
		VIP_DESCRIPTOR *read = rdma(&side, 2, VIP_CONTROL_OP_RDMAREAD, back, 8,
			remote.address, remote.handle);
		post_send(&side, read);
		CHECK(sent(&side, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_FORMAT_ERROR);
		CHECK(state_of(&side) == VIP_STATE_CONNECTED);
		tell(&side, source, side.handle);
	}
	close_side(&side);
}

/* One connection for each way in which an operation is refused. */
enum { NO_RIGHT_TO_WRITE, NO_RIGHT_TO_READ, OUT_OF_RANGE, UNKNOWN_HANDLE, VI_FORBIDS, OTHER_TAG,
	TAKEN_AWAY, REFUSALS };
static int refusal;

static void refusing_server(void)
{
	struct side side;
	open_side(&side, level);
	OK(VipErrorCallback(side.nic, &side, on_error));
	if (refusal == VI_FORBIDS) {
		side.attributes.EnableRdmaWrite = VIP_FALSE;
		OK(VipSetViAttributes(side.vi, &side.attributes));
	}
	serve(&side, name);
	VIP_PROTECTION_HANDLE other = NULL;
	if (refusal == OTHER_TAG)
		OK(VipCreatePtag(side.nic, &other));
	VIP_MEM_ATTRIBUTES rights = { refusal == OTHER_TAG ? other : side.ptag,
		refusal != NO_RIGHT_TO_WRITE, refusal != NO_RIGHT_TO_READ };
	VIP_MEM_HANDLE handle;
	char *memory = aligned_memory(4096);
	OK(VipRegisterMem(side.nic, memory, 4096, &rights, &handle));
	if (refusal == TAKEN_AWAY) {
		/* The handle stays; what it allows changes. */
		VIP_MEM_ATTRIBUTES none = { side.ptag, VIP_FALSE, VIP_FALSE }, shown;
		OK(VipSetMemAttributes(side.nic, memory, handle, &none));
		OK(VipQueryMem(side.nic, memory, handle, &shown));
		CHECK(shown.Ptag == side.ptag && !shown.EnableRdmaWrite && !shown.EnableRdmaRead);
	}
	tell(&side, memory, handle);
	wait_for(refusal == NO_RIGHT_TO_READ ? &refused_read : &refused_write);
	wait_for(&lost);
	CHECK(state_of(&side) == VIP_STATE_ERROR);
	for (int n = 0; n < 4096; n++)
		CHECK(memory[n] == 0);
	OK(VipDeregisterMem(side.nic, memory, handle));
	if (other)
		OK(VipDestroyPtag(side.nic, other));
	close_side(&side);
}

static void refused_client(void)
{
	struct side side;
	open_side(&side, level);
	OK(VipErrorCallback(side.nic, &side, on_error));
	post_hear(&side);
	OK(request(&side, name));
	struct memory remote = hear(&side);
	memset(data(&side, 4096), 1, 64);
	int control = refusal == NO_RIGHT_TO_READ ? VIP_CONTROL_OP_RDMAREAD :
		VIP_CONTROL_OP_RDMAWRITE;
	VIP_UINT64 at = remote.address + (refusal == OUT_OF_RANGE ? 4090 : 0);
	VIP_MEM_HANDLE handle = remote.handle ^ (refusal == UNKNOWN_HANDLE ? 0x5500 : 0);
	post_send(&side, rdma(&side, 0, control, data(&side, 4096), 64, at, handle));
	post_send(&side, local_segment(&side, 1, data(&side, 0), 8));
	CHECK(sent(&side, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_RDMA_PROT_ERROR);
	CHECK(sent(&side, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	CHECK(state_of(&side) == VIP_STATE_ERROR);
	close_side(&side);
}

int main(void)
{
	int levels[] = { VIP_SERVICE_UNRELIABLE, VIP_SERVICE_RELIABLE_DELIVERY,
		VIP_SERVICE_RELIABLE_RECEPTION };
	name = name_of_run("rdma");
	for (int n = 0; n < 3; n++) {
		level = levels[n];
		both(server, client);
	}
	for (refusal = 0; refusal < REFUSALS; refusal++) {
		refused_write = refused_read = lost = 0;
		both(refusing_server, refused_client);
	}
	return 0;
}
