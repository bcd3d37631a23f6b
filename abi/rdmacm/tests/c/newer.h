/* Calls that are newer than the headers of a distribution, by their version. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "common.h"

enum { ADDRINFO_RESOLVED = 16, ADDRINFO_ERROR = 17, USER = 18 };

/* A symbol that the library must have under exactly this version. */
static inline void *versioned(const char *name, const char *version)
{
	void *symbol = dlvsym(RTLD_DEFAULT, name, version);
	if (!symbol)
		fprintf(stderr, "%s@@%s is missing\n", name, version);
	CHECK(symbol);
	return symbol;
}
