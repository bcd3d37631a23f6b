/* Programs that the strict mode looks at: each is a process of its own, whose log is looked at afterwards. */
#ifndef STRICT_H
#define STRICT_H

#include "rc.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static char log_file[64];

/* Runs a program in the strict mode; its status. */
static inline int strictly(const char *mode, void (*run)(void))
{
	unlink(log_file);
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		setenv("QUIPU_STRICT", mode, 1);
		setenv("QUIPU_STRICT_LOG", log_file, 1);
		run();
		exit(0);
	}
	int status;
	SAME(waitpid(child, &status, 0), child);
	return status;
}

/* How many lines of the log have a text. */
static inline int lines_with(const char *text)
{
	static char line[1 << 16];
	int count = 0;
	FILE *file = fopen(log_file, "r");
	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file))
		count += strstr(line, text) != NULL;
	fclose(file);
	return count;
}

static inline void show_log(void)
{
	char command[128];
	snprintf(command, sizeof(command), "cat %s >&2", log_file);
	CHECK(system(command) == 0);
}

/* One report of each of these kinds, and none of another. */
static inline void finds_both(const char *kind, const char *other, void (*run)(void))
{
	char text[64], second[64];
	/* A change that falls between the adapter's look and its own write is lost without a trace. */
	for (int attempt = 0; attempt < 3; attempt++) {
		SAME(strictly("1", run), 0);
		if (lines_with("\"kind\"") > 0)
			break;
	}
	snprintf(text, sizeof(text), "\"kind\":\"%s\"", kind);
	snprintf(second, sizeof(second), "\"kind\":\"%s\"", other);
	int all = strcmp(kind, other) ? 2 : 1;
	if (lines_with(text) != 1 || lines_with(second) != 1 || lines_with("\"kind\"") != all) {
		fprintf(stderr, "expected one %s and one %s:\n", kind, other);
		show_log();
		exit(1);
	}
}

/* One report of that kind, and none of another. */
static inline void finds(const char *kind, void (*run)(void))
{
	finds_both(kind, kind, run);
}

/* No report. */
static inline void innocent(void (*run)(void))
{
	int status = strictly("fail", run);
	if (status != 0)
		show_log();
	SAME(status, 0);
	SAME(lines_with("\"kind\""), 0);
}

static inline struct ibv_send_wr write_to_b(struct pair *p, uint64_t id, struct ibv_sge *sge)
{
	struct ibv_send_wr wr = work(id, IBV_WR_RDMA_WRITE, sge, 1);
	wr.wr.rdma.remote_addr = (uintptr_t)p->b.buffer;
	wr.wr.rdma.rkey = p->b.mr->rkey;
	return wr;
}

static inline int to_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

/* The tests, with a log. */
static inline int run_strictly(const struct test *tests, int argc, char **argv)
{
	snprintf(log_file, sizeof(log_file), "/tmp/quipu-strict-%d.log", (int)getpid());
	int result = run_tests(tests, argc, argv);
	unlink(log_file);
	return result;
}

#endif
