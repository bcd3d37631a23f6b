//! The structures of `vipl.h`.

use libc::{c_char, c_int, c_ulong, c_void};
use quipu_cabi::{CReturn, Errno};
use quipu_via::codes::{Code, Outcome};

/// Any handle.
pub type VIP_PVOID = *mut c_void;

/// `VIP_NET_ADDRESS`, without the bytes of the address, which follow the header.
#[repr(C)]
pub struct VIP_NET_ADDRESS {
    pub(crate) host_len: u16,
    pub(crate) discriminator_len: u16,
    pub(crate) bytes: [u8; 4],
}

/// `VIP_NIC_ATTRIBUTES`
#[repr(C)]
pub struct VIP_NIC_ATTRIBUTES {
    pub(crate) name: [c_char; 64],
    pub(crate) hardware_version: c_ulong,
    pub(crate) provider_version: c_ulong,
    pub(crate) nic_address_len: u16,
    pub(crate) local_nic_address: *const u8,
    pub(crate) thread_safe: c_int,
    pub(crate) max_discriminator_len: u16,
    pub(crate) max_register_bytes: c_ulong,
    pub(crate) max_register_regions: c_ulong,
    pub(crate) max_register_block_bytes: c_ulong,
    pub(crate) max_vi: c_ulong,
    pub(crate) max_descriptors_per_queue: c_ulong,
    pub(crate) max_segments_per_desc: c_ulong,
    pub(crate) max_cq: c_ulong,
    pub(crate) max_cq_entries: c_ulong,
    pub(crate) max_transfer_size: c_ulong,
    pub(crate) native_mtu: c_ulong,
    pub(crate) max_ptags: c_ulong,
    pub(crate) reliability_level_support: u16,
    pub(crate) rdma_read_support: u16,
}

/// `VIP_VI_ATTRIBUTES`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct VIP_VI_ATTRIBUTES {
    pub(crate) reliability_level: u16,
    pub(crate) max_transfer_size: c_ulong,
    pub(crate) qos: VIP_PVOID,
    pub(crate) ptag: VIP_PVOID,
    pub(crate) enable_rdma_write: c_int,
    pub(crate) enable_rdma_read: c_int,
}

/// `VIP_MEM_ATTRIBUTES`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct VIP_MEM_ATTRIBUTES {
    pub(crate) ptag: VIP_PVOID,
    pub(crate) enable_rdma_write: c_int,
    pub(crate) enable_rdma_read: c_int,
}

/// `VIP_ERROR_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct VIP_ERROR_DESCRIPTOR {
    pub(crate) nic: VIP_PVOID,
    pub(crate) vi: VIP_PVOID,
    pub(crate) cq: VIP_PVOID,
    pub(crate) descriptor: VIP_PVOID,
    pub(crate) opcode: c_ulong,
    pub(crate) resource: u32,
    pub(crate) error: u32,
}

/// `VIP_AUTODISCOVERY_LIST`
#[repr(C)]
pub struct VIP_AUTODISCOVERY_LIST {
    pub(crate) hops: c_ulong,
    pub(crate) addresses: *mut *mut VIP_NET_ADDRESS,
    pub(crate) count: c_ulong,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<VIP_NET_ADDRESS>() == 8 && offset_of!(VIP_NET_ADDRESS, bytes) == 4);
    assert!(size_of::<VIP_NIC_ATTRIBUTES>() == 200);
    assert!(offset_of!(VIP_NIC_ATTRIBUTES, local_nic_address) == 88);
    assert!(offset_of!(VIP_NIC_ATTRIBUTES, max_transfer_size) == 168);
    assert!(offset_of!(VIP_NIC_ATTRIBUTES, rdma_read_support) == 194);
    assert!(size_of::<VIP_VI_ATTRIBUTES>() == 40 && offset_of!(VIP_VI_ATTRIBUTES, qos) == 16);
    assert!(size_of::<VIP_MEM_ATTRIBUTES>() == 16);
    assert!(size_of::<VIP_ERROR_DESCRIPTOR>() == 48);
    assert!(size_of::<VIP_AUTODISCOVERY_LIST>() == 24);
};

/// How a call of VIPL reports: a `VIP_RETURN`. A panic of the library is a lack of resources.
pub struct VipReturn;

impl CReturn for VipReturn {
    type Value = Code;
    type Raw = u32;
    #[inline]
    fn success(code: Code) -> u32 {
        code as u32
    }
    fn failure(_: Errno) -> u32 {
        Code::ErrorResource as u32
    }
    fn error(raw: &u32) -> Option<Errno> {
        (*raw != 0).then_some(Errno(*raw as c_int))
    }
}

/// What an entry point yields.
#[inline]
pub(crate) fn code(outcome: Outcome) -> Result<Code, Errno> {
    Ok(outcome.err().unwrap_or(Code::Success))
}
