//! The registers of SINIC and V-SINIC: offsets and bits, as gem5's model has them.
//!
//! A bank of registers is 256 bytes: the address is `bank << 8 | register`. Registers up to `0x38` and from
//! `0x70` on are the same in every bank.

/// Load, store: the `CONFIG_*` bits.
pub(crate) const CONFIG: u32 = 0x00;
/// Store: the `COMMAND_*` bits.
pub(crate) const COMMAND: u32 = 0x04;
/// Load: the causes, which it clears. Store: clears causes.
pub(crate) const INTR_STATUS: u32 = 0x08;
/// Load, store: the causes that interrupt.
pub(crate) const INTR_MASK: u32 = 0x0c;
/// Load: the most bytes of a copy from the receive FIFO.
pub(crate) const RX_MAX_COPY: u32 = 0x10;
/// Load: the most bytes of a copy to the transmit FIFO.
pub(crate) const TX_MAX_COPY: u32 = 0x14;
/// Load: bytes of a split packet that are copied first.
pub(crate) const ZERO_COPY_SIZE: u32 = 0x18;
/// Load: only longer packets are split.
pub(crate) const ZERO_COPY_MARK: u32 = 0x1c;
/// Load: number of banks.
pub(crate) const VIRTUAL_COUNT: u32 = 0x20;
/// Load: packets after which an interrupt is due.
pub(crate) const RX_MAX_INTR: u32 = 0x24;
/// Load: bytes of the receive FIFO.
pub(crate) const RX_FIFO_SIZE: u32 = 0x28;
/// Load: bytes of the transmit FIFO.
pub(crate) const TX_FIFO_SIZE: u32 = 0x2c;
/// Load: the mark below which splitting begins.
pub(crate) const RX_FIFO_LOW: u32 = 0x30;
/// Load: the mark below which the transmit FIFO is low.
pub(crate) const TX_FIFO_LOW: u32 = 0x34;
/// Load: the mark above which splitting ends.
pub(crate) const RX_FIFO_HIGH: u32 = 0x38;
/// Load: the mark above which the transmit FIFO is high.
pub(crate) const TX_FIFO_HIGH: u32 = 0x3c;
/// Store: begins a copy from the receive FIFO. Load: what was stored.
pub(crate) const RX_DATA: u32 = 0x40;
/// Load: the state of the receive FIFO and of this bank.
pub(crate) const RX_DONE: u32 = 0x48;
/// Load: the same, once the bank's copy is done.
pub(crate) const RX_WAIT: u32 = 0x50;
/// Store: begins a copy to the transmit FIFO. Load: what was stored.
pub(crate) const TX_DATA: u32 = 0x58;
/// Load: the state of the transmit FIFO and of this bank.
pub(crate) const TX_DONE: u32 = 0x60;
/// Load: the same, once the bank's copy is done.
pub(crate) const TX_WAIT: u32 = 0x68;
/// Load: the hardware address.
pub(crate) const HW_ADDR: u32 = 0x70;
/// Load: banks by state, and the bank at the head of the receive FIFO.
pub(crate) const RX_STATUS: u32 = 0x78;
/// One past the last register of a bank.
pub(crate) const BANK_SIZE: u32 = 0x80;

/// Split packets, and let payload wait in the FIFO.
pub(crate) const CONFIG_ZERO_COPY: u64 = 1 << 12;
/// The same for drivers that copy later on another core.
pub(crate) const CONFIG_DELAY_COPY: u64 = 1 << 11;
/// Interrupts are on.
pub(crate) const CONFIG_INT_EN: u64 = 1 << 2;
/// The transmitter is on.
pub(crate) const CONFIG_TX_EN: u64 = 1 << 1;
/// The receiver is on.
pub(crate) const CONFIG_RX_EN: u64 = 1;

/// Interrupts.
pub(crate) const COMMAND_INTR: u64 = 1 << 1;
/// Resets the NIC.
pub(crate) const COMMAND_RESET: u64 = 1;

