//! Frames that a packet socket leaves in memory that it shares with the kernel (packet(7), PACKET_RX_RING;
//! Linux Documentation, networking/packet_mmap, TPACKET_V2): to see whether there is one costs no system
//! call.
//!
//! The ring has slots of one size, which hold the frames of most interfaces. What is longer, as trains of
//! segments are, waits in the socket as it would without a ring, and its slot says so, in its order.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use super::mapping::Mapping;
use super::vnet;
use crate::sys::{set_option, set_option_bytes};

/// Slots: 4 MiB of them, so that what comes while this end is kept from its processor for a while finds room.
/// 512, which would stay in a processor's own cache, lost a third of 20,000 short frames in a row, and
/// answered no sooner.
const COUNT: usize = 2048;
/// Octets of a slot: the kernel's header, and a frame of an interface whose MTU is 1500 or a little more.
const SLOT: usize = 2048;
/// Octets that the kernel allocates at a time, a multiple of every size of a page.
const BLOCK: usize = 1 << 16;

/// What the next slot has.
pub(super) enum Next<'a> {
    /// A frame, with the header of [`vnet`] before it.
    Here(&'a mut [u8]),
    /// It did not fit, and waits in the socket.
    InSocket,
    /// It did not fit, and the socket had no room either.
    Lost,
}

/// The ring of a socket. We are the only consumer.
pub(super) struct Ring {
    mapping: Mapping,
    /// The slot that the kernel fills next, or has filled.
    next: usize,
}

impl Ring {
    /// Gives a socket a ring, before it receives anything. Its frames have the header of [`vnet`] already.
    pub(super) fn new(fd: &OwnedFd) -> io::Result<Self> {
        let version = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        set_option(fd, libc::SOL_PACKET, libc::PACKET_VERSION, version)?;
        // Any number says: what does not fit, the socket is to keep.
        set_option(fd, libc::SOL_PACKET, libc::PACKET_COPY_THRESH, 1)?;
        // struct tpacket_req: octets of a block, blocks, octets of a slot, slots.
        let request = [BLOCK, COUNT * SLOT / BLOCK, SLOT, COUNT];
        let request: Vec<u8> =
            request.into_iter().flat_map(|number| (number as u32).to_ne_bytes()).collect();
        set_option_bytes(fd, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        Ok(Self { mapping: Mapping::new(COUNT * SLOT, flags, fd.as_raw_fd(), 0)?, next: 0 })
    }

    /// The header of a slot.
    fn header(&self, slot: usize) -> *mut libc::tpacket2_hdr {
        // SAFETY: slots lie behind each other in the mapping, and are aligned as their size is.
        unsafe { self.mapping.start().add(slot % COUNT * SLOT).cast() }
    }

    fn status(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: the first word of a header, which both sides use atomically.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.header(slot)).tp_status) }
    }

    /// What has come, if anything has. It stays until it is [given back](Self::give_back).
    #[inline]
    pub(super) fn next(&mut self) -> Option<Next<'_>> {
        let status = self.status(self.next).load(Ordering::Acquire);
        (status & libc::TP_STATUS_USER != 0).then(|| self.filled(status))
    }

    fn filled(&mut self, status: u32) -> Next<'_> {
        if status & libc::TP_STATUS_COPY != 0 {
            return Next::InSocket;
        }
        let header = self.header(self.next);
        // SAFETY: the kernel has filled the slot in, and leaves it alone until it is given back.
        let (start, kept, len) =
            unsafe { ((*header).tp_mac, (*header).tp_snaplen, (*header).tp_len) };
        let (start, kept) = (usize::from(start), kept as usize);
        if kept < len as usize || start < vnet::LEN || start + kept > SLOT {
            return Next::Lost;
        }
        // SAFETY: as above; the range lies in the slot, and the result borrows the only owner.
        Next::Here(unsafe {
            let start = header.cast::<u8>().add(start - vnet::LEN);
            std::slice::from_raw_parts_mut(start, vnet::LEN + kept)
        })
    }

    /// The control information of the tag that the kernel has taken off a frame, so many slots ahead.
    pub(super) fn tag(&self, ahead: usize) -> Option<u16> {
        let filled = libc::TP_STATUS_USER | libc::TP_STATUS_VLAN_VALID;
        let slot = self.next + ahead;
        let tagged = self.status(slot).load(Ordering::Acquire) & filled == filled;
        // SAFETY: the kernel has filled the slot in, and leaves it alone until it is given back.
        tagged.then(|| unsafe { (*self.header(slot)).tp_vlan_tci })
    }

    /// How many frames in a row wait in the socket, from the next on and up to `limit`.
    pub(super) fn in_socket(&self, limit: usize) -> usize {
        let both = libc::TP_STATUS_USER | libc::TP_STATUS_COPY;
        let waits = |i: &usize| self.status(self.next + i).load(Ordering::Acquire) & both == both;
        (0..limit.min(COUNT)).take_while(waits).count()
    }

    /// Gives so many slots back to the kernel, all of which had something.
    #[inline]
    pub(super) fn give_back(&mut self, count: usize) {
        for _ in 0..count {
            self.status(self.next).store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next = (self.next + 1) % COUNT;
        }
    }
}
