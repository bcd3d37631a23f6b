/* Active Messages (AM-II) on queue pairs, in the words of UDPAM (1995 to 1998): libam of Quipu. See am(7).
 *
 * Messages have 4 or 8 arguments. A name is an IPv4 address and a port, both in the order of the processor: programs
 * may make names by hand, of endpoints at known ports, before the peers run. The calls return AM_OK or an error code.
 * A program that includes amudp.h has the other dialect; it cannot have both in one file. */
#ifndef QUIPU_UDPAM_H
#define QUIPU_UDPAM_H
#ifdef QUIPU_AMUDP_H
#error "amudp.h and udpam.h are two dialects with the same names: include one of them"
#endif

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct amx_opaque *eb_t;
typedef struct amx_opaque *ea_t;
typedef struct {
    unsigned short port;
    unsigned long ip_addr;
} en_t;
typedef long tag_t;
typedef int handler_t;
typedef int op_t;

#define AM_OK 0
#define AM_ERR_NOT_INIT 1
#define AM_ERR_NOT_TERM 2
#define AM_ERR_BAD_ARG 3
#define AM_ERR_RESOURCE 4
#define AM_ERR_NOT_SENT 5
#define AM_ERR_IN_USE 6

#define AM_NONE 0
#define AM_ALL 0xffffffff
#define AM_SEQ 0
#define AM_PAR 1
#define AM_NOEVENTS 0
#define AM_NOTEMPTY 1
#define AM_EMPTYTONOT 1
#define AM_MSGRECEIVED 2

/* Why a message came back. */
#define EBADARGS 0x1
#define EBADENTRY 0x2
#define EBADTAG 0x4
#define EBADHANDLER 0x8
#define EBADSEGOFF 0x10
#define EBADLENGTH 0x20
#define EBADENDPOINT 0x40
#define ECONGESTION 0x80
#define EUNREACHABLE 0x100
#define EREPLYREJECTED 0x200

/* How it was sent. */
#define AM_REQUEST 0x10000000
#define AM_REPLY 0x20000000
#define AM_MSG_4 0x1
#define AM_MSG_8 0x2
#define AM_MEDIUM_4 0x4
#define AM_MEDIUM_8 0x8
#define AM_LONG_4 0x10
#define AM_LONG_8 0x20
#define AM_GET_XFER_4 0x40
#define AM_GET_XFER_8 0x80

/* What handler 0 gets: void f(int status, op_t opcode, ArgBlock *message). */
typedef struct {
    ea_t request_endpoint;
    int reply_endpoint;
    void *token;
    int handler;
    void *source_addr;
    int nbytes, dest_offset, source_offset;
    int arg0, arg1, arg2, arg3, arg4, arg5, arg6, arg7;
    int buf_id, seq_num;
} ArgBlock;

typedef void (*amu_handler_fn_t)();

