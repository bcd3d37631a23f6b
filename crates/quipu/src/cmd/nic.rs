//! `quipu nic`: an adapter on a packet link, in the foreground.

use std::process::ExitCode;

use quipu_host::Interrupts;

use super::failure::Failure;
use super::qpip::{LinkOptions, describe};

/// Where.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// Share the adapter with other programs of this user, which need no right: their link is `share:NAME`.
    #[arg(long, value_name = "NAME")]
    share: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  sudo quipu nic --link tap:qp0 --address 10.9.0.2/24
      an adapter behind the TAP device qp0; its other end is the kernel's:
      sudo ip address add 10.9.0.1/24 dev qp0 && ping 10.9.0.2
  sudo quipu nic --link packet:eth1 --address fd09::2/64
      an adapter beside the kernel on a network interface
  quipu nic --link udp:127.0.0.1:4000
      without any right: IPv6 in UDP to others of its kind
  quipu nic --share lab --link tap:qp0 --address 10.9.0.2/24
      one adapter for many programs, which need no right: quipu qpip serve --link share:lab

The adapter answers neighbours and echoes; `quipu top` shows what it does. Ctrl-C ends it.";

/// Brings it up, and waits for the end.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let interrupts =
        Interrupts::block().map_err(|error| Failure::new("cannot wait for signals", error, ""))?;
    let adapter = options.link.open()?;
    println!("{}", describe(&adapter)?);
    let remedy = "name it with --share";
    let share = |name: &String| {
        adapter.share(name).map_err(|error| Failure::new("cannot share the adapter", error, remedy))
    };
    let shared = options.share.as_ref().map(share).transpose()?;
    if let Some(name) = &options.share {
        println!("programs attach to it by the link share:{name}");
    }
    println!("Ctrl-C ends it.");
    interrupts.wait();
    drop(shared);
    drop(adapter);
    Ok(ExitCode::SUCCESS)
}
