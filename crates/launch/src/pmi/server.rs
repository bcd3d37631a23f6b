//! The launcher's end of PMI-1: a key-value space, a barrier and abort, for all ranks of a job.

use std::collections::BTreeMap;

use super::wire::{Line, LineBuffer};

/// Longest line that a rank may send, in bytes.
const MAX_LINE: usize = 4096;
/// Longest name, key and value, as `get_maxes` reports them.
const MAX_NAME: usize = 256;
const MAX_KEY: usize = 64;
const MAX_VALUE: usize = 1024;
/// Bytes of keys and values that one rank may put.
const MAX_SPACE: usize = 4 << 20;

/// What the launcher has to do for the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write these bytes to the rank.
    Send {
        /// To which rank.
        rank: u32,
        /// What.
        bytes: Vec<u8>,
    },
    /// End the job: a rank asked for it, or broke the protocol.
    Abort {
        /// Which rank.
        rank: u32,
        /// Exit code of the job.
        code: i32,
        /// Why.
        message: String,
    },
}

/// The state of one rank's connection.
#[derive(Debug)]
struct Client {
    buffer: LineBuffer,
    space: usize,
    in_barrier: bool,
    left: bool,
}

/// A PMI-1 server for the ranks of one job. Bytes that come from a rank go into [`Server::handle`];
/// what is to be done comes out as [`Effect`]s.
#[derive(Debug)]
pub struct Server {
    name: String,
    mapping: String,
    values: BTreeMap<String, String>,
    services: BTreeMap<String, String>,
    clients: Vec<Client>,
}

impl Server {
    /// A server for a job whose ranks lie in blocks on hosts: `ranks_per_host[i]` of them on host i.
    /// `name` is the name of the key-value space; it contains no blank.
    #[must_use]
    pub fn new(name: &str, ranks_per_host: &[u32]) -> Self {
        let client = || Client {
            buffer: LineBuffer::new(MAX_LINE),
            space: 0,
            in_barrier: false,
            left: false,
        };
        let blocks = ranks_per_host.iter().enumerate();
        let blocks: Vec<String> =
            blocks.map(|(host, ranks)| format!("({host},1,{ranks})")).collect();
        Self {
            name: name.into(),
            mapping: format!("(vector,{})", blocks.join(",")),
            values: BTreeMap::new(),
            services: BTreeMap::new(),
            clients: (0..ranks_per_host.iter().sum()).map(|_| client()).collect(),
        }
    }

    /// Handles bytes that `rank` has sent.
    pub fn handle(&mut self, rank: u32, bytes: &[u8], effects: &mut Vec<Effect>) {
        let Some(client) = self.clients.get_mut(rank as usize) else { return };
        let mut lines = Vec::new();
        let whole = client.buffer.push(bytes, |line| lines.push(line.to_vec()));
        for line in &lines {
            if !line.is_empty() {
                self.handle_line(rank, line, effects);
            }
        }
        if let Err(error) = whole {
            effects.push(broken(rank, &error.to_string()));
        }
    }

    /// Notes that `rank` has ended. Ends the job if another rank waits for it at a barrier.
    pub fn handle_exit(&mut self, rank: u32, effects: &mut Vec<Effect>) {
        let Some(client) = self.clients.get_mut(rank as usize) else { return };
        (client.left, client.in_barrier) = (true, false);
        self.check_barrier(effects);
    }

    fn handle_line(&mut self, rank: u32, bytes: &[u8], effects: &mut Vec<Effect>) {
        let line = match Line::parse(bytes) {
            Ok(line) => line,
            Err(error) => return effects.push(broken(rank, &error.to_string())),
        };
        let size = self.clients.len();
        let answer = match line.command() {
            "init" => match line.number("pmi_version") {
                Some(1) => "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1".into(),
                _ => "cmd=response_to_init rc=-1 pmi_version=1 pmi_subversion=1".into(),
            },
            "get_maxes" => format!(
                "cmd=maxes rc=0 kvsname_max={MAX_NAME} keylen_max={MAX_KEY} vallen_max={MAX_VALUE}"
            ),
            "get_appnum" => "cmd=appnum rc=0 appnum=0".into(),
            "get_universe_size" => format!("cmd=universe_size rc=0 size={size}"),
            "get_my_kvsname" => format!("cmd=my_kvsname rc=0 kvsname={}", self.name),
            "put" => self.put(rank, &line),
            "get" => self.get(&line),
            "publish_name" | "unpublish_name" | "lookup_name" => self.name_service(&line),
            "barrier_in" => {
                self.clients[rank as usize].in_barrier = true;
                return self.check_barrier(effects);
            }
            "finalize" => "cmd=finalize_ack rc=0".into(),
            "abort" => {
                let code = line.number("exitcode").and_then(|code| i32::try_from(code).ok());
                let words = line.value("error_msg").unwrap_or("it called abort");
                let message = words.replace('_', " ");
                return effects.push(Effect::Abort { rank, code: code.unwrap_or(1), message });
            }
            other => format!("cmd={other} rc=-1 msg=not_supported"),
        };
        effects.push(send(rank, &answer));
    }

    fn put(&mut self, rank: u32, line: &Line<'_>) -> String {
        let (Some(key), Some(value)) = (line.value("key"), line.value("value")) else {
            return "cmd=put_result rc=-1 msg=no_key_or_no_value".into();
        };
        let client = &mut self.clients[rank as usize];
        client.space += key.len() + value.len();
        if key.len() > MAX_KEY || value.len() > MAX_VALUE || client.space > MAX_SPACE {
            return "cmd=put_result rc=-1 msg=too_long".into();
        }
        self.values.insert(key.into(), value.into());
        "cmd=put_result rc=0 msg=success".into()
    }

