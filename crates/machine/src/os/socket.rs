//! Sockets, and the calls that programs make.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use quipu_inet::tcp::{Config, Connection, Flow, Listener, Secret};

use super::{
    BUFFER_USED, CONTROL_SIZE, CONTROL_USED, MOST_JOINED, free_buffer, output, service, wait,
};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::frames::BELOW_TCP;
use crate::ledger::Category;
use crate::memory::{Heap, Slab, data_size};
use crate::nic::Deferred;
use crate::plan::Plan;
use crate::world::{MACHINE, World};

/// Bookkeeping that Linux counts with each packet of a socket.
const OVERHEAD: u64 = 256;

/// Received payload.
#[derive(Clone, Debug)]
pub(super) struct RxBuffer {
    pub(super) buffer: u64,
    pub(super) data: u64,
    /// Where the payload begins in the data.
    pub(super) skip: u64,
    /// Its offset in the stream, and its length.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Bytes of it that were read.
    pub(super) read: u64,
    pub(super) deferred: Option<Deferred>,
    /// Somebody is copying from the NIC.
    pub(super) copying: bool,
    /// The number of its frame, and when it was queued.
    pub(super) number: u64,
    pub(super) since: u64,
}

impl RxBuffer {
    /// Payload bytes that are in memory; the others are still in the NIC.
    pub(super) fn in_memory(&self) -> u64 {
        match self.deferred {
            Some(deferred) => deferred.copied.saturating_sub(self.skip).min(self.len),
            None => self.len,
        }
    }
}

/// Payload to be sent, until it is acknowledged.
#[derive(Clone, Debug)]
pub(super) struct TxBuffer {
    pub(super) buffer: u64,
    pub(super) data: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A socket of a connection.
#[derive(Debug)]
pub(crate) struct Socket {
    /// Number of the connection.
    pub(crate) conn: u32,
    /// The host of the peer.
    pub(super) peer: u16,
    /// The core of its program.
    pub(super) core: u16,
    pub(super) tcp: Option<Box<Connection>>,
    pub(super) listener: Option<Listener>,
    pub(super) flow: Flow,
    pub(super) established: bool,
    /// Where the control block is.
    pub(super) control: u64,
    pub(super) queue: VecDeque<RxBuffer>,
    pub(super) out_of_order: BTreeMap<u64, RxBuffer>,
    /// Bytes that can be read; bytes that were read.
    pub(crate) readable: u64,
    pub(super) read: u64,
    pub(super) rx_memory: u64,
    rx_limit: u64,
    pub(super) truesize: u64,
    /// Data segments since the room was told to TCP.
    pub(super) untold: u32,
    /// The window's right edge, as last told to TCP.
    told: u64,
    pub(super) unacked: VecDeque<TxBuffer>,
    written: u64,
    pub(super) tx_memory: u64,
    tx_limit: u64,
    /// Ends of messages in the stream that comes, and what they mean.
    messages: VecDeque<(u64, u64)>,
    pub(super) deadline: u64,
    mss: u64,
}

/// What a connection is like.
fn config(plan: &Plan) -> Arc<Config> {
    let mss = (plan.link.mtu - 40) as u16;
    Arc::new(Config {
        receive_mss: mss,
        path_mss: mss,
        max_receive_space: plan.os.receive_buffer.0 * 3 / 4,
        timestamps: plan.os.timestamps,
        sack: plan.os.sack,
        ecn: false,
        pacing: plan.os.pacing,
        ..Config::default()
    })
}

impl Socket {
    /// The end of connection `conn` on a host: `ends` are the hosts, this one first. The passive end waits
    /// for the other.
    pub(crate) fn new(
        plan: &Plan,
        heap: &mut Heap,
        conn: u32,
        ends: [u16; 2],
        core: u16,
        passive: bool,
    ) -> Self {
        let port = |host: u16| if host == MACHINE as u16 { 5001 } else { 10_000 + conn as u16 };
        let address = |host: u16| ([10, 0, 0, host as u8 + 1], port(host)).into();
        let flow = Flow { local: address(ends[0]), remote: address(ends[1]) };
        let secret = Secret([plan.seed ^ 0x51, u64::from(ends[0])]);
        let config = config(plan);
        let listener = passive.then(|| Listener::new(Arc::clone(&config), secret, 1));
        let tcp = (!passive).then(|| Box::new(Connection::connect(0, config, secret, &flow)));
        let mut socket = Self {
            conn,
            peer: ends[1],
            core,
            tcp,
            listener,
            flow,
            established: false,
            control: heap.reserve(CONTROL_SIZE),
            queue: VecDeque::new(),
            out_of_order: BTreeMap::new(),
            readable: 0,
            read: 0,
            rx_memory: 0,
            rx_limit: plan.os.receive_buffer.0,
            truesize: data_size(plan) + OVERHEAD,
            untold: 0,
            told: 0,
            unacked: VecDeque::new(),
            written: 0,
            tx_memory: 0,
            tx_limit: plan.os.send_buffer.0,
            messages: VecDeque::new(),
            deadline: u64::MAX,
            mss: u64::from(plan.link.mtu) - 40 - if plan.os.timestamps { 12 } else { 0 },
        };
        socket.tell_room();
        socket
    }

