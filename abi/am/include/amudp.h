/* Active Messages (AM-II) on queue pairs, in the words of AMUDP: libam of Quipu. See am(7).
 *
 * A program includes this file and links with -lam. Arguments of handlers are 32-bit integers. Everything returns
 * AM_OK or an error code, unless it says otherwise. */
#ifndef QUIPU_AMUDP_H
#define QUIPU_AMUDP_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bundles and endpoints. */
typedef struct amx_opaque *eb_t;
typedef struct amx_opaque *ep_t;

/* The name of an endpoint. Programs copy it, send it elsewhere as bytes, and compare it by AMX_enEqual. */
typedef struct {
    unsigned char address[16];
    uint16_t port, family;
    uint32_t endpoint;
    uint64_t incarnation;
} en_t;

typedef uint64_t tag_t;
typedef uint8_t handler_t;
typedef int op_t;

/* Error codes. */
#define AM_OK 0
#define AM_ERR_NOT_INIT 1 /* AM_Init was not called */
#define AM_ERR_BAD_ARG 2  /* an argument is not valid */
#define AM_ERR_RESOURCE 3 /* there is no more of something, or the call is not possible now */
#define AM_ERR_NOT_SENT 4 /* never returned in this dialect */
#define AM_ERR_IN_USE 5   /* the call would have to wait */

/* Tags. */
#define AM_NONE ((tag_t)0) /* takes no messages: the tag of a new endpoint */
#define AM_ALL ((tag_t)1)  /* takes all messages */

/* Kinds of bundles. */
#define AM_SEQ 0 /* handlers run one at a time */
#define AM_PAR 1 /* any thread may call; handlers of one endpoint run one at a time */

/* Events to wait for. */
#define AM_NOEVENTS 0
#define AM_NOTEMPTY 1
#define AM_NUMEVENTMASKS 2

/* Why a message came back: the first argument of handler 0. */
#define EBADARGS 1
#define EBADENTRY 2
#define EBADTAG 3
#define EBADHANDLER 4
#define EBADSEGOFF 5
#define EBADLENGTH 6
#define EBADENDPOINT 7
#define ECONGESTION 8
#define EUNREACHABLE 9
#define EREPLYREJECTED 10

/* How it was sent: the second argument. */
#define AM_REQUEST_M 1
#define AM_REQUEST_IM 2
#define AM_REQUEST_XFER_M 3
#define AM_REPLY_M 4
#define AM_REPLY_IM 5
#define AM_REPLY_XFER_M 6

/* Handlers are functions of the program, called with as many integers as the message has:
 *   short messages           void f(void *token, int a0, ...)
 *   medium and bulk messages void f(void *token, void *buf, int nbytes, int a0, ...)
 *   handler 0                void f(int status, op_t opcode, void *token) */
typedef void (*amx_handler_fn_t)();
typedef void (*amx_returned_handler_fn_t)(int status, op_t opcode, void *token);

/* The library. */
int AM_Init(void);
int AM_Terminate(void);
int AM_MaxShort(void);
int AM_MaxMedium(void);
int AM_MaxLong(void);
int AM_MaxNumHandlers(void);
int AM_MaxNumTranslations(int *out);
int AM_MaxSegLength(uintptr_t *out);

/* Bundles. */
int AM_AllocateBundle(int type, eb_t *out);
int AM_FreeBundle(eb_t bundle);
int AM_Poll(eb_t bundle);
int AM_GetEventMask(eb_t bundle, int *mask);
int AM_SetEventMask(eb_t bundle, int mask);
int AM_WaitSema(eb_t bundle);

/* Endpoints. */
int AM_AllocateEndpoint(eb_t bundle, ep_t *out, en_t *name);
int AM_FreeEndpoint(ep_t ep);
int AM_MoveEndpoint(ep_t ep, eb_t from, eb_t to);
int AM_SetExpectedResources(ep_t ep, int n_endpoints, int n_outstanding);
int AM_SetTag(ep_t ep, tag_t tag);
int AM_GetTag(ep_t ep, tag_t *tag);
int AM_SetSeg(ep_t ep, void *addr, uintptr_t nbytes);
int AM_GetSeg(ep_t ep, void **addr, uintptr_t *nbytes);

/* Handlers. Any pointer to a function will do. */
int AM_SetHandler(ep_t ep, handler_t handler, amx_handler_fn_t function);
int AM_SetHandlerAny(ep_t ep, handler_t *handler, amx_handler_fn_t function);
int AM_GetNumHandlers(ep_t ep, int *out);
int AM_SetNumHandlers(ep_t ep, int n);
#define AM_SetHandler(ep, handler, function) AM_SetHandler(ep, handler, (amx_handler_fn_t)(function))
#define AM_SetHandlerAny(ep, handler, function) AM_SetHandlerAny(ep, handler, (amx_handler_fn_t)(function))

