/* Prints what the calls that need no device answer. The output must be the same with rdma-core's
 * library and with ours (which knows one event more than the oldest that it is compared with). */
#include <infiniband/verbs.h>
#include <stdio.h>

int main(void)
{
	for (int i = -1; i < 26; i++) {
		printf("%d|%s|%s|%s|%s\n", i, ibv_node_type_str(i), ibv_port_state_str(i),
		       ibv_event_type_str(i < 20 ? i : -1), ibv_wc_status_str(i));
		printf("%d|%d|%d|%d\n", ibv_rate_to_mult(i), ibv_rate_to_mbps(i), mult_to_ibv_rate(i),
		       mbps_to_ibv_rate(ibv_rate_to_mbps(i)));
	}
	for (int mult = 0; mult < 500; mult++)
		printf("%d ", mult_to_ibv_rate(mult));
	printf("\nfork %d\n", ibv_fork_init());
	return 0;
}
