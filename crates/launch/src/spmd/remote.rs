//! The ranks on another host. ssh starts `quipu spmd --node` there, which does for them what the launcher
//! does for those here, and tells it through its standard input and output.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};

use super::frame::{Message, MessageBuffer, Start};
use super::node::Node;
use crate::sys::{self, Interest, Signals};

/// Precedes the first message: whatever a shell prints when it starts comes before it.
const GREETING: &[u8] = b"\nquipu-spmd-node 1\n";
/// Bytes that a shell may print.
const MAX_BANNER: usize = 64 * 1024;

/// What a remote host has sent.
#[derive(Debug)]
enum Incoming {
    /// Before the greeting.
    Banner(Vec<u8>),
    Messages(MessageBuffer),
}

/// The process on another host.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) host: String,
    pub(crate) first: u32,
    pub(crate) count: u32,
    ssh: Child,
    to: Option<File>,
    unsent: Vec<u8>,
    from: Option<File>,
    incoming: Incoming,
}

impl Remote {
    /// Starts it.
    pub(crate) fn start(
        host: &str,
        start: &Start,
        ssh: &[String],
        quipu: &str,
    ) -> io::Result<Self> {
        let (program, options) =
            ssh.split_first().ok_or_else(|| io::Error::other("the command --ssh is empty"))?;
        let mut command = Command::new(program);
        command.args(options).arg(host).arg(format!("exec {} spmd --node", quoted(quipu)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        sys::prepare(&mut command, true);
        let mut child = command.spawn()?;
        let to = child.stdin.take().map(|to| File::from(OwnedFd::from(to)));
        let from = child.stdout.take().map(|from| File::from(OwnedFd::from(from)));
        for file in [&to, &from].into_iter().flatten() {
            sys::set_nonblocking(file.as_fd())?;
        }
        let mut remote = Self {
            host: host.into(),
            first: start.first,
            count: start.count,
            ssh: child,
            to,
            unsent: Vec::new(),
            from,
            incoming: Incoming::Banner(Vec::new()),
        };
        remote.send(&Message::Start(start.clone()));
        Ok(remote)
    }

    pub(crate) fn has(&self, rank: u32) -> bool {
        (self.first..self.first + self.count).contains(&rank)
    }

    pub(crate) fn send(&mut self, message: &Message) {
        self.unsent.extend_from_slice(&message.emit());
        self.flush();
    }

    fn flush(&mut self) {
        let Some(to) = &mut self.to else { return self.unsent.clear() };
        while !self.unsent.is_empty() {
            match to.write(&self.unsent) {
                Ok(len) => drop(self.unsent.drain(..len)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.to = None;
                    return;
                }
            }
        }
    }

    pub(crate) fn interests(&self, interests: &mut Vec<Interest>) {
        if let Some(from) = &self.from {
            interests.push(Interest { fd: from.as_raw_fd(), write: false, ready: false });
        }
        if let Some(to) = self.to.as_ref().filter(|_| !self.unsent.is_empty()) {
            interests.push(Interest { fd: to.as_raw_fd(), write: true, ready: false });
        }
    }

    /// Moves bytes in both directions. After an error the host is lost.
    pub(crate) fn progress(&mut self, events: &mut Vec<Message>) -> Result<(), String> {
        self.flush();
        let mut buffer = [0; 64 * 1024];
        while let Some(from) = &mut self.from {
            match from.read(&mut buffer) {
                Ok(0) => self.from = None,
                Ok(len) => self.handle(&buffer[..len], events)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.from = None,
            }
        }
        Ok(())
    }

    fn handle(&mut self, bytes: &[u8], events: &mut Vec<Message>) -> Result<(), String> {
        let messages = match &mut self.incoming {
            Incoming::Messages(messages) => {
                messages.push(bytes);
                messages
            }
            Incoming::Banner(banner) => {
                banner.extend_from_slice(bytes);
                let mut places = banner.windows(GREETING.len());
                let Some(at) = places.position(|window| window == GREETING) else {
                    let short = banner.len() <= MAX_BANNER;
                    return if short { Ok(()) } else { Err("it sends something else".into()) };
                };
                let mut messages = MessageBuffer::default();
                messages.push(&banner[at + GREETING.len()..]);
                self.incoming = Incoming::Messages(messages);
                return self.handle(&[], events);
            }
        };
        while let Some(message) = messages.next_message().map_err(|error| error.to_string())? {
            let theirs = match &message {
                Message::Pmi { rank, .. }
                | Message::Output { rank, .. }
                | Message::Exit { rank, .. }
                | Message::NotStarted { rank, .. } => {
                    self.first <= *rank && *rank - self.first < self.count
                }
                Message::Start(_) | Message::Signal(_) => false,
            };
            if !theirs {
                return Err("it speaks of ranks that are not its own".into());
            }
            events.push(message);
        }
        Ok(())
    }

    /// Whether and how ssh has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.ssh.try_wait().ok().flatten()
    }

    /// Whether all that it has sent is read.
    pub(crate) fn is_read(&self) -> bool {
        self.from.is_none()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // The process there ends when its standard input does.
        self.to = None;
        if !matches!(self.ssh.try_wait(), Ok(Some(_))) {
            sys::kill(self.ssh.id(), true, libc::SIGTERM);
            let _ = self.ssh.wait();
        }
    }
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `quipu spmd --node`: runs the ranks of this host for a launcher on another one, and ends with them or
/// with the launcher.
///
/// # Errors
/// If the system refuses something, or the launcher sends what makes no sense.
pub fn serve() -> io::Result<()> {
    let signals = Signals::open()?;
    let (mut from, mut to) = (io::stdin().lock(), io::stdout().lock());
    to.write_all(GREETING)?;
    to.flush()?;
    sys::set_nonblocking(io::stdin().as_fd())?;
    let (mut node, mut buffer): (Option<Node>, _) = (None, MessageBuffer::default());
    loop {
        let stdin = io::stdin().as_raw_fd();
        let mut interests = vec![
            Interest { fd: stdin, write: false, ready: false },
            Interest { fd: signals.fd(), write: false, ready: false },
        ];
        if let Some(node) = &node {
            node.interests(&mut interests);
        }
        sys::wait(&mut interests, None)?;
        let mut events = Vec::new();
        if interests[0].ready && !receive(&mut from, &mut buffer, &mut node, &mut events)? {
            return Ok(());
        }
        let mut ended = false;
        while let Some(signal) = signals.next() {
            ended |= signal != libc::SIGCHLD;
        }
        if ended {
            return Ok(());
        }
        if let Some(node) = &mut node {
            node.progress(&interests, &mut events);
            node.reap(&mut events);
        }
        for event in events {
            to.write_all(&event.emit())?;
        }
        to.flush()?;
        if node.as_ref().is_some_and(|node| !node.is_running()) {
            return Ok(());
        }
    }
}

/// Reads what the launcher has sent, and obeys. False if the launcher is gone.
fn receive(
    from: &mut impl Read,
    buffer: &mut MessageBuffer,
    node: &mut Option<Node>,
    events: &mut Vec<Message>,
) -> io::Result<bool> {
    let mut bytes = [0; 64 * 1024];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(len) => buffer.push(&bytes[..len]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    while let Some(message) = buffer.next_message().map_err(io::Error::other)? {
        match (message, &mut *node) {
            (Message::Start(start), None) => *node = Some(Node::start(&start, false, events)),
            (Message::Pmi { rank, bytes }, Some(node)) => node.send(rank, &bytes),
            (Message::Signal(signal), Some(node)) => node.signal(signal),
            _ => return Err(io::Error::other("the launcher sent a message out of order")),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_shell_unchanged() {
        assert_eq!(quoted("/a b/quipu"), "'/a b/quipu'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
