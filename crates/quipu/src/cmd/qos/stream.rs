//! A sockets program for `quipu qos streams`: it reads streams, or writes as many as its standard input says.
//! It ends when its input does.

use std::io::{self, BufRead, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::super::failure::Failure;

/// Bytes of a message, as in the paper on quality of service.
const MESSAGE: usize = 512 << 10;
/// How often a stream that is off looks whether it is on.
const LOOK: Duration = Duration::from_millis(5);

/// What to do.
#[derive(clap::Args)]
pub(super) struct Options {
    #[command(subcommand)]
    end: End,
}

#[derive(clap::Subcommand)]
enum End {
    /// Accept streams at an address and read them. Prints the address.
    Sink { address: SocketAddr },
    /// Connect so many streams. A line with a number says how many of them are written.
    Source { address: SocketAddr, count: usize },
}

/// Does it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::new("a stream has failed", error, "");
    match options.end {
        End::Sink { address } => sink(address).map_err(failed)?,
        End::Source { address, count } => source(address, count).map_err(failed)?,
    }
    // Its threads may wait in a call of a socket.
    std::process::exit(0)
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn sink(address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    say(&listener.local_addr()?.to_string())?;
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || read_all(stream));
        }
    });
    io::stdin().lock().lines().try_for_each(|line| line.map(drop))
}

fn read_all(mut stream: TcpStream) {
    let mut memory = vec![0; MESSAGE];
    while stream.read(&mut memory).is_ok_and(|count| count > 0) {}
}

fn source(address: SocketAddr, count: usize) -> io::Result<()> {
    let active = Arc::new(AtomicUsize::new(0));
    for index in 0..count {
        let (stream, active) = (TcpStream::connect(address)?, Arc::clone(&active));
        thread::spawn(move || write_while(stream, index, &active));
    }
    say("ready")?;
    for line in io::stdin().lock().lines() {
        let wanted = line?.trim().parse().map_err(io::Error::other)?;
        active.store(wanted, Ordering::Relaxed);
    }
    Ok(())
}

/// Writes messages while this stream is one of those that are on.
fn write_while(mut stream: TcpStream, index: usize, active: &AtomicUsize) {
    let message = vec![0x55; MESSAGE];
    loop {
        match index < active.load(Ordering::Relaxed) {
            false => thread::sleep(LOOK),
            true if stream.write_all(&message).is_err() => return,
            true => {}
        }
    }
}
