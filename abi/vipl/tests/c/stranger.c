/* Strangers at the port of a program that waits: they say nothing, nonsense, or leave. Others still connect. */
#include <arpa/inet.h>
#include <pthread.h>
#include <sys/socket.h>

#include "check.h"

static struct side a, b;
static const char *name;

/* The first port of a discriminator (specs/quipu-via.md). */
static int port_of(const char *discriminator)
{
	uint64_t hash = 0xcbf29ce484222325u;
	for (; *discriminator; discriminator++)
		hash = (hash ^ (unsigned char)*discriminator) * 0x100000001b3u;
	return 20480 + (((uint32_t)(hash >> 32) ^ (uint32_t)hash) % 8192);
}

static int stranger(void)
{
	int four = a.nic_attributes.NicAddressLen == 4;
	int fd = socket(four ? AF_INET : AF_INET6, SOCK_STREAM, 0);
	struct sockaddr_in at4 = { .sin_family = AF_INET, .sin_port = htons(port_of(name)) };
	struct sockaddr_in6 at6 = { .sin6_family = AF_INET6, .sin6_port = htons(port_of(name)) };
	memcpy(&at4.sin_addr, a.nic_attributes.LocalNicAddress, 4);
	if (!four)
		memcpy(&at6.sin6_addr, a.nic_attributes.LocalNicAddress, 16);
	CHECK(fd >= 0);
	if (four)
		CHECK(connect(fd, (struct sockaddr *)&at4, sizeof at4) == 0);
	else
		CHECK(connect(fd, (struct sockaddr *)&at6, sizeof at6) == 0);
	return fd;
}

static void *accept_one(void *unused)
{
	(void)unused;
	serve(&b, name);
	return NULL;
}

int main(void)
{
	static const char *nonsense[] = { "GET / HTTP/1.0\r\n\r\n", "\377\377", "\0\001\001", "\0\001\004",
		"\0\022\001QVIA\001\002............", "\0\001\002\0\001\002" };
	static const int lengths[] = { 18, 2, 3, 3, 20, 6 };
	char answer[600];
	pthread_t thread;
	int silent[40];
	name = name_of_run("stranger");
	open_side(&a, VIP_SERVICE_RELIABLE_DELIVERY);
	open_side(&b, VIP_SERVICE_RELIABLE_DELIVERY);
	CHECK(pthread_create(&thread, NULL, accept_one, NULL) == 0);
	usleep(200000);
	for (int n = 0; n < 40; n++)
		silent[n] = stranger();
	for (int n = 0; n < 300; n++) {
		int fd = stranger(), which = n % 7;
		if (which < 6) {
			CHECK(write(fd, nonsense[which], lengths[which]) == lengths[which]);
			/* It ends without an answer. */
			CHECK(read(fd, answer, sizeof answer) <= 0);
		}
		close(fd);
	}
	OK(request(&a, name));
	CHECK(pthread_join(thread, NULL) == 0);
	for (int n = 0; n < 40; n++)
		close(silent[n]);
	post_receive(&b, local_segment(&b, 0, data(&b, 0), 8));
	post_send(&a, local_segment(&a, 0, data(&a, 0), 8));
	sent(&a, VIP_SUCCESS);
	received(&b, VIP_SUCCESS);
	close_side(&a);
	close_side(&b);
	return 0;
}