    /// Room for payload: three quarters of the memory that is free, as Linux has it.
    fn room(&self) -> u64 {
        self.rx_limit.saturating_sub(self.rx_memory) * 3 / 4
    }

    /// Behind the last byte that has come without a gap.
    pub(super) fn received(&self) -> u64 {
        self.read + self.readable
    }

    /// Tells TCP of the room. What was told before stays true, even if packets turn out to take more memory
    /// than their payload suggested.
    pub(super) fn tell_room(&mut self) {
        self.told = self.told.max(self.received() + self.room());
        self.untold = 0;
        let space = self.told - self.received();
        if let Some(tcp) = &mut self.tcp {
            tcp.set_receive_space(space);
        }
    }

    /// Whether the program's reading has made so much room that the peer should hear of it at once: Linux
    /// waits until the window would double.
    fn wants_update(&self) -> bool {
        let left = self.told.saturating_sub(self.received());
        let room = self.room();
        room >= 2 * left && room - left >= 2 * self.mss
    }

    fn writable(&self) -> bool {
        // Linux wakes a writer when a third is free.
        self.tx_limit.saturating_sub(self.tx_memory) >= self.tx_limit / 3
    }

    fn has_room(&self) -> bool {
        self.tx_memory + self.truesize <= self.tx_limit
    }
}

fn socket(world: &World, cpu: &Cpu, index: u32) -> Option<usize> {
    let sockets = &world.hosts[usize::from(cpu.id.host)].os.sockets;
    ((index as usize) < sockets.len()).then_some(index as usize)
}

/// Looks at a socket of this host.
pub(super) fn look<T>(cpu: &Cpu, index: u32, with: impl FnOnce(&mut Socket) -> T) -> Option<T> {
    let mut host = cpu.host();
    host.os.sockets.get_mut(index as usize).map(with)
}

/// Waits until all these sockets are connected. The active ends send their SYN.
pub(crate) async fn accept_all(cpu: &Cpu, sockets: &[u32]) {
    for index in sockets {
        output(cpu, *index).await;
    }
    let host = usize::from(cpu.id.host);
    for index in sockets {
        wait(cpu, |world| {
            world.hosts[host].os.sockets.get(*index as usize).is_none_or(|it| it.established)
        })
        .await;
    }
}

/// Receives up to `most` bytes to `to`, waiting until there are some; how many.
pub(crate) async fn recv(cpu: &Cpu, index: u32, to: u64, most: u64) -> u64 {
    cpu.charge(Category::Syscall, Cost::Syscall);
    let host = usize::from(cpu.id.host);
    wait(cpu, |world| {
        socket(world, cpu, index).is_none_or(|at| world.hosts[host].os.sockets[at].readable > 0)
    })
    .await;
    let mut done = 0;
    while done < most {
        let Some(Some((piece, finished, len))) =
            look(cpu, index, |socket| take(socket, most - done))
        else {
            break;
        };
        cpu.charge(Category::Syscall, Cost::RecvPacket);
        copy_piece(cpu, &piece, to + done, len, finished).await;
        let now = cpu.now();
        cpu.world().tracer.span(piece.number, "copy", piece.since.min(now), now);
        done += len;
        if finished {
            free_buffer(cpu, piece.buffer, piece.data);
        }
        look(cpu, index, |socket| {
            socket.read += len;
            socket.readable -= len;
            if let Some(front) = socket.queue.front_mut() {
                front.copying = false;
            }
            if finished {
                socket.rx_memory = socket.rx_memory.saturating_sub(socket.truesize);
            }
        });
        service(cpu).await;
    }
    if cpu.id.host == MACHINE as u16 {
        cpu.world().goodput[0] += done;
    }
    let update = look(cpu, index, |socket| {
        let wants = socket.wants_update();
        if wants {
            socket.tell_room();
        }
        wants
    });
    if update == Some(true) {
        output(cpu, index).await;
    }
    done
}

/// Takes up to `most` bytes from the queue: the buffer as it was, whether it is used up, and how many bytes.
fn take(socket: &mut Socket, most: u64) -> Option<(RxBuffer, bool, u64)> {
    let front = socket.queue.front_mut().filter(|front| !front.copying)?;
    let piece = front.clone();
    let len = (front.len - front.read).min(most);
    front.read += len;
    front.copying = front.deferred.is_some();
    let finished = front.read == front.len;
    if finished {
        socket.queue.pop_front();
    }
    Some((piece, finished, len))
}

/// Copies `len` bytes of a buffer to the program: from memory, and what is still in the NIC from there.
async fn copy_piece(cpu: &Cpu, piece: &RxBuffer, to: u64, len: u64, last: bool) {
    let in_memory = piece.in_memory();
    let from_memory = in_memory.saturating_sub(piece.read).min(len);
    cpu.touch(Category::Syscall, piece.buffer, BUFFER_USED, false);
    if from_memory > 0 {
        cpu.copy(piece.data + piece.skip + piece.read, to, from_memory);
    }
    let rest = len - from_memory;
    if let (Some(deferred), true) = (piece.deferred, rest > 0)
        && let Some(driver) = cpu.driver()
    {
        let finished = driver.copy_deferred(cpu, deferred.bank, to + from_memory, rest).await;
        if last && !finished {
            // Headers longer than what the NIC copied first have shifted the payload: its end is left.
            driver.copy_deferred(cpu, deferred.bank, 0, 0).await;
        }
    }
}

/// Sends `len` bytes from `from`, waiting for room.
pub(crate) async fn send(cpu: &Cpu, index: u32, from: u64, len: u64) {
    cpu.charge(Category::Syscall, Cost::Syscall);
    let host = usize::from(cpu.id.host);
    let mut done = 0;
    while done < len {
        if look(cpu, index, |socket| socket.has_room()) == Some(false) {
            wait(cpu, |world| {
                socket(world, cpu, index)
                    .is_none_or(|at| world.hosts[host].os.sockets[at].writable())
            })
            .await;
        }
        let Some(mss) = look(cpu, index, |socket| socket.mss) else { return };
        let size = mss.min(len - done);
        cpu.charge(Category::Syscall, Cost::SendPacket);
        let (buffer, data) = super::alloc_buffer(cpu);
        cpu.copy(from + done, data, size);
        look(cpu, index, |socket| {
            let offset = socket.written;
            socket.written += size;
            socket.tx_memory += socket.truesize;
            socket.unacked.push_back(TxBuffer { buffer, data, offset, len: size });
            // The connection stays open for the whole run, and no stream is too long.
            socket.tcp.as_mut().map(|tcp| tcp.send(size, false))
        });
        done += size;
        // What the NIC can cut goes out when it is large, or at the end.
        let gathers = cpu.host().os.offload && done < len && done % MOST_JOINED >= mss;
        if !gathers {
            output(cpu, index).await;
        }
        service(cpu).await;
    }
    if cpu.id.host == MACHINE as u16 {
        cpu.world().goodput[1] += len;
    }
}

/// Sends a message of `len` bytes that means `meaning` to the peer.
pub(crate) async fn send_message(cpu: &Cpu, index: u32, from: u64, len: u64, meaning: u64) {
    {
        let mut world = cpu.world();
        let host = usize::from(cpu.id.host);
        let Some(at) = socket(&world, cpu, index) else { return };
        let (conn, end) = {
            let socket = &world.hosts[host].os.sockets[at];
            (socket.conn as usize, socket.written + len)
        };
        let ends = world.conns[conn];
        let (peer, other) = if usize::from(ends[0].0) == host { ends[1] } else { ends[0] };
        let peer = &mut world.hosts[usize::from(peer)].os.sockets[other as usize];
        peer.messages.push_back((end, meaning));
    }
    send(cpu, index, from, len).await;
}

/// Takes the next message whose last byte was read; what it means.
pub(crate) fn take_message(cpu: &Cpu, index: u32) -> Option<u64> {
    look(cpu, index, |socket| {
        let (end, meaning) = *socket.messages.front()?;
        (socket.read >= end).then(|| {
            socket.messages.pop_front();
            meaning
        })
    })
    .flatten()
}

/// The headers below the payload of a frame with `tcp` bytes of TCP header.
pub(super) fn skip(tcp: usize) -> u64 {
    BELOW_TCP + tcp as u64
}

/// Touches a connection's control block.
pub(super) fn touch_control(cpu: &Cpu, at: u64) {
    cpu.touch(Category::Stack, at, CONTROL_USED, true);
}

/// Frees what was acknowledged.
pub(super) fn free_acked(cpu: &Cpu, index: u32, acked: u64) {
    loop {
        let freed = look(cpu, index, |socket| {
            let front = socket.unacked.front()?;
            if front.offset + front.len > acked {
                return None;
            }
            socket.tx_memory = socket.tx_memory.saturating_sub(socket.truesize);
            socket.unacked.pop_front()
        });
        let Some(Some(buffer)) = freed else { break };
        cpu.charge(Category::Buffer, Cost::BufferFree);
        cpu.touch(Category::Buffer, buffer.buffer, 64, true);
        cpu.free(Slab::Buffer, buffer.buffer);
        cpu.free(Slab::Data, buffer.data);
    }
    let (writable, core) =
        look(cpu, index, |socket| (socket.writable(), socket.core)).unwrap_or((false, 0));
    if writable {
        super::wake(cpu, core);
    }
}
