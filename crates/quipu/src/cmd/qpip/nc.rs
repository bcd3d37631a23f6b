//! `quipu qpip nc`: standard input to a peer and what the peer sends to standard output, in the manner of
//! netcat. The queue pair is the client of any server, or the server of one client.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use quipu::qpip::{Adapter, Mode, TcpChange, TcpQueuePair, TcpSettings};
use quipu::{Completion, CompletionQueue, Error, Request, WcStatus};

use super::places::Places;
use super::{Leave, LinkOptions, Signal, connect, failed, unless_gone};
use crate::cmd::failure::Failure;

/// With whom.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// Address of the server.
    #[arg(value_name = "SERVER", required_unless_present = "listen", requires = "port",
          value_parser = super::peer_address)]
    server: Option<IpAddr>,
    /// TCP port of the server.
    #[arg(value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Wait for one client on this TCP port instead (0: any free port).
    #[arg(long, short, value_name = "PORT", conflicts_with = "server")]
    listen: Option<u16>,
    /// Send nothing, and end when the peer ends: for peers that exit when their input ends.
    #[arg(long, short = 'd')]
    no_input: bool,
}

const EXAMPLES: &str = "\
Examples:
  sudo quipu qpip nc -L tap:qp0 -a 10.9.0.2/24 -l 5003 > copy     waits for one client
  nc -N 10.9.0.2 5003 < file                                      any client
  nc -l 10.9.0.1 5003 > copy                                      any server
  sudo quipu qpip nc -L tap:qp0 -a 10.9.0.2/24 10.9.0.1 5003 < file

The end of the input closes the stream in that direction only; data from the peer still arrives. The
command ends when both directions have ended.";

/// Requests that are posted at once in each direction, and their length. The receives come first.
const RECEIVES: u64 = 32;
const SENDS: u64 = 16;
const LEN: usize = 64 << 10;

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let adapter = options.link.open()?;
    unless_gone(&adapter, talk(options, &adapter))
}

fn talk(options: &Options, adapter: &Adapter) -> Result<ExitCode, Failure> {
    let end = Arc::new(End::new(adapter)?);
    let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
    match (options.server, options.port, options.listen) {
        (Some(server), Some(port), _) => {
            let to = SocketAddr::new(server, port);
            connect(&end.qp, to, &settings)?;
        }
        (_, _, listen) => {
            let port = listen.unwrap_or(0);
            let listener = adapter.listen(port, &settings, 1).map_err(|error| {
                let what = format!("cannot listen on port {port}");
                Failure::new(what, error, "choose another port with --listen")
            })?;
            listener.offer(&end.qp).map_err(failed)?;
            for address in adapter.info().map_err(failed)?.addresses {
                eprintln!("waiting at {}", SocketAddr::new(address, listener.port()));
            }
            end.qp.wait_connected().map_err(failed)?;
        }
    }
    let (leave, qp) = (Leave::prepare(Signal::Cuts)?, Arc::clone(&end));
    leave.is(move || {
        // Its end is an event.
        let _ = qp.qp.abort();
    });
    let input: Option<Input> = (!options.no_input).then(|| Box::new(io::stdin()) as Input);
    let outcome = end.exchange(adapter, input, &mut io::stdout().lock());
    if outcome.is_err() {
        // The peer is told, whatever threads are left.
        let _ = end.qp.abort();
    }
    outcome.map(|()| ExitCode::SUCCESS)
}

type Input = Box<dyn Read + Send>;

/// A queue pair with what it needs.
struct End {
    qp: TcpQueuePair,
    cq: CompletionQueue,
    places: Places,
}

