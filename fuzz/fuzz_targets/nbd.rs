//! Both ends of NBD, over a stream and in the messages of queue pairs, whose peers send what the
//! input has. The first octet chooses the end, and whether magic numbers and lengths are made likely.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_nbd::messages::{
    ClientMemory, MAX_MOVED, MESSAGE_HEADER, MessageClient, MessageEvent, MessageServer, ServerStep,
    Terms, simple_reply,
};
use quipu_nbd::wire::{EXTENDED_CHUNK_MAGIC, EXTENDED_REQUEST_MAGIC, OPTION_MAGIC, REQUEST_MAGIC};
use quipu_nbd::{
    Client, ClientEvent, Command, CommandFlags, Export, Handshake, MAX_PAYLOAD, Server, ServerEvent,
    ServerOptions, Want,
};
use shares::Shares;

static SHARES: Shares<6> = Shares::new([
    "an export",
    "a request",
    "a reply",
    "a reply's end",
    "a message's request",
    "a message's reply",
]);

const SIZE: u64 = 1 << 20;

/// The next octets, filled up with zeros; `None` at the end.
fn take(input: &mut &[u8], count: usize) -> Option<Vec<u8>> {
    let (now, later) = input.split_at(count.min(input.len()));
    *input = later;
    let mut bytes = now.to_vec();
    bytes.resize(count, 0);
    (!now.is_empty() || count == 0).then_some(bytes)
}

