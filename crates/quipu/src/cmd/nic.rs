//! `quipu nic`: an adapter on a packet link, in the foreground.

use std::process::ExitCode;
use std::time::Duration;

use quipu_host::counters::observe::{DROP_REASONS, ENGINE_METRICS, Sample};
use quipu_host::counters::samples;
use quipu_host::{Account, AccountError, Guests, Interrupts, ShareError, Sharer};

use super::failure::Failure;
use super::qpip::{LinkOptions, describe, failed};

/// How often it is looked at whether the link is still there.
const LOOK: Duration = Duration::from_secs(1);

/// Where.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// Share the adapter with other programs of this user. They need no privilege. Their link is
    /// `share:NAME`.
    #[arg(long, value_name = "NAME")]
    share: Option<String>,
    /// Also share it with programs of this user (name or number). May be given several times.
    ///
    /// If root shares the adapter, their link is `share:NAME`, too. Otherwise it is `share:NAME,user=USER`,
    /// with the sharing user, who can read what they send.
    #[arg(long, value_name = "USER", requires = "share")]
    user: Vec<String>,
    /// Also share it with programs of the members of this group (name or number). May be given several times.
    #[arg(long, value_name = "GROUP", requires = "share")]
    group: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  sudo quipu nic --link tap:qp0 --address 10.9.0.2/24
      an adapter at one end of the TAP device qp0; the other end is the kernel's:
      sudo ip address add 10.9.0.1/24 dev qp0
      sudo ip link set qp0 up && ping 10.9.0.2
  sudo quipu nic --link packet:eth1 --address fd09::2/64
      an adapter on a network interface that the kernel uses, too
  quipu nic --link udp:127.0.0.1:4000
      without privilege: IPv6 in UDP to other Quipus
  quipu nic --share lab --link tap:qp0 --address 10.9.0.2/24
      one adapter for many unprivileged programs: quipu qpip serve --link share:lab
  sudo quipu nic --share lab --user alice --group students --link xdp:eth1 --address 10.9.0.2/24
      the same for programs of other users
  sudo quipu nic --link tap:qp0 --address 10.9.0.2/24 --pcap qp0.pcapng
      captures the packets of the link; Wireshark can read the file while it runs

The adapter answers neighbour requests and pings; `quipu top` shows its counters. When Ctrl-C ends
it, it prints how many frames passed, and why some were dropped.";

/// Brings it up, and waits for the end.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let interrupts =
        Interrupts::block().map_err(|error| Failure::new("cannot wait for signals", error, ""))?;
    let guests = guests(options)?;
    let adapter = options.link.open()?;
    println!("{}", describe(&adapter)?);
    let share = |name: &String| adapter.share_with(name, &guests).map_err(not_shared);
    let shared = options.share.as_ref().map(share).transpose()?;
    if let Some(name) = &options.share {
        println!("programs attach with the link share:{name}");
    }
    if let Some(link) = shared.as_ref().and_then(Sharer::guest_link) {
        println!("programs of {} attach with the link {link}", invited(options));
    }
    println!("Ctrl-C ends it.");
    let end = loop {
        if interrupts.wait_at_most(LOOK) {
            break Ok(());
        }
        while let Some(why) = shared.as_ref().and_then(Sharer::take_refusal) {
            eprintln!("a program could not attach: {why}");
        }
        if let Err(gone) = adapter.check() {
            break Err(failed(gone));
        }
    };
    drop(shared);
    let _ = adapter.show_counters();
    // What it shows of itself, unless it is to show nothing (`QUIPU_COUNTERS`).
    let own = samples().into_iter().filter(|sample| sample.process == std::process::id());
    own.for_each(|sample| println!("{}", frames(&sample)));
    drop(adapter);
    end.map(|()| ExitCode::SUCCESS)
}

/// With whom it is shared.
fn guests(options: &Options) -> Result<Guests, Failure> {
    let mut guests = Guests::default();
    let users = options.user.iter().try_for_each(|user| guests.add_user(user));
    let all = users.and_then(|()| options.group.iter().try_for_each(|it| guests.add_group(it)));
    all.map_err(|error| {
        let remedy = match &error {
            AccountError::Unknown(Account::User, _) => {
                "`getent passwd` lists the users; a \
                number also works"
            }
            AccountError::Unknown(Account::Group, _) => {
                "`getent group` lists the groups; a \
                number also works"
            }
            AccountError::Nobodys(..) => "share the adapter from outside this user namespace",
            AccountError::System(..) => "give the number",
        };
        Failure::new("cannot share the adapter", error, remedy)
    })?;
    Ok(guests)
}

/// The same in words.
fn invited(options: &Options) -> String {
    let users = options.user.iter().map(|user| format!("user {user}"));
    let groups = options.group.iter().map(|group| format!("group {group}"));
    users.chain(groups).collect::<Vec<_>>().join(", ")
}

fn not_shared(error: ShareError) -> Failure {
    let remedy = match &error {
        ShareError::Name(_) => "give another name with --share",
        ShareError::Folder(_) => "remove that folder, or give it to this user with that mode",
        // These say it themselves.
        _ => "",
    };
    Failure::new("cannot share the adapter", error, remedy)
}

/// How many frames there were, and why some were dropped.
fn frames(sample: &Sample) -> String {
    let value = |name: &str| {
        let mut named = ENGINE_METRICS.iter().zip(sample.engine).filter(|(it, _)| it.name == name);
        named.next().map_or(0, |(_, value)| value)
    };
    let dropped = DROP_REASONS.iter().zip(sample.drops).filter(|(_, count)| *count > 0);
    let reasons: Vec<_> = dropped.map(|(it, count)| format!("{} {count}", it.name)).collect();
    let (received, sent) = (value("frames_received"), value("frames_sent"));
    let dropped = if reasons.is_empty() { "none".into() } else { reasons.join(", ") };
    format!("frames: {received} received, {sent} sent; dropped: {dropped}")
}
