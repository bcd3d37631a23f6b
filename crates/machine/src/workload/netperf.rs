//! netperf's TCP_STREAM and TCP_MAERTS, and their variants over several connections in turn.

use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::ledger::Category;
use crate::os;

/// Sends messages for ever, over the connections in turn.
pub(super) async fn sender(cpu: &Cpu, sockets: &[u32], message: u64) {
    let user = cpu.host().memory.heap.reserve(message);
    loop {
        for index in sockets {
            cpu.charge(Category::User, Cost::UserCall);
            os::send(cpu, *index, user, message).await;
        }
        if sockets.is_empty() {
            os::wait(cpu, |_| false).await;
        }
    }
}

/// Receives for ever, from the connections in turn.
pub(super) async fn receiver(cpu: &Cpu, sockets: &[u32], message: u64) {
    let user = cpu.host().memory.heap.reserve(message);
    loop {
        for index in sockets {
            cpu.charge(Category::User, Cost::UserCall);
            os::recv(cpu, *index, user, message).await;
        }
        if sockets.is_empty() {
            os::wait(cpu, |_| false).await;
        }
    }
}
