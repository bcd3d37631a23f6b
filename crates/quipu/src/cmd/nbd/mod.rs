//! `quipu nbd`: network block devices.

mod attach;
mod bench;
mod copy;
mod disk;
mod file;
mod info;
mod line;
mod load;
mod memory;
mod qpip;
mod rdma;
mod remote;
mod serve;
mod session;
mod socket;
mod stream;
mod tls;

use std::process::ExitCode;

use super::failure::Failure;

/// Which tool.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    tool: Tool,
}

#[derive(clap::Subcommand)]
enum Tool {
    /// Serve a file, a block device or memory as a network block device.
    Serve(serve::Options),
    /// Describe what a server exports.
    Info(info::Options),
    /// Make a server's disk a file of this machine, until the command ends.
    Attach(attach::Options),
    /// Compare queue pairs with sockets and with the servers of others.
    Bench(bench::Options),
    /// Measure how fast a server is.
    Load(load::Options),
    /// Copy a disk: between servers, files and block devices.
    Copy(copy::Options),
}

/// Runs it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    match &options.tool {
        Tool::Serve(options) => serve::run(options),
        Tool::Info(options) => info::run(options),
        Tool::Attach(options) => attach::run(options),
        Tool::Bench(options) => bench::run(options),
        Tool::Load(options) => load::run(options),
        Tool::Copy(options) => copy::run(options),
    }
}

/// The part of `quipu bench` that is about network block devices.
pub(crate) fn bench(quick: bool, json: bool) -> Result<ExitCode, Failure> {
    bench::transports(quick, json)
}

/// Parses a size such as `512`, `64K`, `1M` or `4G` (powers of 1024) into bytes.
fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| format!("\"{text}\" is no size: write 64M"))?;
    let unit = text[digits.len()..].to_ascii_uppercase();
    let power = match unit.trim_end_matches('B').trim_end_matches('I') {
        "" => 0,
        "K" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        _ => return Err(format!("the unit \"{unit}\" is not known: use K, M, G or T")),
    };
    let size = number.checked_mul(1 << (10 * power)).filter(|size| i64::try_from(*size).is_ok());
    size.ok_or_else(|| format!("\"{text}\" is too large"))
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("512"), Ok(512));
        assert_eq!(size("64k"), Ok(65_536));
        assert_eq!((size("1MiB"), size("2GB")), (Ok(1 << 20), Ok(2 << 30)));
        assert!(size("x").is_err() && size("1Q").is_err() && size("99999999T").is_err());
    }
}
