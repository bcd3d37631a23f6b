/* Two hosts: hosts server OWN-ADDRESS PEER, hosts client OWN-ADDRESS PEER. The server accepts a connection;
 * then both request one from each other. Over each, messages and RDMA in both directions. */
#include "check.h"

enum { SIZE = 150000 };

static struct side side;

struct memory {
	VIP_UINT64 address;
	VIP_MEM_HANDLE handle;
};

static VIP_NET_ADDRESS *named(net_address *out, const char *host, const char *discriminator)
{
	address_of(&side, out, discriminator);
	OK(VipNSGetHostByName(side.nic, (char *)host, &out->address, 0));
	return &out->address;
}

/* Each writes into the other's memory, reads it back, and says so. */
static void exchange(void)
{
	char *own = data(&side, 4096), *source = own + SIZE, *back = source + SIZE;
	struct memory *tell = (struct memory *)data(&side, 0), *hear = tell + 1;
	memset(own, 0, SIZE);
	tell->address = (VIP_UINT64)(unsigned long)own;
	tell->handle = side.handle;
	post_send(&side, local_segment(&side, 0, tell, sizeof *tell));
	sent(&side, VIP_SUCCESS);
	CHECK(received(&side, VIP_SUCCESS)->CS.Length == sizeof *hear);
	for (int n = 0; n < SIZE; n++)
		source[n] = (char)(n * 5 + getpid());
	post_send(&side, rdma(&side, 1, VIP_CONTROL_OP_RDMAWRITE, source, SIZE, hear->address,
		hear->handle));
	post_send(&side, rdma(&side, 2, VIP_CONTROL_OP_RDMAREAD, back, SIZE, hear->address,
		hear->handle));
	sent(&side, VIP_SUCCESS);
	sent(&side, VIP_SUCCESS);
	CHECK(!memcmp(source, back, SIZE));
	/* The peer's write has arrived when its next message has. */
	post_send(&side, descriptor(&side, 3));
	sent(&side, VIP_SUCCESS);
	received(&side, VIP_SUCCESS);
	for (int n = 1; n < SIZE; n++)
		CHECK((char)(own[n] - own[n - 1]) == 5);
	post_send(&side, descriptor(&side, 4));
	sent(&side, VIP_SUCCESS);
	received(&side, VIP_SUCCESS);
}

static void post_receives(void)
{
	struct memory *hear = (struct memory *)data(&side, 0) + 1;
	for (int n = 0; n < 3; n++)
		post_receive(&side, local_segment(&side, 20 + n, hear + n, sizeof *hear));
}

static void leave(int is_server)
{
	VIP_DESCRIPTOR *done;
	/* The client leaves first, and the server sees it. */
	if (is_server)
		await_state(&side, VIP_STATE_ERROR);
	OK(VipDisconnect(side.vi));
	EXPECT(VipRecvDone(side.vi, &done), VIP_DESCRIPTOR_ERROR);
	CHECK(done == NULL);
}

int main(int argc, char **argv)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	CHECK(argc == 4);
	int is_server = !strcmp(argv[1], "server");
	open_side(&side, VIP_SERVICE_RELIABLE_RECEPTION);
	OK(VipNSInit(side.nic, NULL));
	post_receives();
	if (is_server) {
		serve(&side, "hosts");
	} else {
		/* An address to which there is no way. */
		VIP_NET_ADDRESS *nowhere = named(&remote, argv[3], "hosts");
		memset(remote.room + 4, 0xfc, nowhere->HostAddressLen);
		remote.room[4] = nowhere->HostAddressLen == 4 ? 99 : 0xfc;
		EXPECT(VipConnectRequest(side.vi, address_of(&side, &local, "c"), nowhere, 5000,
			&theirs), VIP_NOT_REACHABLE);
		VIP_RETURN returned = VIP_NO_MATCH;
		for (int tries = 0; returned == VIP_NO_MATCH && tries < 2000; tries++) {
			returned = VipConnectRequest(side.vi, address_of(&side, &local, "c"),
				named(&remote, argv[3], "hosts"), TIMEOUT_MS, &theirs);
			usleep(5000);
		}
		OK(returned);
	}
	exchange();
	leave(is_server);
	post_receives();
	OK(VipConnectPeerRequest(side.vi, named(&local, argv[2], "one name"),
		named(&remote, argv[3], "one name"), TIMEOUT_MS));
	OK(VipConnectPeerWait(side.vi, &theirs));
	exchange();
	leave(is_server);
	close_side(&side);
	return 0;
}
