//! Programs whose calls the library does not see: those that are linked statically, and those in Go. They use
//! the kernel's TCP only, and `quipu sockets --report` says so of each connection.
//!
//! Such a program is marked before it begins; the report then finds its connections in `/proc`. So the
//! program itself pays nothing.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use quipu_sockets::report::{MARK, Reason, Row, folder};

/// Most connections of one process that are shown.
const MAX_ROWS: usize = 1000;
/// States in `/proc/net/tcp` of sockets that have no other end.
const TIME_WAIT: &str = "06";
const LISTEN: &str = "0A";

/// Marks this process, which is about to become such a program. If it loads the library after all, that puts
/// its own report in the place of the mark.
pub(super) fn mark() -> io::Result<()> {
    let user = fs::metadata("/proc/self")?.uid();
    let folder = PathBuf::from(folder(user));
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let data = fs::symlink_metadata(&folder)?;
    if !data.is_dir() || data.uid() != user || data.mode() & 0o077 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let path = folder.join(std::process::id().to_string());
    // A process of the same number may have left a file.
    let _ = fs::remove_file(&path);
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, MARK.as_bytes())
}

/// The TCP connections of a marked process.
pub(super) fn rows(process: &Path) -> Vec<Row> {
    let mut known = HashMap::new();
    for table in ["net/tcp", "net/tcp6"] {
        let text = fs::read_to_string(process.join(table)).unwrap_or_default();
        known.extend(text.lines().filter_map(connection));
    }
    let mut rows = Vec::new();
    for entry in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let Some((local, remote)) = inode(&target).and_then(|inode| known.get(&inode)) else {
            continue;
        };
        rows.push(Row {
            fd,
            addresses: (local.to_string(), remote.to_string()),
            reason: Reason::Unseen,
            sent: (0, 0),
            received: (0, 0),
            withdrawals: 0,
        });
    }
    rows.sort_by_key(|row| row.fd);
    rows.truncate(MAX_ROWS);
    rows
}

/// The number of a socket, from what its descriptor is a link to: `socket:[123]`.
fn inode(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// One line of `/proc/net/tcp` or `tcp6`: the socket's number and its addresses. None for a heading, and for
/// a socket that is not connected.
fn connection(line: &str) -> Option<(u64, (SocketAddr, SocketAddr))> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (address(words.next()?)?, address(words.next()?)?);
    let state = words.next()?;
    let inode = words.nth(5)?.parse().ok()?;
    (![TIME_WAIT, LISTEN].contains(&state)).then_some((inode, (local, remote)))
}

/// An address as the kernel prints it: words of 32 bits in the machine's order, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let mut octets = Vec::new();
    for at in (0..ip.len()).step_by(8) {
        let word = u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?;
        octets.extend(word.to_ne_bytes());
    }
    let ip = match octets.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?)),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(octets).ok()?)).to_canonical(),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_connections_of_a_process_are_found() {
        for name in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(name) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let rows = rows(Path::new("/proc/self"));
            for stream in [&client, &server] {
                let row = rows.iter().find(|row| row.fd == stream.as_raw_fd()).unwrap();
                let addresses = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
                assert_eq!(row.addresses, (addresses.0.to_string(), addresses.1.to_string()));
            }
            assert!(!rows.iter().any(|row| row.fd == listener.as_raw_fd()), "it has no other end");
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn lines_of_the_kernel_are_read() {
        let line = "   0: 0100007F:1F90 0200007F:0016 01 00000000:00000000 00:00000000 00000000  1000     \
                    0 4711 1 0000000000000000 100 0 0 10 0";
        let (inode, (local, remote)) = connection(line).unwrap();
        assert_eq!((inode, local.to_string()), (4711, "127.0.0.1:8080".into()));
        assert_eq!(remote.to_string(), "127.0.0.2:22");
        let mapped = address("0000000000000000FFFF00000100007F:0050").unwrap();
        assert_eq!(mapped.to_string(), "127.0.0.1:80", "an IPv4 address");
        assert_eq!(connection(&line.replace(" 01 ", " 0A ")), None, "it listens");
        for text in
            ["", "  sl  local_address rem_address   st", "0: 1:1 2:2 01", "0: 0100007F:1F90"]
        {
            assert_eq!(connection(text), None, "{text}");
        }
    }
}
