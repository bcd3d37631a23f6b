//! `quipu nbd serve`: a disk for NBD clients.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use quipu::ConnectionRequest;
use quipu_host::Interrupts;
use quipu_nbd::uri::{PORT, Place, Uri};
use quipu_nbd::{
    Command, CommandFlags, Errno, Export, MAX_NAME, ProtocolError, Request, Server, ServerEvent,
    ServerOptions, Want,
};

use super::disk::{self, Disk};
use super::memory::Memory;
use super::qpip;
use super::rdma;
use super::stream::{Socket, Stream};
use super::tls;
use super::{Failure, size};
use crate::cmd::qpip::LinkOptions;

/// What to serve, and where.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// The file or block device.
    #[arg(value_name = "FILE", required_unless_present = "memory")]
    file: Option<PathBuf>,
    /// Serve zeros in memory instead, such as 1G. Only what clients write takes memory.
    #[arg(long, value_name = "SIZE", value_parser = disk_size, conflicts_with = "file")]
    memory: Option<u64>,
    /// Refuse writes.
    #[arg(long, short)]
    read_only: bool,
    /// The address and port of TCP.
    #[arg(long, short, value_name = "ADDRESS:PORT",
          default_value_t = SocketAddr::from(([127, 0, 0, 1], PORT)))]
    listen: SocketAddr,
    /// Listen at this UNIX socket instead.
    #[arg(long, short, value_name = "PATH")]
    unix: Option<PathBuf>,
    /// Take queue pairs (nbd+rdma://) at the address of --listen instead of TCP connections.
    #[arg(long, conflicts_with = "unix")]
    rdma: bool,
    /// Take connections of the adapter's own TCP (nbd+qpip://) at the port of --listen; --link names the adapter's
    /// link. Clients are queue pairs and sockets.
    #[arg(long, conflicts_with_all = ["unix", "rdma"])]
    qpip: bool,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    tls: tls::TlsOptions,
    /// The name of the export.
    #[arg(long, short, value_name = "NAME", default_value = "")]
    export: String,
    /// Connections at a time.
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    connections: u16,
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd serve --memory 1G                        a disk in memory at 127.0.0.1:10809
  quipu nbd serve disk.img --listen 0.0.0.0:10809    a file, for other hosts
  quipu nbd serve disk.img --unix /run/disk.sock     at a UNIX socket
  quipu nbd serve disk.img --rdma                    for queue pairs: nbd+rdma://127.0.0.1

Any NBD client can use it: qemu-img info nbd://127.0.0.1, nbdcopy, nbdinfo, fio's nbd engine.
Anybody who can reach the address can read and write the disk. Ctrl-C ends it.";

/// How long a client may take for each step of the negotiation.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// Replies are gathered up to this many bytes while further requests lie in the buffer.
const GATHERED: usize = 256 << 10;
/// Data of a read up to this are copied into the gathered replies.
const SMALL: usize = 32 << 10;

/// Serves until a signal comes.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    // Before other threads begin, which would get the signals otherwise.
    let interrupts = Interrupts::block()?;
    let disk = open(options)?;
    if options.export.len() > MAX_NAME {
        let why = format!("it has more than {MAX_NAME} bytes");
        return Err(Failure::new("the export's name is too long", why, "Give a shorter one."));
    }
    let mut export = Export::new(&options.export, disk.size());
    if disk.is_read_only() {
        export = export.read_only();
    }
    let tls = options.tls.load().map_err(|error| {
        Failure::new("cannot use the certificates", error, "Give PEM files, such as nbdkit's.")
    })?;
    let (place, doors) = listen(options)?;
    let uri = Uri {
        place,
        tls: tls.is_some(),
        certificates: None,
        host_name: None,
        export: options.export.clone(),
    };
    println!("serving {} bytes at {uri}", disk.size());
    println!("Ctrl-C ends it.");
    let service = Arc::new(Service {
        disk,
        export,
        tls,
        connections: AtomicUsize::new(0),
        most: options.connections.into(),
    });
    let accepting = Arc::clone(&service);
    thread::spawn(move || accepting.accept(&doors));
    interrupts.wait();
    if let Some(path) = &options.unix {
        let _ = std::fs::remove_file(path);
    }
    service.disk.flush().map_err(|error| {
        Failure::new("the last writes may be lost", error, "Check the disk that the file lies on.")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The size of a disk in bytes, at least 1.
fn disk_size(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    if bytes > 0 { Ok(bytes) } else { Err("a disk has at least one byte: write 64M".to_owned()) }
}

fn open(options: &Options) -> Result<Box<dyn Disk>, Failure> {
    let Some(path) = &options.file else {
        let size = options.memory.unwrap_or_default();
        if !options.rdma {
            return Ok(Box::new(Memory::new(size)));
        }
        let domain = rdma::server_domain().map_err(|error| {
            Failure::new("cannot open the adapter", error, "`quipu doctor` says what it needs.")
        })?;
        return Ok(Box::new(rdma::Registered::new(size, domain)));
    };
    disk::open(path, options.read_only).map_err(|error| {
        let what = format!("cannot open {}", path.display());
        let remedy = match error.kind() {
            io::ErrorKind::PermissionDenied => "Give --read-only, or a file that you may write to.",
            io::ErrorKind::NotFound => "Make it with `truncate --size 1G FILE`.",
            _ => "Give a regular file or a block device.",
        };
        Failure::new(what, error, remedy)
    })
}

/// What clients connect to.
enum Door {
    Tcp(TcpListener),
    Unix(UnixListener),
    Rdma(rdma::Door),
    Qpip(qpip::Door),
}

/// Who has connected.
enum Caller {
    Socket(Socket),
    Rdma(ConnectionRequest),
}

impl Door {
    fn next(&self) -> Result<Caller, Trouble> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                let _ = stream.set_nodelay(true);
                // Without it a client that is gone keeps its connection for ever.
                let _ = keep_alive(&stream);
                Caller::Socket(Socket::Tcp(stream))
            }
            Self::Unix(listener) => Caller::Socket(Socket::Unix(listener.accept()?.0)),
            Self::Rdma(door) => Caller::Rdma(door.next()?),
            Self::Qpip(door) => Caller::Socket(Socket::Qpip(Box::new(door.next()?))),
        })
    }
}

