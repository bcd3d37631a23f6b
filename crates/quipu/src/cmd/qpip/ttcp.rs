//! `quipu qpip ttcp`: bulk transfer, in the manner of the program of that name, of which the QPIP paper's
//! figure 4 is made.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener as SocketListener, TcpStream};
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use quipu::qpip::{Adapter, TcpChange, TcpQueuePair};
use quipu::{Access, Completion, CompletionQueue, MemoryRegion, Request, Sge, WcStatus};
use serde_json::json;

use super::cpu::Cpu;
use super::{LinkOptions, ModeOption, Signal, broken, connect, failed, no_server};
use crate::cmd::failure::Failure;

/// Who does what.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("role").required(true))]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// Send to the receiver at this address.
    #[arg(long, short, group = "role", value_name = "ADDRESS", value_parser = super::peer_address)]
    transmit: Option<IpAddr>,
    /// Receive from one sender.
    #[arg(long, short, group = "role")]
    receive: bool,
    /// The TCP port.
    #[arg(long, short, default_value_t = 5001, value_name = "PORT")]
    port: u16,
    /// Bytes of each message and each receive.
    #[arg(long, short, default_value_t = 65536, value_name = "BYTES",
          value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    length: u32,
    /// Number of messages to send.
    #[arg(long, short = 'n', default_value_t = 2048, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Number of outstanding requests. They are posted in lists of a quarter of this number.
    #[arg(long, default_value_t = 16, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Mode of the connection. Use `stream` if the other end is a socket.
    #[arg(long, value_enum, default_value_t)]
    mode: ModeOption,
    /// Sleep until half of the outstanding requests are done, at most 20 ms, instead of polling.
    #[arg(long)]
    wait: bool,
    /// Use a kernel socket instead of a queue pair, as a peer for the other end. Needs no link.
    #[arg(long)]
    socket: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu qpip ttcp -r --link udp:127.0.0.1:4000          a queue pair receives
  quipu qpip ttcp -t ADDRESS --link udp:127.0.0.1:4001  another sends to the address that it printed
  sudo quipu qpip ttcp -r -L tap:qp0 -a 10.9.0.2/24 --mode stream
  quipu qpip ttcp -t 10.9.0.2 --socket                  a kernel socket sends to it

The sender's time ends when everything is acknowledged; the receiver's, when everything has arrived.";

/// The longest sleep for more than one completion.
const PERIOD: Duration = Duration::from_millis(20);

/// The receive of an octet by an end that sends.
const OCTET: u64 = u64::MAX;

/// What was measured.
struct Outcome {
    bytes: u64,
    messages: u64,
    took: Duration,
    cpu: Cpu,
}

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let to = options.transmit.map(|to| super::with_port(SocketAddr::new(to, options.port)));
    let outcome = match (options.socket, to.transpose()?) {
        (true, Some(to)) => socket_sends(options, to),
        (true, None) => socket_receives(options),
        (false, to) => {
            let adapter = options.link.open_until_signal(Signal::Cuts)?;
            if !options.json {
                println!("{}", super::describe(&adapter)?);
            }
            let end = End::new(&adapter, options)?;
            let outcome = match to {
                Some(to) => end.sends(to),
                None => end.receives(),
            };
            super::unless_gone(&adapter, outcome)
        }
    }?;
    print!("{}", report(options, &outcome));
    Ok(ExitCode::SUCCESS)
}

