/* Completion queues and notifications, in one process: two VIs of one NIC. */
#include <pthread.h>

#include "check.h"

static struct side a, b;
static VIP_CQ_HANDLE cq;
static volatile int overruns, cq_calls, receive_calls, send_calls;

static void *accept_one(void *name)
{
	serve(&b, name);
	return NULL;
}

/* Connects a and b. */
static void join(const char *name)
{
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, accept_one, (void *)name) == 0);
	OK(request(&a, name));
	CHECK(pthread_join(thread, NULL) == 0);
}

static void on_error(VIP_PVOID context, VIP_ERROR_DESCRIPTOR *error)
{
	(void)context;
	if (error->ResourceCode == VIP_RESOURCE_CQ) {
		CHECK(error->CQHandle == cq && error->ErrorCode == VIP_ERROR_VI_OVERRUN);
		overruns++;
	}
}

static void on_entry(VIP_PVOID context, VIP_NIC_HANDLE nic, VIP_VI_HANDLE vi, VIP_BOOLEAN receive)
{
	CHECK(context == &cq && nic == b.nic && vi == b.vi && receive == VIP_TRUE);
	VIP_DESCRIPTOR *done;
	OK(VipRecvDone(vi, &done));
	cq_calls++;
}

static void on_descriptor(VIP_PVOID context, VIP_NIC_HANDLE nic, VIP_VI_HANDLE vi,
	VIP_DESCRIPTOR *done)
{
	volatile int *calls = context;
	CHECK(nic == a.nic && vi == a.vi && (done->CS.Status & VIP_STATUS_DONE));
	*calls += 1;
}

static void wait_for(volatile int *count, int value)
{
	for (int tries = 0; *count < value; tries++) {
		CHECK(tries < 4000);
		usleep(5000);
	}
	CHECK(*count == value);
}

static void open_with_cq(void)
{
	VIP_VI_HANDLE vi;
	VIP_BOOLEAN receive;
	EXPECT(VipCreateCQ(b.nic, 0, &cq), VIP_INVALID_PARAMETER);
	EXPECT(VipCreateCQ(b.nic, b.nic_attributes.MaxCQEntries + 1, &cq), VIP_ERROR_RESOURCE);
	OK(VipCreateCQ(b.nic, 4, &cq));
	EXPECT(VipCQDone(cq, &vi, &receive), VIP_NOT_DONE);
	EXPECT(VipCQWait(cq, 20, &vi, &receive), VIP_TIMEOUT);
	EXPECT(VipCQWait(cq, 0, &vi, &receive), VIP_TIMEOUT);
	OK(VipDestroyVi(b.vi));
	/* Both queues on one completion queue. */
	OK(VipCreateVi(b.nic, &b.attributes, cq, cq, &b.vi));
	EXPECT(VipDestroyCQ(cq), VIP_ERROR_RESOURCE);
	VIP_DESCRIPTOR *done;
	EXPECT(VipSendWait(b.vi, 10, &done), VIP_ERROR_RESOURCE);
	EXPECT(VipRecvWait(b.vi, 10, &done), VIP_ERROR_RESOURCE);
	EXPECT(VipSendNotify(b.vi, NULL, on_descriptor), VIP_ERROR_RESOURCE);
	EXPECT(VipRecvNotify(b.vi, NULL, on_descriptor), VIP_ERROR_RESOURCE);
}

static void expect_entry(VIP_BOOLEAN expected)
{
	VIP_VI_HANDLE vi;
	VIP_BOOLEAN receive;
	OK(VipCQWait(cq, TIMEOUT_MS, &vi, &receive));
	CHECK(vi == b.vi && receive == expected);
	VIP_DESCRIPTOR *done;
	if (expected)
		OK(VipRecvDone(vi, &done));
	else
		OK(VipSendDone(vi, &done));
}

static void send_to_b(int count)
{
	for (int n = 0; n < count; n++) {
		post_send(&a, local_segment(&a, n, data(&a, 0), 100));
		sent(&a, VIP_SUCCESS);
	}
}

