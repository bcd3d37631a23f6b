/* Careless calls: each gets a code, and none does harm. */
#include <sys/mman.h>

#include "check.h"

static struct side side;
static volatile int post_errors, overruns;

static void on_descriptor(VIP_PVOID c, VIP_NIC_HANDLE n, VIP_VI_HANDLE v, VIP_DESCRIPTOR *d)
{
	(void)c, (void)n, (void)v, (void)d;
}

static void on_entry(VIP_PVOID c, VIP_NIC_HANDLE n, VIP_VI_HANDLE v, VIP_BOOLEAN r)
{
	(void)c, (void)n, (void)v, (void)r;
}

static void on_error(VIP_PVOID context, VIP_ERROR_DESCRIPTOR *error)
{
	CHECK(context == &side && error->NicHandle == side.nic && error->ViHandle == side.vi);
	if (error->ErrorCode == VIP_ERROR_POST_DESC) {
		CHECK(error->ResourceCode == VIP_RESOURCE_DESCRIPTOR);
		post_errors++;
	} else {
		CHECK(error->ErrorCode == VIP_ERROR_VI_OVERRUN);
		overruns++;
	}
}

static void wait_for(volatile int *count, int value)
{
	for (int tries = 0; *count < value; tries++) {
		CHECK(tries < 4000);
		usleep(5000);
	}
}