/// The result as text or JSON.
fn report(options: &Options, outcome: &Outcome) -> String {
    let Outcome { bytes, messages, took, cpu } = outcome;
    let seconds = took.as_secs_f64().max(1e-9);
    let mbit = *bytes as f64 * 8.0 / 1e6 / seconds;
    let role = if options.receive { "received" } else { "sent" };
    let (program, adapter) = (cpu.program.as_secs_f64(), cpu.adapter.as_secs_f64());
    if options.json {
        let result = json!({
            "role": role,
            "socket": options.socket,
            "bytes": bytes,
            "requests": messages,
            "message_bytes": options.length,
            "seconds": seconds,
            "mbit_per_second": mbit,
            "cpu_seconds": { "program": program, "adapter_thread": adapter },
        });
        return format!("{result:#}\n");
    }
    let share = |spent: f64| spent / seconds * 100.0;
    format!(
        "{role} {bytes} bytes in {messages} requests, {seconds:.3} s: {mbit:.1} Mbit/s\n\
         processor: program {program:.3} s ({:.0} %), adapter's thread {adapter:.3} s ({:.0} %)\n",
        share(program),
        share(adapter),
    )
}

/// A queue pair with what it needs.
struct End<'a> {
    options: &'a Options,
    adapter: &'a Adapter,
    qp: TcpQueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion,
    /// The memory of each request.
    places: Vec<[Sge; 1]>,
}

impl<'a> End<'a> {
    fn new(adapter: &'a Adapter, options: &'a Options) -> Result<Self, Failure> {
        let (depth, length) = (options.depth, options.length as usize);
        let pd = adapter.protection_domain().map_err(failed)?;
        let cq = adapter.completion_queue(2 * depth).map_err(failed)?;
        let queues = pd.queue_pair(&cq, &cq).send_queue(depth, 1).recv_queue(depth, 1);
        let qp = queues.build_tcp().map_err(failed)?;
        let memory = depth as usize * length + 1;
        let memory = pd.register(memory, Access::LOCAL_WRITE).map_err(failed)?;
        let place = |at| memory.sge(at * length, length).map(|sge| [sge]);
        let places = (0..depth as usize).map(place).collect::<Result<_, _>>().map_err(failed)?;
        Ok(Self { options, adapter, qp, cq, memory, places })
    }

    /// Requests that are posted together. The last of such a list of sends says when it is done.
    fn batch(&self) -> u64 {
        u64::from(self.options.depth / 4).max(1)
    }

    /// Whoever sleeps does so for half of what is under way, whereof each completion says how much is done.
    fn moderate(&self, each: u64) -> Result<(), Failure> {
        let count = u64::from(self.options.depth / 2) / each;
        self.cq.moderate(count.max(1) as u16, PERIOD).map_err(failed)
    }

    /// Posts the receives of some places.
    fn receive(&self, numbers: impl Iterator<Item = u64>) -> Result<(), Failure> {
        let receive = |number: u64| (number, &self.places[number as usize][..]);
        let receives: Vec<_> = numbers.map(receive).collect();
        self.qp.post_recvs(&receives).map_err(|(_, error)| self.broken(error))
    }

    /// Posts sends; the last says when they are done.
    fn send(&self, numbers: Range<u64>) -> Result<(), Failure> {
        let last = numbers.end - 1;
        let send = |number: u64| {
            let send = Request::send(&self.places[number as usize % self.places.len()]).id(number);
            if number == last { send } else { send.unsignaled() }
        };
        let sends: Vec<_> = numbers.map(send).collect();
        self.qp.post_sends(&sends).map_err(|(_, error)| self.broken(error))
    }

    /// Posts a receive of one octet.
    fn receive_octet(&self) -> Result<(), Failure> {
        let place = [self.memory.sge(self.memory.len() - 1, 1).map_err(failed)?];
        self.qp.post_recv(OCTET, &place).map_err(failed)
    }

    /// Takes completions; none if there is an event instead.
    fn completions(&self, out: &mut [Completion]) -> Result<usize, quipu::Error> {
        if !self.options.wait {
            return self.cq.poll(out);
        }
        match self.cq.poll(out)? {
            0 => self.adapter.wait(&self.cq).map(|()| 0),
            found => Ok(found),
        }
    }

    fn check(&self, completion: &Completion) -> Result<(), Failure> {
        match completion.status {
            WcStatus::Success => Ok(()),
            _ => Err(self.broken(quipu::Error::Work(*completion))),
        }
    }