static void receives_of_b(int count)
{
	for (int n = 0; n < count; n++)
		post_receive(&b, local_segment(&b, n, data(&b, n * 100), 100));
}

static void entries(void)
{
	receives_of_b(2);
	post_receive(&a, descriptor(&a, 20));
	send_to_b(2);
	post_send(&b, descriptor(&b, 20));
	/* One entry for each descriptor, whichever queue it is of. */
	int receives = 0;
	for (int n = 0; n < 3; n++) {
		VIP_VI_HANDLE vi;
		VIP_BOOLEAN receive;
		VIP_DESCRIPTOR *done;
		VIP_RETURN returned;
		do
			returned = VipCQDone(cq, &vi, &receive);
		while (returned == VIP_NOT_DONE);
		record("VipCQDone(", returned);
		CHECK(returned == VIP_SUCCESS);
		receives += receive;
		if (receive)
			OK(VipRecvDone(vi, &done));
		else
			OK(VipSendDone(vi, &done));
	}
	CHECK(receives == 2);
	received(&a, VIP_SUCCESS);
	/* Waits sleep until something comes. */
	receives_of_b(1);
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	waitpid(child, NULL, 0);
	send_to_b(1);
	expect_entry(VIP_TRUE);
}

static void sizes(void)
{
	receives_of_b(6);
	send_to_b(3);
	for (int tries = 0; ; tries++) {
		/* Three entries may be queued by now; the size does not go below them. */
		VIP_RETURN returned = VipResizeCQ(cq, 2);
		if (returned == VIP_ERROR_RESOURCE) {
			record("VipResizeCQ(", returned);
			break;
		}
		OK(returned);
		OK(VipResizeCQ(cq, 4));
		(void)state_of(&b);
		CHECK(tries < 4000);
		usleep(1000);
	}
	EXPECT(VipResizeCQ(cq, 0), VIP_INVALID_PARAMETER);
	OK(VipResizeCQ(cq, 8));
	send_to_b(3);
	for (int n = 0; n < 6; n++)
		expect_entry(VIP_TRUE);
	/* Entries beyond the size are lost, and that is an asynchronous error, once. */
	OK(VipErrorCallback(b.nic, NULL, on_error));
	OK(VipResizeCQ(cq, 1));
	receives_of_b(4);
	send_to_b(4);
	for (int tries = 0; !overruns; tries++) {
		(void)state_of(&b);
		CHECK(tries < 4000);
		usleep(1000);
	}
	wait_for(&overruns, 1);
	VIP_DESCRIPTOR *done;
	expect_entry(VIP_TRUE);
	for (int n = 0; n < 3; n++)
		OK(VipRecvDone(b.vi, &done));
	OK(VipResizeCQ(cq, 8));
}

static void notifications(void)
{
	EXPECT(VipCQNotify(cq, &cq, NULL), VIP_INVALID_PARAMETER);
	EXPECT(VipRecvNotify(a.vi, NULL, NULL), VIP_INVALID_PARAMETER);
	/* Armed before there is an entry, and with one already there; one entry for each call. */
	OK(VipCQNotify(cq, &cq, on_entry));
	OK(VipCQNotify(cq, &cq, on_entry));
	receives_of_b(3);
	send_to_b(3);
	wait_for(&cq_calls, 2);
	OK(VipCQNotify(cq, &cq, on_entry));
	wait_for(&cq_calls, 3);
	OK(VipRecvNotify(a.vi, (void *)&receive_calls, on_descriptor));
	post_receive(&a, descriptor(&a, 21));
	post_send(&b, descriptor(&b, 21));
	expect_entry(VIP_FALSE);
	wait_for(&receive_calls, 1);
	receives_of_b(1);
	post_send(&a, local_segment(&a, 0, data(&a, 0), 8));
	OK(VipSendNotify(a.vi, (void *)&send_calls, on_descriptor));
	wait_for(&send_calls, 1);
	expect_entry(VIP_TRUE);
	/* The queues are empty: the descriptors went to the handlers. */
	VIP_DESCRIPTOR *done = (VIP_DESCRIPTOR *)1;
	EXPECT(VipSendDone(a.vi, &done), VIP_DESCRIPTOR_ERROR);
	CHECK(done == NULL);
	EXPECT(VipRecvDone(a.vi, &done), VIP_DESCRIPTOR_ERROR);
	EXPECT(VipRecvWait(a.vi, 10, &done), VIP_DESCRIPTOR_ERROR);
	post_receive(&a, descriptor(&a, 22));
	EXPECT(VipRecvDone(a.vi, &done), VIP_NOT_DONE);
	EXPECT(VipRecvWait(a.vi, 10, &done), VIP_TIMEOUT);
}

