/* Active Messages: the dialect of UDPAM with AM_DIALECT_U, else that of AMUDP. */
#ifdef AM_DIALECT_U
#include <udpam.h>
#else
#include <amudp.h>
#endif
