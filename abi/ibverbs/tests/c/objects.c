/* What regions may become, and what goes with a device that is closed. */
#define _GNU_SOURCE
#include "rc.h"

#include <sys/mman.h>
#include <unistd.h>

/* A file of that name, in memory. */
static int file(const char *name, size_t bytes)
{
	int fd = memfd_create(name, MFD_CLOEXEC);
	CHECK(fd >= 0);
	SAME(ftruncate(fd, bytes), 0);
	return fd;
}

static void stays(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length)
{
	uint32_t lkey = mr->lkey, rkey = mr->rkey;
	errno = 0;
	SAME(ibv_rereg_mr(mr, flags, pd, addr, length, 0), IBV_REREG_MR_ERR_INPUT);
	SAME(errno, EINVAL);
	CHECK(mr->lkey == lkey && mr->rkey == rkey);
}

/* Memory of the program can become other memory. Files, imported regions and null regions are what they are. */
static void some_regions_cannot_change(void)
{
	struct pair p = make_pair(0);
	struct ibv_context *elsewhere = open_device();
	struct ibv_pd *foreign = ibv_alloc_pd(elsewhere), *other = ibv_alloc_pd(p.context);
	int fd = file("region", 8192);
	struct ibv_mr *of_file = ibv_reg_dmabuf_mr(p.pd, 0, 4096, 0, fd, IBV_ACCESS_REMOTE_READ);
	struct ibv_mr *null = ibv_alloc_null_mr(p.pd), *imported = ibv_import_mr(p.pd, p.a.mr->handle);
	CHECK(foreign && other && of_file && null && imported);
	struct ibv_mr *fixed[] = { of_file, null, imported };
	for (int i = 0; i < 3; i++) {
		stays(fixed[i], IBV_REREG_MR_CHANGE_TRANSLATION, NULL, p.b.buffer, 4096);
		stays(fixed[i], IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0);
		stays(fixed[i], IBV_REREG_MR_CHANGE_PD, other, NULL, 0);
	}
	/* A domain of the same device only. */
	stays(p.a.mr, IBV_REREG_MR_CHANGE_PD, foreign, NULL, 0);
	SAME(ibv_rereg_mr(p.a.mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0), 0);
	CHECK(p.a.mr->pd == other);
	SAME(ibv_rereg_mr(p.a.mr, IBV_REREG_MR_CHANGE_PD, p.pd, NULL, 0, 0), 0);

	ibv_unimport_mr(imported);
	SAME(ibv_dereg_mr(null), 0);
	SAME(ibv_dereg_mr(of_file), 0);
	SAME(ibv_dealloc_pd(other), 0);
	SAME(ibv_dealloc_pd(foreign), 0);
	SAME(ibv_close_device(elsewhere), 0);
	close(fd);
	close_pair(&p);
}

/* Whether a file of that name is mapped. */
static int is_mapped(const char *name)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int found = 0;
	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		found |= strstr(line, name) != NULL;
	fclose(maps);
	return found;
}

/* Device memory and mapped files go with the last context of their device, as in the kernel. */
static void a_closed_device_gives_back_its_memory(void)
{
	struct ibv_alloc_dm_attr all = { .length = 4 << 20 }, word = { .length = 4 };
	uint32_t number = 0;
	int fd = file("left-behind", 1 << 16);
	for (int round = 0; round < 3; round++) {
		struct ibv_context *context = open_device(), *second;
		struct ibv_pd *pd = ibv_alloc_pd(context);
		struct ibv_dm *dm = ibv_alloc_dm(context, &all);
		CHECK(pd && dm && !ibv_alloc_dm(context, &word) && errno == ENOMEM);
		CHECK(ibv_reg_dm_mr(pd, dm, 0, 4096, IBV_ACCESS_ZERO_BASED));
		CHECK(ibv_reg_dmabuf_mr(pd, 0, 1 << 16, 0, fd, IBV_ACCESS_LOCAL_WRITE));
		SAME(ibv_memcpy_to_dm(dm, 4, "dear", 4), 0);
		/* A second context of it keeps them. */
		CHECK((second = ibv_import_device(dup(context->cmd_fd))));
		SAME(ibv_close_device(context), 0);
		SAME(ibv_memcpy_from_dm(&number, dm, 4, 4), 0);
		SAME(memcmp(&number, "dear", 4), 0);
		CHECK(is_mapped("left-behind"));
		SAME(ibv_close_device(second), 0);
		CHECK(!is_mapped("left-behind"));
		SAME(ibv_memcpy_to_dm(dm, 0, &number, 4), EINVAL);
	}
	close(fd);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "some_regions_cannot_change", some_regions_cannot_change },
		{ "a_closed_device_gives_back_its_memory", a_closed_device_gives_back_its_memory },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
