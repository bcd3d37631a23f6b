/* Connections: each code of the calls that make and end them. */
#include <pthread.h>

#include "check.h"

static struct side a, b;
static const char *name;
static VIP_RETURN requested;

static void *ask(void *unused)
{
	(void)unused;
	requested = request(&a, name);
	return NULL;
}

static pthread_t start(void)
{
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, ask, NULL) == 0);
	return thread;
}

static VIP_RETURN finish(pthread_t thread)
{
	CHECK(pthread_join(thread, NULL) == 0);
	return requested;
}

static VIP_CONN_HANDLE wait_for_request(void)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	VIP_CONN_HANDLE connection;
	OK(VipConnectWait(b.nic, address_of(&b, &local, name), TIMEOUT_MS, &remote.address, &theirs,
		&connection));
	/* The requester's address is that which it gave. */
	CHECK(remote.address.HostAddressLen == b.nic_attributes.NicAddressLen);
	CHECK(remote.address.DiscriminatorLen == strlen("a client"));
	CHECK(!memcmp(remote.room + 4 + remote.address.HostAddressLen, "a client", 8));
	CHECK(theirs.EnableRdmaWrite == a.attributes.EnableRdmaWrite);
	return connection;
}

static void nobody_waits(void)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	VIP_CONN_HANDLE connection;
	struct timespec begun, ended;
	clock_gettime(CLOCK_MONOTONIC, &begun);
	EXPECT(VipConnectRequest(a.vi, address_of(&a, &local, "x"), address_of(&a, &remote, name),
		TIMEOUT_MS, &theirs), VIP_NO_MATCH);
	clock_gettime(CLOCK_MONOTONIC, &ended);
	CHECK(ended.tv_sec - begun.tv_sec < 5);
	CHECK(state_of(&a) == VIP_STATE_IDLE);
	EXPECT(VipConnectRequest(a.vi, address_of(&a, &local, "x"), address_of(&a, &remote, name), 0,
		&theirs), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectWait(b.nic, address_of(&b, &local, name), 30, &remote.address, &theirs,
		&connection), VIP_TIMEOUT);
	EXPECT(VipConnectWait(b.nic, address_of(&b, &local, name), 0, &remote.address, &theirs,
		&connection), VIP_TIMEOUT);
}

static void rejected(void)
{
	pthread_t thread = start();
	OK(VipConnectReject(wait_for_request()));
	CHECK(finish(thread) == VIP_REJECT);
	CHECK(state_of(&a) == VIP_STATE_IDLE);
}

static void conflicts(void)
{
	pthread_t thread = start();
	VIP_CONN_HANDLE connection = wait_for_request();
	VIP_VI_ATTRIBUTES right = b.attributes, wrong = right;
	CHECK(state_of(&a) == VIP_STATE_CONNECT_PENDING);
	wrong.ReliabilityLevel = VIP_SERVICE_RELIABLE_RECEPTION;
	OK(VipSetViAttributes(b.vi, &wrong));
	EXPECT(VipConnectAccept(connection, b.vi), VIP_INVALID_RELIABILITY_LEVEL);
	wrong = right;
	wrong.MaxTransferSize = 100;
	OK(VipSetViAttributes(b.vi, &wrong));
	EXPECT(VipConnectAccept(connection, b.vi), VIP_INVALID_MTU);
	wrong = right;
	wrong.QoS = (VIP_QOS)1;
	OK(VipSetViAttributes(b.vi, &wrong));
	EXPECT(VipConnectAccept(connection, b.vi), VIP_INVALID_QOS);
	/* The requester has heard nothing of it. */
	OK(VipSetViAttributes(b.vi, &right));
	OK(VipConnectAccept(connection, b.vi));
	CHECK(finish(thread) == VIP_SUCCESS);
	EXPECT(VipConnectAccept(connection, b.vi), VIP_INVALID_PARAMETER);
	EXPECT(VipConnectReject(connection), VIP_INVALID_PARAMETER);
}

static void connected(void)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	CHECK(state_of(&a) == VIP_STATE_CONNECTED && state_of(&b) == VIP_STATE_CONNECTED);
	EXPECT(VipDestroyVi(a.vi), VIP_INVALID_STATE);
	EXPECT(VipSetViAttributes(a.vi, &a.attributes), VIP_INVALID_STATE);
	EXPECT(VipConnectRequest(a.vi, address_of(&a, &local, "x"), address_of(&a, &remote, name),
		1000, &theirs), VIP_INVALID_STATE);
	EXPECT(VipConnectPeerRequest(a.vi, address_of(&a, &local, "x"),
		address_of(&a, &remote, name), 1000), VIP_INVALID_STATE);
	/* A VI that is connected accepts nothing. */
	struct side other = a;
	OK(VipCreateVi(a.nic, &a.attributes, NULL, NULL, &a.vi));
	pthread_t thread = start();
	VIP_CONN_HANDLE connection = wait_for_request();
	EXPECT(VipConnectAccept(connection, b.vi), VIP_INVALID_STATE);
	OK(VipConnectReject(connection));
	CHECK(finish(thread) == VIP_REJECT);
	OK(VipDestroyVi(a.vi));
	a.vi = other.vi;
}

