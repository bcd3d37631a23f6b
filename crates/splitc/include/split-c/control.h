/* An old name of the same. */
#include <split-c/split-c.h>
