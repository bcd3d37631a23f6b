//! The server against bytes of a client.

use super::*;
use crate::wire::{option, reply};

/// A server that has got its client's flags, with nothing in its output.
fn negotiating(options: ServerOptions) -> Server {
    let mut server = Server::new(options);
    assert_eq!(server.output().len(), 18);
    server.output().clear();
    assert_eq!(server.input(&3_u32.to_be_bytes()), Ok(None));
    server
}

fn option(server: &mut Server, number: u32, data: &[u8]) -> Option<ServerEvent> {
    let mut header = OPTION_MAGIC.to_be_bytes().to_vec();
    header.extend(number.to_be_bytes());
    header.extend((data.len() as u32).to_be_bytes());
    let event = server.input(&header).unwrap();
    if data.is_empty() { event } else { server.input(data).unwrap() }
}

/// The kinds of the option replies in the output, which is taken away.
fn kinds(server: &mut Server) -> Vec<u32> {
    let out = std::mem::take(server.output());
    let (mut at, mut kinds) = (0, Vec::new());
    while at < out.len() {
        kinds.push(u32_at(&out, at + 12));
        at += 20 + u32_at(&out, at + 16) as usize;
    }
    kinds
}

fn go(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend([0, 0]);
    data
}

/// A server in transmission.
fn started(structured: bool) -> Server {
    let mut server = negotiating(ServerOptions::new(Export::new("disk", 1 << 20)));
    if structured {
        option(&mut server, option::STRUCTURED_REPLY, &[]);
    }
    assert_eq!(option(&mut server, option::GO, &go("disk")), Some(ServerEvent::Started(0)));
    server.output().clear();
    server
}

fn ask(server: &mut Server, command: Command, offset: u64, length: u64) -> Option<ServerEvent> {
    let flags = CommandFlags::empty();
    let request = Request { flags, kind: command.number(), cookie: 7, offset, length };
    let mut bytes = Vec::new();
    request.encode(server.is_extended(), &mut bytes);
    server.input(&bytes).unwrap()
}

#[test]
fn options_are_answered() {
    let mut server = negotiating(ServerOptions::new(Export::new("disk", 512)));
    option(&mut server, 99, b"x");
    assert_eq!(kinds(&mut server), [reply::ERR_UNSUP]);
    option(&mut server, option::LIST, &[]);
    assert_eq!(kinds(&mut server), [reply::SERVER, reply::ACK]);
    option(&mut server, option::INFO, &go("none"));
    assert_eq!(kinds(&mut server), [reply::ERR_UNKNOWN]);
    option(&mut server, option::GO, &[0, 0, 0, 9, b'x']);
    assert_eq!(kinds(&mut server), [reply::ERR_INVALID]);
    option(&mut server, option::STARTTLS, &[]);
    assert_eq!(kinds(&mut server), [reply::ERR_POLICY]);
    assert_eq!(option(&mut server, option::GO, &go("")), Some(ServerEvent::Started(0)));
    assert_eq!(kinds(&mut server), [reply::INFO, reply::ACK]);
}

#[test]
fn without_tls_nothing_goes_on_where_it_is_required() {
    let mut options = ServerOptions::new(Export::new("", 512));
    options.tls_required = true;
    let mut server = negotiating(options);
    option(&mut server, option::GO, &go(""));
    assert_eq!(kinds(&mut server), [reply::ERR_TLS_REQD]);
    assert_eq!(option(&mut server, option::STARTTLS, &[]), Some(ServerEvent::StartTls));
    server.tls_started();
    server.output().clear();
    assert_eq!(option(&mut server, option::GO, &go("")), Some(ServerEvent::Started(0)));
}

#[test]
fn a_write_is_handed_over_after_its_payload() {
    let mut server = started(false);
    assert_eq!(ask(&mut server, Command::Write, 0, 4096), None);
    assert_eq!(server.wants(), Want::Payload { cookie: 7, at: 0, length: 4096 });
    let Some(ServerEvent::Request(Command::Write, request)) = server.payload_done() else {
        panic!()
    };
    server.reply_done(&request);
    assert_eq!(server.output().len(), 16);
}

#[test]
fn requests_outside_of_the_export_are_refused() {
    let mut server = started(false);
    for (command, offset, length, errno) in [
        (Command::Read, 1 << 20, 1, Errno::INVAL),
        (Command::Write, u64::MAX, 2, Errno::NOSPC),
        (Command::Trim, 0, 2 << 20, Errno::NOSPC),
        (Command::BlockStatus, 0, 512, Errno::INVAL),
    ] {
        assert_eq!(ask(&mut server, command, offset, length), None);
        let out = std::mem::take(server.output());
        assert_eq!(u32_at(&out, 4), errno.0, "{command:?}");
        if command == Command::Write {
            assert_eq!(server.wants(), Want::Discard(2));
            assert_eq!(server.payload_done(), None);
        }
    }
    assert_eq!(server.wants(), Want::Bytes(28));
}

#[test]
fn a_refused_write_of_gigabytes_ends_the_session() {
    let mut server = started(false);
    ask(&mut server, Command::Write, 0, u64::from(u32::MAX));
    assert_eq!(server.wants(), Want::Nothing);
}

#[test]
fn reads_are_answered_in_chunks_if_that_was_agreed_on() {
    for structured in [false, true] {
        let mut server = started(structured);
        let event = ask(&mut server, Command::Read, 512, 512);
        let Some(ServerEvent::Request(Command::Read, request)) = event else { panic!() };
        server.reply_read(&request);
        assert_eq!(server.output().len(), if structured { 28 } else { 16 });
        assert_eq!(server.reply_zeros(&request), structured);
    }
}

#[test]
fn status_needs_its_context() {
    let mut server = negotiating(ServerOptions::new(Export::new("disk", 1 << 20)));
    let mut data = go("disk");
    data.truncate(8);
    data.extend(1_u32.to_be_bytes());
    data.extend(15_u32.to_be_bytes());
    data.extend(b"base:allocation");
    option(&mut server, option::SET_META_CONTEXT, &data);
    assert_eq!(kinds(&mut server), [reply::ERR_INVALID]);
    option(&mut server, option::EXTENDED_HEADERS, &[]);
    option(&mut server, option::SET_META_CONTEXT, &data);
    assert_eq!(kinds(&mut server), [reply::ACK, reply::META_CONTEXT, reply::ACK]);
    option(&mut server, option::GO, &go("disk"));
    let event = ask(&mut server, Command::BlockStatus, 0, 1 << 20);
    let Some(ServerEvent::Request(Command::BlockStatus, request)) = event else { panic!() };
    server.output().clear();
    let hole = Extent { length: 1 << 20, hole: true, zero: true };
    server.reply_status(&request, &[hole]).unwrap();
    assert_eq!(server.output().len(), 32 + 8 + 16);
    assert!(server.reply_status(&request, &[]).is_err());
}

#[test]
fn a_broken_client_ends_its_session() {
    let mut server = Server::new(ServerOptions::new(Export::new("", 1)));
    assert_eq!(server.input(&[0, 0, 0, 0]), Err(ProtocolError::Oldstyle));
    assert_eq!(server.wants(), Want::Nothing);
    let mut server = started(false);
    assert!(server.input(&[0; 28]).is_err());
}