/* The calls of the library, whose codes are those of the other dialect. */
int amu_call_Init(void) __asm__("AM_Init");
int amu_call_Terminate(void) __asm__("AM_Terminate");
int amu_call_AllocateBundle(int, eb_t *) __asm__("AM_AllocateBundle");
int amu_call_FreeBundle(eb_t) __asm__("AM_FreeBundle");
int amu_call_Poll(eb_t) __asm__("AM_Poll");
int amu_call_SetEventMask(eb_t, int) __asm__("AM_SetEventMask");
int amu_call_GetEventMask(eb_t, int *) __asm__("AM_GetEventMask");
int amu_call_FreeEndpoint(ea_t) __asm__("AM_FreeEndpoint");
int amu_call_AllocateEndpoint(eb_t, ea_t *, void *) __asm__("AM_AllocateEndpoint");
int amu_call_MoveEndpoint(ea_t, eb_t, eb_t) __asm__("AM_MoveEndpoint");
int amu_call_SetTag(ea_t, uint64_t) __asm__("AM_SetTag");
int amu_call_GetTag(ea_t, uint64_t *) __asm__("AM_GetTag");
int amu_call_SetSeg(ea_t, void *, uintptr_t) __asm__("AM_SetSeg");
int amu_call_GetSeg(ea_t, void **, uintptr_t *) __asm__("AM_GetSeg");
int amu_call_SetHandler(ea_t, unsigned char, amu_handler_fn_t) __asm__("AM_SetHandler");
int amu_call_SetHandlerAny(ea_t, unsigned char *, amu_handler_fn_t) __asm__("AM_SetHandlerAny");
int amu_call_UnMap(ea_t, int) __asm__("AM_UnMap");
int amu_call_GetTranslationInuse(ea_t, int) __asm__("AM_GetTranslationInuse");
int amu_call_GetTranslationTag(ea_t, int, uint64_t *) __asm__("AM_GetTranslationTag");
int amu_call_GetNumTranslations(ea_t, int *) __asm__("AM_GetNumTranslations");
int amu_call_SetNumTranslations(ea_t, int) __asm__("AM_SetNumTranslations");
int amu_call_GetNumHandlers(ea_t, int *) __asm__("AM_GetNumHandlers");
int amu_call_GetDestEndpoint(void *, ea_t *) __asm__("AM_GetDestEndpoint");
int amu_call_GetMsgTag(void *, uint64_t *) __asm__("AM_GetMsgTag");
int AMX_Request(ea_t, int, unsigned char, int, const int32_t *);
int AMX_RequestI(ea_t, int, unsigned char, const void *, int, int, const int32_t *);
int AMX_RequestXfer(ea_t, int, uintptr_t, unsigned char, const void *, int, int, int, const int32_t *);
int AMX_Reply(void *, unsigned char, int, const int32_t *);
int AMX_ReplyI(void *, unsigned char, const void *, int, int, const int32_t *);
int AMX_ReplyXfer(void *, uintptr_t, unsigned char, const void *, int, int, const int32_t *);
int AMU_Listen(ea_t, int port, en_t *name);
int AMU_MapAddress(ea_t, int index, unsigned long ip, unsigned port, uint64_t tag);
int AMU_GetTranslationName(ea_t, int index, en_t *name);
int AMU_GetSourceEndpoint(void *token, en_t *name);
int AMU_HasHandler(ea_t, int handler);
int AMU_SetReturnHandler(ea_t, amu_handler_fn_t);
int AMU_Wait(eb_t);
int AMU_Get(ea_t, int, long, unsigned char, long, int, int, int, const int32_t *);

/* The code of this dialect. */
static inline int amu_code(int code) {
    static const unsigned char codes[] = {AM_OK, AM_ERR_NOT_INIT, AM_ERR_BAD_ARG, AM_ERR_RESOURCE, AM_ERR_NOT_SENT,
                                          AM_ERR_IN_USE};
    return code >= 0 && code < 6 ? codes[code] : AM_ERR_RESOURCE;
}
/* An asynchronous call that would have to wait was not sent. */
static inline int amu_sent(int code) {
    return amu_code(code) == AM_ERR_IN_USE ? AM_ERR_NOT_SENT : amu_code(code);
}
/* Tags: all and none are other numbers here. */
static inline uint64_t amu_tag(tag_t tag) {
    return (unsigned long)tag == AM_ALL || tag == -1 ? 1 : tag == 1 ? AM_ALL : (uint64_t)tag;
}
static inline tag_t amu_from_tag(uint64_t tag) {
    return tag == 1 ? (tag_t)AM_ALL : tag == AM_ALL ? 1 : (tag_t)tag;
}

static inline int amu_Init(void) { return amu_code(amu_call_Init()); }
static inline int amu_Terminate(void) { return amu_code(amu_call_Terminate()); }
static inline int amu_AllocateBundle(int type, eb_t *out) { return amu_code(amu_call_AllocateBundle(type, out)); }
static inline int amu_FreeBundle(eb_t eb) { return amu_code(amu_call_FreeBundle(eb)); }
static inline int amu_Poll(eb_t eb) { return amu_code(amu_call_Poll(eb)); }
static inline int amu_SetEventMask(eb_t eb, int mask) { return amu_code(amu_call_SetEventMask(eb, mask != 0)); }
static inline int amu_GetEventMask(eb_t eb) {
    int mask = 0;
    amu_call_GetEventMask(eb, &mask);
    return mask;
}
/* Waits for a message if the event mask says so, and clears the mask. Runs no handlers. */
static inline int amu_Wait(eb_t eb) { return amu_code(AMU_Wait(eb)); }

