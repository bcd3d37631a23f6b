//! A connection between a queue pair and a socket: what goes over it, and who begins.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

use super::adapter::{Adapter, QueuePair};
use super::socket::{Buffers, Info, connect, listen};

/// The octet at an offset of the adapter's stream, or of the kernel's.
fn octet(adapters: bool, offset: u64) -> u8 {
    let at = offset.wrapping_mul(7).wrapping_add(offset / 251).wrapping_add(offset / 65_521);
    at as u8 ^ if adapters { 0 } else { 0xa5 }
}

/// `len` octets of a stream.
pub fn fill(adapters: bool, from: u64, len: u64) -> Vec<u8> {
    (from..from + len).map(|offset| octet(adapters, offset)).collect()
}

/// Where octets that should be those from an offset on are others.
pub fn first_wrong(adapters: bool, from: u64, octets: &[u8]) -> Option<u64> {
    (from..).zip(octets).find(|(offset, is)| octet(adapters, *offset) != **is).map(|(at, _)| at)
}

/// Who speaks when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Both at once.
    Together,
    /// The kernel closes its direction before the adapter says anything: a half close.
    KernelFirst,
    /// The other way round.
    AdapterFirst,
}

pub const ORDERS: [Order; 3] = [Order::Together, Order::KernelFirst, Order::AdapterFirst];

/// Octets from the kernel to the adapter, those back, and the order.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub there: u64,
    pub back: u64,
    pub order: Order,
}

impl Plan {
    /// Whether the adapter listens first.
    pub fn waits(&self) -> bool {
        self.order == Order::KernelFirst
    }
}

/// Who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    Kernel,
    Adapter,
}

pub const CLIENTS: [Client; 2] = [Client::Kernel, Client::Adapter];

/// The kernel's part of a plan.
pub fn talk(stream: &TcpStream, plan: &Plan) -> io::Result<()> {
    match plan.order {
        Order::KernelFirst => write(stream, plan.there).and_then(|()| read(stream, plan.back)),
        Order::AdapterFirst => read(stream, plan.back).and_then(|()| write(stream, plan.there)),
        Order::Together => thread::scope(|scope| {
            let writer = scope.spawn(|| write(stream, plan.there));
            read(stream, plan.back)?;
            writer.join().unwrap()
        }),
    }
}

/// Writes the kernel's stream, and closes the direction.
pub fn write(mut stream: &TcpStream, total: u64) -> io::Result<()> {
    let mut at = 0;
    while at < total {
        // Not the lengths of anything else.
        let len = (total - at).min(70_001);
        stream.write_all(&fill(false, at, len))?;
        at += len;
    }
    stream.shutdown(Shutdown::Write)
}

/// Reads the adapter's stream to its end.
pub fn read(mut stream: &TcpStream, total: u64) -> io::Result<()> {
    let (mut at, mut buffer) = (0, vec![0; 100_003]);
    loop {
        let len = stream.read(&mut buffer)?;
        if let Some(wrong) = first_wrong(true, at, &buffer[..len]) {
            return Err(io::Error::other(format!("the octet at {wrong} is another")));
        }
        at += len as u64;
        if len == 0 || at > total {
            let whole = io::Error::other(format!("{at} octets of {total}"));
            return if at == total { Ok(()) } else { Err(whole) };
        }
    }
}

/// Makes a connection and lets both ends do their part: what the kernel says of its end.
#[track_caller]
pub fn exchange(
    adapter: &Adapter,
    (version, client): (usize, Client),
    receives: (u64, u64),
    buffers: Buffers,
    plan: Plan,
) -> Info {
    let what = format!("version {version}, client {client:?}, {buffers:?}, {plan:?}");
    let mut qp = adapter.queue_pair(receives);
    let kernel = match client {
        Client::Kernel => {
            adapter.offer(&qp);
            let to = adapter.address(version);
            thread::spawn(move || kernel(connect(to, buffers)?, plan))
        }
        Client::Adapter => {
            let (listener, at) = listen(version, buffers).unwrap();
            qp.connect(at, None);
            thread::spawn(move || kernel(listener.accept()?.0, plan))
        }
    };
    serve(&mut qp, &what, &plan, kernel)
}

fn serve(
    qp: &mut QueuePair,
    what: &str,
    plan: &Plan,
    kernel: thread::JoinHandle<io::Result<Info>>,
) -> Info {
    qp.until(what, |it| it.step(plan) || kernel.is_finished());
    // Where the kernel has failed, it says why.
    let info = kernel.join().unwrap();
    let info = info.unwrap_or_else(|error| panic!("{what}: the kernel: {error}: {qp:?}"));
    qp.until(what, |it| it.step(plan));
    qp.check(what, plan);
    info
}

fn kernel(stream: TcpStream, plan: Plan) -> io::Result<Info> {
    let info = Info::of(&stream);
    talk(&stream, &plan)?;
    Ok(info)
}
