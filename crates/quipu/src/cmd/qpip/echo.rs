//! The server of `quipu qpip pingpong`: everything goes back to where it came from.

use std::io::{self, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener as SocketListener, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use quipu::qpip::{Adapter, Event, TcpChange, TcpListener, TcpQueuePair, UdpQueuePair};
use quipu::{
    Access, Completion, CompletionQueue, Error, MemoryRegion, ProtectionDomain, Request, WcExtra,
    WcStatus,
};

use super::pingpong::Options;
use super::{Leave, Signal, describe, failed};
use crate::cmd::failure::Failure;

/// Messages that are under way to and fro, and their greatest length.
const PLACES: usize = 16;
const LEN: usize = 65_536;
/// Queue pairs for clients of TCP: one of them is there for the next.
const CLIENTS: usize = 8;
/// In the number of a send.
const SEND: u64 = 1 << 32;
/// Below are the ports that services are given (RFC 6335), or choose: systems give clients higher ones (Linux
/// from this one on, most others from 49152).
const FIRST_OF_CLIENTS: u16 = 32_768;

/// Whether a datagram that came to `port` is answered. None from nowhere (RFC 768: a source port of 0 wants
/// no answer), and none that another service may have sent, which would answer the answer, for ever.
fn is_answered(from: SocketAddr, port: u16) -> bool {
    from.port() >= FIRST_OF_CLIENTS && from.port() != port
}

/// Serves until the process is ended.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.socket {
        let _ends = Leave::prepare(Signal::Ends)?;
        return sockets(options.port).map_err(|error| Failure::new("the socket", error, ""));
    }
    let adapter = options.link.open_until_signal(Signal::Ends)?;
    let mut server = Server::new(&adapter, options)?;
    println!("{}", describe(&adapter)?);
    println!("returning everything sent to port {}; Ctrl-C ends it", server.listener.port());
    let outcome = server.run(options.wait).map_err(failed);
    super::unless_gone(&adapter, outcome.map(|()| ExitCode::SUCCESS))
}

/// A queue pair that has a client of TCP, or waits for one.
struct Client {
    qp: TcpQueuePair,
    memory: MemoryRegion,
    /// When it was heard of last, by the server's clock; none while nobody has connected.
    heard: Option<u64>,
}

struct Server {
    adapter: Adapter,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    listener: TcpListener,
    udp: (UdpQueuePair, MemoryRegion),
    clients: Vec<Client>,
    /// Counts what was heard of clients, so that the one is known that is silent for longest.
    clock: u64,
}

/// Memory for all messages of a queue pair.
fn memory(pd: &ProtectionDomain) -> Result<MemoryRegion, Error> {
    pd.register(PLACES * LEN, Access::LOCAL_WRITE)
}

impl Client {
    fn idle(pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<Self, Error> {
        let (qp, memory) = (pd.queue_pair(cq, cq).build_tcp()?, memory(pd)?);
        for place in 0..PLACES {
            qp.post_recv(place as u64, &[memory.sge(place * LEN, LEN)?])?;
        }
        Ok(Self { qp, memory, heard: None })
    }

    /// Sends back what has come, and receives where that was.
    fn completed(&self, completion: &Completion) -> Result<(), Error> {
        let (number, len) = (completion.wr_id, completion.byte_len as usize);
        let place = (number & !SEND) as usize * LEN;
        // It may have been reset meanwhile, and takes nothing more then; an event tells of it.
        let _ = if number & SEND != 0 || len == 0 {
            self.qp.post_recv(number & !SEND, &[self.memory.sge(place, LEN)?])
        } else {
            let message = [self.memory.sge(place, len)?];
            self.qp.post_send(&Request::send(&message).id(number | SEND))
        };
        Ok(())
    }
}

impl Server {
    fn new(adapter: &Adapter, options: &Options) -> Result<Self, Failure> {
        let pd = adapter.protection_domain().map_err(failed)?;
        let cq = adapter.completion_queue(((CLIENTS + 1) * PLACES) as u32).map_err(failed)?;
        let taken = |port| {
            let what = format!("cannot listen on port {port}");
            move |error| Failure::new(what, error, "choose another port with --port")
        };
        let (port, settings) = (options.port, options.mode.settings());
        let listener = adapter.listen(port, &settings, 8).map_err(taken(port))?;
        // One port for both, whoever has chosen it.
        let port = listener.port();
        let qp = pd.queue_pair(&cq, &cq).build_udp(port).map_err(taken(port))?;
        let udp = (qp, memory(&pd).map_err(failed)?);
        for place in 0..PLACES {
            let room = udp.1.sge(place * LEN, LEN).map_err(failed)?;
            udp.0.post_recv(place as u64, &[room]).map_err(failed)?;
        }
        let (adapter, clients) = (adapter.clone(), Vec::new());
        let mut server = Self { adapter, pd, cq, listener, udp, clients, clock: 0 };
        (0..CLIENTS).try_for_each(|_| server.add()).map_err(failed)?;
        Ok(server)
    }