/* Translations. */
int AMX_MapName(ep_t ep, int index, const en_t *name, tag_t tag);
int AMX_MapAnyName(ep_t ep, int *index, const en_t *name, tag_t tag);
int AMX_NamesEqual(const en_t *one, const en_t *other);
static inline int AM_Map(ep_t ep, int index, en_t name, tag_t tag) {
    return AMX_MapName(ep, index, &name, tag);
}
static inline int AM_MapAny(ep_t ep, int *index, en_t name, tag_t tag) {
    return AMX_MapAnyName(ep, index, &name, tag);
}
static inline int AMX_enEqual(en_t one, en_t other) {
    return AMX_NamesEqual(&one, &other);
}
int AM_UnMap(ep_t ep, int index);
int AM_GetTranslationInuse(ep_t ep, int index);
int AM_GetTranslationTag(ep_t ep, int index, tag_t *tag);
int AMX_SetTranslationTag(ep_t ep, int index, tag_t tag);
int AM_GetTranslationName(ep_t ep, int index, en_t *name);
int AM_GetNumTranslations(ep_t ep, int *out);
int AM_SetNumTranslations(ep_t ep, int n);

/* In handlers. */
int AM_GetSourceEndpoint(void *token, en_t *name);
int AM_GetDestEndpoint(void *token, ep_t *ep);
int AM_GetMsgTag(void *token, tag_t *tag);
int AMX_GetSourceId(void *token, int *index);

/* Counts of messages. */
typedef struct {
    uint64_t requests_sent, requests_received, replies_sent, replies_received, returned;
} amx_stats_t;
int AMX_GetEndpointStatistics(ep_t ep, amx_stats_t *out);
int AMX_AggregateStatistics(amx_stats_t *sum, const amx_stats_t *more);
#define AMX_initial_stats ((amx_stats_t){0, 0, 0, 0, 0})
static inline int AMX_DumpStatistics(FILE *to, const amx_stats_t *stats, int is_global) {
    fprintf(to, "%s: requests %llu sent, %llu received; replies %llu sent, %llu received; %llu came back\n",
            is_global ? "all endpoints" : "endpoint", (unsigned long long)stats->requests_sent,
            (unsigned long long)stats->requests_received, (unsigned long long)stats->replies_sent,
            (unsigned long long)stats->replies_received, (unsigned long long)stats->returned);
    return AM_OK;
}

/* A variable that programs set; the library says what failed in any case. */
int *AMX_VerboseErrorsPlace(void);
#define AMX_VerboseErrors (*AMX_VerboseErrorsPlace())

/* Writes why, and ends the process. */
static inline void AMX_FatalErr(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "*** FATAL ERROR: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    fflush(stderr);
    abort();
}

/* What AM_Request... and AM_Reply... below call: the arguments are a list. */
int AMX_Request(ep_t ep, int to, handler_t handler, int count, const int32_t *args);
int AMX_RequestI(ep_t ep, int to, handler_t handler, const void *from, int nbytes, int count,
                 const int32_t *args);
int AMX_RequestXfer(ep_t ep, int to, uintptr_t offset, handler_t handler, const void *from, int nbytes,
                    int is_async, int count, const int32_t *args);
int AMX_Reply(void *token, handler_t handler, int count, const int32_t *args);
int AMX_ReplyI(void *token, handler_t handler, const void *from, int nbytes, int count, const int32_t *args);
int AMX_ReplyXfer(void *token, uintptr_t offset, handler_t handler, const void *from, int nbytes, int count,
                  const int32_t *args);

/* AM_Request0..16, AM_RequestI0..16, AM_RequestXfer0..16, AM_RequestXferAsync0..16, AM_Reply0..16,
 * AM_ReplyI0..16, AM_ReplyXfer0..16. */
#define AMX_UNPACK(...) __VA_ARGS__
#define AMX_DEFINE(M, PARAMS, ARGS)                                                                              \
    static inline int AM_Request##M(ep_t ep, int to, handler_t h AMX_UNPACK PARAMS) {                            \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_Request(ep, to, h, M, args);                                                                  \
    }                                                                                                            \
    static inline int AM_RequestI##M(ep_t ep, int to, handler_t h, const void *from,                             \
                                     int nbytes AMX_UNPACK PARAMS) {                                             \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_RequestI(ep, to, h, from, nbytes, M, args);                                                   \
    }                                                                                                            \
    static inline int AM_RequestXfer##M(ep_t ep, int to, uintptr_t offset, handler_t h, const void *from,        \
                                        int nbytes AMX_UNPACK PARAMS) {                                          \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_RequestXfer(ep, to, offset, h, from, nbytes, 0, M, args);                                     \
    }                                                                                                            \
    static inline int AM_RequestXferAsync##M(ep_t ep, int to, uintptr_t offset, handler_t h, const void *from,   \
                                             int nbytes AMX_UNPACK PARAMS) {                                     \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_RequestXfer(ep, to, offset, h, from, nbytes, 1, M, args);                                     \
    }                                                                                                            \
    static inline int AM_Reply##M(void *token, handler_t h AMX_UNPACK PARAMS) {                                  \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_Reply(token, h, M, args);                                                                     \
    }                                                                                                            \
    static inline int AM_ReplyI##M(void *token, handler_t h, const void *from, int nbytes AMX_UNPACK PARAMS) {   \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_ReplyI(token, h, from, nbytes, M, args);                                                      \
    }                                                                                                            \
    static inline int AM_ReplyXfer##M(void *token, uintptr_t offset, handler_t h, const void *from,              \
                                      int nbytes AMX_UNPACK PARAMS) {                                            \
        const int32_t args[] = {AMX_UNPACK ARGS 0};                                                              \
        return AMX_ReplyXfer(token, offset, h, from, nbytes, M, args);                                           \
    }

