/* Sends between two processes, at each reliability level: many messages, several segments, immediate data,
 * inline data, empty messages, and the end of the connection as the peer sees it. */
#include "check.h"

enum { MESSAGES = 300, SIZE = 3000, WINDOW = 16 };

static const char *name;
static int level;

static unsigned char byte_of(int message, int at)
{
	return (unsigned char)(message * 31 + at * 7);
}

static void post_window(struct side *side, int message)
{
	int slot = message % WINDOW;
	VIP_DESCRIPTOR *receive = descriptor(side, slot);
	/* Two segments: a message is scattered over both. */
	receive->CS.SegCount = 2;
	receive->DS[0].Local.Data.Address = data(side, slot * 4096);
	receive->DS[0].Local.Handle = side->handle;
	receive->DS[0].Local.Length = 1000;
	receive->DS[1].Local.Data.Address = data(side, slot * 4096 + 2000);
	receive->DS[1].Local.Handle = side->handle;
	receive->DS[1].Local.Length = 2000;
	post_receive(side, receive);
}

static void server(void)
{
	struct side side;
	open_side(&side, level);
	/* Receives are posted before there is a connection. */
	for (int n = 0; n < WINDOW; n++)
		post_window(&side, n);
	serve(&side, name);
	for (int n = 0; n < MESSAGES; n++) {
		VIP_DESCRIPTOR *done = received(&side, VIP_SUCCESS);
		unsigned length = n % SIZE;
		unsigned char *first = (unsigned char *)done->DS[0].Local.Data.Address;
		CHECK(done->CS.Length == length);
		CHECK((done->CS.Status & VIP_STATUS_OP_MASK) == VIP_STATUS_OP_RECEIVE);
		CHECK(!(done->CS.Status & VIP_STATUS_IMMEDIATE) == (n % 3 != 0));
		if (n % 3 == 0)
			CHECK(done->CS.ImmediateData == 1000000u + n);
		for (unsigned at = 0; at < length; at++)
			CHECK((at < 1000 ? first[at] : first[1000 + at]) == byte_of(n, at));
		if (n + WINDOW < MESSAGES)
			post_window(&side, n + WINDOW);
		/* One message back for each: the client has no more than a window under way. */
		post_send(&side, local_segment(&side, 32 + n % 8, data(&side, 0), 0));
		CHECK(sent(&side, VIP_SUCCESS)->CS.Length == 0);
	}
	await_state(&side, VIP_STATE_ERROR);
	close_side(&side);
}

static void client(void)
{
	struct side side;
	open_side(&side, level);
	for (int n = 0; n < WINDOW; n++)
		post_receive(&side, descriptor(&side, n));
	OK(request(&side, name));
	CHECK(state_of(&side) == VIP_STATE_CONNECTED);
	for (int n = 0; n < MESSAGES; n++) {
		unsigned length = n % SIZE;
		for (unsigned at = 0; at < length; at++)
			data(&side, 0)[at] = byte_of(n, at);
		VIP_DESCRIPTOR *send = local_segment(&side, 32, data(&side, 0), length);
		if (n % 3 == 0) {
			send->CS.Control = VIP_CONTROL_OP_SENDRECV | VIP_CONTROL_IMMEDIATE;
			send->CS.ImmediateData = 1000000 + n;
		}
		char inlined[VIPX_Q_MAX_INLINE];
		if (n % 5 == 1 && length <= sizeof inlined) {
			/* Memory that is not registered, and used for something else at once. */
			memcpy(inlined, data(&side, 0), length);
			send->DS[0].Local.Data.Address = inlined;
			send->DS[0].Local.Handle = 0;
			send->CS.Control |= VIPX_Q_CONTROL_INLINE;
		}
		post_send(&side, send);
		memset(inlined, 0xee, sizeof inlined);
		VIP_DESCRIPTOR *done = sent(&side, VIP_SUCCESS);
		CHECK(done == send && done->CS.Length == length);
		CHECK((done->CS.Status & VIP_STATUS_OP_MASK) == VIP_STATUS_OP_SEND);
		CHECK(received(&side, VIP_SUCCESS)->CS.Length == 0);
		post_receive(&side, descriptor(&side, n % WINDOW));
	}
	close_side(&side);
}

int main(void)
{
	int levels[] = { VIP_SERVICE_UNRELIABLE, VIP_SERVICE_RELIABLE_DELIVERY,
		VIP_SERVICE_RELIABLE_RECEPTION };
	name = name_of_run("sends");
	for (int n = 0; n < 3; n++) {
		level = levels[n];
		both(server, client);
	}
	return 0;
}