    fn get(&self, line: &Line<'_>) -> String {
        let key = line.value("key").unwrap_or_default();
        let value = match key {
            "PMI_process_mapping" => Some(&self.mapping),
            _ => self.values.get(key),
        };
        match value {
            Some(value) => format!("cmd=get_result rc=0 msg=success value={value}"),
            None => format!("cmd=get_result rc=-1 msg=key_{key}_not_found value=unknown"),
        }
    }

    fn name_service(&mut self, line: &Line<'_>) -> String {
        let service = line.value("service").unwrap_or_default().to_owned();
        match (line.command(), line.value("port")) {
            ("publish_name", Some(port)) if self.services.len() < 1024 => {
                self.services.insert(service, port.into());
                "cmd=publish_result rc=0 info=ok".into()
            }
            ("publish_name", _) => "cmd=publish_result rc=-1 info=refused".into(),
            ("unpublish_name", _) => {
                self.services.remove(&service);
                "cmd=unpublish_result rc=0 info=ok".into()
            }
            _ => match self.services.get(&service) {
                Some(port) => format!("cmd=lookup_result rc=0 info=ok port={port}"),
                None => "cmd=lookup_result rc=-1 info=not_found port=".into(),
            },
        }
    }

    /// Opens the barrier if all ranks are in it; ends the job if one of them never will be.
    fn check_barrier(&mut self, effects: &mut Vec<Effect>) {
        let waiting = self.clients.iter().filter(|client| client.in_barrier).count();
        if waiting == 0 {
            return;
        }
        if let Some(rank) = self.clients.iter().position(|client| client.left) {
            let message = format!("it has ended, and {waiting} ranks wait for it at a barrier");
            for client in &mut self.clients {
                client.in_barrier = false;
            }
            return effects.push(Effect::Abort { rank: rank as u32, code: 1, message });
        }
        if waiting < self.clients.len() {
            return;
        }
        for (rank, client) in (0..).zip(&mut self.clients) {
            client.in_barrier = false;
            effects.push(send(rank, "cmd=barrier_out rc=0"));
        }
    }
}

fn send(rank: u32, line: &str) -> Effect {
    Effect::Send { rank, bytes: format!("{line}\n").into_bytes() }
}

fn broken(rank: u32, why: &str) -> Effect {
    Effect::Abort { rank, code: 1, message: format!("it does not speak PMI-1: {why}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(server: &mut Server, rank: u32, line: &str) -> Vec<Effect> {
        let mut effects = Vec::new();
        server.handle(rank, format!("{line}\n").as_bytes(), &mut effects);
        effects
    }

    fn answer(server: &mut Server, rank: u32, line: &str) -> String {
        match &ask(server, rank, line)[..] {
            [Effect::Send { rank: to, bytes }] if *to == rank => {
                String::from_utf8(bytes.clone()).unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn values_are_there_for_all_ranks() {
        let mut server = Server::new("kvs", &[1, 2]);
        let put = answer(&mut server, 0, "cmd=put kvsname=kvs key=a value=x=1");
        assert_eq!(put, "cmd=put_result rc=0 msg=success\n");
        let get = answer(&mut server, 2, "cmd=get kvsname=kvs key=a");
        assert_eq!(get, "cmd=get_result rc=0 msg=success value=x=1\n");
        let get = answer(&mut server, 2, "cmd=get kvsname=kvs key=b");
        assert_eq!(get, "cmd=get_result rc=-1 msg=key_b_not_found value=unknown\n");
        let get = answer(&mut server, 0, "cmd=get kvsname=kvs key=PMI_process_mapping");
        assert_eq!(get, "cmd=get_result rc=0 msg=success value=(vector,(0,1,1),(1,1,2))\n");
    }

    #[test]
    fn the_barrier_opens_for_all_at_once() {
        let mut server = Server::new("kvs", &[3]);
        for _ in 0..2 {
            assert_eq!(ask(&mut server, 1, "cmd=barrier_in"), []);
            assert_eq!(ask(&mut server, 0, "cmd=barrier_in"), []);
            let out = ask(&mut server, 2, "cmd=barrier_in");
            assert_eq!(out, [0, 1, 2].map(|rank| send(rank, "cmd=barrier_out rc=0")));
        }
    }

    #[test]
    fn a_barrier_that_cannot_open_ends_the_job() {
        let mut server = Server::new("kvs", &[2]);
        ask(&mut server, 0, "cmd=barrier_in");
        let mut effects = Vec::new();
        server.handle_exit(1, &mut effects);
        assert!(matches!(&effects[..], [Effect::Abort { rank: 1, code: 1, .. }]), "{effects:?}");
    }

    #[test]
    fn other_versions_and_calls_are_refused() {
        let mut server = Server::new("kvs", &[1]);
        assert!(answer(&mut server, 0, "cmd=init pmi_version=2").contains("rc=-1"));
        assert!(answer(&mut server, 0, "cmd=frobnicate").contains("rc=-1"));
        let long = format!("cmd=put key=a value={}", "x".repeat(MAX_VALUE + 1));
        assert!(answer(&mut server, 0, &long).contains("rc=-1"));
        let effects = ask(&mut server, 0, "cmd=abort exitcode=7 error_msg=no_memory");
        let abort = Effect::Abort { rank: 0, code: 7, message: "no memory".into() };
        assert_eq!(effects, [abort]);
        assert!(matches!(ask(&mut server, 0, "nonsense")[..], [Effect::Abort { .. }]));
        assert_eq!(ask(&mut server, 9, "cmd=init"), []);
    }
}
