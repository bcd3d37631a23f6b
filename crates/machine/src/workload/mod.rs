//! The programs: what runs on the machine under test, and what runs on the hosts that load it.

mod files;
mod netperf;
mod serve;

use std::future::Future;
use std::pin::Pin;

use crate::cpu::Cpu;
use crate::os::{self, Socket};
use crate::plan::{Plan, WorkloadKind};
use crate::world::{MACHINE, World};

/// The software of a core.
pub(crate) type Program = Pin<Box<dyn Future<Output = ()>>>;

/// How many connections a plan has.
pub(crate) fn connections(plan: &Plan) -> u32 {
    plan.workload.connections.max(plan.cpu.cores)
}

/// Makes all sockets. The machine under test waits for the others to connect.
pub(crate) fn connect(world: &mut World) {
    let plan = world.plan.clone();
    for conn in 0..connections(&plan) {
        let peer = 1 + (conn % plan.link.peers) as u16;
        let machine = MACHINE as u16;
        let core = (conn % plan.cpu.cores) as u16;
        let mut ends = [(machine, 0), (peer, 0)];
        for (end, core) in ends.iter_mut().zip([core, 0]) {
            let other = if end.0 == machine { peer } else { machine };
            let host = &mut world.hosts[usize::from(end.0)];
            let heap = &mut host.memory.heap;
            let hosts = [end.0, other];
            let passive = end.0 == machine;
            host.os.sockets.push(Socket::new(&plan, heap, conn, hosts, core, passive));
            end.1 = host.os.sockets.len() as u32 - 1;
        }
        world.conns.push(ends);
    }
}

/// The sockets of a core's program.
fn sockets_of(cpu: &Cpu, plan: &Plan) -> Vec<u32> {
    let cores = if usize::from(cpu.id.host) == MACHINE { plan.cpu.cores } else { 1 };
    let count = cpu.host().os.sockets.len() as u32;
    (0..count).filter(|index| index % cores == u32::from(cpu.id.core)).collect()
}

/// The software of a core: brings the NIC up on the first core, then runs the program for ever.
pub(crate) fn program(cpu: Cpu, plan: Plan) -> Program {
    Box::pin(async move {
        let starts = cpu.id.core == cpu.host().interrupt_core;
        if let (true, Some(driver)) = (starts, cpu.driver()) {
            driver.start(&cpu).await;
        }
        let sockets = sockets_of(&cpu, &plan);
        os::accept_all(&cpu, &sockets).await;
        let on_machine = usize::from(cpu.id.host) == MACHINE;
        let work = &plan.workload;
        match (work.kind, on_machine) {
            (WorkloadKind::Stream | WorkloadKind::StreamMulti, true)
            | (WorkloadKind::Maerts | WorkloadKind::MaertsMulti, false) => {
                netperf::sender(&cpu, &sockets, work.message.0).await;
            }
            (WorkloadKind::Stream | WorkloadKind::StreamMulti, false)
            | (WorkloadKind::Maerts | WorkloadKind::MaertsMulti, true) => {
                netperf::receiver(&cpu, &sockets, work.message.0).await;
            }
            (WorkloadKind::Rr, true) => serve::echo(&cpu, &sockets, work).await,
            (WorkloadKind::Rr, false) => serve::ask(&cpu, &sockets, work, 1).await,
            (WorkloadKind::Web, true) => serve::web(&cpu, &sockets).await,
            (WorkloadKind::Web, false) => serve::browse(&cpu, &sockets).await,
            (WorkloadKind::IscsiTarget, true) | (WorkloadKind::IscsiInitiator, false) => {
                serve::target(&cpu, &sockets, work).await;
            }
            (WorkloadKind::IscsiTarget, false) | (WorkloadKind::IscsiInitiator, true) => {
                serve::initiator(&cpu, &sockets, work).await;
            }
        }
    })
}
