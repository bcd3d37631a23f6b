//! The states of a connection and what moves it from one to the next (RFC 9293 3.3.2, figure 5).

/// Where a connection is. LISTEN has no connection: it is a [`super::Listener`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Nothing is left.
    Closed,
    /// A SYN was sent.
    SynSent,
    /// A SYN was received and answered.
    SynReceived,
    /// Data flows in both directions.
    Established,
    /// This end has closed; its FIN is not acknowledged.
    FinWait1,
    /// This end has closed, and the peer knows.
    FinWait2,
    /// The peer has closed.
    CloseWait,
    /// Both have closed at once.
    Closing,
    /// This end has closed after the peer.
    LastAck,
    /// Both have closed; old segments may still arrive.
    TimeWait,
}

/// What moves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// The user opens.
    ActiveOpen,
    /// A SYN came to a listener.
    PassiveOpen,
    /// A SYN without an acceptable acknowledgement came.
    Syn,
    /// Our SYN is acknowledged, and the peer's is here.
    SynAcked,
    /// Our FIN goes out.
    Close,
    /// Our FIN is acknowledged.
    FinAcked,
    /// The peer's FIN is next in order.
    Fin,
    /// 2 MSL are over.
    Expire,
    /// RST, abort, or the user's patience is at its end.
    Abort,
}

impl State {
    /// The transition table. None: that cannot happen in this state. A close, or a FIN, in SYN-RECEIVED
    /// takes effect when the connection stands, as RFC 9293 3.10.4 allows.
    pub(crate) fn next(self, input: Input) -> Option<Self> {
        use State::*;
        Some(match (self, input) {
            (Closed, Input::ActiveOpen) => SynSent,
            (Closed, Input::PassiveOpen) => SynReceived,
            (SynSent, Input::Syn) => SynReceived,
            (SynSent | SynReceived, Input::SynAcked) => Established,
            (Established, Input::Close) => FinWait1,
            (CloseWait, Input::Close) => LastAck,
            (Established, Input::Fin) => CloseWait,
            (FinWait1, Input::Fin) => Closing,
            (FinWait2, Input::Fin) => TimeWait,
            (FinWait1, Input::FinAcked) => FinWait2,
            (Closing, Input::FinAcked) => TimeWait,
            (LastAck, Input::FinAcked) => Closed,
            (TimeWait, Input::Expire) => Closed,
            (Closed, Input::Abort) => return None,
            (_, Input::Abort) => Closed,
            _ => return None,
        })
    }

    /// Whether both SYNs are exchanged.
    pub fn is_synchronized(self) -> bool {
        !matches!(self, Self::Closed | Self::SynSent | Self::SynReceived)
    }

    /// Whether the peer may still send data: its FIN has not come.
    pub fn receives(self) -> bool {
        matches!(self, Self::Established | Self::FinWait1 | Self::FinWait2)
    }

    /// Whether data of this end may be on its way.
    pub fn sends(self) -> bool {
        matches!(
            self,
            Self::Established | Self::CloseWait | Self::FinWait1 | Self::Closing | Self::LastAck
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::{Input, State};

    const STATES: [State; 10] = [
        State::Closed,
        State::SynSent,
        State::SynReceived,
        State::Established,
        State::FinWait1,
        State::FinWait2,
        State::CloseWait,
        State::Closing,
        State::LastAck,
        State::TimeWait,
    ];
    const INPUTS: [Input; 9] = [
        Input::ActiveOpen,
        Input::PassiveOpen,
        Input::Syn,
        Input::SynAcked,
        Input::Close,
        Input::FinAcked,
        Input::Fin,
        Input::Expire,
        Input::Abort,
    ];

    #[test]
    fn the_table() {
        let mut table = format!("{:12}", "");
        for input in INPUTS {
            write!(table, " {:12}", format!("{input:?}")).unwrap();
        }
        for state in STATES {
            write!(table, "\n{:12}", format!("{state:?}")).unwrap();
            for input in INPUTS {
                let next = state.next(input).map_or("-".into(), |next| format!("{next:?}"));
                write!(table, " {next:12}").unwrap();
            }
        }
        let table: Vec<_> = table.lines().map(str::trim_end).collect();
        insta::assert_snapshot!(table.join("\n"));
    }
}
