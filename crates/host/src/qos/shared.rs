//! A process's end of a shared port.

use std::io;
use std::net::IpAddr;

use quipu_nic::qos::{Config as Rules, Demand, LANES, MEMBERS, Port};
use quipu_nic::{PortShare, Time};

use super::file::{PortFile, lock_patiently};
use crate::clock::kernel_ns;

/// After so long a lock that somebody holds is tried again.
const RETRY_NS: u64 = 10_000;

/// Between two looks whether other members live: what a dead one has asked for may be granted for so long.
const LOOK_NS: u64 = 20_000_000;

/// The port of an address, of which this process is a member.
pub(super) struct SharedPort {
    file: PortFile,
    port: Port,
    member: usize,
    process: u32,
    generation: u64,
    /// When it is looked next whether other members live.
    look_at: u64,
    /// A configuration that the adapter does not know of yet.
    changed: Option<Rules>,
    /// What the port was not told because somebody held the lock.
    kept: Demand,
}

impl SharedPort {
    /// Joins the port of `address`, which has these rules from now on.
    ///
    /// # Errors
    /// There is no folder for it, or no place in it.
    pub(super) fn join(address: IpAddr, rules: &Rules) -> io::Result<Self> {
        let file = PortFile::open(address)?;
        let held = lock_patiently(&file).ok_or(io::ErrorKind::ResourceBusy)?;
        let now_ns = kernel_ns();
        let mut port = if held.is_deserted() {
            // What those before have left is no concern of this one.
            held.begin(rules)?
        } else if held.rules().as_ref() == Some(rules) {
            let mut port = Port::new(rules, MEMBERS);
            held.load(&mut port, now_ns);
            port
        } else {
            held.configure(rules, now_ns)?
        };
        let member = held.join(std::process::id());
        let member = member.ok_or_else(|| io::Error::other("16 processes share it already"))?;
        port.join(member);
        held.save(&port);
        drop(held);
        let generation = file.generation();
        let process = std::process::id();
        Ok(Self {
            file,
            port,
            member,
            process,
            generation,
            look_at: 0,
            changed: None,
            kept: Demand::default(),
        })
    }

    fn keep(&mut self, demand: &Demand) {
        for lane in 0..LANES {
            self.kept.unused[lane] += demand.unused[lane];
            self.kept.sent[lane] = self.kept.sent[lane].plus(&demand.sent[lane]);
        }
    }
}

impl PortShare for SharedPort {
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; LANES], Time) {
        self.keep(demand);
        let Some(held) = self.file.lock(self.process, now.0) else {
            return ([0; LANES], now.after(RETRY_NS));
        };
        if self.file.generation() != self.generation {
            self.generation = self.file.generation();
            if let Some(rules) = held.rules() {
                self.port = Port::new(&rules, MEMBERS);
                self.changed = Some(rules);
            }
        }
        held.load(&mut self.port, now.0);
        if now.0 >= self.look_at {
            self.look_at = now.0 + LOOK_NS;
            held.remove_dead(|member| self.port.join(member));
        }
        let kept = std::mem::take(&mut self.kept);
        let told = Demand { octets: demand.octets, packet: demand.packet, ..kept };
        let granted = self.port.exchange(self.member, now.0, &told);
        held.save(&self.port);
        (granted, Time(self.port.next_ns()))
    }

    fn configure(&mut self, rules: &Rules) {
        let configured = lock_patiently(&self.file).map(|held| held.configure(rules, kernel_ns()));
        if let Some(Ok(port)) = configured {
            self.port = port;
            self.generation = self.file.generation();
        }
    }

    fn changed(&mut self) -> Option<Rules> {
        self.changed.take()
    }

    fn is_shared(&self) -> bool {
        true
    }
}

impl Drop for SharedPort {
    fn drop(&mut self) {
        // A child of fork does not have the memory.
        if self.process == std::process::id()
            && let Some(held) = lock_patiently(&self.file)
        {
            held.leave(self.member);
        }
    }
}
