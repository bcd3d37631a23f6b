//! The client against our server, in pieces of a stream that lies in memory, and against wrong servers.

use super::*;
use crate::export::Extent;
use crate::server::{Server, ServerEvent, ServerOptions};
use crate::wire::CHUNK_MAGIC;

/// A server with a disk in memory, and what it has not read yet.
struct Disk {
    server: Server,
    disk: Vec<u8>,
    unread: Vec<u8>,
    buffer: Vec<u8>,
}

impl Disk {
    fn new(options: ServerOptions) -> Self {
        let size = options.exports[0].size as usize;
        Self { server: Server::new(options), disk: vec![0; size], unread: vec![], buffer: vec![] }
    }

    /// Carries out all that has come.
    fn run(&mut self) {
        loop {
            let event = match self.server.wants() {
                Want::Bytes(count) if self.unread.len() >= count => {
                    let bytes: Vec<_> = self.unread.drain(..count).collect();
                    self.server.input(&bytes).unwrap()
                }
                Want::Payload { length, .. } if self.unread.len() as u64 >= length => {
                    self.buffer = self.unread.drain(..length as usize).collect();
                    self.server.payload_done()
                }
                _ => return,
            };
            if let Some(ServerEvent::Request(command, request)) = event {
                self.execute(command, &request);
            }
        }
    }

    fn execute(&mut self, command: Command, request: &Request) {
        let range = request.offset as usize..(request.offset + request.length) as usize;
        match command {
            Command::Read if self.disk[range.clone()].iter().all(|byte| *byte == 0) => {
                if !self.server.reply_zeros(request) {
                    self.server.reply_read(request);
                    self.server.output().extend(vec![0; request.length as usize]);
                }
            }
            Command::Read => {
                self.server.reply_read(request);
                self.server.output().extend_from_slice(&self.disk[range]);
            }
            Command::Write => {
                self.disk[range].copy_from_slice(&self.buffer);
                self.server.reply_done(request);
            }
            Command::BlockStatus => {
                let extent = Extent { length: request.length, hole: false, zero: false };
                self.server.reply_status(request, &[extent]).unwrap();
            }
            _ => self.server.reply_done(request),
        }
    }
}

/// A client with the data of its last read.
struct End {
    client: Client,
    unread: Vec<u8>,
    data: Vec<u8>,
    events: Vec<ClientEvent>,
}

impl End {
    fn new(wanted: Handshake) -> Self {
        Self { client: Client::new(wanted), unread: vec![], data: vec![0xee; 8192], events: vec![] }
    }

    fn run(&mut self) -> Result<(), ProtocolError> {
        loop {
            let event = match self.client.wants() {
                Want::Bytes(count) if self.unread.len() >= count => {
                    let bytes: Vec<_> = self.unread.drain(..count).collect();
                    self.client.input(&bytes)?
                }
                Want::Payload { at, length, .. } if self.unread.len() as u64 >= length => {
                    let (at, length) = (at as usize, length as usize);
                    self.data[at..at + length].copy_from_slice(&self.unread[..length]);
                    self.unread.drain(..length);
                    self.client.payload_done()?
                }
                _ => return Ok(()),
            };
            self.events.extend(event);
        }
    }

    /// Exchanges everything with a server until nothing moves.
    fn meet(&mut self, disk: &mut Disk) {
        loop {
            disk.unread.append(self.client.output());
            disk.run();
            let silent = disk.server.output().is_empty();
            self.unread.append(disk.server.output());
            self.run().unwrap();
            if silent && self.client.output().is_empty() {
                return;
            }
        }
    }
}

fn session(structured: bool, extended: bool) -> (End, Disk) {
    let mut disk = Disk::new(ServerOptions::new(Export::new("disk", 8192)));
    let mut end = End::new(Handshake { structured, extended, ..Handshake::new("disk") });
    end.meet(&mut disk);
    assert!(matches!(end.events.pop(), Some(ClientEvent::Started(export)) if export.size == 8192));
    (end, disk)
}

#[test]
fn data_go_there_and_back_in_every_dialect() {
    for (structured, extended) in [(false, false), (true, false), (true, true)] {
        let (mut end, mut disk) = session(structured, extended);
        let none = CommandFlags::empty();
        let write = end.client.request(Command::Write, none, 4096, 3);
        end.client.output().extend(b"abc");
        end.meet(&mut disk);
        let read = end.client.request(Command::Read, none, 4095, 5);
        end.meet(&mut disk);
        let done = |cookie| ClientEvent::Reply { cookie, reply: Reply::Done(Ok(())) };
        assert_eq!(end.events, [done(write), done(read)]);
        assert_eq!(&end.data[..5], b"\0abc\0");
        assert_eq!(end.client.outstanding(), 0);
    }
}