/* The integers, each list one longer than that before. The comma stands first in one, last in the other. */
#define AMX_P0
#define AMX_A0
#define AMX_P1 AMX_P0, int32_t a0
#define AMX_A1 AMX_A0 a0,
#define AMX_P2 AMX_P1, int32_t a1
#define AMX_A2 AMX_A1 a1,
#define AMX_P3 AMX_P2, int32_t a2
#define AMX_A3 AMX_A2 a2,
#define AMX_P4 AMX_P3, int32_t a3
#define AMX_A4 AMX_A3 a3,
#define AMX_P5 AMX_P4, int32_t a4
#define AMX_A5 AMX_A4 a4,
#define AMX_P6 AMX_P5, int32_t a5
#define AMX_A6 AMX_A5 a5,
#define AMX_P7 AMX_P6, int32_t a6
#define AMX_A7 AMX_A6 a6,
#define AMX_P8 AMX_P7, int32_t a7
#define AMX_A8 AMX_A7 a7,
#define AMX_P9 AMX_P8, int32_t a8
#define AMX_A9 AMX_A8 a8,
#define AMX_P10 AMX_P9, int32_t a9
#define AMX_A10 AMX_A9 a9,
#define AMX_P11 AMX_P10, int32_t a10
#define AMX_A11 AMX_A10 a10,
#define AMX_P12 AMX_P11, int32_t a11
#define AMX_A12 AMX_A11 a11,
#define AMX_P13 AMX_P12, int32_t a12
#define AMX_A13 AMX_A12 a12,
#define AMX_P14 AMX_P13, int32_t a13
#define AMX_A14 AMX_A13 a13,
#define AMX_P15 AMX_P14, int32_t a14
#define AMX_A15 AMX_A14 a14,
#define AMX_P16 AMX_P15, int32_t a15
#define AMX_A16 AMX_A15 a15,
AMX_DEFINE(0, (AMX_P0), (AMX_A0))
AMX_DEFINE(1, (AMX_P1), (AMX_A1))
AMX_DEFINE(2, (AMX_P2), (AMX_A2))
AMX_DEFINE(3, (AMX_P3), (AMX_A3))
AMX_DEFINE(4, (AMX_P4), (AMX_A4))
AMX_DEFINE(5, (AMX_P5), (AMX_A5))
AMX_DEFINE(6, (AMX_P6), (AMX_A6))
AMX_DEFINE(7, (AMX_P7), (AMX_A7))
AMX_DEFINE(8, (AMX_P8), (AMX_A8))
AMX_DEFINE(9, (AMX_P9), (AMX_A9))
AMX_DEFINE(10, (AMX_P10), (AMX_A10))
AMX_DEFINE(11, (AMX_P11), (AMX_A11))
AMX_DEFINE(12, (AMX_P12), (AMX_A12))
AMX_DEFINE(13, (AMX_P13), (AMX_A13))
AMX_DEFINE(14, (AMX_P14), (AMX_A14))
AMX_DEFINE(15, (AMX_P15), (AMX_A15))
AMX_DEFINE(16, (AMX_P16), (AMX_A16))
#undef AMX_P0
#undef AMX_A0
#undef AMX_P1
#undef AMX_A1
#undef AMX_P2
#undef AMX_A2
#undef AMX_P3
#undef AMX_A3
#undef AMX_P4
#undef AMX_A4
#undef AMX_P5
#undef AMX_A5
#undef AMX_P6
#undef AMX_A6
#undef AMX_P7
#undef AMX_A7
#undef AMX_P8
#undef AMX_A8
#undef AMX_P9
#undef AMX_A9
#undef AMX_P10
#undef AMX_A10
#undef AMX_P11
#undef AMX_A11
#undef AMX_P12
#undef AMX_A12
#undef AMX_P13
#undef AMX_A13
#undef AMX_P14
#undef AMX_A14
#undef AMX_P15
#undef AMX_A15
#undef AMX_P16
#undef AMX_A16
#undef AMX_DEFINE
#undef AMX_UNPACK

/* Addresses and other values may be given as arguments: their low 32 bits are sent. */
#define AMX_I32(x) ((int32_t)(x))

#ifdef __cplusplus
}
#endif

#endif
