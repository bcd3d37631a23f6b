//! Programs that exchange requests and responses: netperf's TCP_RR, a web server and its clients, an iSCSI
//! target and its initiator.

use super::files::{self, DIRECTORIES, DIRECTORY_BYTES};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::ledger::Category;
use crate::os;
use crate::plan::WorkloadPlan;
use crate::world::MACHINE;

/// Bytes of a call of recv.
const READ: u64 = 64 << 10;
/// Bytes of an HTTP request, and of a response's header (Apache 2.0).
const HTTP_REQUEST: u64 = 320;
const HTTP_RESPONSE: u64 = 280;
/// Bytes of an iSCSI basic header segment (RFC 3720 10).
const PDU: u64 = 48;
/// Bytes of a page of the page cache.
const PAGE: u64 = 8192;
/// Of 10 requests, so many are for dynamic content (SPECweb99).
const DYNAMIC: u64 = 3;

/// Waits until one of the sockets can be read.
async fn wait_any(cpu: &Cpu, sockets: &[u32]) {
    let host = usize::from(cpu.id.host);
    os::wait(cpu, |world| {
        let all = &world.hosts[host].os.sockets;
        sockets.iter().any(|index| all.get(*index as usize).is_some_and(|it| it.readable > 0))
    })
    .await;
}

fn is_readable(cpu: &Cpu, index: u32) -> bool {
    cpu.host().os.sockets.get(index as usize).is_some_and(|socket| socket.readable > 0)
}

/// Counts a request that is complete, on the machine under test.
fn count(cpu: &Cpu) {
    if usize::from(cpu.id.host) == MACHINE {
        cpu.world().requests += 1;
    }
}

/// Sends a message of `length` bytes from `user` for each message that comes, for ever.
async fn answer_each(cpu: &Cpu, sockets: &[u32], user: u64, length: u64) {
    loop {
        wait_any(cpu, sockets).await;
        for index in sockets.iter().copied().filter(|index| is_readable(cpu, *index)) {
            os::recv(cpu, index, user, READ).await;
            while os::take_message(cpu, index).is_some() {
                cpu.charge(Category::User, Cost::UserCall);
                os::send_message(cpu, index, user, length, 0).await;
                count(cpu);
            }
        }
    }
}

/// netperf's server: answers each request.
pub(super) async fn echo(cpu: &Cpu, sockets: &[u32], work: &WorkloadPlan) {
    let user = cpu.host().memory.heap.reserve(READ.max(work.response.0));
    answer_each(cpu, sockets, user, work.response.0).await;
}

/// netperf's client: `outstanding` requests on each connection.
pub(super) async fn ask(cpu: &Cpu, sockets: &[u32], work: &WorkloadPlan, outstanding: u32) {
    let user = cpu.host().memory.heap.reserve(READ.max(work.request.0));
    for index in sockets {
        for _ in 0..outstanding {
            os::send_message(cpu, *index, user, work.request.0, 0).await;
        }
    }
    answer_each(cpu, sockets, user, work.request.0).await;
}

/// The web server: finds the file in the page cache and sends it.
pub(super) async fn web(cpu: &Cpu, sockets: &[u32]) {
    let (user, set) = {
        let heap = &mut cpu.host().memory.heap;
        (heap.reserve(READ), heap.reserve(DIRECTORIES * DIRECTORY_BYTES))
    };
    loop {
        wait_any(cpu, sockets).await;
        for index in sockets.iter().copied().filter(|index| is_readable(cpu, *index)) {
            os::recv(cpu, index, user, READ).await;
            while let Some(meaning) = os::take_message(cpu, index) {
                let (size, at) = (meaning & 0xff_ffff, meaning >> 24);
                let dynamic = meaning % 10 < DYNAMIC;
                cpu.charge_times(Category::User, Cost::WebRequest, 1 + u64::from(dynamic));
                cpu.touch(Category::User, user, 4096, false);
                cpu.charge_times(Category::Fs, Cost::FilePage, size.div_ceil(PAGE));
                os::send(cpu, index, user, HTTP_RESPONSE).await;
                os::send_message(cpu, index, set + at, size, 0).await;
                count(cpu);
            }
        }
    }
}

/// The clients of the web server: a request as soon as the response before is there, as scaled Surge clients
/// that saturate the server.
pub(super) async fn browse(cpu: &Cpu, sockets: &[u32]) {
    let user = cpu.host().memory.heap.reserve(READ);
    for index in sockets {
        request_file(cpu, *index, user).await;
    }
    loop {
        wait_any(cpu, sockets).await;
        for index in sockets.iter().copied().filter(|index| is_readable(cpu, *index)) {
            os::recv(cpu, index, user, READ).await;
            while os::take_message(cpu, index).is_some() {
                request_file(cpu, index, user).await;
            }
        }
    }
}

async fn request_file(cpu: &Cpu, index: u32, user: u64) {
    let file = files::draw(&mut cpu.world().rng);
    os::send_message(cpu, index, user, HTTP_REQUEST, file.at << 24 | file.size).await;
}

/// The iSCSI target: no disk, data at once.
pub(super) async fn target(cpu: &Cpu, sockets: &[u32], work: &WorkloadPlan) {
    let user = cpu.host().memory.heap.reserve(READ.max(PDU + work.response.0));
    loop {
        wait_any(cpu, sockets).await;
        for index in sockets.iter().copied().filter(|index| is_readable(cpu, *index)) {
            os::recv(cpu, index, user, READ).await;
            while os::take_message(cpu, index).is_some() {
                cpu.charge(Category::User, Cost::IscsiCommand);
                cpu.charge(Category::Fs, Cost::BlockRequest);
                os::send_message(cpu, index, user, PDU + work.response.0, 0).await;
                count(cpu);
            }
        }
    }
}

/// The iSCSI initiator: asynchronous reads, each reissued when it completes.
pub(super) async fn initiator(cpu: &Cpu, sockets: &[u32], work: &WorkloadPlan) {
    let read = PDU + work.response.0;
    let window = read * u64::from(work.outstanding.min(64)) * sockets.len().clamp(1, 4) as u64;
    let user = cpu.host().memory.heap.reserve(window.max(READ));
    for index in sockets {
        for _ in 0..work.outstanding {
            cpu.charge(Category::Fs, Cost::BlockRequest);
            os::send_message(cpu, *index, user, PDU, 0).await;
        }
    }
    let mut place = 0;
    loop {
        wait_any(cpu, sockets).await;
        for index in sockets.iter().copied().filter(|index| is_readable(cpu, *index)) {
            // Reads complete into pages of their own: the buffer is used in turn.
            let most = READ.min(window.max(READ) - place);
            place += os::recv(cpu, index, user + place, most).await;
            if place + read > window.max(READ) {
                place = 0;
            }
            while os::take_message(cpu, index).is_some() {
                cpu.charge(Category::User, Cost::IscsiCommand);
                cpu.charge(Category::Fs, Cost::BlockRequest);
                os::send_message(cpu, index, user, PDU, 0).await;
                count(cpu);
            }
        }
    }
}