#[test]
fn zeros_do_not_travel() {
    let (mut end, mut disk) = session(true, true);
    let cookie = end.client.request(Command::Read, CommandFlags::empty(), 0, 8192);
    end.meet(&mut disk);
    let reply = |reply| ClientEvent::Reply { cookie, reply };
    let zeros = Reply::Zeros { at: 0, length: 8192 };
    assert_eq!(end.events, [reply(zeros), reply(Reply::Done(Ok(())))]);
}

#[test]
fn status_and_refusals() {
    for extended in [false, true] {
        let (mut end, mut disk) = session(true, extended);
        assert!(end.client.has_status());
        let cookie = end.client.request(Command::BlockStatus, CommandFlags::empty(), 0, 8192);
        let late = end.client.request(Command::Read, CommandFlags::empty(), 8192, 1);
        end.meet(&mut disk);
        let extents = vec![Extent { length: 8192, hole: false, zero: false }];
        let expected = [
            ClientEvent::Reply { cookie, reply: Reply::Extents(extents) },
            ClientEvent::Reply { cookie, reply: Reply::Done(Ok(())) },
            ClientEvent::Reply { cookie: late, reply: Reply::Done(Err(Errno::INVAL)) },
        ];
        assert_eq!(end.events, expected);
    }
}

#[test]
fn a_list_ends_the_session() {
    let mut disk = Disk::new(ServerOptions::new(Export::new("disk", 1)));
    let mut end = End::new(Handshake { list: true, ..Handshake::new("") });
    end.meet(&mut disk);
    let listed = ClientEvent::Listed { name: "disk".into(), description: String::new() };
    assert_eq!(end.events, [listed, ClientEvent::Ended]);
}

#[test]
fn a_missing_export_is_named() {
    let mut disk = Disk::new(ServerOptions::new(Export::new("disk", 1)));
    let mut end = End::new(Handshake::new("other"));
    for _ in 0..4 {
        disk.unread.append(end.client.output());
        disk.run();
        end.unread.append(disk.server.output());
        if let Err(error) = end.run() {
            assert!(error.to_string().contains("\"other\""), "{error}");
            return;
        }
    }
    panic!("the server has no such export");
}

/// A chunk of a server that lies.
fn chunk(end: &mut End, cookie: u64, kind: u16, flags: u16, data: &[u8]) {
    let length = data.len() as u32;
    end.unread.extend(CHUNK_MAGIC.to_be_bytes());
    end.unread.extend(flags.to_be_bytes());
    end.unread.extend(kind.to_be_bytes());
    end.unread.extend(cookie.to_be_bytes());
    end.unread.extend(length.to_be_bytes());
    end.unread.extend(data);
}

#[test]
fn a_server_that_lies_ends_the_session() {
    use crate::wire::chunk::{BLOCK_STATUS, DONE, NONE, OFFSET_DATA, OFFSET_HOLE};
    let data = |offset: u64, count: usize| {
        let mut data = offset.to_be_bytes().to_vec();
        data.resize(8 + count, 1);
        data
    };
    let wrong: [(u16, u16, Vec<u8>); 6] = [
        (OFFSET_DATA, DONE, data(4096, 4)),
        (OFFSET_DATA, DONE, data(510, 4)),
        (OFFSET_DATA, DONE, data(512, 3)),
        (OFFSET_HOLE, DONE, data(512, 4)),
        (NONE, 0, vec![]),
        (BLOCK_STATUS, DONE, vec![0; 12]),
    ];
    for (kind, flags, data) in wrong {
        let (mut end, _) = session(true, false);
        let cookie = end.client.request(Command::Read, CommandFlags::empty(), 512, 4);
        chunk(&mut end, cookie, kind, flags, &data);
        assert!(end.run().is_err(), "kind {kind}");
        assert_eq!(end.client.wants(), Want::Nothing);
    }
    let (mut end, _) = session(true, false);
    chunk(&mut end, 99, NONE, DONE, &[]);
    assert_eq!(end.run(), Err(ProtocolError::Cookie(99)));
}