/// Makes a header of a client likely: magic number, command, and small numbers.
fn likely(bytes: &mut [u8]) {
    match bytes.len() {
        16 => {
            bytes[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
            let (option, is_empty) = (bytes[8] % 12, bytes[9] & 1 == 0);
            bytes[8..15].fill(0);
            bytes[11] = option;
            bytes[15] = if is_empty { 0 } else { bytes[15] & 0x1f };
        }
        28 | 32 => {
            let magic = if bytes.len() == 28 { REQUEST_MAGIC } else { EXTENDED_REQUEST_MAGIC };
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
            bytes[4..7].fill(0);
            bytes[7] &= 7;
            bytes[16..22].fill(0);
            let end = bytes.len();
            bytes[24..end - 2].fill(0);
        }
        _ => {}
    }
}

fn new_server() -> Server {
    Server::new(ServerOptions::new(Export::new("", SIZE)))
}

fn server(mut input: &[u8], repaired: bool) {
    let mut server = new_server();
    if repaired {
        let _ = server.input(&3_u32.to_be_bytes());
    }
    loop {
        let event = match server.wants() {
            Want::Bytes(count) => {
                let Some(mut bytes) = take(&mut input, count) else { return };
                if repaired {
                    likely(&mut bytes);
                }
                server.input(&bytes)
            }
            Want::Payload { length, .. } | Want::Discard(length) => {
                assert!(length <= u64::from(MAX_PAYLOAD));
                Ok(server.payload_done())
            }
            Want::Nothing => return,
        };
        match event {
            Ok(Some(ServerEvent::Started(_))) => SHARES.reach("an export"),
            Ok(Some(ServerEvent::Request(command, request))) => {
                SHARES.reach("a request");
                let moves = matches!(command, Command::Read | Command::Write);
                assert!(!moves || request.offset + request.length <= SIZE);
                match command {
                    Command::Read => server.reply_read(&request),
                    _ => server.reply_done(&request),
                }
            }
            Ok(_) => {}
            Err(_) => assert_eq!(server.wants(), Want::Nothing),
        }
        server.output().clear();
    }
}

/// A client that has agreed with a server of ours.
fn agreed() -> Client {
    let (mut client, mut server) = (Client::new(Handshake::new("")), new_server());
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    loop {
        to_client.append(server.output());
        while let Want::Bytes(count) = client.wants() {
            if to_client.len() < count {
                break;
            }
            let bytes: Vec<_> = to_client.drain(..count).collect();
            if let Ok(Some(ClientEvent::Started(_))) = client.input(&bytes) {
                return client;
            }
        }
        to_server.append(client.output());
        while let Want::Bytes(count) = server.wants() {
            if to_server.len() < count {
                break;
            }
            let bytes: Vec<_> = to_server.drain(..count).collect();
            let _ = server.input(&bytes);
        }
    }
}

fn client(mut input: &[u8], repaired: bool) {
    let mut client = if repaired { agreed() } else { Client::new(Handshake::new("")) };
    let none = CommandFlags::empty();
    let mut cookies = Vec::new();
    if repaired {
        cookies.push(client.request(Command::Read, none, 0, 4096));
        cookies.push(client.request(Command::BlockStatus, none, 0, 4096));
        cookies.push(client.request(Command::Flush, none, 0, 0));
    }
    loop {
        let outcome = match client.wants() {
            Want::Bytes(count) => {
                assert!(count <= 2 << 20);
                let Some(mut bytes) = take(&mut input, count) else { return };
                if repaired && count == 32 {
                    let cookie = cookies[usize::from(bytes[8]) % cookies.len()];
                    bytes[..4].copy_from_slice(&EXTENDED_CHUNK_MAGIC.to_be_bytes());
                    bytes[6] &= 0x80;
                    bytes[7] &= 7;
                    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
                    bytes[24..31].fill(0);
                }
                client.input(&bytes)
            }
            Want::Payload { length, at, .. } => {
                assert!(at + length <= 4096);
                client.payload_done()
            }
            Want::Discard(_) | Want::Nothing => return,
        };
        match outcome {
            Ok(Some(ClientEvent::Reply { reply: quipu_nbd::Reply::Done(_), .. })) => {
                SHARES.reach("a reply's end");
            }
            Ok(_) => SHARES.reach("a reply"),
            Err(_) => assert_eq!(client.wants(), Want::Nothing),
        }
        client.output().clear();
    }
}

const TERMS: Terms = Terms { credits: 4, inline: 512 };

/// Both ends in messages that have agreed, or that have just begun.
fn pair(agreed: bool) -> (MessageClient, MessageServer) {
    let options = ServerOptions::new(Export::new("", SIZE));
    let mut server = MessageServer::new(options, TERMS, TERMS);
    let mut client = MessageClient::new(Handshake::new(""), TERMS, TERMS);
    let mut started = !agreed;
    while !started {
        let bytes = std::mem::take(server.output());
        started = matches!(client.input(&bytes), Ok(MessageEvent::Started(_)));
        let bytes = std::mem::take(client.output());
        let _ = server.input(&bytes);
    }
    (client, server)
}

/// The next message: its length is in the first two octets.
fn message(input: &mut &[u8]) -> Option<Vec<u8>> {
    let length = take(input, 2)?;
    take(input, usize::from(u16::from_be_bytes([length[0] & 3, length[1]])))
}

fn message_server(mut input: &[u8], repaired: bool) {
    let mut server = pair(repaired).1;
    while let Some(mut bytes) = message(&mut input) {
        if repaired && bytes.len() >= MESSAGE_HEADER {
            likely(&mut bytes[..28]);
            if bytes[7] == 1 && bytes.len() > MESSAGE_HEADER {
                let length = (bytes.len() - MESSAGE_HEADER) as u32;
                bytes[24..28].copy_from_slice(&length.to_be_bytes());
            }
        }
        match server.input(&bytes) {
            Ok(ServerStep::Execute(job)) => {
                SHARES.reach("a message's request");
                let length = job.request.length;
                if matches!(job.command, Command::Read | Command::Write) {
                    assert!(job.request.offset + length <= SIZE);
                    assert!(job.memory.address.checked_add(length).is_some() || !job.is_moved);
                    let short = job.command == Command::Write && !job.is_moved;
                    assert!(!short || bytes.len() - MESSAGE_HEADER == length as usize);
                }
            }
            Ok(_) => {}
            Err(_) => return,
        }
        server.output().clear();
    }
}

fn message_client(mut input: &[u8], repaired: bool) {
    let mut client = pair(repaired).0;
    let none = CommandFlags::empty();
    let memory = Some(ClientMemory { key: 9, address: 0 });
    let mut cookies = Vec::new();
    if repaired {
        let long = MAX_MOVED.into();
        for (command, length, memory) in [
            (Command::Read, 64, None),
            (Command::Read, long, memory),
            (Command::BlockStatus, 4096, None),
            (Command::Flush, 0, None),
        ] {
            cookies.extend(client.request(command, none, (0, length), memory).map(|it| it.cookie));
        }
        assert_eq!(cookies.len(), 4);
    }
    while let Some(mut bytes) = message(&mut input) {
        if repaired && bytes.len() >= 16 {
            let cookie = cookies[usize::from(bytes[8]) % cookies.len()];
            let is_error = bytes[4] & 1 == 1;
            let result = if is_error { Err(quipu_nbd::Errno::IO) } else { Ok(()) };
            let head = simple_reply(cookie, result);
            bytes[..16].copy_from_slice(&head);
        }
        match client.input(&bytes) {
            Ok(MessageEvent::Completed(done)) => {
                SHARES.reach("a message's reply");
                assert!(done.data.end <= bytes.len());
                assert!(done.revoke.is_none() || done.revoke == Some(9));
            }
            Ok(_) => {}
            Err(_) => return,
        }
        client.output().clear();
    }
    let _ = Terms::from_bytes(input);
}

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let Some((how, rest)) = data.split_first() else { return };
    let repaired = how & 6 != 0;
    match (how & 1 == 0, how & 8 == 0) {
        (true, true) => server(rest, repaired),
        (false, true) => client(rest, repaired),
        (true, false) => message_server(rest, repaired),
        (false, false) => message_client(rest, repaired),
    }
});
