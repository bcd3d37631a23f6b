//! Both ends, with a host whose memory has keys, and peers that do not keep to the rules.

use std::collections::HashMap;

use super::*;
use crate::wire::{ALLOCATION_ID, Command, CommandFlags, Errno, Request};
use crate::{Export, Extent, Handshake, ServerOptions};

const TERMS: Terms = Terms { credits: 4, inline: 512 };
const SIZE: usize = 1 << 20;

/// Two ends that have agreed, a disk, and the client's registered memory.
struct Pair {
    client: MessageClient,
    server: MessageServer,
    disk: Vec<u8>,
    regions: HashMap<u32, Vec<u8>>,
}

impl Pair {
    fn new() -> Self {
        let options = ServerOptions::new(Export::new("disk", SIZE as u64));
        let mut server = MessageServer::new(options, TERMS, TERMS);
        let mut client = MessageClient::new(Handshake::new("disk"), TERMS, TERMS);
        let mut started = false;
        while !started {
            let to_client = std::mem::take(server.output());
            // Messages are cut anywhere.
            for piece in to_client.chunks(7) {
                started |= matches!(client.input(piece), Ok(MessageEvent::Started(_)));
            }
            let to_server = std::mem::take(client.output());
            for piece in to_server.chunks(11) {
                server.input(piece).unwrap();
            }
        }
        Self { client, server, disk: vec![0; SIZE], regions: HashMap::new() }
    }

    /// Carries a request out as a host does; the reply.
    fn serve(&mut self, message: &[u8]) -> Vec<u8> {
        let job = match self.server.input(message).unwrap() {
            ServerStep::Execute(job) => job,
            ServerStep::Refuse(cookie, errno) => return simple_reply(cookie, Err(errno)).into(),
            other => panic!("{other:?}"),
        };
        let Request { cookie, offset, length, .. } = job.request;
        let range = offset as usize..(offset + length) as usize;
        let mut reply = simple_reply(cookie, Ok(())).to_vec();
        match job.command {
            Command::Write if job.is_moved => {
                let region = &self.regions[&job.memory.key];
                let at = job.memory.address as usize;
                self.disk[range].copy_from_slice(&region[at..at + length as usize]);
            }
            Command::Write => self.disk[range].copy_from_slice(&message[MESSAGE_HEADER..]),
            Command::Read if job.is_moved => {
                let region = self.regions.get_mut(&job.memory.key).unwrap();
                let at = job.memory.address as usize;
                region[at..at + length as usize].copy_from_slice(&self.disk[range]);
            }
            Command::Read => reply.extend(&self.disk[range]),
            Command::BlockStatus => {
                let extent = Extent { length, hole: false, zero: false };
                reply = self.server.reply_extents(&job.request, &[extent]);
            }
            _ => {}
        }
        reply
    }

    fn ask(
        &mut self,
        command: Command,
        range: (u64, u64),
        key: Option<u32>,
        data: &[u8],
    ) -> Completed {
        let memory = key.map(|key| ClientMemory { key, address: 16 });
        let ticket = self.client.request(command, CommandFlags::empty(), range, memory).unwrap();
        let reply = self.serve(&[&ticket.header[..], data].concat());
        let Ok(MessageEvent::Completed(done)) = self.client.input(&reply) else { panic!() };
        assert_eq!(done.cookie, ticket.cookie);
        if command == Command::Read && key.is_none() && done.result.is_ok() {
            assert_eq!(reply[done.data.clone()], self.disk[range.0 as usize..][..range.1 as usize]);
        }
        done
    }
}

#[test]
fn short_data_lie_in_messages_and_long_data_in_memory_with_a_key() {
    let mut pair = Pair::new();
    pair.regions.insert(9, vec![5; 8192]);
    assert!(pair.ask(Command::Write, (0, 512), None, &[3; 512]).revoke.is_none());
    assert_eq!(pair.ask(Command::Write, (4096, 4096), Some(9), &[]).revoke, Some(9));
    assert_eq!((pair.disk[511], pair.disk[512], pair.disk[4096]), (3, 0, 5));
    pair.ask(Command::Read, (256, 512), None, &[]);
    let done = pair.ask(Command::Read, (0, 1024), Some(9), &[]);
    assert_eq!((done.result, done.revoke), (Ok(()), Some(9)));
    assert_eq!((pair.regions[&9][16], pair.regions[&9][16 + 512]), (3, 0));
    let done = pair.ask(Command::BlockStatus, (0, 1 << 16), None, &[]);
    assert_eq!(done.extents, [Extent { length: 1 << 16, hole: false, zero: false }]);
    pair.ask(Command::Flush, (0, 0), None, &[]);
    let outside = pair.ask(Command::Read, (SIZE as u64, 1), None, &[]);
    assert_eq!(outside.result, Err(Errno::INVAL));
    assert_eq!(pair.client.outstanding(), 0);
    assert_eq!(pair.server.input(&pair.client.disconnect()), Ok(ServerStep::Ended));
}