impl End {
    /// An idle one, whose receives are posted.
    fn new(adapter: &Adapter) -> Result<Self, Failure> {
        let pd = adapter.protection_domain().map_err(failed)?;
        let cq = adapter.completion_queue((RECEIVES + SENDS) as u32).map_err(failed)?;
        let queues = pd.queue_pair(&cq, &cq);
        let queues = queues.send_queue(SENDS as u32, 1).recv_queue(RECEIVES as u32, 1);
        let qp = queues.build_tcp().map_err(failed)?;
        let places = Places::new(&pd, (RECEIVES + SENDS) as usize, LEN).map_err(failed)?;
        let end = Self { qp, cq, places };
        for place in 0..RECEIVES {
            end.receive(place).map_err(failed)?;
        }
        Ok(end)
    }

    fn receive(&self, place: u64) -> Result<(), Error> {
        self.qp.post_recv(place, &self.places.room(place)?)
    }

    /// Until both directions have ended; without an input its own ends with the peer's. What reads the input
    /// is a thread of its own, which nobody waits for when the connection breaks: a terminal may keep it for
    /// ever.
    fn exchange(
        self: &Arc<Self>,
        adapter: &Adapter,
        input: Option<Input>,
        output: &mut dyn Write,
    ) -> Result<(), Failure> {
        let (free, places) = channel();
        for place in RECEIVES..RECEIVES + SENDS {
            // The other end is here.
            let _ = free.send(place);
        }
        let (end, sends) = (Arc::clone(self), input.is_some());
        let unread = Arc::new(OnceLock::new());
        if let Some(input) = input {
            let unread = Arc::clone(&unread);
            std::thread::spawn(move || {
                // Without a connection there is nothing to end.
                let _ = match end.send(input, &places) {
                    Ok(()) => end.qp.close(),
                    // The peer must not take what there was of it for all.
                    Err(error) => {
                        let _ = unread.set(error);
                        end.qp.abort()
                    }
                };
            });
        }
        let (mut over, mut out) = (None, [Completion::default(); 64]);
        loop {
            let found = self.cq.poll(&mut out).map_err(failed)?;
            for completion in &out[..found] {
                self.completed(completion, &free, output)?;
            }
            if found > 0 {
                continue;
            }
            output.flush()?;
            // What came before the end completes before the event that tells of it.
            if let Some(change) = over {
                let unread = unread.get();
                return unread.map_or_else(
                    || ended(change),
                    |error| Err(Failure::new("cannot read the input", error, "")),
                );
            }
            match adapter.poll_event().map_err(failed)? {
                Some(event) => match event.change {
                    TcpChange::PeerClosed if !sends => {
                        let _ = self.qp.close();
                    }
                    TcpChange::Connected | TcpChange::PeerClosed => {}
                    change => over = Some(change),
                },
                None => adapter.wait(&self.cq).map_err(failed)?,
            }
        }
    }

    /// Sends all of the input; returns at once when the connection has ended.
    fn send(&self, mut input: Input, free: &Receiver<u64>) -> io::Result<()> {
        let mut buffer = vec![0; LEN];
        while let Ok(place) = free.recv() {
            let len = loop {
                match input.read(&mut buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    read => break read?,
                }
            };
            if len == 0 {
                break;
            }
            let memory = self.places.fill(place, &buffer[..len]);
            let posted = memory.and_then(|it| self.qp.post_send(&Request::send(&it).id(place)));
            // How the connection has ended an event tells.
            if posted.is_err() {
                break;
            }
        }
        Ok(())
    }

    fn completed(
        &self,
        completion: &Completion,
        free: &Sender<u64>,
        output: &mut dyn Write,
    ) -> Result<(), Failure> {
        let place = completion.wr_id;
        // What is flushed an event explains.
        if completion.status != WcStatus::Success {
            return Ok(());
        }
        if place >= RECEIVES {
            // Nobody wants it when the input has ended.
            let _ = free.send(place);
            return Ok(());
        }
        let bytes = self.places.read(place, completion.byte_len as usize).map_err(failed)?;
        output.write_all(&bytes)?;
        // After the end of the stream it is of no use, and after a reset refused.
        let _ = self.receive(place);
        Ok(())
    }
}

