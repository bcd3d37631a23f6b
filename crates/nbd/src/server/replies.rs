//! Replies to requests.

use super::{Extent, Server};
use crate::wire::{
    ALLOCATION_ID, Chunk, Command, CommandFlags, Errno, ProtocolError, Request, SIMPLE_REPLY_MAGIC,
    chunk,
};

impl Server {
    /// Whether the reply to this request is made of chunks.
    fn chunked(&self, request: &Request) -> bool {
        let command = Command::of(request.kind);
        let always = matches!(command, Some(Command::Read | Command::BlockStatus));
        self.extended || (self.structured && always)
    }

    fn simple(&mut self, request: &Request, errno: u32) {
        self.output.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.output.extend(errno.to_be_bytes());
        self.output.extend(request.cookie.to_be_bytes());
    }

    fn chunk(&mut self, request: &Request, kind: u16, length: u64) {
        let Request { cookie, offset, .. } = *request;
        let header = Chunk { flags: chunk::DONE, kind, cookie, offset, length };
        header.encode(self.extended, &mut self.output);
    }

    /// The request failed.
    pub fn reply_error(&mut self, request: &Request, errno: Errno) {
        if self.chunked(request) {
            self.chunk(request, chunk::ERROR, 6);
            self.output.extend(errno.0.to_be_bytes());
            self.output.extend(0_u16.to_be_bytes());
        } else {
            self.simple(request, errno.0);
        }
    }

    /// The request is done, and the reply has no data.
    pub fn reply_done(&mut self, request: &Request) {
        if self.chunked(request) {
            self.chunk(request, chunk::NONE, 0);
        } else {
            self.simple(request, 0);
        }
    }

    /// The header of the reply to a read. The caller sends `request.length` bytes of data right after it.
    pub fn reply_read(&mut self, request: &Request) {
        if !self.chunked(request) {
            self.simple(request, 0);
        } else if request.length == 0 {
            self.chunk(request, chunk::NONE, 0);
        } else {
            self.chunk(request, chunk::OFFSET_DATA, request.length + 8);
            self.output.extend(request.offset.to_be_bytes());
        }
    }

    /// The reply to a read of nothing but zeros, where that needs no data on the wire.
    ///
    /// Returns whether it was made; otherwise the caller sends the zeros as data.
    pub fn reply_zeros(&mut self, request: &Request) -> bool {
        let fits = request.length > 0 && u32::try_from(request.length).is_ok();
        if !self.chunked(request) || !fits {
            return false;
        }
        self.chunk(request, chunk::OFFSET_HOLE, 12);
        self.output.extend(request.offset.to_be_bytes());
        self.output.extend((request.length as u32).to_be_bytes());
        true
    }

    /// The extents from the request's offset on, at least one. Adjacent ones may be of the same kind.
    ///
    /// # Errors
    ///
    /// There is none, which is a fault of the back end.
    pub fn reply_status(
        &mut self,
        request: &Request,
        extents: &[Extent],
    ) -> Result<(), ProtocolError> {
        if extents.is_empty() {
            let cookie = request.cookie;
            return Err(ProtocolError::Reply { cookie, why: "there is no extent" });
        }
        let first = [Extent { length: extents[0].length.min(request.length), ..extents[0] }];
        let one = request.flags.contains(CommandFlags::REQ_ONE);
        let extents = if one { &first } else { extents };
        if self.extended {
            self.chunk(request, chunk::BLOCK_STATUS_EXT, 8 + 16 * extents.len() as u64);
            self.output.extend(ALLOCATION_ID.to_be_bytes());
            self.output.extend((extents.len() as u32).to_be_bytes());
            for extent in extents {
                self.output.extend(extent.length.to_be_bytes());
                self.output.extend(u64::from(extent.flags()).to_be_bytes());
            }
            return Ok(());
        }
        // Longer ones are cut to a multiple of any block size; the client asks again for the rest.
        const LONGEST: u64 = 0xffff_0000;
        let end = extents.iter().position(|extent| extent.length > LONGEST);
        let extents = &extents[..end.map_or(extents.len(), |end| end + 1)];
        self.chunk(request, chunk::BLOCK_STATUS, 4 + 8 * extents.len() as u64);
        self.output.extend(ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            self.output.extend((extent.length.min(LONGEST) as u32).to_be_bytes());
            self.output.extend(extent.flags().to_be_bytes());
        }
        Ok(())
    }
}