    fn broken(&self, error: quipu::Error) -> Failure {
        let remedy = match self.options.mode {
            // A message that does not fit is answered by a reset.
            ModeOption::Message => {
                "give both ends the same --mode and --length; sockets need --mode stream"
            }
            ModeOption::Stream => "check whether the other end still runs",
        };
        broken(&self.qp, error, remedy)
    }

    fn sends(&self, to: SocketAddr) -> Result<Outcome, Failure> {
        let settings = self.options.mode.settings();
        self.moderate(self.batch())?;
        // What is posted is the window, and into a closed one no TCP sends its end.
        self.receive_octet()?;
        connect(&self.qp, to, &settings)?;
        let (begun, cpu, count) = (Instant::now(), Cpu::now(), self.options.count);
        let (mut posted, mut done) = (0, 0);
        let (depth, batch) = (u64::from(self.options.depth), self.batch());
        let mut out = [Completion::default(); 64];
        while done < count {
            while posted < count && posted + batch <= done + depth {
                let next = count.min(posted + batch);
                self.send(posted..next)?;
                posted = next;
                if posted == count {
                    // Too few are left to sleep for many.
                    self.cq.moderate(0, Duration::ZERO).map_err(failed)?;
                }
            }
            let found = self.completions(&mut out).map_err(failed)?;
            for completion in &out[..found] {
                self.check(completion)?;
                match completion.wr_id {
                    // What a socket sends back is nothing to us, but its end comes behind it.
                    OCTET if completion.byte_len > 0 => self.receive_octet()?,
                    OCTET => {}
                    // Sends are done in order.
                    last => done = last + 1,
                }
            }
            // Ends of the connection are seen by what they flush; here they are only taken.
            while found == 0 && self.adapter.poll_event().map_err(failed)?.is_some() {}
        }
        let (took, cpu) = (begun.elapsed(), Cpu::now().since(cpu));
        // All is acknowledged: how the connection ends is the peer's affair.
        let _ = self.qp.close().and_then(|()| self.qp.wait_closed());
        Ok(Outcome { bytes: count * u64::from(self.options.length), messages: count, took, cpu })
    }

    fn receives(&self) -> Result<Outcome, Failure> {
        let settings = self.options.mode.settings();
        let listener = self.adapter.listen(self.options.port, &settings, 1).map_err(failed)?;
        self.moderate(1)?;
        self.receive(0..u64::from(self.options.depth))?;
        listener.offer(&self.qp).map_err(failed)?;
        waiting(self.options, listener.port());
        self.qp.wait_connected().map_err(failed)?;
        let (begun, cpu) = (Instant::now(), Cpu::now());
        let (mut bytes, mut messages, mut ended) = (0, 0, false);
        let mut out = [Completion::default(); 64];
        loop {
            // After the end nothing comes that could be waited for.
            let found = if ended { self.cq.poll(&mut out) } else { self.completions(&mut out) };
            let found = found.map_err(failed)?;
            for completion in &out[..found] {
                self.check(completion)?;
                bytes += u64::from(completion.byte_len);
                messages += u64::from(completion.byte_len > 0);
            }
            self.receive(out[..found].iter().map(|completion| completion.wr_id))?;
            // What came before the end completes before the event that tells of it.
            if ended && found == 0 {
                break;
            }
            while found == 0
                && let Some(event) = self.adapter.poll_event().map_err(failed)?
            {
                ended |= event.change != TcpChange::Connected;
            }
        }
        let (took, cpu) = (begun.elapsed(), Cpu::now().since(cpu));
        // The peer has closed; whether the connection still stands is all the same.
        let _ = self.qp.close().and_then(|()| self.qp.wait_closed());
        Ok(Outcome { bytes, messages, took, cpu })
    }
}

/// Says where senders are to connect to, beside the result if that is for programs.
fn waiting(options: &Options, port: u16) {
    match options.json {
        true => eprintln!("waiting on port {port}"),
        false => println!("waiting on port {port}"),
    }
}

