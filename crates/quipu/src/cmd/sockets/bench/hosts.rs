//! Two hosts: network namespaces with a veth pair between them, which end with this process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::Outcome;

/// Addresses of the two hosts.
const ADDRESSES: [&str; 2] = ["10.9.0.1", "10.9.0.2"];

/// Makes the second namespace and the link, prints a process of each, and waits for the end of its input.
/// The memory file system is of its own, since the user is another one inside.
const SCRIPT: &str = "\
set -e
mount -t tmpfs none /dev/shm
exec 3<&0
unshare --net cat <&3 >/dev/null &
far=$!
trap 'kill $far' EXIT
while [ \"$(readlink /proc/$far/ns/net)\" = \"$(readlink /proc/$$/ns/net)\" ]; do sleep 0.02; done
there() { nsenter -t $far -n \"$@\"; }
ip link add quipu0 type veth peer name quipu1 netns $far
ip addr add \"$1/24\" dev quipu0
there ip addr add \"$2/24\" dev quipu1
ip link set lo up
ip link set quipu0 up
there ip link set lo up
there ip link set quipu1 up
echo $$ $far
wait $far";

/// The two hosts.
pub(super) struct Hosts {
    holder: Child,
    inside: [String; 2],
    has_own_user: bool,
}

impl Hosts {
    /// Makes them.
    ///
    /// # Errors
    ///
    /// Programs are missing, or namespaces are not allowed.
    pub(super) fn new() -> Outcome<Self> {
        let has_own_user = !rustix::process::geteuid().is_root();
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount"]);
        if has_own_user {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["sh", "-c", SCRIPT, "sh"]).args(ADDRESSES);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut holder = command.spawn()?;
        let mut line = String::new();
        let read = match &mut holder.stdout {
            Some(output) => BufReader::new(output).read_line(&mut line),
            None => Ok(0),
        };
        let mut hosts = Self { holder, inside: Default::default(), has_own_user };
        read?;
        let (near, far) = line.trim().split_once(' ').ok_or(
            "two hosts are not measured: this needs network namespaces, unshare, nsenter and ip",
        )?;
        hosts.inside = [near.to_owned(), far.to_owned()];
        Ok(hosts)
    }

    /// What a command begins with in order to run on a host.
    pub(super) fn prefix(&self, host: usize) -> Vec<String> {
        let mut words =
            vec!["nsenter".to_owned(), "--target".to_owned(), self.inside[host].clone()];
        if self.has_own_user {
            words.extend(["--user", "--preserve-credentials"].map(str::to_owned));
        }
        words.extend(["--net", "--mount"].map(str::to_owned));
        words
    }

    /// The first host's address.
    pub(super) fn address() -> &'static str {
        ADDRESSES[0]
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // The end of its input ends it, and with it what it has made.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