/* Handles of nothing, of another kind, of what is gone. */
static void with_bad_handles(void *bad)
{
	net_address local, remote;
	VIP_NIC_ATTRIBUTES nic_attributes;
	VIP_VI_ATTRIBUTES attributes = side.attributes;
	VIP_MEM_ATTRIBUTES memory = { NULL, 0, 0 };
	VIP_VI_HANDLE vi;
	VIP_CQ_HANDLE cq;
	VIP_CONN_HANDLE connection;
	VIP_PROTECTION_HANDLE ptag;
	VIP_MEM_HANDLE handle;
	VIP_VI_STATE state;
	VIP_BOOLEAN flag;
	static VIP_DESCRIPTOR unused;
	VIP_DESCRIPTOR *done, *one = &unused;
	char name[64];
	VIP_ULONG length = sizeof name;
	address_of(&side, &local, "x");
	address_of(&side, &remote, "y");

	EXPECT(VipCloseNic(bad), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryNic(bad, &nic_attributes), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateVi(bad, &attributes, NULL, NULL, &vi), VIP_INVALID_PARAMETER);
	EXPECT(VipDestroyVi(bad), VIP_INVALID_PARAMETER);
	EXPECT(VipSetViAttributes(bad, &attributes), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryVi(bad, &state, &attributes, &flag, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectWait(bad, &local.address, 0, &remote.address, &attributes, &connection),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectAccept(bad, side.vi), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectReject(bad), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectRequest(bad, &local.address, &remote.address, 1, &attributes),
		VIP_INVALID_PARAMETER);
	EXPECT(VipDisconnect(bad), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerRequest(bad, &local.address, &remote.address, 1), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerDone(bad, &attributes), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerWait(bad, &attributes), VIP_INVALID_PARAMETER);
	EXPECT(VipCreatePtag(bad, &ptag), VIP_INVALID_PARAMETER);
	EXPECT(VipDestroyPtag(bad, side.ptag), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(bad, side.memory, 1, &memory, &handle), VIP_INVALID_PARAMETER);
	EXPECT(VipDeregisterMem(bad, side.memory, side.handle), VIP_INVALID_PARAMETER);
	EXPECT(VipSetMemAttributes(bad, side.memory, side.handle, &memory), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryMem(bad, side.memory, side.handle, &memory), VIP_INVALID_PARAMETER);
	EXPECT(VipPostSend(bad, one, side.handle), VIP_INVALID_PARAMETER);
	EXPECT(VipPostRecv(bad, one, side.handle), VIP_INVALID_PARAMETER);
	EXPECT(VipSendDone(bad, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipRecvDone(bad, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipSendWait(bad, 0, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipRecvWait(bad, 0, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipSendNotify(bad, NULL, on_descriptor), VIP_INVALID_PARAMETER);
	EXPECT(VipRecvNotify(bad, NULL, on_descriptor), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateCQ(bad, 1, &cq), VIP_INVALID_PARAMETER);
	EXPECT(VipDestroyCQ(bad), VIP_INVALID_PARAMETER);
	EXPECT(VipResizeCQ(bad, 1), VIP_INVALID_PARAMETER);
	EXPECT(VipCQDone(bad, &vi, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipxQCQDoneDescriptor(bad, &vi, &flag, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipCQWait(bad, 0, &vi, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipCQNotify(bad, NULL, on_entry), VIP_INVALID_PARAMETER);
	EXPECT(VipErrorCallback(bad, NULL, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipQuerySystemManagementInfo(bad, 1, &vi), VIP_INVALID_PARAMETER);
	EXPECT(VipNSInit(bad, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipNSShutdown(bad), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByName(bad, "localhost", &remote.address, 0), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByAddr(bad, &local.address, name, &length), VIP_INVALID_PARAMETER);
}

static void without_pointers(void)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES attributes = side.attributes;
	VIP_MEM_ATTRIBUTES memory = { NULL, 0, 0 };
	VIP_VI_HANDLE vi;
	VIP_CQ_HANDLE cq;
	VIP_DESCRIPTOR *done;
	VIP_CONN_HANDLE connection;
	VIP_MEM_HANDLE handle;
	VIP_VI_STATE state;
	VIP_BOOLEAN flag;
	char name[64];
	VIP_ULONG length = sizeof name;
	address_of(&side, &local, "x");
	address_of(&side, &remote, "y");
	OK(VipCreateCQ(side.nic, 1, &cq));

	EXPECT(VipOpenNic(NULL, &vi), VIP_INVALID_PARAMETER);
	EXPECT(VipOpenNic("VINIC", NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryNic(side.nic, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateVi(side.nic, NULL, NULL, NULL, &vi), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateVi(side.nic, &attributes, NULL, NULL, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateVi(side.nic, &attributes, side.vi, NULL, &vi), VIP_INVALID_PARAMETER);
	EXPECT(VipSetViAttributes(side.vi, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryVi(side.vi, NULL, &attributes, &flag, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryVi(side.vi, &state, NULL, &flag, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryVi(side.vi, &state, &attributes, NULL, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryVi(side.vi, &state, &attributes, &flag, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectWait(side.nic, NULL, 0, &remote.address, &attributes, &connection),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectWait(side.nic, &local.address, 0, NULL, &attributes, &connection),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectWait(side.nic, &local.address, 0, &remote.address, NULL, &connection),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectWait(side.nic, &local.address, 0, &remote.address, &attributes, NULL),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectRequest(side.vi, NULL, &remote.address, 1, &attributes),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectRequest(side.vi, &local.address, NULL, 1, &attributes),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectRequest(side.vi, &local.address, &remote.address, 1, NULL),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerRequest(side.vi, NULL, &remote.address, 1), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerRequest(side.vi, &local.address, NULL, 1), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerDone(side.vi, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerWait(side.vi, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipCreatePtag(side.nic, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipDestroyPtag(side.nic, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(side.nic, NULL, 1, &memory, &handle), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(side.nic, side.memory, 0, &memory, &handle), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(side.nic, side.memory, ~0ul, &memory, &handle), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(side.nic, side.memory, 1, NULL, &handle), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(side.nic, side.memory, 1, &memory, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipSetMemAttributes(side.nic, side.memory, side.handle, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryMem(side.nic, side.memory, side.handle, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipSendDone(side.vi, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipRecvDone(side.vi, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipSendWait(side.vi, 0, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipRecvWait(side.vi, 0, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipSendNotify(side.vi, NULL, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateCQ(side.nic, 1, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipCQDone(cq, NULL, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipCQDone(cq, &vi, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipxQCQDoneDescriptor(cq, NULL, &flag, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipxQCQDoneDescriptor(cq, &vi, NULL, &done), VIP_INVALID_PARAMETER);
	EXPECT(VipxQCQDoneDescriptor(cq, &vi, &flag, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipCQWait(cq, 0, NULL, &flag), VIP_INVALID_PARAMETER);
	EXPECT(VipQuerySystemManagementInfo(side.nic, 1, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByName(side.nic, NULL, &remote.address, 0), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByName(side.nic, "localhost", NULL, 0), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByAddr(side.nic, NULL, name, &length), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByAddr(side.nic, &local.address, NULL, &length), VIP_INVALID_PARAMETER);
	EXPECT(VipNSGetHostByAddr(side.nic, &local.address, name, NULL), VIP_INVALID_PARAMETER);
	OK(VipDestroyCQ(cq));
}

static void with_bad_addresses(void)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES attributes;
	VIP_CONN_HANDLE connection;
	address_of(&side, &local, "x");
	address_of(&side, &remote, "y");
	unsigned short lengths[] = { 1, 5, 200, 0xffff };
	for (int n = 0; n < 4; n++) {
		remote.address.HostAddressLen = lengths[n];
		EXPECT(VipConnectRequest(side.vi, &local.address, &remote.address, 1, &attributes),
			VIP_INVALID_PARAMETER);
		EXPECT(VipConnectWait(side.nic, &remote.address, 0, &local.address, &attributes,
			&connection), VIP_INVALID_PARAMETER);
	}
	/* No host at all is nobody to ask; the other family is not this NIC's. */
	remote.address.HostAddressLen = 0;
	EXPECT(VipConnectRequest(side.vi, &local.address, &remote.address, 1, &attributes),
		VIP_INVALID_PARAMETER);
	memset(remote.room + 4, 0x20, 16);
	remote.address.HostAddressLen = 20 - side.nic_attributes.NicAddressLen;
	EXPECT(VipConnectRequest(side.vi, &local.address, &remote.address, 1, &attributes),
		VIP_INVALID_PARAMETER);
	address_of(&side, &remote, "y");
	remote.address.DiscriminatorLen = side.nic_attributes.MaxDiscriminatorLen + 1;
	EXPECT(VipConnectRequest(side.vi, &local.address, &remote.address, 1, &attributes),
		VIP_INVALID_PARAMETER);
	EXPECT(VipConnectPeerRequest(side.vi, &local.address, &remote.address, 1),
		VIP_INVALID_PARAMETER);
}

static void attributes(void)
{
	VIP_VI_ATTRIBUTES wrong;
	VIP_VI_HANDLE vi;
	struct {
		int level, read;
		unsigned long size;
		void *ptag;
		VIP_RETURN code;
	} cases[] = {
		{ 0, 0, 100, NULL, VIP_INVALID_RELIABILITY_LEVEL },
		{ 3, 0, 100, NULL, VIP_INVALID_RELIABILITY_LEVEL },
		{ 2, 0, 0, NULL, VIP_INVALID_MTU },
		{ 2, 0, side.nic_attributes.MaxTransferSize + 1, NULL, VIP_INVALID_MTU },
		{ 1, 1, 100, NULL, VIP_INVALID_RDMAREAD },
		{ 2, 0, 100, (void *)0x1234, VIP_INVALID_PTAG },
		{ 2, 0, 100, side.vi, VIP_INVALID_PTAG },
	};
	for (unsigned n = 0; n < sizeof cases / sizeof cases[0]; n++) {
		wrong = side.attributes;
		wrong.ReliabilityLevel = cases[n].level;
		wrong.EnableRdmaRead = cases[n].read;
		wrong.MaxTransferSize = cases[n].size;
		wrong.Ptag = cases[n].ptag;
		EXPECT(VipCreateVi(side.nic, &wrong, NULL, NULL, &vi), cases[n].code);
		EXPECT(VipSetViAttributes(side.vi, &wrong), cases[n].code);
	}
	VIP_VI_STATE state;
	VIP_BOOLEAN flag;
	OK(VipQueryVi(side.vi, &state, &wrong, &flag, &flag));
	CHECK(wrong.MaxTransferSize == side.attributes.MaxTransferSize && wrong.Ptag == side.ptag);
	CHECK(wrong.ReliabilityLevel == side.attributes.ReliabilityLevel && state == VIP_STATE_IDLE);
}

static void memory(void)
{
	VIP_MEM_ATTRIBUTES attributes = { side.ptag, 0, 0 };
	VIP_MEM_ATTRIBUTES wrong = { side.vi, 0, 0 };
	VIP_MEM_HANDLE first, second;
	VIP_PROTECTION_HANDLE ptag;
	EXPECT(VipRegisterMem(side.nic, side.memory, 100, &wrong, &first), VIP_INVALID_PTAG);
	EXPECT(VipSetMemAttributes(side.nic, side.memory, side.handle, &wrong), VIP_INVALID_PTAG);
	/* Memory that is not there. */
	void *gone = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(munmap(gone, 8192) == 0);
	EXPECT(VipRegisterMem(side.nic, gone, 8192, &attributes, &first), VIP_INVALID_PARAMETER);
	/* One region twice, and parts of it. */
	OK(VipRegisterMem(side.nic, side.memory + 1, 100, &attributes, &first));
	OK(VipRegisterMem(side.nic, side.memory + 1, 100, &attributes, &second));
	CHECK(first && second && first != second);
	EXPECT(VipDeregisterMem(side.nic, side.memory, first), VIP_INVALID_PARAMETER);
	EXPECT(VipQueryMem(side.nic, side.memory, first, &attributes), VIP_INVALID_PARAMETER);
	OK(VipDeregisterMem(side.nic, side.memory + 1, first));
	EXPECT(VipDeregisterMem(side.nic, side.memory + 1, first), VIP_INVALID_PARAMETER);
	OK(VipDeregisterMem(side.nic, side.memory + 1, second));
	/* Tags that are in use stay. */
	OK(VipCreatePtag(side.nic, &ptag));
	attributes.Ptag = ptag;
	OK(VipRegisterMem(side.nic, side.memory, 100, &attributes, &first));
	EXPECT(VipDestroyPtag(side.nic, ptag), VIP_ERROR_RESOURCE);
	EXPECT(VipDestroyPtag(side.nic, side.ptag), VIP_ERROR_RESOURCE);
	OK(VipDeregisterMem(side.nic, side.memory, first));
	OK(VipDestroyPtag(side.nic, ptag));
	EXPECT(VipDestroyPtag(side.nic, ptag), VIP_INVALID_PARAMETER);
	EXPECT(VipRegisterMem(side.nic, side.memory, 100, &attributes, &first), VIP_INVALID_PTAG);
	/* Constants can be registered, and sent. */
	attributes.Ptag = NULL;
	OK(VipRegisterMem(side.nic, (void *)"constant", 9, &attributes, &first));
	OK(VipDeregisterMem(side.nic, (void *)"constant", first));
}

static void bad_descriptors(void)
{
	VIP_DESCRIPTOR *done, *one = descriptor(&side, 0);
	OK(VipErrorCallback(side.nic, &side, on_error));
	EXPECT(VipPostSend(side.vi, NULL, side.handle), VIP_INVALID_PARAMETER);
	EXPECT(VipPostRecv(side.vi, NULL, side.handle), VIP_INVALID_PARAMETER);
	EXPECT(VipPostRecv(side.vi, one, 0), VIP_INVALID_PARAMETER);
	EXPECT(VipPostRecv(side.vi, one, side.handle ^ 0x7700), VIP_INVALID_PARAMETER);
	EXPECT(VipPostRecv(side.vi, (VIP_DESCRIPTOR *)64, side.handle), VIP_INVALID_PARAMETER);
	EXPECT(VipPostSend(side.vi, (VIP_DESCRIPTOR *)~0ul, side.handle), VIP_INVALID_PARAMETER);
	wait_for(&post_errors, 6);
	/* One that lies in memory which is not registered is read all the same, unless the mode is strict. */
	VIP_DESCRIPTOR *elsewhere = aligned_memory(4096);
	EXPECT(VipPostSend(side.vi, elsewhere, side.handle),
		getenv("QUIPU_VIPL_STRICT") ? VIP_INVALID_PARAMETER : VIP_SUCCESS);
	if (!getenv("QUIPU_VIPL_STRICT")) {
		CHECK(sent(&side, VIP_DESCRIPTOR_ERROR) == elsewhere);
		CHECK(elsewhere->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	}
	free(elsewhere);
	/* A queue takes as many as it says. */
	for (unsigned long n = 0; n < side.nic_attributes.MaxDescriptorsPerQueue; n++)
		OK(VipPostRecv(side.vi, one, side.handle));
	EXPECT(VipPostRecv(side.vi, one, side.handle), VIP_ERROR_RESOURCE);
	wait_for(&overruns, 1);
	EXPECT(VipDestroyVi(side.vi), VIP_ERROR_RESOURCE);
	OK(VipDisconnect(side.vi));
	for (unsigned long n = 0; n < side.nic_attributes.MaxDescriptorsPerQueue; n++) {
		EXPECT(VipRecvDone(side.vi, &done), VIP_DESCRIPTOR_ERROR);
		CHECK(done == one);
	}
	EXPECT(VipRecvDone(side.vi, &done), VIP_DESCRIPTOR_ERROR);
	CHECK(done == NULL);
	OK(VipErrorCallback(side.nic, NULL, NULL));
}

int main(void)
{
	open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
	CHECK(side.nic_attributes.ReliabilityLevelSupport == 7);
	CHECK(side.nic_attributes.RDMAReadSupport == 6);
	CHECK(side.nic_attributes.NicAddressLen == 4 || side.nic_attributes.NicAddressLen == 16);
	CHECK(!strcmp(side.nic_attributes.Name, "VINIC") && side.nic_attributes.ThreadSafe);
	VIP_NIC_HANDLE closed;
	OK(VipOpenNic("/dev/via_lo", &closed));
	OK(VipCloseNic(closed));
	with_bad_handles(NULL);
	with_bad_handles(closed);
	with_bad_handles((void *)0x1234);
	with_bad_handles((void *)~0ul);
	with_bad_handles(side.memory);
	with_bad_handles(side.ptag);
	without_pointers();
	with_bad_addresses();
	attributes();
	memory();
	bad_descriptors();
	close_side(&side);
	with_bad_handles(side.vi);
	with_bad_handles(side.nic);
	return 0;
}