/* An endpoint at a port of its own. The name is malloc'ed, if it is wanted. */
static inline int amu_known(eb_t eb, ea_t *out, en_t **name, int port) {
    unsigned char other[32];
    en_t own;
    int code = amu_call_AllocateEndpoint(eb, out, other);
    if (code == 0)
        code = AMU_Listen(*out, port, &own);
    if (code == 0 && name != NULL && (*name = (en_t *)malloc(sizeof own)) != NULL)
        **name = own;
    return amu_code(code);
}
static inline int amu_known3(eb_t eb, ea_t *out, int port) { return amu_known(eb, out, NULL, port); }
static inline int amu_allocate2(eb_t eb, ea_t *out) { return amu_known(eb, out, NULL, 0); }
static inline int amu_allocate3(eb_t eb, ea_t *out, en_t **name) { return amu_known(eb, out, name, 0); }
#define AMU_PICK(a, b, c, d, name, ...) name
/* Older programs give no place for the name. */
#define AM_AllocateEndpoint(...) AMU_PICK(__VA_ARGS__, , amu_allocate3, amu_allocate2, )(__VA_ARGS__)
#define AM_AllocateKnownEndpoint(...) AMU_PICK(__VA_ARGS__, amu_known, amu_known3, , )(__VA_ARGS__)
static inline int amu_FreeEndpoint(ea_t ea) { return amu_code(amu_call_FreeEndpoint(ea)); }
static inline int amu_MoveEndpoint(ea_t ea, eb_t from, eb_t to) { return amu_code(amu_call_MoveEndpoint(ea, from, to)); }
static inline int amu_SetExpectedResources(ea_t ea, int endpoints, int outstanding) {
    (void)ea;
    return endpoints > 0 && outstanding > 0 ? AM_OK : AM_ERR_BAD_ARG;
}
static inline int amu_SetTag(ea_t ea, tag_t tag) { return amu_code(amu_call_SetTag(ea, amu_tag(tag))); }
static inline int amu_GetTag(ea_t ea, tag_t *out) {
    uint64_t tag = 0;
    int code = amu_call_GetTag(ea, &tag);
    *out = amu_from_tag(tag);
    return amu_code(code);
}
static inline int amu_SetSeg(ea_t ea, void *addr, int nbytes) {
    return nbytes < 0 ? AM_ERR_BAD_ARG : amu_code(amu_call_SetSeg(ea, addr, (uintptr_t)nbytes));
}
static inline int amu_GetSeg(ea_t ea, void *addr, int *nbytes) {
    uintptr_t len = 0;
    int code = amu_call_GetSeg(ea, (void **)addr, &len);
    *nbytes = (int)len;
    return amu_code(code);
}
static inline int amu_MaxSegLength(int *out) {
    *out = 1 << 28;
    return AM_OK;
}
static inline int amu_SetHandler(ea_t ea, handler_t handler, amu_handler_fn_t function) {
    if (handler < 0 || handler > 255)
        return AM_ERR_BAD_ARG;
    if (handler == 0)
        return amu_code(AMU_SetReturnHandler(ea, function));
    if (AMU_HasHandler(ea, handler))
        return AM_ERR_IN_USE;
    return amu_code(amu_call_SetHandler(ea, (unsigned char)handler, function));
}
static inline int amu_SetHandlerAny(ea_t ea, handler_t *out, amu_handler_fn_t function) {
    unsigned char handler = 0;
    int code = amu_call_SetHandlerAny(ea, &handler, function);
    *out = handler;
    return amu_code(code);
}
static inline int amu_GetNumHandlers(ea_t ea, int *out) { return amu_code(amu_call_GetNumHandlers(ea, out)); }
static inline int amu_Map(ea_t ea, int index, en_t name, tag_t tag) {
    return amu_code(AMU_MapAddress(ea, index, name.ip_addr, name.port, amu_tag(tag)));
}
static inline int amu_MapAny(ea_t ea, int *index, en_t name, tag_t tag) {
    int most = 0, code = AM_ERR_RESOURCE;
    amu_call_GetNumTranslations(ea, &most);
    for (*index = 0; *index < most; ++*index)
        if ((code = amu_Map(ea, *index, name, tag)) != AM_ERR_IN_USE)
            return code;
    return AM_ERR_RESOURCE;
}
static inline int amu_Unmap(ea_t ea, int index) { return amu_code(amu_call_UnMap(ea, index)); }
static inline int amu_GetTranslationInuse(ea_t ea, int index) { return amu_code(amu_call_GetTranslationInuse(ea, index)); }
static inline int amu_GetTranslationName(ea_t ea, int index, en_t *name) {
    return amu_code(AMU_GetTranslationName(ea, index, name));
}
static inline int amu_GetTranslationTag(ea_t ea, int index, tag_t *out) {
    uint64_t tag = 0;
    int code = amu_call_GetTranslationTag(ea, index, &tag);
    *out = amu_from_tag(tag);
    return amu_code(code);
}
static inline int amu_GetNumTranslations(ea_t ea, int *out) { return amu_code(amu_call_GetNumTranslations(ea, out)); }
static inline int amu_SetNumTranslations(ea_t ea, int n) { return amu_code(amu_call_SetNumTranslations(ea, n)); }
static inline int amu_GetSourceEndpoint(void *token, en_t *name) { return amu_code(AMU_GetSourceEndpoint(token, name)); }
static inline int amu_GetDestEndpoint(void *token, ea_t *ea) { return amu_code(amu_call_GetDestEndpoint(token, ea)); }
static inline int amu_GetMsgTag(void *token, tag_t *out) {
    uint64_t tag = 0;
    int code = amu_call_GetMsgTag(token, &tag);
    *out = amu_from_tag(tag);
    return amu_code(code);
}
static inline int AM_MaxShort(void) { return 8; }
static inline int AM_MaxMedium(void) { return 512; }
static inline int AM_MaxLong(void) { return 8192; }

