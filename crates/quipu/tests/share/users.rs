//! An adapter that is shared with programs of other users, as whom only root can start them; everywhere else
//! these tests say that they were skipped.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use quipu::Config;
use quipu::qpip::{Adapter, QpipConfig};

use super::{PATIENCE, QUIPU, Running, shared_by};

/// Numbers that no account has.
const GUEST: u32 = 61_011;
const MEMBER: u32 = 61_012;
const STRANGER: u32 = 61_013;
const GROUP: u32 = 61_020;
const OTHER_GROUP: u32 = 61_021;

/// One who has a folder in a public place: a number that other runs of this test have not.
fn owner() -> u32 {
    62_000 + std::process::id() % 2000
}

/// Whether this process may become somebody else, who may run the command.
fn may_become_others() -> bool {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("SKIPPED: only root can become other users");
        return false;
    }
    let closed = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 1 == 0;
    if let Some(path) = std::path::Path::new(QUIPU).ancestors().find(|path| closed(path)) {
        println!("SKIPPED: other users may not pass {}", path.display());
        return false;
    }
    true
}

/// The command as some other user, who is in one group.
fn quipu_as(user: u32, group: u32) -> Command {
    let mut command = Command::new(QUIPU);
    command.current_dir("/").uid(user).gid(group);
    command.env("QUIPU_COUNTERS", "never");
    command
}

/// A server of HTTP that says this.
fn serve(user: u32, link: &str, port: &str, text: &str) -> Running {
    let mut command = quipu_as(user, user);
    command.args(["qpip", "serve", "--link", link, "--port", port, "--text", text]);
    let mut server = Running::spawn(&mut command, "never");
    server.until("http");
    server
}

/// What a client of HTTP gets from there; or what it says.
fn get(mut command: Command, link: &str, to: SocketAddr) -> Result<String, String> {
    let Output { status, stdout, stderr } =
        command.args(["qpip", "get", "--link", link, &format!("http://{to}/")]).output().unwrap();
    match status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&stdout).into_owned()),
        _ => Err(String::from_utf8_lossy(&stderr).into_owned()),
    }
}

/// The memory files of shared adapters that a process has mapped.
fn files(running: &Running) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", running.child.id())).unwrap();
    let shared = maps.lines().filter(|line| line.contains("memfd:quipu-share"));
    shared.map(|line| line.split_whitespace().nth(4).unwrap().to_owned()).collect()
}

#[test]
fn users_who_are_named_share_roots_adapter_and_no_memory_with_each_other() {
    if !may_become_others() {
        return;
    }
    let (guest, group) = (GUEST.to_string(), GROUP.to_string());
    let more = ["--user", &guest, "--user", "root", "--group", &group];
    let (mut nic, link, address) = shared_by(&mut Command::new(QUIPU), &more);
    assert!(
        nic.until("programs of").contains(&format!("group {group} attach with the link {link}"))
    );
    let to = SocketAddr::new(address, 87);
    let one = serve(GUEST, &link, "87", "from a guest");
    let two = serve(GUEST, &link, "88", "from another program of the guest");
    // By the group that it has first of all; by another, a guest, and root itself.
    let mut member = quipu_as(MEMBER, MEMBER);
    let in_group = format!("--groups={OTHER_GROUP},{GROUP}");
    let by_another = Command::new("setpriv").args([&in_group, "true"]).status();
    if by_another.is_ok_and(|status| status.success()) {
        member = Command::new("setpriv");
        let (user, own) = (format!("--reuid={MEMBER}"), format!("--regid={MEMBER}"));
        member.current_dir("/").args([&user, &own, &in_group, QUIPU]);
        member.env("QUIPU_COUNTERS", "never");
    } else {
        println!("no setpriv here");
        member.gid(GROUP);
    }
    let mut root = Command::new(QUIPU);
    root.env("QUIPU_COUNTERS", "never");
    for command in [quipu_as(MEMBER, GROUP), member, quipu_as(GUEST, GUEST), root] {
        assert_eq!(get(command, &link, to).as_deref(), Ok("from a guest"));
    }
    // Each has memory in common with the adapter, and nobody else.
    let [of_one, of_two] = [&one, &two].map(files);
    assert_eq!((of_one.len(), of_two.len()), (1, 1));
    let both: BTreeSet<_> = of_one.union(&of_two).cloned().collect();
    assert_eq!(both.len(), 2);
    // What those had who have ended goes soon.
    let begun = Instant::now();
    while files(&nic) != both {
        assert!(begun.elapsed() < PATIENCE, "it has other memory: {:?}", files(&nic));
        std::thread::sleep(Duration::from_millis(5));
    }

    let refused = get(quipu_as(STRANGER, OTHER_GROUP), &link, to).unwrap_err();
    let said = "root shares the adapter, but not with this user; ask for it to be shared with you";
    assert!(refused.contains(said), "{refused}");
    // Also where the kernel lets it in, as from file systems without lists of who may.
    let name = link.strip_prefix("share:").unwrap();
    let folders = ["/run/quipu", "/dev/shm/quipu-public-0"].into_iter();
    let mut places = folders.map(|folder| format!("{folder}/share-{name}"));
    let place = places.find(|place| fs::exists(place).unwrap()).unwrap();
    fs::set_permissions(place, fs::Permissions::from_mode(0o666)).unwrap();
    let refused = get(quipu_as(STRANGER, OTHER_GROUP), &link, to).unwrap_err();
    let said = format!("the adapter is not shared with its user, {STRANGER}; ask for it");
    assert!(refused.contains(&said), "{refused}");
    assert_eq!(get(quipu_as(GUEST, GUEST), &link, to).as_deref(), Ok("from a guest"));
}