/// Has the kernel end a connection whose client does not answer for a minute and a half: its network is
/// cut, or its machine is off.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

fn listen(options: &Options) -> Result<(Place, Door), Failure> {
    let is_other_file =
        options.unix.as_deref().is_some_and(|path| path.exists() && !is_socket(path));
    let failed = |what: String, error: io::Error| {
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse if is_other_file => {
                "A file that is no socket is there: remove it, or give another --unix."
            }
            io::ErrorKind::AddrInUse => {
                "Another server listens there: give another --listen or --unix."
            }
            io::ErrorKind::AddrNotAvailable => {
                "Give --listen an address of this host (`ip address` lists them), or 0.0.0.0."
            }
            io::ErrorKind::NotFound => "Give --unix a path in a folder that exists.",
            io::ErrorKind::PermissionDenied => {
                "Give --unix a path in a folder that you may write to, or --listen a port from 1024 up."
            }
            _ => "Give another --listen or --unix.",
        };
        Failure::new(format!("cannot listen at {what}"), error, remedy)
    };
    if let Some(path) = &options.unix {
        leave_stale(path);
        let door = UnixListener::bind(path).map_err(|e| failed(path.display().to_string(), e))?;
        return Ok((Place::Unix(path.clone()), Door::Unix(door)));
    }
    if options.rdma {
        let failed = |error: quipu::Error| {
            let remedy = "Give an address of this host and a port that is free.";
            Failure::new(format!("cannot listen at {}", options.listen), error, remedy)
        };
        let door = rdma::Door::open(options.listen).map_err(failed)?;
        let address = door.address().map_err(failed)?;
        let (host, port) = (address.ip().to_string(), address.port());
        return Ok((Place::Rdma { host, port }, Door::Rdma(door)));
    }
    if options.qpip {
        let failed = |error: quipu::Error| {
            let what = format!("cannot listen at port {}", options.listen.port());
            Failure::new(what, error, "Give another port with --listen.")
        };
        let adapter = qpip::open(&options.link)?;
        let door = qpip::Door::open(adapter, options.listen.port()).map_err(failed)?;
        let address = door.address().map_err(failed)?;
        let (host, port) = (address.ip().to_string(), address.port());
        return Ok((Place::Qpip { host, port }, Door::Qpip(door)));
    }
    let door =
        TcpListener::bind(options.listen).map_err(|e| failed(options.listen.to_string(), e))?;
    let address = door.local_addr()?;
    let (host, port) = (address.ip().to_string(), address.port());
    Ok((Place::Tcp { host, port }, Door::Tcp(door)))
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket())
}

/// Removes the socket of a server that has ended without doing so.
fn leave_stale(path: &Path) {
    if is_socket(path) && std::os::unix::net::UnixStream::connect(path).is_err() {
        let _ = std::fs::remove_file(path);
    }
}

pub(super) struct Service {
    pub(super) disk: Box<dyn Disk>,
    pub(super) export: Export,
    tls: Option<Arc<rustls::ServerConfig>>,
    connections: AtomicUsize,
    most: usize,
}

