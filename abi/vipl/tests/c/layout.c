/* Sizes, offsets and numbers that programs compiled long ago rely on. */
#include <stddef.h>

#include <vipl.h>

#define IS(what, value) _Static_assert((what) == (value), #what)
#define AT(type, member, offset) IS(offsetof(type, member), offset)

IS(sizeof(VIP_NET_ADDRESS), 8);
AT(VIP_NET_ADDRESS, HostAddress, 4);
IS(sizeof(VIP_NIC_ATTRIBUTES), 200);
AT(VIP_NIC_ATTRIBUTES, HardwareVersion, 64);
AT(VIP_NIC_ATTRIBUTES, NicAddressLen, 80);
AT(VIP_NIC_ATTRIBUTES, LocalNicAddress, 88);
AT(VIP_NIC_ATTRIBUTES, ThreadSafe, 96);
AT(VIP_NIC_ATTRIBUTES, MaxDiscriminatorLen, 100);
AT(VIP_NIC_ATTRIBUTES, MaxRegisterBytes, 104);
AT(VIP_NIC_ATTRIBUTES, MaxVI, 128);
AT(VIP_NIC_ATTRIBUTES, MaxTransferSize, 168);
AT(VIP_NIC_ATTRIBUTES, NativeMTU, 176);
AT(VIP_NIC_ATTRIBUTES, ReliabilityLevelSupport, 192);
AT(VIP_NIC_ATTRIBUTES, RDMAReadSupport, 194);
IS(sizeof(VIP_PVOID64), 8);
IS(sizeof(VIP_CONTROL_SEGMENT), 32);
AT(VIP_CONTROL_SEGMENT, NextHandle, 8);
AT(VIP_CONTROL_SEGMENT, SegCount, 12);
AT(VIP_CONTROL_SEGMENT, Control, 14);
AT(VIP_CONTROL_SEGMENT, ImmediateData, 20);
AT(VIP_CONTROL_SEGMENT, Length, 24);
AT(VIP_CONTROL_SEGMENT, Status, 28);
IS(sizeof(VIP_DESCRIPTOR_SEGMENT), 16);
AT(VIP_DATA_SEGMENT, Handle, 8);
AT(VIP_DATA_SEGMENT, Length, 12);
#ifdef VIPL_NAMES_1_0
IS(sizeof(VIP_DESCRIPTOR), 48);
AT(VIP_DESCRIPTOR, Control, 0);
AT(VIP_DESCRIPTOR, Data, 32);
#else
IS(sizeof(VIP_DESCRIPTOR), 64);
AT(VIP_DESCRIPTOR, CS, 0);
AT(VIP_DESCRIPTOR, DS, 32);
#endif
IS(sizeof(VIP_VI_ATTRIBUTES), 40);
AT(VIP_VI_ATTRIBUTES, EnableRdmaRead, 36);
IS(sizeof(VIP_MEM_ATTRIBUTES), 16);
IS(sizeof(VIP_ERROR_DESCRIPTOR), 48);
AT(VIP_ERROR_DESCRIPTOR, ErrorCode, 44);
IS(sizeof(VIP_AUTODISCOVERY_LIST), 24);
IS(VIP_INVALID_STATE, 12);
IS(VIP_ERROR_NOT_SUPPORTED, 16);
IS(VIP_STATUS_REMOTE_DESC_ERROR, 0x100);
IS(VIP_ERROR_CATASTROPHIC, 10);

int main(void)
{
	return 0;
}
