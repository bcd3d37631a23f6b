//! The server of `quipu qpip pingpong`: everything goes back to where it came from.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener as SocketListener, TcpStream, UdpSocket};
use std::process::ExitCode;

use quipu::qpip::{Adapter, TcpChange, TcpListener, TcpQueuePair, UdpQueuePair};
use quipu::{
    Access, Completion, CompletionQueue, Error, MemoryRegion, ProtectionDomain, Request, WcExtra,
    WcStatus,
};

use super::pingpong::Options;
use super::{describe, failed};
use crate::cmd::failure::Failure;

/// Messages that are under way to and fro, and their greatest length.
const PLACES: usize = 16;
const LEN: usize = 65_536;
/// In the number of a send.
const SEND: u64 = 1 << 32;

/// Serves until the process is ended.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.socket {
        return sockets(options.port).map_err(|error| Failure::new("the socket", error, ""));
    }
    let adapter = options.link.open_until_signal()?;
    let mut server = Server::new(&adapter, options)?;
    println!("{}", describe(&adapter)?);
    println!("sending back what comes to port {}; Ctrl-C ends it", options.port);
    let outcome = server.run(options.wait).map_err(failed);
    super::unless_gone(&adapter, outcome.map(|()| ExitCode::SUCCESS))
}

struct Server {
    adapter: Adapter,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    listener: TcpListener,
    udp: (UdpQueuePair, MemoryRegion),
    /// The one client of TCP, or who is there for the next.
    tcp: (TcpQueuePair, MemoryRegion),
}

/// Memory for all messages of a queue pair.
fn memory(pd: &ProtectionDomain) -> Result<MemoryRegion, Error> {
    pd.register(PLACES * LEN, Access::LOCAL_WRITE)
}

fn idle(
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
) -> Result<(TcpQueuePair, MemoryRegion), Error> {
    let (qp, memory) = (pd.queue_pair(cq, cq).build_tcp()?, memory(pd)?);
    for place in 0..PLACES {
        qp.post_recv(place as u64, &[memory.sge(place * LEN, LEN)?])?;
    }
    Ok((qp, memory))
}

impl Server {
    fn new(adapter: &Adapter, options: &Options) -> Result<Self, Failure> {
        let pd = adapter.protection_domain().map_err(failed)?;
        let cq = adapter.completion_queue(8 * PLACES as u32).map_err(failed)?;
        let taken = |error| {
            let what = format!("cannot listen at port {}", options.port);
            Failure::new(what, error, "choose another with --port")
        };
        let listener = adapter.listen(options.port, &options.mode.settings(), 8).map_err(taken)?;
        let qp = pd.queue_pair(&cq, &cq).build_udp(options.port).map_err(taken)?;
        let udp = (qp, memory(&pd).map_err(failed)?);
        for place in 0..PLACES {
            let room = udp.1.sge(place * LEN, LEN).map_err(failed)?;
            udp.0.post_recv(place as u64, &[room]).map_err(failed)?;
        }
        let tcp = idle(&pd, &cq).map_err(failed)?;
        listener.offer(&tcp.0).map_err(failed)?;
        Ok(Self { adapter: adapter.clone(), pd, cq, listener, udp, tcp })
    }

    fn run(&mut self, wait: bool) -> Result<(), Error> {
        // Polls without completions between two looks at the events.
        let (mut fruitless, between) = (0, if wait { 1 } else { 256 });
        loop {
            if self.complete()? {
                continue;
            }
            fruitless += 1;
            if fruitless < between {
                continue;
            }
            fruitless = 0;
            match self.adapter.poll_event()? {
                Some(event) => {
                    // What came before the event has completed by now, perhaps since the last look.
                    while self.complete()? {}
                    if event.qp_num == self.tcp.0.number() {
                        self.happened(event.change)?;
                    }
                }
                None if wait => self.adapter.wait(&self.cq)?,
                None => {}
            }
        }
    }

    /// Handles what is in the completion queue; whether there was anything.
    fn complete(&mut self) -> Result<bool, Error> {
        let mut out = [Completion::default(); PLACES];
        let found = self.cq.poll(&mut out)?;
        out[..found].iter().try_for_each(|completion| self.completed(completion))?;
        Ok(found > 0)
    }

    fn happened(&mut self, change: TcpChange) -> Result<(), Error> {
        match change {
            TcpChange::Connected => Ok(()),
            TcpChange::PeerClosed => self.tcp.0.close(),
            TcpChange::Closed | TcpChange::Failed(_) | TcpChange::Aborted => {
                self.tcp = idle(&self.pd, &self.cq)?;
                self.listener.offer(&self.tcp.0)
            }
        }
    }

    fn completed(&mut self, completion: &Completion) -> Result<(), Error> {
        // How a connection ends the events say; datagrams that cannot be sent are lost.
        let (number, len) = (completion.wr_id, completion.byte_len as usize);
        let (sent, ok) = (number & SEND != 0, completion.status == WcStatus::Success);
        let place = (number & !SEND) as usize * LEN;
        if completion.qp_num == self.udp.0.number() {
            let (qp, memory) = &self.udp;
            return match completion.extra {
                WcExtra::From(from) if ok && !sent && len > 0 => {
                    let message = [memory.sge(place, len)?];
                    qp.send_to(&Request::send(&message).id(number | SEND), SocketAddr::from(from))
                }
                _ => qp.post_recv(number & !SEND, &[memory.sge(place, LEN)?]),
            };
        }
        let (qp, memory) = &self.tcp;
        if completion.qp_num != qp.number() || !ok {
            return Ok(());
        }
        if sent || len == 0 {
            qp.post_recv(number & !SEND, &[memory.sge(place, LEN)?])
        } else {
            let message = [memory.sge(place, len)?];
            // It may have been reset meanwhile, of which an event tells.
            let _ = qp.post_send(&Request::send(&message).id(number | SEND));
            Ok(())
        }
    }
}

/// The same with sockets of the kernel.
fn sockets(port: u16) -> std::io::Result<ExitCode> {
    let udp = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| UdpSocket::bind(("0.0.0.0", port)))?;
    let tcp = SocketListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| SocketListener::bind(("0.0.0.0", port)))?;
    println!("sending back what comes to port {port}; Ctrl-C ends it");
    std::thread::spawn(move || {
        let mut buffer = vec![0; LEN];
        loop {
            // Whoever is gone is gone; others are still there.
            if let Ok((len, from)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(&buffer[..len], from);
            }
        }
    });
    loop {
        let (stream, _) = tcp.accept()?;
        std::thread::spawn(move || send_back(stream));
    }
}

fn send_back(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; LEN];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            len => stream.write_all(&buffer[..len])?,
        }
    }
}
