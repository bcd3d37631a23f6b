//! What a script has the program or its peer do.

use quipu_nic::*;

use super::{MEMORY, OUTBOX, Player, SINK, nanoseconds, offset_of};
use crate::script::{self, Symbol};

impl Player<'_> {
    /// What the program or the peer does.
    pub(super) fn act(&mut self, words: &[String]) {
        let word = |at: usize| words.get(at).map(String::as_str).unwrap_or_default();
        let number = |at: usize| word(at).parse::<u64>().expect("a number");
        let hexadecimal = |at: usize| u64::from_str_radix(word(at), 16).expect("an address");
        match word(0) {
            "recv" => {
                let sge = self.sge(offset_of(word(3)), number(2) as usize);
                let sges = [sge];
                self.adapter.post_recv(self.now, self.qp, number(1), &sges).unwrap();
            }
            "send" => {
                let op = match word(3) {
                    "inv" => SendOp::SendInv(hexadecimal(4) as u32),
                    _ => SendOp::Send,
                };
                let solicited = words.iter().any(|word| word == "se");
                self.post_bytes(number(1), op, word(2), solicited);
            }
            "write" => {
                let op = SendOp::Write { rkey: hexadecimal(3) as u32, addr: hexadecimal(4) };
                self.post_bytes(number(1), op, word(2), false);
            }
            "read" => {
                let op = SendOp::Read { rkey: hexadecimal(3) as u32, addr: hexadecimal(4) };
                self.post(number(1), op, SINK, number(2) as usize, SendFlags::empty());
            }
            "add" => {
                let (rkey, addr) = (hexadecimal(2) as u32, hexadecimal(3));
                let op = SendOp::FetchAdd { rkey, addr, add: number(4) };
                self.post(number(1), op, SINK, 8, SendFlags::empty());
            }
            "swap" => {
                let (rkey, addr) = (hexadecimal(2) as u32, hexadecimal(3));
                let (compare, swap) = (number(4), number(5));
                let op = SendOp::CompareSwap { rkey, addr, compare, swap };
                self.post(number(1), op, SINK, 8, SendFlags::empty());
            }
            "window" => self.bind_window(),
            "deregister" => self.adapter.dereg_mr(self.now, self.region.id).unwrap(),
            "allow" => {
                let access = if word(1) == "nothing" { Access::empty() } else { panic!("what?") };
                let attr = QpAttr { access, ..QpAttr::default() };
                let mask = QpAttrMask::ACCESS_FLAGS;
                self.adapter.modify_qp(self.now, self.qp, &attr, mask).unwrap();
            }
            "fill" => {
                let bytes = script::bytes(word(2), &self.symbols);
                self.memory.write(offset_of(word(1)), &bytes).unwrap();
            }
            "full" => self.full = true,
            "room" => {
                let conn = self.conn.expect("a stream");
                match words.len() {
                    1 => {
                        self.full = false;
                        self.transmit(conn);
                    }
                    _ => {
                        self.transmit_into(conn, number(1) as usize);
                    }
                }
            }
            "disconnect" => self.modify_to(QpState::Sqd),
            "abort" => self.modify_to(QpState::Err),
            "wait" => {
                let until = self.now.after(nanoseconds(word(1)));
                while let Some(at) = self.adapter.poll_timeout().filter(|&at| at <= until) {
                    self.now = at;
                    self.adapter.handle_timeout(at);
                    self.settle();
                }
                self.now = until;
            }
            "close" | "reset" => {
                let loss = if word(0) == "close" { Loss::Closed } else { Loss::TimedOut };
                if let Some(conn) = self.conn.take() {
                    self.adapter.handle_lost(self.now, conn, loss);
                }
            }
            other => panic!("{}: what is {other}?", self.place(0)),
        }
    }

    fn modify_to(&mut self, state: QpState) {
        let attr = QpAttr { state, ..QpAttr::default() };
        self.adapter.modify_qp(self.now, self.qp, &attr, QpAttrMask::STATE).unwrap();
    }

    fn post_bytes(&mut self, wr_id: u64, op: SendOp, what: &str, solicited: bool) {
        let bytes = script::bytes(what, &self.symbols);
        self.memory.write(OUTBOX, &bytes).unwrap();
        let flags = if solicited { SendFlags::SOLICITED } else { SendFlags::empty() };
        self.post(wr_id, op, OUTBOX, bytes.len(), flags);
    }

    fn post(&mut self, wr_id: u64, op: SendOp, offset: usize, len: usize, flags: SendFlags) {
        let sges = [self.sge(offset, len)];
        let payload = Payload::Sges(if len == 0 { &[] } else { &sges });
        self.adapter
            .post_send(self.qp, &SendWr { wr_id, to: To::Peer, op, flags, payload })
            .unwrap();
        self.adapter.ring_doorbell(self.now, self.qp);
    }

    /// A window over all of the memory, which the peer may invalidate: `$mw`.
    fn bind_window(&mut self) {
        let (mw, key) = self.adapter.alloc_mw(self.pd, WindowType::Two).unwrap();
        let rkey = key.0.wrapping_add(1);
        let (mr, addr) = (self.region.id, self.memory.addr() as u64);
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let bind = BindMw { mw, rkey, mr, addr, len: MEMORY as u64, access };
        self.post(99, SendOp::BindMw(bind), 0, 0, SendFlags::empty());
        self.symbols.insert("mw", Symbol::Key(rkey));
    }
}
