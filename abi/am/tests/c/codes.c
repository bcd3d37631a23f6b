/* What calls return, in one process. */
#include <amudp.h>
#include <string.h>

#include "expect.h"

static eb_t bundle, other;
static ep_t ep;
static int ran, came, last_status, last_sum;
static void *stale;

static void replies_twice(void *token, int a0) {
    stale = token;
    tag_t tag;
    en_t name, own;
    ep_t here;
    int source;
    DONE(AM_GetMsgTag(token, &tag));
    DONE(AM_GetSourceEndpoint(token, &name));
    DONE(AM_GetDestEndpoint(token, &here));
    DONE(AMX_GetSourceId(token, &source));
    DONE(AM_GetTranslationName(ep, 0, &own));
    EXPECT(tag == 99 && AMX_enEqual(name, own) && here == ep && source == 0);
    EXPECT(AM_Request0(ep, 0, 2) == AM_ERR_RESOURCE);
    DONE(AM_Reply2(token, 2, a0, 1));
    EXPECT(AM_Reply2(token, 2, a0, 1) == AM_ERR_RESOURCE);
    ran++;
}

static void reply(void *token, int a0, int a1) {
    last_sum = a0 + a1;
    EXPECT(AM_Reply0(token, 2) == AM_ERR_RESOURCE);
    ran++;
}

static void sixteen(void *token, void *buf, int nbytes, int a0, int a1, int a2, int a3, int a4, int a5, int a6,
                    int a7, int a8, int a9, int a10, int a11, int a12, int a13, int a14, int a15) {
    int all[] = {a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15};
    for (int i = 0; i < 16; i++)
        EXPECT(all[i] == 100 + i);
    EXPECT(nbytes == 5 && memcmp(buf, "bytes", 5) == 0);
    char text[] = "other";
    DONE(AM_ReplyI0(token, 4, text, 5));
    memset(buf, 0, 5); /* the reply has copied */
    ran++;
}

static void back(void *token, void *buf, int nbytes) {
    (void)token;
    EXPECT(nbytes == 5 && memcmp(buf, "other", 5) == 0);
    ran++;
}

static void returned(int status, op_t opcode, void *token) {
    (void)opcode;
    (void)token;
    last_status = status;
    came++;
}

static void until_it_comes(int count) {
    while (came < count)
        DONE(AM_Poll(bundle));
}

static void tables(void) {
    int n;
    tag_t tag;
    en_t name;
    handler_t any;
    void *at;
    uintptr_t len;
    DONE(AM_GetNumTranslations(ep, &n));
    EXPECT(n == 256);
    EXPECT(AM_SetNumTranslations(ep, 1 << 21) == AM_ERR_RESOURCE);
    DONE(AM_SetNumTranslations(ep, 1024));
    DONE(AM_GetTranslationName(ep, 0, &name));
    DONE(AM_Map(ep, 1000, name, 5));
    EXPECT(AM_Map(ep, 1000, name, 5) == AM_ERR_RESOURCE);
    EXPECT(AM_Map(ep, 1024, name, 5) == AM_ERR_BAD_ARG && AM_Map(ep, -1, name, 5) == AM_ERR_BAD_ARG);
    EXPECT(AM_SetNumTranslations(ep, 300) == AM_ERR_RESOURCE);
    DONE(AM_GetTranslationInuse(ep, 1000));
    DONE(AM_GetTranslationTag(ep, 1000, &tag));
    EXPECT(tag == 5);
    DONE(AM_UnMap(ep, 1000));
    EXPECT(AM_GetTranslationInuse(ep, 1000) != AM_OK && AM_UnMap(ep, 1000) == AM_ERR_BAD_ARG);
    DONE(AM_MapAny(ep, &n, name, 6));
    EXPECT(n == 1);
    DONE(AM_UnMap(ep, 1));
    DONE(AM_SetHandlerAny(ep, &any, reply));
    EXPECT(any == 5);
    DONE(AM_GetNumHandlers(ep, &n));
    EXPECT(n == 256);
    static char segment[4096];
    DONE(AM_SetSeg(ep, segment, sizeof segment));
    DONE(AM_GetSeg(ep, &at, &len));
    EXPECT(at == segment && len == sizeof segment);
    DONE(AM_SetSeg(ep, NULL, 0));
    DONE(AM_SetExpectedResources(ep, 4, 16));
    EXPECT(AM_SetExpectedResources(ep, 0, 16) == AM_ERR_BAD_ARG);
}

