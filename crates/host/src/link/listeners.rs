//! The sockets at which engines of this host find this one, and the callers that wait there.

use std::io;
use std::os::fd::OwnedFd;

use quipu_nic::Time;

use super::{Links, SETUP_MAX, State, socket};
use crate::net::listener::{Accepted, Acceptor};
use crate::net::token::Token;

impl Links {
    /// Lets engines of this host find this one, which listens at `port`.
    pub(crate) fn listen(&mut self, port: u16) {
        if !self.usable {
            return;
        }
        let mut address = self.own.source(0);
        address.set_port(port);
        let name = if self.own.is_restricted() {
            socket::Name::At(address)
        } else {
            socket::Name::Everywhere(port)
        };
        let listening = socket::listen(name).and_then(|fd| {
            if self.acceptor.is_none() {
                self.acceptor = Some(Acceptor::new()?);
            }
            let token = Token::LinkListener(self.listeners.len() as u32);
            self.epoll.add(&fd, libc::EPOLLIN, token.bits())?;
            Ok(fd)
        });
        match listening {
            Ok(fd) => self.listeners.push(Some(fd)),
            Err(error) => {
                tracing::warn!(%error, "peers on this host cannot find this engine, and use TCP");
            }
        }
    }

    /// Takes the callers that wait at a listener.
    pub(crate) fn accept(&mut self, now: Time, index: u32) {
        self.accept_by(now, index, socket::accept);
    }

    /// The same, by `take`.
    pub(super) fn accept_by(
        &mut self,
        now: Time,
        index: u32,
        take: impl Fn(&OwnedFd) -> io::Result<OwnedFd>,
    ) {
        for _ in 0..SETUP_MAX {
            let (Some(Some(listener)), Some(acceptor)) =
                (self.listeners.get(index as usize), self.acceptor.as_mut())
            else {
                return;
            };
            match acceptor.accept_by(|| take(listener).map(|fd| (fd, ()))) {
                // A caller beyond the limit hears the socket close, and goes by TCP.
                Accepted::Connection(fd, ()) if self.in_setup.len() < SETUP_MAX => {
                    if let Err(error) = self.add(now, fd, State::AwaitKnock, None) {
                        tracing::debug!(%error, "a connection from this host is refused");
                    }
                }
                Accepted::Connection(..) => {}
                Accepted::Nothing => return,
                Accepted::Refused => {}
                Accepted::Stuck => return self.stop_listening(index),
                Accepted::Failed => {
                    self.epoll.remove(listener);
                    return self.resting.add(index, now.0);
                }
            }
        }
    }

    /// Looks at listeners again that have rested.
    pub(super) fn listen_again(&mut self, now: Time) {
        for index in self.resting.wake(now.0) {
            let Some(Some(listener)) = self.listeners.get(index as usize) else { continue };
            let token = Token::LinkListener(index);
            if self.epoll.add(listener, libc::EPOLLIN, token.bits()).is_err() {
                self.resting.add(index, now.0);
            }
        }
    }

    /// Has callers refused at once, where they could be neither taken nor turned away: they would keep
    /// the listener readable for ever, and wait.
    fn stop_listening(&mut self, index: u32) {
        tracing::warn!(
            "out of file descriptors; peers on this host are reached by TCP; raise \
            ulimit -n"
        );
        if let Some(listener) = self.listeners[index as usize].take() {
            self.epoll.remove(&listener);
        }
        if let Some(acceptor) = &mut self.acceptor {
            acceptor.refill();
        }
    }
}
