/* Two connections of SDP in one process: a thread of the server sleeps at an idle one, and another at one
   to which a message comes from time to time. Prints how many of the messages came late. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

enum { MESSAGES = 1000, PAUSE_MS = 2, LATE_MS = 35 };

static void *sleep_at(void *socket)
{
    char byte;
    if (recv(*(int *)socket, &byte, 1, 0) != 0)
        fail("the idle connection");
    return NULL;
}

static int client(const struct sockaddr_in *to)
{
    int idle = socket(27, SOCK_STREAM, 0), busy = socket(27, SOCK_STREAM, 0);
    if (connect(idle, (void *)to, sizeof *to) || connect(busy, (void *)to, sizeof *to))
        fail("connect");
    sleep(1);
    for (int i = 0; i < MESSAGES; i++) {
        usleep(PAUSE_MS * 1000);
        double sent = now_ms();
        if (send(busy, &sent, sizeof sent, 0) != sizeof sent)
            fail("send");
    }
    close(busy);
    close(idle);
    return 0;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(argc > 1 ? atoi(argv[1]) : 0);
    int go[2];
    if (pipe(go))
        fail("pipe");
    /* Before there is an adapter, so that both processes open their own. */
    pid_t child = fork();
    if (child == 0) {
        char byte;
        if (read(go[0], &byte, 1) != 1)
            fail("the server");
        return client(&at);
    }
    int listener = socket(27, SOCK_STREAM, 0);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 2))
        fail("listen");
    if (write(go[1], "", 1) != 1)
        fail("write");
    int idle = accept(listener, NULL, NULL), busy = accept(listener, NULL, NULL);
    if (idle < 0 || busy < 0)
        fail("accept");
    pthread_t thread;
    if (pthread_create(&thread, NULL, sleep_at, &idle))
        fail("pthread_create");
    /* Meanwhile the library's own thread begins to look after both. */
    usleep(700000);
    int late = 0;
    double sent;
    while (recv(busy, &sent, sizeof sent, MSG_WAITALL) == sizeof sent)
        late += now_ms() - sent > LATE_MS;
    int status;
    pthread_join(thread, NULL);
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("the client");
    printf("%d\n", late);
    return 0;
}
