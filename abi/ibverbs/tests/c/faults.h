/* Programs under plans of faults: each is a process of its own, under a plan of its own. */
#ifndef FAULTS_H
#define FAULTS_H

#include "rc.h"

#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

static char plan_file[64], log_file[64];

static inline void remove_files(void)
{
	unlink(plan_file);
	unlink(log_file);
}

/* Runs a case in a child, under the plan that the words make. */
static inline void under(void (*run)(const void *), const void *argument, const char *words, ...)
{
	va_list rest;
	FILE *file = fopen(plan_file, "w");
	CHECK(file);
	fputs("seed = 1\n[[fault]]\n", file);
	va_start(rest, words);
	vfprintf(file, words, rest);
	va_end(rest);
	SAME(fclose(file), 0);
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		setenv("QUIPU_FAULTS", plan_file, 1);
		setenv("QUIPU_FAULT_LOG", log_file, 1);
		run(argument);
		exit(0);
	}
	int status;
	SAME(waitpid(child, &status, 0), child);
	if (status != 0) {
		fprintf(stderr, "under the plan:\n");
		va_start(rest, words);
		vfprintf(stderr, words, rest);
		va_end(rest);
		exit(1);
	}
}

static inline enum ibv_qp_state state(struct end *end)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	SAME(ibv_query_qp(end->qp, &attr, IBV_QP_STATE, &init), 0);
	return attr.qp_state;
}

static inline struct ibv_async_event next_event(struct ibv_context *context)
{
	struct ibv_async_event event;
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	SAME(poll(&fd, 1, 20000), 1);
	SAME(ibv_get_async_event(context, &event), 0);
	ibv_ack_async_event(&event);
	return event;
}

/* The tests, with a plan and a log. */
static inline int run_under_plans(const struct test *tests, int argc, char **argv)
{
	snprintf(plan_file, sizeof(plan_file), "/tmp/quipu-plan-%d.toml", (int)getpid());
	snprintf(log_file, sizeof(log_file), "/tmp/quipu-plan-%d.log", (int)getpid());
	int result = run_tests(tests, argc, argv);
	remove_files();
	return result;
}

#endif
