//! A server that sends back what comes over TCP, and its client: queue pairs whose TCP is the adapter's own.
//! Either may be a socket instead.
//!
//! ```text
//! export QUIPU_QPIP_LINK=udp:127.0.0.1:4000
//! cargo run --example qpip                            # the server, which prints its address
//! QUIPU_QPIP_LINK=udp:127.0.0.1:4001 \
//! cargo run --example qpip -- [fd51:...]:7            # a client
//! ```
//!
//! On a TAP device (`QUIPU_QPIP_LINK=tap:qp0 QUIPU_QPIP_ADDRESS=10.9.0.2/24`) try `nc 10.9.0.2 7` as the
//! client.

use std::net::SocketAddr;

use quipu::qpip::{Adapter, Mode, TcpChange, TcpListener, TcpQueuePair, TcpSettings};
use quipu::{Access, Completion, CompletionQueue, Config, Error, MemoryRegion, Request, WcStatus};

const PORT: u16 = 7;
const SIZE: usize = 4096;
const RECEIVE: u64 = 1;
const SEND: u64 = 2;

/// An idle queue pair, with memory and a receive posted.
fn idle(adapter: &Adapter) -> Result<(TcpQueuePair, CompletionQueue, MemoryRegion), Error> {
    let (pd, cq) = (adapter.protection_domain()?, adapter.completion_queue(16)?);
    let qp = pd.queue_pair(&cq, &cq).build_tcp()?;
    let memory = pd.register(SIZE, Access::LOCAL_WRITE)?;
    qp.post_recv(RECEIVE, &[memory.sge(0, SIZE)?])?;
    Ok((qp, cq, memory))
}

/// Sends back what comes, until the client goes.
fn serve(adapter: &Adapter, listener: &TcpListener) -> Result<(), Error> {
    let (qp, cq, memory) = idle(adapter)?;
    listener.offer(&qp)?;
    loop {
        // The event first: what came before it has completed, and is found below.
        let event = adapter.poll_event()?;
        let mut completions = [Completion::default(); 2];
        let found = cq.poll(&mut completions)?;
        for done in completions[..found].iter().filter(|it| it.status == WcStatus::Success) {
            if done.wr_id == RECEIVE {
                let received = memory.sge(0, done.byte_len as usize)?;
                qp.post_send(&Request::send(&[received]).id(SEND))?;
            } else {
                qp.post_recv(RECEIVE, &[memory.sge(0, SIZE)?])?;
            }
        }
        match event.filter(|it| it.qp_num == qp.number()).map(|it| it.change) {
            Some(TcpChange::Connected) => {
                if let Some(flow) = qp.flow()? {
                    println!("{} connects", flow.remote);
                }
            }
            Some(TcpChange::PeerClosed) => qp.close()?,
            Some(TcpChange::Failed(failure)) => return Err(Error::Tcp(failure)),
            Some(TcpChange::Closed | TcpChange::Aborted) => return Ok(()),
            None if found == 0 => adapter.wait(&cq)?,
            None => {}
        }
    }
}

fn ask(adapter: &Adapter, server: SocketAddr, settings: &TcpSettings) -> Result<(), Error> {
    let (qp, cq, memory) = idle(adapter)?;
    qp.connect(server, settings)?;
    qp.post_send(&Request::send_inline(b"is anybody there?").id(SEND))?;
    let mut done = [cq.next()?, cq.next()?];
    done.sort_by_key(|completion| completion.wr_id);
    let answer = memory.to_vec(0, done[0].byte_len as usize)?;
    println!("{}", String::from_utf8_lossy(&answer));
    qp.close()?;
    qp.wait_closed()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let adapter = Adapter::open_with(Config::from_env()?)?;
    let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
    if let Some(server) = std::env::args().nth(1) {
        return Ok(ask(&adapter, server.parse()?, &settings)?);
    }
    let listener = adapter.listen(PORT, &settings, 8)?;
    for address in adapter.info()?.addresses {
        println!("listening at {}", SocketAddr::new(address, PORT));
    }
    loop {
        if let Err(error) = serve(&adapter, &listener) {
            eprintln!("{error}");
        }
    }
}
