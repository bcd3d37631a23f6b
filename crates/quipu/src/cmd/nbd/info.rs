//! `quipu nbd info`: what a server exports.

use std::process::ExitCode;

use quipu_nbd::uri::{Place, Uri};
use quipu_nbd::wire::reply;
use quipu_nbd::{ProtocolError, TransmissionFlags};
use serde_json::json;

use super::Failure;
use super::disk::Disk;
use super::qpip;
use super::remote::Remote;
use super::session::{Session, Trouble};
use crate::cmd::qpip::LinkOptions;

/// Which server.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// The server: nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH or nbd+rdma://HOST[:PORT]/EXPORT.
    #[arg(value_name = "URI")]
    uri: Uri,
    /// List the names of all exports.
    #[arg(long, short)]
    list: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd info nbd://127.0.0.1              size and features of the default export
  quipu nbd info --list nbd://127.0.0.1       all exports
  quipu nbd info --json nbd+unix:///?socket=/run/disk.sock";

/// Brings up what the URI's transport needs.
pub(super) fn prepare(uri: &Uri, link: &LinkOptions) -> Result<(), Failure> {
    if matches!(uri.place, Place::Qpip { .. }) {
        qpip::open(link)?;
    }
    Ok(())
}

/// What a failed connection means.
pub(super) fn failed(uri: &Uri, trouble: &Trouble) -> Failure {
    let remedy = match trouble {
        Trouble::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            "Nobody listens there: start the server, or give its port."
        }
        Trouble::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
            "Give the path of the server's socket."
        }
        Trouble::QueuePair(quipu::Error::Rejected { .. }) => {
            "Start the server there with `quipu nbd serve --rdma`, or give its port."
        }
        Trouble::Protocol(ProtocolError::Refused { code: reply::ERR_TLS_REQD, .. }) => {
            "Write nbds:// in place of nbd:// (nbds+unix:// for UNIX sockets)."
        }
        Trouble::Protocol(_) => "`quipu nbd info --list` shows the exports of a server.",
        Trouble::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            "ca-cert.pem must have signed the server's certificate, which cannot be a CA's (docs/nbd.md)."
        }
        Trouble::Tls(_) => "docs/nbd.md, TLS, says which files the folder has.",
        _ => "Check the address, and whether the server runs and a firewall lets its port pass.",
    };
    Failure::new(format!("cannot use {uri}"), trouble, remedy)
}

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    prepare(&options.uri, &options.link)?;
    if options.list { list(options) } else { describe(options) }
}

fn list(options: &Options) -> Result<ExitCode, Failure> {
    let found = Session::list(&options.uri).map_err(|trouble| failed(&options.uri, &trouble))?;
    if options.json {
        let rows: Vec<_> = found
            .iter()
            .map(|(name, description)| json!({"name": name, "description": description}))
            .collect();
        println!("{}", json!({"exports": rows}));
        return Ok(ExitCode::SUCCESS);
    }
    for (name, description) in &found {
        println!("\"{}\"  {}", name.escape_debug(), description.escape_debug());
    }
    Ok(ExitCode::SUCCESS)
}

/// The features of an export, by their names in the protocol.
fn features(flags: TransmissionFlags) -> Vec<String> {
    let named = flags - TransmissionFlags::HAS_FLAGS;
    named.iter_names().map(|(name, _)| name.to_lowercase().replace('_', "-")).collect()
}

fn describe(options: &Options) -> Result<ExitCode, Failure> {
    let disk = Remote::open(&options.uri).map_err(|trouble| failed(&options.uri, &trouble))?;
    let export = disk.export();
    let (features, blocks) = (features(export.flags), export.blocks);
    if options.json {
        println!(
            "{}",
            json!({
                "uri": options.uri.to_string(), "export": export.name, "size": export.size,
                "description": export.description, "features": features,
                "read_only": disk.is_read_only(), "allocation": disk.has_status(),
                "block_sizes": {"minimum": blocks.minimum, "preferred": blocks.preferred,
                                "maximum": blocks.maximum},
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    println!("export       \"{}\"", export.name.escape_debug());
    if !export.description.is_empty() {
        println!("description  {}", export.description.escape_debug());
    }
    println!("size         {} bytes", export.size);
    println!("features     {}", features.join(", "));
    println!(
        "block sizes  {} to {}, preferred {}",
        blocks.minimum, blocks.maximum, blocks.preferred
    );
    println!("allocation   {}", if disk.has_status() { "known" } else { "not known" });
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_failed_connection_says_what_to_do() {
        let uri: Uri = "nbd://localhost".parse().unwrap();
        let said = |trouble: &Trouble| failed(&uri, trouble).to_string();
        let refused = |code| {
            let (export, text) = (String::new(), String::new());
            Trouble::Protocol(ProtocolError::Refused { export, code, text })
        };
        assert!(said(&refused(reply::ERR_TLS_REQD)).contains("nbds://"));
        assert!(said(&refused(reply::ERR_UNSUP)).contains("--list"));
        let wrong = io::Error::new(io::ErrorKind::InvalidData, "TLS: UnknownIssuer");
        assert!(said(&Trouble::Io(wrong)).contains("ca-cert.pem"));
    }
}