    /// Waits for one more client.
    fn add(&mut self) -> Result<(), Error> {
        let client = Client::idle(&self.pd, &self.cq)?;
        self.listener.offer(&client.qp)?;
        self.clients.push(client);
        Ok(())
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
            if !self.look()? && wait {
                self.adapter.wait(&self.cq)?;
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

    /// Handles an event; whether there was one.
    fn look(&mut self) -> Result<bool, Error> {
        let Some(event) = self.adapter.poll_event()? else { return Ok(false) };
        // What came before the event has completed by now, perhaps since the last look.
        while self.complete()? {}
        self.happened(event)?;
        Ok(true)
    }

    fn happened(&mut self, event: Event) -> Result<(), Error> {
        let Some(at) = self.clients.iter().position(|it| it.qp.number() == event.qp_num) else {
            return Ok(());
        };
        match event.change {
            TcpChange::Connected => {
                self.clock += 1;
                self.clients[at].heard = Some(self.clock);
                self.make_room();
            }
            TcpChange::PeerClosed => {
                // It may have been reset since.
                let _ = self.clients[at].qp.close();
            }
            TcpChange::Closed | TcpChange::Failed(_) | TcpChange::Aborted => {
                self.clients.swap_remove(at);
                self.add()?;
            }
        }
        Ok(())
    }

    /// When nobody is left for the next client, the one goes that is silent for longest.
    fn make_room(&self) {
        if self.clients.iter().all(|it| it.heard.is_some())
            && let Some(longest) = self.clients.iter().min_by_key(|it| it.heard)
        {
            // Its end is an event.
            let _ = longest.qp.abort();
        }
    }

    fn completed(&mut self, completion: &Completion) -> Result<(), Error> {
        if completion.qp_num == self.udp.0.number() {
            return self.datagram(completion);
        }
        let client = self.clients.iter_mut().find(|it| it.qp.number() == completion.qp_num);
        // How a connection ends the events say.
        match client.filter(|_| completion.status == WcStatus::Success) {
            None => Ok(()),
            Some(client) => {
                self.clock += 1;
                client.heard = client.heard.map(|_| self.clock);
                client.completed(completion)
            }
        }
    }

    /// Sends a datagram back; one that cannot be sent is lost.
    fn datagram(&mut self, completion: &Completion) -> Result<(), Error> {
        let (number, len) = (completion.wr_id, completion.byte_len as usize);
        let came = completion.status == WcStatus::Success && number & SEND == 0 && len > 0;
        let place = (number & !SEND) as usize * LEN;
        let (qp, memory) = &self.udp;
        if let WcExtra::From(from) = completion.extra
            && let from = SocketAddr::from(from)
            && came
            && is_answered(from, qp.port())
        {
            let message = [memory.sge(place, len)?];
            if qp.send_to(&Request::send(&message).id(number | SEND), from).is_ok() {
                return Ok(());
            }
        }
        qp.post_recv(number & !SEND, &[memory.sge(place, LEN)?])
    }
}

/// A socket of TCP and one of UDP at the same port.
fn both_at(port: u16) -> io::Result<(UdpSocket, SocketListener)> {
    let udp = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| UdpSocket::bind(("0.0.0.0", port)))?;
    let port = udp.local_addr()?.port();
    let tcp = SocketListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| SocketListener::bind(("0.0.0.0", port)))?;
    Ok((udp, tcp))
}

/// The same with sockets of the kernel.
fn sockets(port: u16) -> io::Result<ExitCode> {
    // A port that the kernel chooses for UDP may be another program's for TCP.
    let tries = if port == 0 { 16 } else { 1 };
    let (udp, tcp) =
        (1..tries).find_map(|_| both_at(port).ok()).map_or_else(|| both_at(port), Ok)?;
    let port = udp.local_addr()?.port();
    println!("returning everything sent to port {port}; Ctrl-C ends it");
    thread::spawn(move || {
        let mut buffer = vec![0; LEN];
        loop {
            // Anyone who is gone is gone; others are still there.
            if let Ok((len, from)) = udp.recv_from(&mut buffer)
                && is_answered(from, port)
            {
                let _ = udp.send_to(&buffer[..len], from);
            }
        }
    });
    loop {
        match tcp.accept() {
            // Without room for a thread the connection is closed.
            Ok((stream, _)) => drop(thread::Builder::new().spawn(move || send_back(stream))),
            // It was reset before it was taken, or there are too many now.
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn send_back(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; LEN];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            len => stream.write_all(&buffer[..len])?,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cmd::qpip::tests::adapter;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// Runs a server while `clients` does what it does.
    fn served(words: &[&str], clients: impl FnOnce(&Adapter, SocketAddr) + Send) {
        let options = Line::try_parse_from([&["pingpong"], words].concat()).unwrap().options;
        let (here, there) = (adapter(), adapter());
        let mut server = Server::new(&there, &options).unwrap();
        let to = SocketAddr::new(there.info().unwrap().addresses[0], server.listener.port());
        assert_eq!(server.udp.0.port(), to.port());
        thread::scope(|scope| {
            let client = scope.spawn(|| clients(&here, to));
            while !client.is_finished() {
                if !server.complete().unwrap() && !server.look().unwrap() {
                    server.adapter.wait_timeout(&server.cq, Duration::from_millis(5)).unwrap();
                }
            }
            client.join().unwrap();
        });
    }

    /// What comes within a time.
    fn next(cq: &CompletionQueue, adapter: &Adapter, within: Duration) -> Option<Completion> {
        let (mut out, begun) = ([Completion::default()], std::time::Instant::now());
        while cq.poll(&mut out).unwrap() == 0 {
            if begun.elapsed() > within {
                return None;
            }
            adapter.wait_timeout(cq, Duration::from_millis(5)).unwrap();
        }
        Some(out[0])
    }

    #[test]
    fn services_and_nobody_are_not_answered() {
        let answers = |port, own| is_answered((Ipv6Addr::LOCALHOST, port).into(), own);
        for service in [0, 7, 13, 17, 19, 53, 1023, 5002, 5003, 32_767] {
            assert!(!answers(service, 5002), "{service}");
        }
        assert!(answers(32_768, 5002) && answers(u16::MAX, 5002));
        assert!(!answers(40_000, 40_000), "another server of this kind");
    }

    #[test]
    fn a_datagram_comes_back_unless_a_server_of_this_kind_may_have_sent_it() {
        served(&["--port", "0"], |adapter, to| {
            let (pd, cq) =
                (adapter.protection_domain().unwrap(), adapter.completion_queue(16).unwrap());
            let memory = pd.register(16, Access::LOCAL_WRITE).unwrap();
            for (from, long, comes) in [(to.port(), 1, false), (7, 1, false), (0, 20, true)] {
                let qp = pd.queue_pair(&cq, &cq).build_udp(from).unwrap();
                qp.post_recv(1, &[memory.sge(8, 8).unwrap()]).unwrap();
                qp.send_to(&Request::send(&[memory.sge(0, 8).unwrap()]).id(2), to).unwrap();
                let sent = next(&cq, adapter, Duration::from_secs(20)).unwrap();
                assert_eq!((sent.wr_id, sent.status), (2, WcStatus::Success));
                let back = next(&cq, adapter, Duration::from_secs(long));
                assert_eq!(back.map(|it| it.byte_len), comes.then_some(8), "from port {from}");
            }
        });
    }

    #[test]
    fn clients_that_are_silent_make_room_for_those_that_come() {
        served(&["--port", "0"], |adapter, to| {
            let (pd, cq) =
                (adapter.protection_domain().unwrap(), adapter.completion_queue(64).unwrap());
            let memory = pd.register(16, Access::LOCAL_WRITE).unwrap();
            let settings = super::super::ModeOption::Stream.settings();
            let connect = || {
                let qp = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
                qp.post_recv(1, &[memory.sge(8, 8).unwrap()]).unwrap();
                qp.connect(to, &settings).unwrap();
                qp
            };
            let ask = |qp: &TcpQueuePair| {
                qp.post_send(&Request::send(&[memory.sge(0, 8).unwrap()]).id(2)).unwrap();
                let done = [(); 2].map(|()| next(&cq, adapter, Duration::from_secs(20)).unwrap());
                assert!(done.iter().all(|it| it.status == WcStatus::Success), "{done:?}");
                qp.post_recv(1, &[memory.sge(8, 8).unwrap()]).unwrap();
            };
            let busy = connect();
            ask(&busy);
            let mut silent: Vec<_> = (0..CLIENTS - 2).map(|_| connect()).collect();
            ask(&busy);
            // The first of them goes, and not who asks.
            let last = connect();
            assert!(silent[0].wait_closed().is_err());
            let flushed = next(&cq, adapter, Duration::from_secs(20)).unwrap();
            assert_eq!(flushed.status, WcStatus::WrFlushErr);
            drop(silent.remove(0));
            ask(&last);
            ask(&busy);
        });
    }
}