/* The next entry together with its descriptor. */
static VIP_DESCRIPTOR *next_descriptor(VIP_RETURN expected)
{
	VIP_VI_HANDLE vi;
	VIP_BOOLEAN receive;
	VIP_DESCRIPTOR *done;
	VIP_RETURN returned;
	for (int tries = 0; ; tries++) {
		returned = VipxQCQDoneDescriptor(cq, &vi, &receive, &done);
		record("VipxQCQDoneDescriptor(", returned);
		if (returned != VIP_NOT_DONE)
			break;
		CHECK(tries < 4000);
		usleep(5000);
	}
	CHECK(returned == expected && vi == b.vi && receive == VIP_TRUE);
	CHECK(done->CS.Status & VIP_STATUS_DONE);
	return done;
}

static void descriptors(void)
{
	VIP_VI_HANDLE vi;
	VIP_BOOLEAN receive;
	VIP_DESCRIPTOR *done;
	char word[8] = "inlined";
	EXPECT(VipxQCQDoneDescriptor(cq, &vi, &receive, &done), VIP_NOT_DONE);
	receives_of_b(3);
	VIP_DESCRIPTOR *write = rdma(&a, 0,
		VIP_CONTROL_OP_RDMAWRITE | VIP_CONTROL_IMMEDIATE | VIPX_Q_CONTROL_INLINE, word, 8,
		(VIP_UINT64)(uintptr_t)data(&b, 5000), b.handle);
	write->CS.ImmediateData = 77;
	write->DS[1].Local.Handle = 0;
	post_send(&a, write);
	memset(word, 0, sizeof word);
	sent(&a, VIP_SUCCESS);
	done = next_descriptor(VIP_SUCCESS);
	CHECK(done->CS.ImmediateData == 77 && strcmp(data(&b, 5000), "inlined") == 0);
	/* An entry whose descriptor was taken without it is passed over. */
	send_to_b(1);
	VIP_RETURN returned;
	do
		returned = VipRecvDone(b.vi, &done);
	while (returned == VIP_NOT_DONE);
	CHECK(returned == VIP_SUCCESS);
	EXPECT(VipxQCQDoneDescriptor(cq, &vi, &receive, &done), VIP_NOT_DONE);
	send_to_b(1);
	CHECK(next_descriptor(VIP_SUCCESS)->CS.Length == 100);
}

int main(void)
{
	open_side(&a, VIP_SERVICE_RELIABLE_DELIVERY);
	/* A second handle of the same device. */
	open_side(&b, VIP_SERVICE_RELIABLE_DELIVERY);
	CHECK(a.nic != b.nic);
	open_with_cq();
	join(name_of_run("queues"));
	entries();
	sizes();
	notifications();
	descriptors();
	receives_of_b(1);
	close_side(&a);
	VIP_DESCRIPTOR *done = next_descriptor(VIP_DESCRIPTOR_ERROR);
	CHECK(done->CS.Status & VIP_STATUS_DESC_FLUSHED_ERROR);
	OK(VipDisconnect(b.vi));
	while (VipRecvDone(b.vi, &done) == VIP_SUCCESS || done)
		;
	OK(VipDestroyVi(b.vi));
	OK(VipDestroyCQ(cq));
	EXPECT(VipDestroyCQ(cq), VIP_INVALID_PARAMETER);
	OK(VipCloseNic(b.nic));
	return 0;
}