static void disconnected(void)
{
	VIP_DESCRIPTOR *done;
	post_receive(&a, descriptor(&a, 0));
	post_receive(&b, descriptor(&b, 0));
	OK(VipDisconnect(a.vi));
	/* Flushed, and IDLE: sends are flushed at once, receives wait. */
	CHECK(received(&a, VIP_DESCRIPTOR_ERROR)->CS.Status ==
		(VIP_STATUS_DONE | VIP_STATUS_DESC_FLUSHED_ERROR | VIP_STATUS_OP_RECEIVE));
	OK(VipDisconnect(a.vi));
	post_send(&a, descriptor(&a, 1));
	EXPECT(VipDestroyVi(a.vi), VIP_ERROR_RESOURCE);
	CHECK(sent(&a, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	EXPECT(VipSendDone(a.vi, &done), VIP_DESCRIPTOR_ERROR);
	CHECK(done == NULL);
	/* The peer is in ERROR; all that is posted is flushed. */
	await_state(&b, VIP_STATE_ERROR);
	CHECK(received(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	post_receive(&b, descriptor(&b, 0));
	CHECK(received(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	post_send(&b, descriptor(&b, 1));
	CHECK(sent(&b, VIP_DESCRIPTOR_ERROR)->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	EXPECT(VipDestroyVi(b.vi), VIP_INVALID_STATE);
	OK(VipDisconnect(b.vi));
}

/* A VI connects again and again. */
static void again(void)
{
	for (int n = 0; n < 5; n++) {
		pthread_t thread = start();
		post_receive(&b, local_segment(&b, 0, data(&b, 0), 100));
		OK(VipConnectAccept(wait_for_request(), b.vi));
		CHECK(finish(thread) == VIP_SUCCESS);
		data(&a, 0)[0] = 'a' + n;
		post_send(&a, local_segment(&a, 0, data(&a, 0), 1));
		sent(&a, VIP_SUCCESS);
		CHECK(received(&b, VIP_SUCCESS)->CS.Length == 1 && data(&b, 0)[0] == 'a' + n);
		OK(VipDisconnect(n % 2 ? a.vi : b.vi));
		OK(VipDisconnect(n % 2 ? b.vi : a.vi));
	}
}

/* The requester gives up before the server accepts. */
static void too_late(void)
{
	net_address local, remote;
	VIP_VI_ATTRIBUTES theirs;
	pthread_t thread = start();
	VIP_CONN_HANDLE connection = wait_for_request();
	OK(VipDisconnect(a.vi));
	(void)finish(thread);
	thread = start();
	OK(VipConnectReject(wait_for_request()));
	CHECK(finish(thread) == VIP_REJECT);
	OK(VipConnectReject(connection));
	/* It waits for an answer no longer than it says. */
	VIP_RETURN returned = VIP_NO_MATCH;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct side side;
		open_side(&side, VIP_SERVICE_RELIABLE_DELIVERY);
		OK(VipConnectWait(side.nic, address_of(&side, &local, "slow"), TIMEOUT_MS,
			&remote.address, &theirs, &connection));
		usleep(300000);
		EXPECT(VipConnectAccept(connection, side.vi), VIP_TIMEOUT);
		CHECK(state_of(&side) == VIP_STATE_IDLE);
		close_side(&side);
		exit(0);
	}
	while (returned == VIP_NO_MATCH)
		returned = VipConnectRequest(a.vi, address_of(&a, &local, "x"),
			address_of(&a, &remote, "slow"), 100, &theirs);
	record("VipConnectRequest(", returned);
	CHECK(returned == VIP_TIMEOUT && state_of(&a) == VIP_STATE_IDLE);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
	name = name_of_run("connect");
	open_side(&a, VIP_SERVICE_RELIABLE_DELIVERY);
	open_side(&b, VIP_SERVICE_RELIABLE_DELIVERY);
	nobody_waits();
	rejected();
	conflicts();
	connected();
	disconnected();
	again();
	too_late();
	close_side(&a);
	close_side(&b);
	return 0;
}