/// Where [`many`] attaches.
const LINK: &str = "SHARED_LINK_OF_TEST";

/// As a child: attaches as often as it can, says how often, and keeps what it has.
#[test]
fn many() {
    let Ok(link) = std::env::var(LINK) else { return };
    let mut adapters = Vec::new();
    let why = loop {
        let qpip = Some(QpipConfig::new(link.parse().unwrap()));
        let address = Some([127, 0, 0, 1].into());
        match Adapter::open_with(Config { address, counters: false, qpip, ..Config::default() }) {
            Ok(adapter) => adapters.push(adapter),
            Err(error) => break error,
        }
    };
    println!("HAS {}: {why}", adapters.len());
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn one_user_does_not_take_all_places() {
    if !may_become_others() {
        return;
    }
    let users = [GUEST, MEMBER].map(|user| user.to_string());
    let more = ["--user", &users[0], "--user", &users[1]];
    let (_nic, link, address) = shared_by(&mut Command::new(QUIPU), &more);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "users::many", "--nocapture"]).env(LINK, &link).current_dir("/");
    command.uid(GUEST).gid(GUEST).stdin(Stdio::piped());
    let mut greedy = Running::spawn(&mut command, "never");
    let said = greedy.until("HAS");
    let why = format!("user {GUEST} has 32 programs attached, and one guest may have at most half");
    assert!(said.contains("HAS 32: ") && said.contains(&why), "{said}");
    let to = SocketAddr::new(address, 90);
    let _server = serve(MEMBER, &link, "90", "from another user");
    let text = Ok("from another user".to_owned());
    assert_eq!(get(quipu_as(MEMBER, MEMBER), &link, to), text);
}

#[test]
fn who_trusts_a_user_says_so() {
    if !may_become_others() {
        return;
    }
    let (guest, owner) = (GUEST.to_string(), owner());
    let (mut nic, link, address) = shared_by(&mut quipu_as(owner, owner), &["--user", &guest]);
    let named = format!("{link},user={owner}");
    assert!(nic.until("programs of").trim_end().ends_with(&named));
    let to = SocketAddr::new(address, 89);
    let _server = serve(owner, &link, "89", "from the owner");
    let text = Ok("from the owner".to_owned());
    assert_eq!(get(quipu_as(GUEST, GUEST), &named, to), text);
    // Somebody else is another; root, too.
    let unnamed = get(quipu_as(GUEST, GUEST), &link, to).unwrap_err();
    assert!(
        unnamed.contains("neither this user nor root") && unnamed.contains(",user="),
        "{unnamed}"
    );
    let stranger = get(quipu_as(STRANGER, STRANGER), &named, to).unwrap_err();
    assert!(
        stranger.contains(&format!("user {owner} shares the adapter, but not with")),
        "{stranger}"
    );
    let nobody = get(quipu_as(GUEST, GUEST), &format!("{link},user=no-such-user"), to).unwrap_err();
    assert!(nobody.contains("there is no user no-such-user"), "{nobody}");
    // A folder that others can write to, or somebody else has made, is not looked at.
    let folder = format!("/dev/shm/quipu-public-{owner}");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o757)).unwrap();
    let open = get(quipu_as(GUEST, GUEST), &named, to).unwrap_err();
    assert!(open.contains("neither this user nor root"), "{open}");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(get(quipu_as(GUEST, GUEST), &named, to), text);
    nic.signal("TERM");
    assert_eq!(nic.end(), Some(0));
    fs::remove_dir(&folder).unwrap();
    let mut squatter = quipu_as(owner, owner);
    std::os::unix::fs::symlink("/tmp", &folder).unwrap();
    let refused = squatter.args(["nic", "--link", super::OWN, "--share", "x", "--user", &guest]);
    let refused = String::from_utf8(refused.output().unwrap().stderr).unwrap();
    fs::remove_file(&folder).unwrap();
    assert!(refused.contains(&folder) && refused.contains("remove that folder"), "{refused}");
}

#[test]
fn guests_who_are_not_there_are_named() {
    let said = |more: &[&str]| {
        let args = [&["nic", "--link", super::OWN][..], more].concat();
        let output = Command::new(QUIPU).args(args).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, unknown) = said(&["--share", "x", "--group", "no-such-group"]);
    assert!(code == Some(1) && unknown.contains("there is no group no-such-group"), "{unknown}");
    let (code, alone) = said(&["--user", "root"]);
    assert!(code == Some(2) && alone.contains("--share"), "{alone}");
}
