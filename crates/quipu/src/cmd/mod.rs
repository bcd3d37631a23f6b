//! What the command line says, and who does it.

// First, for its macros.
#[macro_use]
mod output;

mod am;
mod bench;
mod capture;
mod completion;
mod devices;
mod doctor;
mod elf;
mod env;
mod failure;
mod faults;
mod ipoib;
mod libraries;
mod looking;
mod machine;
mod nbd;
mod nic;
mod paper;
mod qos;
mod qpip;
mod run;
mod sim;
mod sockets;
mod splitc;
mod spmd;
mod top;
mod variables;

use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

/// Queue pairs over IP in user space: RDMA for any program, with no RDMA hardware, no kernel module
/// and no root.
///
/// RDMA programs run unmodified: `quipu run -- PROGRAM` gives them the device quipu0, which uses an IP
/// address of this machine.
#[derive(Parser)]
#[command(name = "quipu", version, propagate_version = true, max_term_width = 100)]
#[command(after_long_help = MAIN_EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

const MAIN_EXAMPLES: &str = "\
Examples:
  quipu doctor                            checks whether Quipu works on this machine
  quipu run -- ib_write_bw                a server
  quipu run -- ib_write_bw 127.0.0.1      its client, in another terminal
  quipu sim --seeds 10000                 runs ten thousand simulated networks
  quipu bench --quick                     measures for a minute

`quipu help run` lists the environment variables (QUIPU_ADDRESS, QUIPU_LOG and others).";

#[derive(Subcommand)]
enum Task {
    /// Run a program with Quipu as its RDMA adapter.
    Run(run::Options),
    /// Run a program, with its TCP connections on this machine through shared memory.
    Sockets(sockets::Options),
    /// Print the variables that `quipu run` sets, for a shell to evaluate.
    Env(env::Options),
    /// List the RDMA devices that programs see.
    Devices(devices::Options),
    /// Check what works on this machine, and say how to repair what does not.
    Doctor(doctor::Options),
    /// Show your engines at work: queue pairs, messages, bytes, errors.
    Top(top::Options),
    /// Start an adapter with its own IP addresses on a packet link.
    Nic(nic::Options),
    /// Run a network interface over the adapter: IP over InfiniBand.
    Ipoib(ipoib::Options),
    /// Run tools over that adapter's own TCP and UDP: a web server, ttcp, pingpong.
    Qpip(qpip::Options),
    /// Compile Split-C programs.
    Splitc(splitc::Options),
    /// Start the processes of a parallel program, here or on several hosts, and wait for them.
    Spmd(spmd::Options),
    /// Quality of service: show and change the ports of your programs, check a configuration.
    Qos(qos::Options),
    /// Run the adapter in simulated networks with faults, and check its behaviour.
    Sim(sim::Options),
    /// Simulate whole hosts: processor, caches, buses and NICs under the project's own TCP.
    Machine(machine::Options),
    /// Compare Quipu with raw sockets, memory, UCX, libfabric and Open MPI.
    Bench(quipu_bench::Options),
    /// Network block devices: serve, describe and copy disks.
    Nbd(nbd::Options),
    /// Measure Active Messages.
    Am(am::Options),
    /// Run the experiments of a paper, and compare the published values with ours.
    Paper(paper::Options),
    /// Print the completion script for a shell.
    Completion(completion::Options),
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    ManPages(completion::ManOptions),
}

/// What the device is to be like.
#[derive(Args, Clone, Debug, Default)]
struct DeviceOptions {
    /// The device's only address: one of this machine's, such as 10.0.0.1, or fe80::1%eth0 if link-local.
    ///
    /// Default: all addresses of this machine. The first is that of an interface that is up, IPv4 before
    /// IPv6, loopback last. With 127.0.0.1 or ::1, only programs on this machine can connect.
    #[arg(long, short, env = "QUIPU_ADDRESS", value_name = "ADDRESS",
          value_parser = variables::trimmed::<quipu_host::WantedAddress>)]
    address: Option<quipu_host::WantedAddress>,
}

/// Runs the command.
pub(crate) fn main() -> ExitCode {
    let matches = variables::read(Cli::command());
    let task = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).task;
    let outcome = output::catch(|| match task {
        Task::Run(options) => run::run(&options),
        Task::Sockets(options) => sockets::run(&options),
        Task::Env(options) => env::run(&options),
        Task::Devices(options) => devices::run(&options),
        Task::Doctor(options) => doctor::run(&options),
        Task::Top(options) => top::run(&options),
        Task::Nic(options) => nic::run(&options),
        Task::Ipoib(options) => ipoib::run(&options),
        Task::Qpip(options) => qpip::run(&options),
        Task::Splitc(options) => splitc::run(&options),
        Task::Spmd(options) => spmd::run(&options),
        Task::Qos(options) => qos::run(&options),
        Task::Sim(options) => sim::run(&options),
        Task::Machine(options) => machine::run(&options),
        Task::Bench(options) => bench::run(&options),
        Task::Nbd(options) => nbd::run(&options),
        Task::Am(options) => am::run(&options),
        Task::Paper(options) => paper::run(&options),
        Task::Completion(options) => completion::run(&options, Cli::command()),
        Task::ManPages(options) => completion::man_pages(&options, Cli::command()),
    });
    outcome.unwrap_or_else(|failure| {
        eprint!("{failure}");
        failure.code()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_programs_own_options_are_left_alone() {
        let words = ["quipu", "run", "--address", "::1", "--", "ib_write_bw", "-a", "--log"];
        let Task::Run(options) = Cli::try_parse_from(words).unwrap().task else { panic!() };
        assert_eq!(options.program(), ["ib_write_bw", "-a", "--log"]);
        let words = ["quipu", "run", "ib_write_bw", "-a"];
        let Task::Run(options) = Cli::try_parse_from(words).unwrap().task else { panic!() };
        assert_eq!(options.program(), ["ib_write_bw", "-a"]);
    }
}