fn socket_failed(error: std::io::Error) -> Failure {
    Failure::new("the socket", error, "")
}

fn socket_sends(options: &Options, to: SocketAddr) -> Result<Outcome, Failure> {
    let mut stream = TcpStream::connect(to).map_err(|error| no_server(to, &error))?;
    stream.set_nodelay(true).map_err(socket_failed)?;
    let message = vec![0; options.length as usize];
    let (begun, cpu) = (Instant::now(), Cpu::now());
    for _ in 0..options.count {
        stream.write_all(&message).map_err(socket_failed)?;
    }
    stream.shutdown(Shutdown::Write).map_err(socket_failed)?;
    // The end comes back when everything has arrived; a reset if it has not.
    io::copy(&mut stream, &mut io::sink()).map_err(socket_failed)?;
    let (took, cpu) = (begun.elapsed(), Cpu::now().since(cpu));
    let bytes = options.count * u64::from(options.length);
    Ok(Outcome { bytes, messages: options.count, took, cpu })
}

fn socket_receives(options: &Options) -> Result<Outcome, Failure> {
    let listener = SocketListener::bind((Ipv6Addr::UNSPECIFIED, options.port));
    let listener = listener.or_else(|_| SocketListener::bind(("0.0.0.0", options.port)));
    let listener = listener.map_err(socket_failed)?;
    waiting(options, listener.local_addr().map_err(socket_failed)?.port());
    let (mut stream, _) = listener.accept().map_err(socket_failed)?;
    let mut buffer = vec![0; options.length as usize];
    let (begun, cpu) = (Instant::now(), Cpu::now());
    let (mut bytes, mut messages) = (0, 0);
    loop {
        match stream.read(&mut buffer).map_err(socket_failed)? {
            0 => break,
            len => (bytes, messages) = (bytes + len as u64, messages + 1),
        }
    }
    Ok(Outcome { bytes, messages, took: begun.elapsed(), cpu: Cpu::now().since(cpu) })
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

    fn line(words: &[&str]) -> Result<Options, clap::Error> {
        Line::try_parse_from([&["ttcp"], words].concat()).map(|line| line.options)
    }

    #[test]
    fn one_end_sends_and_the_other_receives() {
        assert!(line(&["-r"]).unwrap().receive);
        assert_eq!(line(&["-t", "::1"]).unwrap().transmit, Some(Ipv6Addr::LOCALHOST.into()));
        for bad in [&["-r", "-t", "::1"] as &[&str], &[], &["-t", "host"], &["-r", "-l", "0"]] {
            assert!(line(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_result_is_said_for_people_and_for_programs() {
        let outcome = Outcome {
            bytes: 1_000_000,
            messages: 10,
            took: Duration::from_millis(500),
            cpu: Cpu { program: Duration::from_millis(250), ..Cpu::default() },
        };
        let text = report(&line(&["-r"]).unwrap(), &outcome);
        assert!(text.starts_with("received 1000000 bytes in 10 requests, 0.500 s: 16.0 Mbit/s\n"));
        assert!(text.contains("program 0.250 s (50 %)"));
        let json: serde_json::Value =
            serde_json::from_str(&report(&line(&["-r", "--json"]).unwrap(), &outcome)).unwrap();
        assert_eq!(json["mbit_per_second"], 16.0);
        assert_eq!(json["cpu_seconds"]["program"], 0.25);
    }

    #[test]
    fn octets_that_come_back_are_no_sends() {
        let (here, there) = (adapter(), adapter());
        let words = ["--mode", "stream", "-l", "1000", "-n", "100"];
        let receiver = line(&[&words[..], &["-r"]].concat()).unwrap();
        let sender = line(&[&words[..], &["-t", "::1"]].concat()).unwrap();
        let (receiver, sender) =
            (End::new(&there, &receiver).unwrap(), End::new(&here, &sender).unwrap());
        let listener = there.listen(5001, &receiver.options.mode.settings(), 1).unwrap();
        listener.offer(&receiver.qp).unwrap();
        let to = SocketAddr::new(there.info().unwrap().addresses[0], listener.port());
        let outcome = std::thread::scope(|scope| {
            let sent = scope.spawn(|| sender.sends(to).unwrap());
            receiver.qp.wait_connected().unwrap();
            // The window is closed: two octets are back, one after the other, before anything can be sent.
            let octet = [receiver.memory.sge(0, 1).unwrap()];
            for id in 0..2 {
                receiver.qp.post_send(&Request::send(&octet).id(id)).unwrap();
            }
            let mut out = [Completion::default(); 64];
            let mut next = || {
                let begun = Instant::now();
                loop {
                    let found = receiver.cq.poll(&mut out).unwrap();
                    if found > 0 {
                        return out[..found].to_vec();
                    }
                    assert!(begun.elapsed() < Duration::from_secs(20), "nothing comes");
                    std::thread::yield_now();
                }
            };
            let mut back = 0;
            while back < 2 {
                back += next().len();
            }
            receiver.receive(0..16).unwrap();
            let mut bytes = 0;
            while bytes < 100_000 {
                let done = next();
                bytes += done.iter().map(|done| u64::from(done.byte_len)).sum::<u64>();
                receiver.receive(done.iter().map(|done| done.wr_id)).unwrap();
            }
            receiver.qp.close().unwrap();
            sent.join().unwrap()
        });
        assert_eq!((outcome.bytes, outcome.messages), (100_000, 100));
    }

    #[test]
    fn a_reset_is_told_as_one() {
        let (here, there) = (adapter(), adapter());
        for (mode, remedy) in [("stream", "still runs"), ("message", "--mode stream")] {
            let words = ["--mode", mode, "-l", "1000", "-n", "100"];
            let receiver = line(&[&words[..], &["-r"]].concat()).unwrap();
            let sender = line(&[&words[..], &["-t", "::1"]].concat()).unwrap();
            let (receiver, sender) =
                (End::new(&there, &receiver).unwrap(), End::new(&here, &sender).unwrap());
            let listener = there.listen(0, &receiver.options.mode.settings(), 1).unwrap();
            listener.offer(&receiver.qp).unwrap();
            let to = SocketAddr::new(there.info().unwrap().addresses[0], listener.port());
            let failure = std::thread::scope(|scope| {
                let sent = scope.spawn(|| sender.sends(to).map(|_| ()).unwrap_err());
                receiver.qp.wait_connected().unwrap();
                receiver.qp.abort().unwrap();
                sent.join().unwrap().to_string()
            });
            assert!(failure.contains("reset by the peer") && failure.contains(remedy), "{failure}");
        }
    }

    #[test]
    fn a_socket_sends_to_a_socket() {
        let port =
            SocketListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let both = ["--socket", "-p", port.as_str(), "-l", "1000", "-n", "50"];
        let receiver = line(&[&both[..], &["-r"]].concat()).unwrap();
        let sender = line(&[&both[..], &["-t", "127.0.0.1"]].concat()).unwrap();
        let received = std::thread::spawn(move || socket_receives(&receiver).unwrap().bytes);
        let to = SocketAddr::from(([127, 0, 0, 1], sender.port));
        let begun = Instant::now();
        while socket_sends(&sender, to).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(10), "the receiver does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(received.join().unwrap(), 50_000);
    }
    #[test]
    fn what_a_receiver_has_not_taken_is_not_sent() {
        let listener = SocketListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let sender = line(&["--socket", "-t", "127.0.0.1", "-l", "1000", "-n", "1"]).unwrap();
        let sent = std::thread::spawn(move || socket_sends(&sender, to).is_err());
        let (stream, _) = listener.accept().unwrap();
        // It is there, and with it unread the end is a reset.
        stream.peek(&mut [0]).unwrap();
        drop(stream);
        assert!(sent.join().unwrap());
    }
}
