/* The name service, what is known of the network, and NICs in a child of fork. */
#include <arpa/inet.h>

#include "check.h"

int main(void)
{
	struct side side;
	net_address found;
	char name[1100];
	VIP_ULONG length = sizeof name;
	VIP_AUTODISCOVERY_LIST list;
	open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
	const char *numeric = side.nic_attributes.NicAddressLen == 4 ? "127.0.0.1" : "::1";
	int family = side.nic_attributes.NicAddressLen == 4 ? AF_INET : AF_INET6;
	unsigned char expected[16];
	CHECK(inet_pton(family, numeric, expected) == 1);

	/* Nothing before VipNSInit, and nothing after VipNSShutdown. */
	EXPECT(VipNSGetHostByName(side.nic, (char *)numeric, &found.address, 0), VIP_ERROR_NAMESERVICE);
	EXPECT(VipNSShutdown(side.nic), VIP_ERROR_NAMESERVICE);
	OK(VipNSInit(side.nic, NULL));
	memset(&found, 0x77, sizeof found);
	OK(VipNSGetHostByName(side.nic, (char *)numeric, &found.address, 0));
	CHECK(found.address.HostAddressLen == side.nic_attributes.NicAddressLen);
	CHECK(!memcmp(found.room + 4, expected, found.address.HostAddressLen));
	/* The discriminator is the program's. */
	CHECK(found.address.DiscriminatorLen == 0x7777);
	CHECK(found.room[4 + found.address.HostAddressLen] == 0x77);
	EXPECT(VipNSGetHostByName(side.nic, (char *)numeric, &found.address, 1), VIP_ERROR_NAMESERVICE);
	EXPECT(VipNSGetHostByName(side.nic, "no.such.host.invalid", &found.address, 0),
		VIP_ERROR_NAMESERVICE);
	found.address.DiscriminatorLen = 0;
	OK(VipNSGetHostByAddr(side.nic, &found.address, name, &length));
	CHECK(length == strlen(name) + 1);
	VIP_ULONG needed = length;
	length = 2;
	EXPECT(VipNSGetHostByAddr(side.nic, &found.address, name, &length), VIP_ERROR_RESOURCE);
	CHECK(length == needed);
	OK(VipNSShutdown(side.nic));
	EXPECT(VipNSGetHostByAddr(side.nic, &found.address, name, &length), VIP_ERROR_NAMESERVICE);

	EXPECT(VipQuerySystemManagementInfo(side.nic, 7, &list), VIP_ERROR_NOT_SUPPORTED);
	OK(VipQuerySystemManagementInfo(side.nic, VIP_SMI_AUTODISCOVERY, &list));
	CHECK(list.NumAdAddrs == 1 && list.NumberOfHops == 1);
	CHECK(!memcmp(list.ADAddrArray[0]->HostAddress, expected, found.address.HostAddressLen));

	/* A child of fork uses the handle of the NIC, and nothing else of its parent. */
	pid_t child = fork();
	if (child == 0) {
		VIP_PROTECTION_HANDLE ptag;
		VIP_MEM_HANDLE handle;
		VIP_MEM_ATTRIBUTES memory = { NULL, 0, 0 };
		OK(VipCreatePtag(side.nic, &ptag));
		memory.Ptag = ptag;
		OK(VipRegisterMem(side.nic, side.memory, MEMORY, &memory, &handle));
		EXPECT(VipDisconnect(side.vi), VIP_INVALID_PARAMETER);
		OK(VipCloseNic(side.nic));
		exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	/* An address is a name of a device, too. */
	VIP_NIC_HANDLE other;
	OK(VipOpenNic(numeric, &other));
	/* Closing frees what hangs on it. */
	VIP_VI_HANDLE vi;
	side.attributes.Ptag = NULL;
	OK(VipCreateVi(other, &side.attributes, NULL, NULL, &vi));
	OK(VipCloseNic(other));
	EXPECT(VipDisconnect(vi), VIP_INVALID_PARAMETER);
	side.attributes.Ptag = side.ptag;
	/* One that is not of this machine opens nothing. */
	EXPECT(VipOpenNic("192.0.2.77", &other), VIP_ERROR_RESOURCE);
	close_side(&side);
	return 0;
}
