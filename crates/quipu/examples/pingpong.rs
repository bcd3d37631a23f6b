//! Two processes send a message back and forth, and one says how long that takes.
//!
//! ```text
//! cargo run --release --example pingpong                      # first process: waits on port 7471
//! cargo run --release --example pingpong -- 127.0.0.1         # second process
//! ```
//!
//! `QUIPU_ADDRESS` picks the address of the device; between two machines, set it on each.

use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use quipu::{Access, Device, Request};

/// Where the first process waits for the second to exchange endpoints.
const PORT: u16 = 7471;
const ROUNDS: u32 = 100_000;
const SIZE: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = std::env::args().nth(1);
    let mut stream = match &server {
        Some(host) => TcpStream::connect((host.as_str(), PORT))?,
        None => TcpListener::bind(("::", PORT))?.accept()?.0,
    };

    let device = Device::from_env()?;
    let pd = device.protection_domain()?;
    let (sends, recvs) = (device.completion_queue(16)?, device.completion_queue(16)?);
    let qp = pd.queue_pair(&sends, &recvs).build()?;
    let memory = pd.register(SIZE, Access::LOCAL_WRITE)?;
    let buffer = [memory.sge(0, SIZE)?];

    // Post the first receive before the peer can send.
    qp.post_recv(0, &buffer)?;
    qp.connect_over(&mut stream)?;

    let begun = Instant::now();
    for round in 0..ROUNDS {
        let mine = server.is_some();
        if mine {
            qp.post_send(&Request::send_inline(&u64::from(round).to_be_bytes()))?;
            sends.next()?;
        }
        recvs.next()?;
        qp.post_recv(0, &buffer)?;
        if !mine {
            qp.post_send(&Request::send_inline(&u64::from(round).to_be_bytes()))?;
            sends.next()?;
        }
    }
    let each = begun.elapsed() / ROUNDS / 2;
    println!("{ROUNDS} round trips over {}: {each:?} each way", device.address());
    Ok(())
}