int main(void) {
    en_t name;
    EXPECT(AM_AllocateBundle(AM_SEQ, &bundle) == AM_ERR_NOT_INIT);
    EXPECT(AM_Terminate() == AM_ERR_NOT_INIT);
    DONE(AM_Init());
    EXPECT(AM_AllocateBundle(7, &bundle) == AM_ERR_BAD_ARG);
    DONE(AM_AllocateBundle(AM_SEQ, &bundle));
    DONE(AM_AllocateBundle(AM_PAR, &other));
    EXPECT(AM_AllocateEndpoint(bundle, NULL, &name) == AM_ERR_BAD_ARG);
    EXPECT(AM_AllocateEndpoint(NULL, &ep, &name) == AM_ERR_BAD_ARG);
    DONE(AM_AllocateEndpoint(bundle, &ep, &name));
    DONE(AM_SetHandler(ep, 0, returned));
    DONE(AM_SetHandler(ep, 1, replies_twice));
    DONE(AM_SetHandler(ep, 2, reply));
    DONE(AM_SetHandler(ep, 3, sixteen));
    DONE(AM_SetHandler(ep, 4, back));
    EXPECT(AM_Request0(ep, 0, 1) == AM_ERR_BAD_ARG);
    DONE(AM_Map(ep, 0, name, 99));

    /* The tag of a new endpoint accepts nothing. */
    DONE(AM_Request1(ep, 0, 1, 7));
    until_it_comes(1);
    EXPECT(last_status == EBADTAG && ran == 0);
    DONE(AM_SetTag(ep, 99));
    DONE(AM_Request1(ep, 0, 1, 7));
    EXPECT(ran == 2 && last_sum == 8);
    DONE(AM_Request0(ep, 0, 200));
    until_it_comes(2);
    EXPECT(last_status == EBADHANDLER);

    EXPECT(AM_Reply0(stale, 2) == AM_ERR_RESOURCE && AM_Reply0(NULL, 2) == AM_ERR_RESOURCE);
    EXPECT(AM_RequestI0(ep, 0, 3, NULL, 5) == AM_ERR_BAD_ARG);
    EXPECT(AM_RequestI0(ep, 0, 3, "bytes", -1) == AM_ERR_BAD_ARG);
    EXPECT(AM_RequestI0(ep, 0, 3, "bytes", AM_MaxMedium() + 1) == AM_ERR_BAD_ARG);
    EXPECT(AM_RequestXfer0(ep, 0, 0, 3, "bytes", AM_MaxLong() + 1) == AM_ERR_BAD_ARG);
    int (*by_address)(ep_t, int, handler_t, const void *, int, int, int, int, int, int, int, int, int, int, int,
                      int, int, int, int, int, int) = AM_RequestI16;
    DONE(by_address(ep, 0, 3, "bytes", 5, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113,
                    114, 115));
    EXPECT(ran == 4);
    tables();

    DONE(AM_MoveEndpoint(ep, bundle, other));
    DONE(AM_FreeBundle(bundle));
    EXPECT(AM_Poll(bundle) == AM_ERR_BAD_ARG);
    DONE(AM_Request1(ep, 0, 1, 7));
    EXPECT(ran == 6);
    DONE(AM_FreeEndpoint(ep));
    EXPECT(AM_Request0(ep, 0, 1) == AM_ERR_BAD_ARG);
    DONE(AM_Terminate());
    return 0;
}