/* Messages with 4 and with 8 arguments. */
#define AMU_P4 int a0, int a1, int a2, int a3
#define AMU_A4 a0, a1, a2, a3
#define AMU_P8 AMU_P4, int a4, int a5, int a6, int a7
#define AMU_A8 AMU_A4, a4, a5, a6, a7
#define AMU_DEFINE(M)                                                                                            \
    static inline int AM_Request##M(ea_t ea, int to, handler_t h, AMU_P##M) {                                    \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMX_Request(ea, to, (unsigned char)h, M, args));                                         \
    }                                                                                                            \
    static inline int AM_RequestI##M(ea_t ea, int to, handler_t h, void *from, int nbytes, AMU_P##M) {           \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMX_RequestI(ea, to, (unsigned char)h, from, nbytes, M, args));                          \
    }                                                                                                            \
    static inline int AM_RequestXfer##M(ea_t ea, int to, int offset, handler_t h, void *from, int nbytes,        \
                                        AMU_P##M) {                                                              \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMX_RequestXfer(ea, to, (uintptr_t)offset, (unsigned char)h, from, nbytes, 0, M, args)); \
    }                                                                                                            \
    static inline int AM_RequestXferAsync##M(ea_t ea, int to, int offset, handler_t h, void *from, int nbytes,   \
                                             AMU_P##M) {                                                         \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_sent(AMX_RequestXfer(ea, to, (uintptr_t)offset, (unsigned char)h, from, nbytes, 1, M, args)); \
    }                                                                                                            \
    static inline int AM_GetXfer##M(ea_t ea, int to, int from, handler_t h, int offset, int nbytes, AMU_P##M) {  \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMU_Get(ea, to, from, (unsigned char)h, offset, nbytes, 0, M, args));                    \
    }                                                                                                            \
    static inline int AM_GetXferAsynch##M(ea_t ea, int to, int from, handler_t h, int offset, int nbytes,        \
                                          AMU_P##M) {                                                            \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_sent(AMU_Get(ea, to, from, (unsigned char)h, offset, nbytes, 1, M, args));                    \
    }                                                                                                            \
    static inline int AM_Reply##M(void *token, handler_t h, AMU_P##M) {                                          \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMX_Reply(token, (unsigned char)h, M, args));                                            \
    }                                                                                                            \
    static inline int AM_ReplyI##M(void *token, handler_t h, void *from, int nbytes, AMU_P##M) {                 \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMX_ReplyI(token, (unsigned char)h, from, nbytes, M, args));                             \
    }                                                                                                            \
    static inline int AM_ReplyXfer##M(void *token, int offset, handler_t h, void *from, int nbytes, AMU_P##M) {  \
        const int32_t args[] = {AMU_A##M};                                                                       \
        return amu_code(AMX_ReplyXfer(token, (uintptr_t)offset, (unsigned char)h, from, nbytes, M, args));       \
    }