impl Service {
    fn accept(self: &Arc<Self>, door: &Door) {
        loop {
            let Ok(caller) = door.next() else {
                // Descriptors are short: those of clients that leave come back.
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            if self.connections.fetch_add(1, Ordering::AcqRel) >= self.most {
                self.connections.fetch_sub(1, Ordering::AcqRel);
                eprintln!("a client was turned away: {} connections are in use", self.most);
                continue;
            }
            let service = Arc::clone(self);
            let serve = move || {
                if let Err(trouble) = service.attend(caller) {
                    eprintln!("a connection ended: {trouble}");
                }
                service.connections.fetch_sub(1, Ordering::AcqRel);
            };
            if thread::Builder::new().name("nbd".into()).spawn(serve).is_err() {
                self.connections.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Serves a client to its end.
    fn attend(&self, caller: Caller) -> Result<(), Trouble> {
        match caller {
            Caller::Socket(socket) => serve_socket(self, socket),
            Caller::Rdma(request) => rdma::serve(self, request),
        }
    }

    /// Carries out a request that is neither a read nor asks for extents. `data` are those of a write.
    pub(super) fn carry_out(
        &self,
        command: Command,
        request: &Request,
        data: &[u8],
    ) -> io::Result<()> {
        let (offset, length) = (request.offset, request.length);
        match command {
            Command::Write => self.disk.write(offset, data)?,
            Command::Flush => return self.disk.flush(),
            Command::Trim => self.disk.zero(offset, length, true)?,
            Command::WriteZeroes => {
                let hole = !request.flags.contains(CommandFlags::NO_HOLE);
                self.disk.zero(offset, length, hole)?;
            }
            Command::Read | Command::BlockStatus | Command::Cache | Command::Disconnect => {}
        }
        self.force(request)
    }

    /// Has a write on stable storage if its request asks for that.
    pub(super) fn force(&self, request: &Request) -> io::Result<()> {
        if request.flags.contains(CommandFlags::FUA) { self.disk.flush() } else { Ok(()) }
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Protocol(#[from] ProtocolError),
    #[error("{0}")]
    QueuePair(#[from] quipu::Error),
    #[error("{0}")]
    Tls(#[from] tls::TlsError),
}

/// How a part of a session ended.
enum End {
    /// The client has left.
    Left,
    /// TLS is to begin.
    StartTls,
}

/// Serves a client over a socket until it leaves.
fn serve_socket(service: &Service, mut socket: Socket) -> Result<(), Trouble> {
    socket.set_patience(Some(PATIENCE))?;
    let mut options = ServerOptions::new(service.export.clone());
    (options.tls, options.tls_required) = (service.tls.is_some(), service.tls.is_some());
    let (server, stream, data) = (Server::new(options), Stream::new(socket), Vec::new());
    let mut session = Session { service, server, stream, data };
    if matches!(session.run()?, End::Left) {
        return Ok(());
    }
    let config = service.tls.as_ref().ok_or(tls::TlsError::Early)?;
    session.stream.send(session.server.output(), &[])?;
    session.stream = session.stream.start_tls(|socket| tls::accept(config, socket))?;
    session.server.tls_started();
    session.run().map(|_| ())
}

/// One client.
struct Session<'a> {
    service: &'a Service,
    server: Server,
    stream: Stream,
    /// Payload of the request that is carried out.
    data: Vec<u8>,
}

impl Session<'_> {
    fn run(&mut self) -> Result<End, Trouble> {
        loop {
            let event = match self.server.wants() {
                Want::Bytes(count) => {
                    if self.stream.buffered() < count || self.server.output().len() > GATHERED {
                        self.stream.send(self.server.output(), &[])?;
                    }
                    let Some(bytes) = self.stream.take(count)? else { return Ok(End::Left) };
                    self.server.input(bytes)
                }
                Want::Payload { length, .. } | Want::Discard(length) => {
                    self.data.resize(length as usize, 0);
                    self.stream.fill(&mut self.data)?;
                    Ok(self.server.payload_done())
                }
                Want::Nothing => {
                    self.stream.send(self.server.output(), &[])?;
                    return Ok(End::Left);
                }
            };
            match event {
                Ok(Some(ServerEvent::Started(_))) => self.stream.socket().set_patience(None)?,
                Ok(Some(ServerEvent::StartTls)) => return Ok(End::StartTls),
                Ok(Some(ServerEvent::Request(command, request))) => {
                    self.execute(command, &request)?;
                }
                Ok(_) => {}
                Err(error) => {
                    let _ = self.stream.send(self.server.output(), &[]);
                    return Err(error.into());
                }
            }
        }
    }

    fn execute(&mut self, command: Command, request: &Request) -> Result<(), Trouble> {
        let outcome = match command {
            Command::Read => return self.read(request),
            Command::BlockStatus => {
                match self.service.disk.extents(request.offset, request.length) {
                    Ok(extents) => return Ok(self.server.reply_status(request, &extents)?),
                    Err(error) => Err(error),
                }
            }
            _ => self.service.carry_out(command, request, &self.data),
        };
        match outcome {
            Ok(()) => self.server.reply_done(request),
            Err(error) => self.server.reply_error(request, errno(&error)),
        }
        // A payload of megabytes is seldom followed by others of its size.
        self.data.shrink_to(1 << 20);
        Ok(())
    }

    fn read(&mut self, request: &Request) -> Result<(), Trouble> {
        self.data.resize(request.length as usize, 0);
        if let Err(error) = self.service.disk.read(request.offset, &mut self.data) {
            self.server.reply_error(request, errno(&error));
            return Ok(());
        }
        self.server.reply_read(request);
        if self.data.len() <= SMALL {
            self.server.output().extend_from_slice(&self.data);
        } else {
            self.stream.send(self.server.output(), &self.data)?;
        }
        Ok(())
    }
}

/// The number on the wire of an error of the disk.
pub(super) fn errno(error: &io::Error) -> Errno {
    Errno::of_system(error.raw_os_error().unwrap_or(5))
}
