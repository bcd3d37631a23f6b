/* What the programs here check: the first line that does not hold ends the program. */
#include <stdio.h>
#include <stdlib.h>

#define EXPECT(holds)                                                                                            \
    do {                                                                                                         \
        if (!(holds)) {                                                                                          \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #holds);                                        \
            exit(1);                                                                                             \
        }                                                                                                        \
    } while (0)
#define DONE(call) EXPECT((call) == AM_OK)
