//! Messages without payload, which the protocol itself sends.

use quipu_wire::sdp::{Body, Flags, MAX_HEADERS_LEN, Mode};

use crate::Connection;

/// What is to be sent as soon as there is a credit. Each is one flag or value: a peer cannot make it grow.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Control {
    /// The mode in which this end sends has changed to buffered.
    pub(crate) sends_buffered: bool,
    /// The peer is to use combined mode again.
    pub(crate) wants_combined: bool,
    /// The size that the peer's receive buffers should have.
    pub(crate) wished_size: Option<u32>,
    /// The peer was asked for a size and has not answered.
    pub(crate) awaits_size: bool,
    /// The reset of this end is to be sent.
    pub(crate) abort: bool,
}

impl Connection {
    /// Writes the next message that the protocol has to send by itself to the front of `out`; its length.
    /// `None`: there is nothing to send, or no credit for it. Send it as one SEND.
    pub fn poll_control(&mut self, now: u64, out: &mut [u8; MAX_HEADERS_LEN]) -> Option<usize> {
        if self.reset.is_some() && !self.control.abort {
            return None;
        }
        if !self.out.may_send_control() {
            let may =
                self.out.credits() == 1 && !self.control.abort && self.incoming.owes_credits();
            return may.then(|| self.emit(Flags::default(), &Body::Data, 0, out));
        }
        let body = match self.next_control() {
            Some(body) => body,
            None if self.incoming.owes_credits() => Body::Data,
            None => return None,
        };
        let len = self.emit(Flags::default(), &body, 0, out);
        if body == Body::SourceCancel {
            self.source.cancel_sent(now, self.out.last_number());
        }
        Some(len)
    }

    /// What is most urgent; it counts as sent.
    fn next_control(&mut self) -> Option<Body> {
        if self.control.abort {
            return Some(self.next_of_abort());
        }
        let answer = self.sink.answer();
        if answer.read > 0 {
            return Some(Body::ReadComplete(std::mem::take(&mut answer.read)));
        }
        if std::mem::take(&mut answer.send_sm) {
            return Some(Body::SendSm);
        }
        if self.source.wants_cancel() {
            return Some(Body::SourceCancel);
        }
        if let Some(size) = self.buffers.resized() {
            self.buffers.confirm();
            return Some(Body::ChangeReceiveBuffersAck(size));
        }
        if !self.control.awaits_size
            && let Some(size) = self.control.wished_size.take()
        {
            self.control.awaits_size = true;
            return Some(Body::ChangeReceiveBuffers(size));
        }
        if std::mem::take(&mut self.control.sends_buffered) {
            return Some(Body::ModeChange { of_receiver: false, mode: Mode::Buffered });
        }
        if std::mem::take(&mut self.control.wants_combined) {
            return Some(Body::ModeChange { of_receiver: true, mode: Mode::Combined });
        }
        if self.ends.own && !self.ends.own_sent && !self.source.is_open() {
            self.ends.own_sent = true;
            return Some(Body::Disconnect);
        }
        None
    }

    /// An abort follows the end of the stream.
    fn next_of_abort(&mut self) -> Body {
        if std::mem::replace(&mut self.ends.own_sent, true) {
            self.control.abort = false;
            return Body::Abort;
        }
        Body::Disconnect
    }
}