/// Cause: [`COMMAND_INTR`].
pub(crate) const INTR_SOFT: u64 = 1 << 8;
/// Cause: the transmit FIFO has become low.
pub(crate) const INTR_TX_LOW: u64 = 1 << 7;
/// Cause: the transmit FIFO has become full.
pub(crate) const INTR_TX_FULL: u64 = 1 << 6;
/// Cause: a copy to the transmit FIFO is done.
pub(crate) const INTR_TX_DMA: u64 = 1 << 5;
/// Cause: a packet was sent.
pub(crate) const INTR_TX_PACKET: u64 = 1 << 4;
/// Cause: the receive FIFO has become high.
pub(crate) const INTR_RX_HIGH: u64 = 1 << 3;
/// Cause: the receive FIFO has become empty.
pub(crate) const INTR_RX_EMPTY: u64 = 1 << 2;
/// Cause: a copy from the receive FIFO is done.
pub(crate) const INTR_RX_DMA: u64 = 1 << 1;
/// Cause: a packet has come.
pub(crate) const INTR_RX_PACKET: u64 = 1;
/// The causes for which the interrupt does not wait.
pub(crate) const INTR_NO_DELAY: u64 =
    INTR_SOFT | INTR_TX_LOW | INTR_TX_FULL | INTR_RX_HIGH | INTR_RX_EMPTY;
/// All causes.
pub(crate) const INTR_ALL: u64 = 0x1ff;

/// RxData: copy all of the packet, even if it would be split.
pub(crate) const DATA_NO_DELAY: u64 = 1 << 61;
/// RxData, TxData: the address is virtual, which is not supported.
pub(crate) const DATA_VADDR: u64 = 1 << 60;
/// TxData: the packet goes on with the next copy.
pub(crate) const DATA_MORE: u64 = 1 << 63;
/// TxData: the NIC fills in checksums.
pub(crate) const DATA_CHECKSUM: u64 = 1 << 62;
/// RxData: this address throws the rest of the packet away.
pub(crate) const DISCARD: u64 = 1;

/// The value of RxData or TxData for a copy.
pub(crate) fn data(at: u64, len: u64) -> u64 {
    (len & 0xf_ffff) << 40 | at & 0xff_ffff_ffff
}

/// The address of a value of RxData or TxData.
pub(crate) fn data_addr(data: u64) -> u64 {
    data & 0xff_ffff_ffff
}

/// The length of a value of RxData or TxData.
pub(crate) fn data_len(data: u64) -> u64 {
    data >> 40 & 0xf_ffff
}

/// A copy is under way, or waits.
pub(crate) const DONE_BUSY: u64 = 1 << 31;
/// The last copy is done.
pub(crate) const DONE_COMPLETE: u64 = 1 << 30;
/// RxDone: the packet has more bytes; the length is that of the rest.
pub(crate) const RX_DONE_MORE: u64 = 1 << 29;
/// RxDone: no packet waits.
pub(crate) const RX_DONE_EMPTY: u64 = 1 << 28;
/// RxDone: the FIFO is above its high mark.
pub(crate) const RX_DONE_HIGH: u64 = 1 << 27;
/// RxDone: the FIFO was never high since it was empty.
pub(crate) const RX_DONE_NOT_HIGH: u64 = 1 << 26;
/// RxDone: a TCP packet.
pub(crate) const RX_DONE_TCP: u64 = 1 << 22;
/// RxDone: an IP packet.
pub(crate) const RX_DONE_IP: u64 = 1 << 20;
/// TxDone: there is no room for a copy of the largest size.
pub(crate) const TX_DONE_FULL: u64 = 1 << 29;
/// TxDone: the FIFO is below its low mark.
pub(crate) const TX_DONE_LOW: u64 = 1 << 28;

/// Packets in the FIFO, of RxDone or TxDone.
pub(crate) fn done_packets(done: u64) -> u64 {
    done >> 32 & 0xffff
}

/// The address of a bank's register.
pub(crate) fn banked(bank: u32, register: u32) -> u32 {
    bank << 8 | register
}