AMU_DEFINE(4)
AMU_DEFINE(8)
#undef AMU_DEFINE
#undef AMU_P4
#undef AMU_A4
#undef AMU_P8
#undef AMU_A8

#define AM_Init amu_Init
#define AM_Terminate amu_Terminate
#define AM_AllocateBundle amu_AllocateBundle
#define AM_FreeBundle amu_FreeBundle
#define AM_Poll amu_Poll
#define AM_SetEventMask amu_SetEventMask
#define AM_GetEventMask amu_GetEventMask
#define AM_Wait amu_Wait
#define AM_FreeEndpoint amu_FreeEndpoint
#define AM_MoveEndpoint amu_MoveEndpoint
#define AM_SetExpectedResources amu_SetExpectedResources
#define AM_SetTag amu_SetTag
#define AM_GetTag amu_GetTag
#define AM_SetSeg amu_SetSeg
#define AM_GetSeg amu_GetSeg
#define AM_MaxSegLength amu_MaxSegLength
#define AM_SetHandler(ea, handler, function) amu_SetHandler(ea, handler, (amu_handler_fn_t)(function))
#define AM_SetHandlerAny(ea, handler, function) amu_SetHandlerAny(ea, handler, (amu_handler_fn_t)(function))
#define AM_GetNumHandlers amu_GetNumHandlers
#define AM_Map amu_Map
#define AM_MapAny amu_MapAny
#define AM_Unmap amu_Unmap
#define AM_GetTranslationInuse amu_GetTranslationInuse
#define AM_GetTranslationName amu_GetTranslationName
#define AM_GetTranslationTag amu_GetTranslationTag
#define AM_GetNumTranslations amu_GetNumTranslations
#define AM_SetNumTranslations amu_SetNumTranslations
#define AM_GetSourceEndpoint amu_GetSourceEndpoint
#define AM_GetDestEndpoint amu_GetDestEndpoint
#define AM_GetMsgTag amu_GetMsgTag
#define AM_WaitSema amu_Wait
#define AM_UnMap amu_Unmap

/* Older names. */
#define AM_RequestMedium4 AM_RequestI4
#define AM_RequestMedium8 AM_RequestI8
#define AM_RequestLong4 AM_RequestXfer4
#define AM_RequestLong8 AM_RequestXfer8
#define AM_RequestLongAsync4 AM_RequestXferAsync4
#define AM_RequestLongAsync8 AM_RequestXferAsync8
#define AM_ReplyMedium4 AM_ReplyI4
#define AM_ReplyMedium8 AM_ReplyI8
#define AM_ReplyLong4 AM_ReplyXfer4
#define AM_ReplyLong8 AM_ReplyXfer8

#ifdef __cplusplus
}
#endif

#endif
