/* Connections that both ends request. */
#include "check.h"

static const char *name;
static int with_one_name;
/* The code of the attributes that differ. */
static VIP_RETURN with_other_attributes;

static void start(struct side *side, int is_first, unsigned long timeout)
{
	net_address local, remote;
	char names[2][64];
	for (int n = 0; n < 2; n++)
		snprintf(names[n], sizeof names[n], "%s %d", name, with_one_name ? 0 : n);
	OK(VipConnectPeerRequest(side->vi, address_of(side, &local, names[!is_first]),
		address_of(side, &remote, names[is_first]), timeout));
}

static void run(int is_first)
{
	struct side side;
	VIP_VI_ATTRIBUTES theirs;
	VIP_RETURN returned;
	open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
	EXPECT(VipConnectPeerDone(side.vi, &theirs), VIP_INVALID_STATE);
	EXPECT(VipConnectPeerWait(side.vi, &theirs), VIP_INVALID_STATE);
	if (with_other_attributes && is_first) {
		if (with_other_attributes == VIP_INVALID_MTU)
			side.attributes.MaxTransferSize = 77;
		else if (with_other_attributes == VIP_INVALID_QOS)
			side.attributes.QoS = (VIP_QOS)1;
		else
			side.attributes.ReliabilityLevel = VIP_SERVICE_RELIABLE_RECEPTION;
		OK(VipSetViAttributes(side.vi, &side.attributes));
	}
	for (int n = 0; n < 4; n++)
		post_receive(&side, local_segment(&side, n, data(&side, 8 * n), 8));
	/* One of them comes late. */
	if (is_first)
		usleep(50000);
	start(&side, is_first, TIMEOUT_MS);
	if (!is_first && !with_other_attributes)
		EXPECT(VipConnectPeerDone(side.vi, &theirs), VIP_NOT_DONE);
	if (is_first)
		returned = VipConnectPeerWait(side.vi, &theirs);
	else
		while ((returned = VipConnectPeerDone(side.vi, &theirs)) == VIP_NOT_DONE)
			usleep(1000);
	record(is_first ? "VipConnectPeerWait(" : "VipConnectPeerDone(", returned);
	if (with_other_attributes) {
		CHECK(returned == with_other_attributes);
		CHECK(state_of(&side) == VIP_STATE_IDLE);
		close_side(&side);
		return;
	}
	OK(returned);
	CHECK(state_of(&side) == VIP_STATE_CONNECTED);
	CHECK(theirs.MaxTransferSize == side.attributes.MaxTransferSize);
	memcpy(data(&side, 4000), is_first ? "first" : "other", 5);
	post_send(&side, local_segment(&side, 8, data(&side, 4000), 5));
	sent(&side, VIP_SUCCESS);
	VIP_DESCRIPTOR *done = received(&side, VIP_SUCCESS);
	CHECK(!memcmp(done->DS[0].Local.Data.Address, is_first ? "other" : "first", 5));
	/* Neither leaves before the other has got its message. */
	post_send(&side, local_segment(&side, 9, data(&side, 4000), 1));
	sent(&side, VIP_SUCCESS);
	received(&side, VIP_SUCCESS);
	close_side(&side);
}

static void first(void)
{
	run(1);
}

static void other(void)
{
	run(0);
}

static void alone(void)
{
	struct side side;
	VIP_VI_ATTRIBUTES theirs;
	open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
	start(&side, 0, 100);
	EXPECT(VipConnectPeerWait(side.vi, &theirs), VIP_TIMEOUT);
	CHECK(state_of(&side) == VIP_STATE_IDLE);
	start(&side, 0, 50);
	VIP_RETURN returned;
	while ((returned = VipConnectPeerDone(side.vi, &theirs)) == VIP_NOT_DONE)
		usleep(1000);
	record("VipConnectPeerDone(", returned);
	CHECK(returned == VIP_TIMEOUT);
	/* Disconnecting ends the request. */
	start(&side, 0, VIP_INFINITE);
	CHECK(state_of(&side) == VIP_STATE_CONNECT_PENDING);
	OK(VipDisconnect(side.vi));
	CHECK(state_of(&side) == VIP_STATE_IDLE);
	EXPECT(VipConnectPeerWait(side.vi, &theirs), VIP_INVALID_STATE);
	close_side(&side);
}

int main(void)
{
	name = name_of_run("peers");
	both(alone, alone);
	both(first, other);
	with_one_name = 1;
	both(first, other);
	with_one_name = 0;
	VIP_RETURN codes[] = { VIP_INVALID_MTU, VIP_INVALID_QOS, VIP_INVALID_RELIABILITY_LEVEL };
	for (int n = 0; n < 6; n++) {
		/* Each process asks in each of the two ways. */
		with_other_attributes = codes[n / 2];
		both(n % 2 ? first : other, n % 2 ? other : first);
	}
	return 0;
}
