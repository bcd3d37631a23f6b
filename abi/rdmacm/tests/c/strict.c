/* What the strict mode finds in calls of rdma_cm. */
#include "common.h"

#include <sys/wait.h>

static char log_file[64];

/* Lines of the log with a text. */
static int lines_with(const char *text)
{
	static char line[1 << 16];
	int count = 0;
	FILE *file = fopen(log_file, "r");
	CHECK(file);
	while (fgets(line, sizeof line, file))
		count += strstr(line, text) != NULL;
	CHECK(fclose(file) == 0);
	return count;
}

/* Connects with so many bytes for the peer, in a process of its own that is looked at strictly. */
static void connects_with(int length, int possible)
{
	pid_t child;
	int status;
	unlink(log_file);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		static const char data[256];
		struct rdma_conn_param param = { .private_data = data, .private_data_len = length };
		struct rdma_event_channel *here, *there;
		struct rdma_cm_id *id;
		int port;
		setenv("QUIPU_STRICT", "1", 1);
		setenv("QUIPU_STRICT_LOG", log_file, 1);
		here = rdma_create_event_channel();
		there = rdma_create_event_channel();
		listener(there, RDMA_PS_TCP, &port);
		id = resolved(here, RDMA_PS_TCP, port);
		if (possible)
			CHECK(rdma_connect(id, &param) == 0);
		else
			FAILS(rdma_connect(id, &param), EINVAL);
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
	snprintf(log_file, sizeof log_file, "/tmp/quipu-cm-strict-%d.log", (int)getpid());
	connects_with(56, 1);
	CHECK(lines_with("\"kind\"") == 0);
	connects_with(57, 0);
	CHECK(lines_with("\"kind\":\"private-data\"") == 1);
	CHECK(lines_with("57 bytes") == 1 && lines_with("rdma_connect") == 1);
	/* A device whose messages have room for more is none for all programs. */
	setenv("QUIPU_CM_DEVICE", "quipu_iw0", 1);
	connects_with(57, 1);
	CHECK(lines_with("\"kind\":\"private-data\"") == 1);
	unlink(log_file);
	return 0;
}