/// Whether an end is a good one.
fn ended(change: TcpChange) -> Result<(), Failure> {
    match change {
        TcpChange::Failed(failure) => Err(Failure::new(
            "the connection",
            Error::Tcp(failure),
            "check whether the peer \
                still runs",
        )),
        TcpChange::Aborted => Err(Failure::new("the connection", "ended by a signal", "")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use quipu::qpip::TcpListener;

    use super::*;
    use crate::cmd::qpip::tests::adapter;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn it_is_told_a_server_or_a_port_to_listen_at() {
        let line = |words: &[&str]| Line::try_parse_from([&["nc"], words].concat());
        let client = line(&["10.9.0.1", "7"]).unwrap().options;
        assert_eq!((client.server, client.port), (Some([10, 9, 0, 1].into()), Some(7)));
        let zone = line(&["fe80::1%qp0", "7"]).err().unwrap().to_string();
        assert!(zone.contains("leave out \"%qp0\""), "{zone}");
        assert_eq!(line(&["-l", "7"]).unwrap().options.listen, Some(7));
        for bad in [&[] as &[&str], &["10.9.0.1"], &["10.9.0.1", "0"], &["-l", "7", "::1", "7"]] {
            assert!(line(bad).is_err(), "{bad:?}");
        }
    }

    /// A client and a server, which are connected, behind the listener that has led to it.
    fn connected(here: &Adapter, there: &Adapter) -> (TcpListener, Arc<End>, Arc<End>) {
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        let listener = there.listen(7, &settings, 1).unwrap();
        let (client, server) =
            (Arc::new(End::new(here).unwrap()), Arc::new(End::new(there).unwrap()));
        listener.offer(&server.qp).unwrap();
        let to = SocketAddr::new(there.info().unwrap().addresses[0], listener.port());
        client.qp.connect(to, &settings).unwrap();
        (listener, client, server)
    }

    #[test]
    fn each_end_gets_all_that_the_other_is_given() {
        let (here, there) = (adapter(), adapter());
        let (_listener, client, server) = connected(&here, &there);
        // More than the window, and nothing at all.
        let long: Vec<_> = (0..5 << 20).map(|at: u32| (at.wrapping_mul(at) >> 9) as u8).collect();
        let (mut at_client, mut at_server) = (Vec::new(), Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let input: Input = Box::new(io::Cursor::new(long.clone()));
                client.exchange(&here, Some(input), &mut at_client).unwrap();
            });
            server.exchange(&there, None, &mut at_server).unwrap();
        });
        assert!(at_server == long, "{} octets came, or others", at_server.len());
        assert!(at_client.is_empty());
    }

    /// A file of which only the beginning can be read.
    struct Broken(bool);

    impl Read for Broken {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let begun = std::mem::replace(&mut self.0, true);
            if begun { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(out.len()) }
        }
    }

    #[test]
    fn an_input_that_cannot_be_read_ends_in_a_failure_at_both_ends() {
        let (here, there) = (adapter(), adapter());
        let (_listener, client, server) = connected(&here, &there);
        std::thread::scope(|scope| {
            scope.spawn(|| server.exchange(&there, None, &mut Vec::new()).unwrap_err());
            let input: Input = Box::new(Broken(false));
            let failure = client.exchange(&here, Some(input), &mut Vec::new()).unwrap_err();
            assert!(failure.to_string().contains("cannot read the input"), "{failure}");
        });
    }

    #[test]
    fn a_reset_is_a_failure() {
        let (here, there) = (adapter(), adapter());
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        let listener = there.listen(7, &settings, 1).unwrap();
        let (client, server) = (Arc::new(End::new(&here).unwrap()), End::new(&there).unwrap());
        listener.offer(&server.qp).unwrap();
        let to = SocketAddr::new(there.info().unwrap().addresses[0], listener.port());
        client.qp.connect(to, &settings).unwrap();
        server.qp.wait_connected().unwrap();
        server.qp.abort().unwrap();
        let mut output = Vec::new();
        let failure = client.exchange(&here, None, &mut output).unwrap_err();
        assert!(failure.to_string().contains("the connection"), "{failure}");
    }
}
