/* Looks symbols up as programs do that load the library themselves: dlopen of either name, then
 * dlvsym of exact versions (NCCL) or dlsym (others). Then binds every private symbol that the
 * providers of real hardware want, by loading them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

static int failures;

static void need(void *library, const char *symbol, const char *version)
{
	void *found = version ? dlvsym(library, symbol, version) : dlsym(library, symbol);
	if (!found) {
		printf("not found: %s %s\n", symbol, version ? version : "(default)");
		failures++;
	}
}

static const char *const nccl[] = {
	"ibv_get_device_list", "ibv_free_device_list", "ibv_get_device_name", "ibv_open_device",
	"ibv_close_device", "ibv_get_async_event", "ibv_ack_async_event", "ibv_query_device",
	"ibv_query_port", "ibv_query_gid", "ibv_query_qp", "ibv_alloc_pd", "ibv_dealloc_pd",
	"ibv_reg_mr", "ibv_dereg_mr", "ibv_create_cq", "ibv_destroy_cq", "ibv_create_qp",
	"ibv_modify_qp", "ibv_destroy_qp", "ibv_fork_init", "ibv_event_type_str",
};

int main(void)
{
	void *plain = dlopen("libibverbs.so", RTLD_NOW);
	void *numbered = dlopen("libibverbs.so.1", RTLD_NOW);
	if (!plain || plain != numbered) {
		printf("two libraries, or none: %s\n", dlerror());
		return 1;
	}
	for (size_t i = 0; i < sizeof(nccl) / sizeof(*nccl); i++) {
		need(plain, nccl[i], "IBVERBS_1.1");
		need(plain, nccl[i], NULL);
	}
	need(plain, "ibv_reg_mr_iova2", "IBVERBS_1.8");
	need(plain, "ibv_query_ece", "IBVERBS_1.10");
	need(plain, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
	need(plain, "ibv_query_port_speed", "IBVERBS_1.16");
	need(plain, "ibv_alloc_pd", "IBVERBS_1.0");
	need(plain, "ibv_query_gid_type", "IBVERBS_PRIVATE_25");
	need(plain, "ibv_query_gid_type", "IBVERBS_PRIVATE_34");
	need(plain, "ibv_cmd_post_send", "IBVERBS_PRIVATE_65");
	need(plain, "ibv_query_gid_type", NULL);
	if (dlsym(plain, "__quipu_export_0_0") || dlsym(plain, "rust_eh_personality")) {
		printf("more is exported than the interface\n");
		failures++;
	}

	const char *const providers[] = { "libmlx5.so.1", "libmlx4.so.1", "libefa.so.1" };
	for (size_t i = 0; i < sizeof(providers) / sizeof(*providers); i++)
		if (!dlopen(providers[i], RTLD_NOW))
			printf("%s\n", dlerror());
	return failures != 0;
}
