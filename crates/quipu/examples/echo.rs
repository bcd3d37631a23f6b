//! A server that sends back what clients write to it, found by address and port as `rdma_cm` programs find
//! each other.
//!
//! ```text
//! cargo run --example echo                       # the server, at port 7472
//! cargo run --example echo -- 127.0.0.1:7472     # a client
//! ```
//!
//! `QUIPU_ADDRESS` picks the address of the device; between two machines, set it on each.

use std::net::SocketAddr;

use quipu::{
    Access, CompletionQueue, Connection, Device, Error, Listener, MemoryRegion, QueuePair, Request,
    WcStatus,
};

const PORT: u16 = 7472;
const SIZE: usize = 4096;

/// A queue pair that is not connected, with memory and a receive posted.
fn queue_pair(device: &Device) -> Result<(QueuePair, CompletionQueue, MemoryRegion), Error> {
    let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
    let qp = pd.queue_pair(&cq, &cq).build()?;
    let memory = pd.register(SIZE, Access::LOCAL_WRITE)?;
    qp.post_recv(1, &[memory.sge(0, SIZE)?])?;
    Ok((qp, cq, memory))
}

/// Sends back what comes, until the client goes.
fn serve(device: &Device, listener: &Listener) -> Result<(), Error> {
    let request = listener.next()?;
    println!("{} connects", request.peer());
    let (qp, cq, memory) = queue_pair(device)?;
    let connection = request.accept(qp, b"")?;
    std::thread::scope(|scope| {
        // When the client goes, the receive that waits for it is flushed.
        scope.spawn(|| connection.wait_end());
        loop {
            let received = match cq.next() {
                Ok(received) => received.byte_len as usize,
                Err(error) if error.work_status() == Some(WcStatus::WrFlushErr) => return Ok(()),
                Err(error) => return Err(error),
            };
            connection.post_send(&Request::send(&[memory.sge(0, received)?]).id(2))?;
            cq.next()?;
            connection.post_recv(1, &[memory.sge(0, SIZE)?])?;
        }
    })
}

fn ask(device: &Device, server: SocketAddr) -> Result<(), Error> {
    let (qp, cq, memory) = queue_pair(device)?;
    let connection = Connection::open(qp, server, b"")?;
    connection.post_send(&Request::send_inline(b"is anybody there?").id(2))?;
    let mut done = [cq.next()?, cq.next()?];
    done.sort_by_key(|completion| completion.wr_id);
    let answer = memory.to_vec(0, done[0].byte_len as usize)?;
    println!("{}", String::from_utf8_lossy(&answer));
    connection.disconnect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::from_env()?;
    if let Some(server) = std::env::args().nth(1) {
        return Ok(ask(&device, server.parse()?)?);
    }
    let listener = Listener::bind(&device, SocketAddr::new(device.address(), PORT))?;
    println!("listening at {}", listener.address()?);
    loop {
        serve(&device, &listener)?;
    }
}
