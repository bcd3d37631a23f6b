/* Looks for devices only after it has left the folder that it was started in, as daemon(3) does. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	int count = 0;
	if (chdir("/"))
		return 1;
	struct ibv_device **list = ibv_get_device_list(&count);
	if (!list || count < 1)
		return 2;
	puts(ibv_get_device_name(list[0]));
	return 0;
}
