/* What programs ask about devices, ports and addresses, and find by the numbers that they show each other. */
#include "rc.h"

#include <unistd.h>

static void devices_and_their_capabilities(void)
{
	struct ibv_context *context = open_device();
	struct ibv_device_attr old;
	struct ibv_device_attr_ex attr, again;
	struct ibv_query_device_ex_input input = { .comp_mask = 1 };
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK }, later = values;

	SAME(ibv_query_device(context, &old), 0);
	SAME(ibv_query_device_ex(context, NULL, &attr), 0);
	SAME(memcmp(&attr.orig_attr, &old, sizeof old), 0);
	CHECK(old.node_guid == ibv_get_device_guid(context->device) && old.node_guid != 0);
	CHECK(old.phys_port_cnt == 1 && attr.phys_port_cnt_ex == 1 && old.max_mr > 0 && old.max_mw > 0);
	CHECK(attr.completion_timestamp_mask == UINT64_MAX && attr.hca_core_clock == 1000000);
	SAME(ibv_query_device_ex(context, &input, &again), EINVAL);
	input.comp_mask = 0;
	memset(&again, 0xff, sizeof again);
	SAME(ibv_query_device_ex(context, &input, &again), 0);
	SAME(memcmp(&attr, &again, sizeof attr), 0);
	CHECK(ibv_is_qpt_supported(attr.rss_caps.supported_qpts, IBV_QPT_RAW_PACKET));

	SAME(ibv_query_rt_values_ex(context, &values), 0);
	SAME(ibv_query_rt_values_ex(context, &later), 0);
	CHECK(values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
	CHECK(later.raw_clock.tv_sec * 1000000000LL + later.raw_clock.tv_nsec >=
	      values.raw_clock.tv_sec * 1000000000LL + values.raw_clock.tv_nsec);
	values.comp_mask = 1 << 7;
	SAME(ibv_query_rt_values_ex(context, &values), EOPNOTSUPP);
	SAME(ibv_close_device(context), 0);
}

static void ports_and_addresses(void)
{
	struct ibv_context *context = open_device();
	struct ibv_port_attr port;
	struct ibv_gid_entry entry, table[8];
	union ibv_gid gid;
	__be16 pkey = 0;

	SAME(ibv_query_port(context, 1, &port), 0);
	CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
	CHECK(port.gid_tbl_len >= 1 && port.pkey_tbl_len == 1);
	SAME(ibv_query_port(context, 0, &port), EINVAL);
	SAME(ibv_query_port(context, 2, &port), EINVAL);

	SAME(ibv_query_gid(context, 1, 0, &gid), 0);
	SAME(ibv_query_gid(context, 1, port.gid_tbl_len, &gid), -1);
	SAME(errno, EINVAL);
	SAME(ibv_query_gid_ex(context, 1, 0, &entry, 0), 0);
	SAME(memcmp(&entry.gid, &gid, sizeof gid), 0);
	CHECK(entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.port_num == 1 && entry.gid_index == 0);
	SAME(ibv_query_gid_ex(context, 2, 0, &entry, 0), EINVAL);
	SAME(ibv_query_gid_ex(context, 1, 0, &entry, 1), EOPNOTSUPP);
	SAME(ibv_query_gid_table(context, table, 8, 0), port.gid_tbl_len);
	SAME(memcmp(&table[0], &entry, sizeof entry), 0);
	SAME(ibv_query_gid_table(context, table, 0, 0), -EINVAL);
	SAME(ibv_query_gid_table(context, table, 8, 1), -EOPNOTSUPP);

	SAME(ibv_query_pkey(context, 1, 0, &pkey), 0);
	SAME(pkey, 0xffff);
	SAME(ibv_get_pkey_index(context, 1, pkey), 0);
	SAME(ibv_get_pkey_index(context, 1, htons(0x8001)), -1);
	SAME(ibv_query_pkey(context, 1, 1, &pkey), -1);
	SAME(ibv_close_device(context), 0);
}

/* The list outlives what is freed of it, and each device is there once. */
static void lists_of_devices(void)
{
	int count = -1;
	struct ibv_device **list = ibv_get_device_list(&count), **other = ibv_get_device_list(NULL);
	CHECK(list && other && count >= 1 && !list[count]);
	for (int i = 0; i < count; i++) {
		CHECK(list[i] == other[i] && ibv_get_device_name(list[i])[0]);
		CHECK(list[i]->transport_type == IBV_TRANSPORT_IB || list[i]->transport_type == IBV_TRANSPORT_IWARP);
		for (int j = 0; j < i; j++)
			CHECK(ibv_get_device_guid(list[i]) != ibv_get_device_guid(list[j]));
	}
	ibv_free_device_list(other);
	struct ibv_context *context = ibv_open_device(list[0]);
	CHECK(context && context->device == list[0]);
	ibv_free_device_list(list);
	CHECK(strcmp(ibv_get_device_name(context->device), "quipu0") == 0);
	SAME(ibv_close_device(context), 0);
	CHECK(ibv_is_fork_initialized() == IBV_FORK_DISABLED || ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
}

/* Another part of the program finds a device, its domain, region and memory by their numbers. */
static void parts_of_a_program_share_by_numbers(void)
{
	struct pair p = make_pair(0);
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(p.context, &attr), *same_dm;
	uint32_t word = 77;
	CHECK(dm);
	struct ibv_context *second = ibv_import_device(dup(p.context->cmd_fd));
	CHECK(second && second->async_fd != p.context->async_fd);
	struct ibv_pd *pd = ibv_import_pd(second, p.pd->handle);
	CHECK(pd && pd->context == second && pd->handle == p.pd->handle);
	CHECK(!ibv_import_pd(second, p.pd->handle + 1000) && errno);
	struct ibv_mr *mr = ibv_import_mr(pd, p.a.mr->handle);
	CHECK(mr && mr->lkey == p.a.mr->lkey && mr->rkey == p.a.mr->rkey && mr->length == p.a.mr->length);
	CHECK((same_dm = ibv_import_dm(second, dm->handle)));
	SAME(ibv_memcpy_to_dm(dm, 8, &word, 4), 0);
	word = 0;
	SAME(ibv_memcpy_from_dm(&word, same_dm, 8, 4), 0);
	SAME(word, 77);
	/* Objects of its own live in the shared domain. */
	struct ibv_mr *own = ibv_reg_mr(pd, p.b.buffer, 100, IBV_ACCESS_LOCAL_WRITE);
	CHECK(own);
	SAME(ibv_dereg_mr(own), 0);
	ibv_unimport_dm(same_dm);
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	SAME(ibv_close_device(second), 0);
	SAME(ibv_free_dm(dm), 0);
	int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
	CHECK(other >= 0 && !ibv_import_device(other) && errno == EOPNOTSUPP);
	close(other);
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{ "devices_and_their_capabilities", devices_and_their_capabilities },
		{ "ports_and_addresses", ports_and_addresses },
		{ "lists_of_devices", lists_of_devices },
		{ "parts_of_a_program_share_by_numbers", parts_of_a_program_share_by_numbers },
		{ NULL, NULL },
	};
	return run_tests(tests, argc, argv);
}