#[test]
fn no_more_requests_are_made_than_there_are_receives() {
    let mut pair = Pair::new();
    let flags = CommandFlags::empty();
    let make = |client: &mut MessageClient| client.request(Command::Flush, flags, (0, 0), None);
    let tickets: Vec<_> = (0..4).map(|_| make(&mut pair.client).unwrap()).collect();
    assert_eq!((pair.client.credits(), make(&mut pair.client)), (0, None));
    // Replies in another order.
    for ticket in tickets.iter().rev() {
        let reply = pair.serve(&ticket.header);
        pair.client.input(&reply).unwrap();
    }
    assert!(make(&mut pair.client).is_some());
}

#[test]
fn a_request_without_memory_for_its_data_is_not_made() {
    let mut client = Pair::new().client;
    let (flags, memory) = (CommandFlags::empty(), Some(ClientMemory::default()));
    assert_eq!(client.request(Command::Read, flags, (0, 4096), None), None);
    assert_eq!(client.request(Command::Read, flags, (0, 16), memory), None);
    assert_eq!(client.request(Command::Write, flags, (0, 1 << 21), memory), None);
    assert_eq!(client.outstanding(), 0);
}

fn request(kind: u16, length: u64, memory: ClientMemory, data: usize) -> Vec<u8> {
    let flags = CommandFlags::empty();
    let request = Request { flags, kind, cookie: 7, offset: 0, length };
    let mut bytes = Vec::new();
    request.encode(false, &mut bytes);
    bytes.resize(MESSAGE_HEADER, 0);
    memory.encode(&mut bytes[28..]);
    bytes.resize(MESSAGE_HEADER + data, 1);
    bytes
}

#[test]
fn a_client_that_lies_about_lengths_ends_its_session() {
    let none = ClientMemory::default();
    for message in [
        request(1, 512, none, 511),
        request(1, 513, none, 513),
        request(0, 512, none, 1),
        request(3, 0, none, 0)[..39].to_vec(),
        vec![0; MESSAGE_HEADER],
        Vec::new(),
    ] {
        assert!(Pair::new().server.input(&message).is_err(), "{message:?}");
    }
    let far = ClientMemory { key: 1, address: u64::MAX - 4 };
    let refused = |message: &[u8]| Pair::new().server.input(message);
    assert_eq!(refused(&request(1, 1024, far, 0)), Ok(ServerStep::Refuse(7, Errno::INVAL)));
    let long = request(0, u64::from(u32::MAX), none, 0);
    assert_eq!(refused(&long), Ok(ServerStep::Refuse(7, Errno::OVERFLOW)));
    assert_eq!(refused(&request(77, 0, none, 0)), Ok(ServerStep::Refuse(7, Errno::INVAL)));
}

#[test]
fn a_server_that_lies_ends_its_session() {
    let fresh = || {
        let mut client = Pair::new().client;
        let ticket = client.request(Command::Read, CommandFlags::empty(), (0, 64), None).unwrap();
        (client, ticket.cookie)
    };
    let (mut client, cookie) = fresh();
    assert!(client.input(&simple_reply(cookie + 1, Ok(()))).is_err());
    assert!(client.input(&simple_reply(cookie | 0xffff, Ok(()))).is_err());
    // Data are missing, or there are too many.
    assert!(client.input(&simple_reply(cookie, Ok(()))).is_err());
    let long = [&simple_reply(cookie, Ok(()))[..], &[0; 65]].concat();
    assert!(client.input(&long).is_err() && client.input(&long[..15]).is_err());
    assert!(client.input(&[1; 16]).is_err());
    let whole = [&simple_reply(cookie, Ok(()))[..], &[0; 64]].concat();
    assert!(client.input(&whole).is_ok());
    assert_eq!(client.input(&whole), Err(ProtocolError::Cookie(cookie)));
}

#[test]
fn wrong_extents_end_the_session() {
    for extents in [&[][..], &[0; 8], &[1, 0], &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]] {
        let mut client = Pair::new().client;
        let (flags, range) = (CommandFlags::empty(), (0, 64));
        let ticket = client.request(Command::BlockStatus, flags, range, None).unwrap();
        let message = [&simple_reply(ticket.cookie, Ok(()))[..], extents].concat();
        assert!(client.input(&message).is_err(), "{extents:?}");
    }
    assert_eq!(ALLOCATION_ID, 1);
}

#[test]
fn a_client_that_never_ends_its_option_is_bounded() {
    let options = ServerOptions::new(Export::new("", 1));
    let mut server = MessageServer::new(options, TERMS, TERMS);
    let mut ended = false;
    for _ in 0..1000 {
        ended |= server.input(&[0; 512]).is_err();
    }
    assert!(ended);
}

#[test]
fn terms_are_checked() {
    assert_eq!(Terms::from_bytes(&[TERMS.to_bytes().as_slice(), &[0; 44]].concat()), Ok(TERMS));
    for (at, value) in [(0, 0), (5, 9), (7, 0), (6, 2), (10, 0), (9, 2)] {
        let mut bytes = TERMS.to_bytes();
        bytes[at] = value;
        assert!(Terms::from_bytes(&bytes).is_err(), "{bytes:?}");
    }
    assert!(Terms::from_bytes(&[]).is_err());
}
