//! One receive into the memory where payload belongs, and into a buffer behind it.

use std::io;
use std::os::fd::OwnedFd;

use libc::iovec;

use crate::sys;

/// Ranges of memory that one receive takes.
const MAX_PLACES: usize = 96;

/// Receives what there is, without waiting: into `places` (address and length) one after the other, and
/// behind them into `buffer`. 0 is the end of the stream. `None` if there are too many places.
///
/// # Safety
///
/// Each place may be written, or is not mapped at all, and no reference to it is alive; others may read and
/// write it meanwhile.
pub(super) unsafe fn receive(
    fd: &OwnedFd,
    places: &[(usize, usize)],
    buffer: &mut [u8],
) -> Option<io::Result<usize>> {
    let mut list = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_PLACES + 1];
    let used = list.get_mut(..places.len() + 1)?;
    for (range, &(addr, len)) in used.iter_mut().zip(places) {
        *range = iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr), iov_len: len };
    }
    used[places.len()] = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the buffer is a live slice, and the places are as the caller promises.
    Some(unsafe { sys::receive_list(fd, used) })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn bytes_go_into_one_place_after_the_other_and_then_into_the_buffer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let receiver = OwnedFd::from(listener.accept().unwrap().0);
        sender.write_all(b"one and two, and the rest").unwrap();
        let (mut memory, mut buffer) = ([0u8; 16], [0u8; 64]);
        let addr = memory.as_mut_ptr().expose_provenance();
        let places = [(addr + 8, 3), (addr, 8)];
        // SAFETY: `memory` lives, and nobody else uses it.
        let received = unsafe { receive(&receiver, &places, &mut buffer) };
        assert_eq!(received.unwrap().unwrap(), 25);
        assert_eq!(&memory[..11], b" and twoone");
        assert_eq!(&buffer[..14], b", and the rest");
        // SAFETY: as above.
        let too_many = unsafe { receive(&receiver, &[(addr, 1); MAX_PLACES + 1], &mut buffer) };
        assert!(too_many.is_none());
    }
}
