/* A program that loads libraries by whole paths gets Quipu's; and one that is found by its own search path
 * only is still found. Argument: the library that is preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                       \
	do {                                                                                   \
		if (!(condition)) {                                                            \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, dlerror()); \
			exit(1);                                                               \
		}                                                                              \
	} while (0)

static void loaded_as(const char *path, const char *ours)
{
	Dl_info info;
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	CHECK(library);
	void *symbol = dlsym(library, "ibv_get_device_list");
	CHECK(symbol && dladdr(symbol, &info) != 0);
	if (strcmp(info.dli_fname, ours) != 0) {
		fprintf(stderr, "%s is %s, not %s\n", path, info.dli_fname, ours);
		exit(1);
	}
	CHECK(dlclose(library) == 0);
}

int main(int argc, char **argv)
{
	CHECK(argc == 2);
	/* None of these files need be there. */
	loaded_as("/usr/lib/x86_64-linux-gnu/libibverbs.so.1", argv[1]);
	loaded_as("/usr/lib/libibverbs.so.1.14.44.0", argv[1]);
	loaded_as("/usr/lib64/libibverbs.so", argv[1]);
	loaded_as(argv[1], argv[1]);
	loaded_as("libibverbs.so.1", argv[1]);
	/* By the search path of this file (DT_RUNPATH). */
	void *found = dlopen("libquipu_test_found.so", RTLD_NOW);
	CHECK(found && dlsym(found, "quipu_test_found"));
	CHECK(!dlopen("/no/such/library.so", RTLD_NOW) && strstr(dlerror(), "/no/such/library.so"));
	CHECK(dlopen(NULL, RTLD_NOW));
	return 0;
}
