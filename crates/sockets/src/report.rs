//! Why a connection is not raised, and the rows that a process shows of its connections.

use std::fmt;

/// Why a connection stays with the kernel's TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// Raised.
    None,
    /// It has not carried enough messages yet.
    Young,
    /// Both ends are being asked.
    Asking,
    /// The other end is not on this host, or not in this network namespace.
    OtherHost,
    /// The process at the other end does not run Quipu, or cannot raise the connection.
    NoPeer,
    /// Another process has the socket too, or had it before.
    Shared,
    /// A socket option or a call that only the kernel has.
    Feature,
    /// The program uses a call that Quipu cannot see, such as io_uring.
    Unseen,
    /// No memory, thread or descriptor was to be had.
    Resources,
    /// The peer broke the protocol.
    Fault,
    /// The user said so.
    Disabled,
    /// The connection has ended.
    Ended,
}

impl Reason {
    /// All of them, by number.
    pub const ALL: [Self; 12] = [
        Self::None,
        Self::Young,
        Self::Asking,
        Self::OtherHost,
        Self::NoPeer,
        Self::Shared,
        Self::Feature,
        Self::Unseen,
        Self::Resources,
        Self::Fault,
        Self::Disabled,
        Self::Ended,
    ];

    /// The reason with a number.
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Fault)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "raised",
            Self::Young => "plain: it has carried too few messages",
            Self::Asking => "plain: the other end is being asked",
            Self::OtherHost => "plain: the other end is not on this host",
            Self::NoPeer => "plain: the other end does not run Quipu",
            Self::Shared => "plain: another process has had the socket too",
            Self::Feature => "plain: the program uses a feature that only the kernel has",
            Self::Unseen => "plain: the program uses calls that Quipu does not see",
            Self::Resources => "plain: no memory, thread or descriptor was to be had",
            Self::Fault => "plain: the other end broke the protocol",
            Self::Disabled => "plain: QUIPU_SOCKETS says so",
            Self::Ended => "plain: the connection has ended",
        })
    }
}

/// The folder in which the processes of a user show their connections, each in a file that has its
/// number for a name.
pub fn folder(user: u32) -> String {
    format!("/dev/shm/quipu-sockets-{user}")
}

/// What a process shows of one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The descriptor.
    pub fd: i32,
    /// Local and remote address, as `address:port`.
    pub addresses: (String, String),
    /// Whether it is raised, and if not, why.
    pub reason: Reason,
    /// Octets that this process has sent through the ring, and over TCP.
    pub sent: (u64, u64),
    /// Octets that it has received through the ring, and over TCP.
    pub received: (u64, u64),
    /// How often octets were taken back from the ring of the sender.
    pub withdrawals: u64,
}

impl Row {
    /// One line of the file.
    pub fn encode(&self) -> String {
        format!(
            "{} {} {} {} {} {} {} {} {}\n",
            self.fd,
            self.addresses.0,
            self.addresses.1,
            self.reason as u8,
            self.sent.0,
            self.sent.1,
            self.received.0,
            self.received.1,
            self.withdrawals
        )
    }

    /// Reads a line. None if it is not one.
    pub fn decode(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let [fd, local, remote, reason, numbers @ ..] = &words[..] else { return None };
        let numbers: Vec<u64> =
            numbers.iter().map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [ring_sent, tcp_sent, ring_received, tcp_received, withdrawals] = numbers[..] else {
            return None;
        };
        Some(Self {
            fd: fd.parse().ok()?,
            addresses: ((*local).to_owned(), (*remote).to_owned()),
            reason: Reason::from_number(reason.parse().ok()?),
            sent: (ring_sent, tcp_sent),
            received: (ring_received, tcp_received),
            withdrawals,
        })
    }
}

/// The file of a program whose calls the library does not see (a static one, or one in Go). Its connections
/// are to be looked up elsewhere.
pub const MARK: &str = "unseen\n";

/// What a process shows of all its connections, closed ones too, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Connections that are raised now.
    pub raised: u64,
    /// Connections that were ever raised.
    pub raises: u64,
    /// Raised connections that went back to the kernel for good.
    pub lowers: u64,
    /// Sleeps for something to receive that ended.
    pub wake_ups: u64,
    /// Octets sent through rings, and over TCP by connections that were raised.
    pub sent: (u64, u64),
    /// Octets received so.
    pub received: (u64, u64),
    /// How often octets were taken back from a ring.
    pub withdrawals: u64,
}

/// The word that begins the line of [`Totals`], where rows have a descriptor.
const TOTALS: &str = "totals";

impl Totals {
    /// One line of the file.
    pub fn encode(&self) -> String {
        format!(
            "{TOTALS} {} {} {} {} {} {} {} {} {}\n",
            self.raised,
            self.raises,
            self.lowers,
            self.wake_ups,
            self.sent.0,
            self.sent.1,
            self.received.0,
            self.received.1,
            self.withdrawals
        )
    }

    /// Reads a line. None if it is not one.
    pub fn decode(line: &str) -> Option<Self> {
        let numbers = line.strip_prefix(TOTALS)?.split_ascii_whitespace();
        let numbers: Vec<u64> = numbers.map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [raised, raises, lowers, wake_ups, octets @ .., withdrawals] = &numbers[..] else {
            return None;
        };
        let [sent, tcp_sent, received, tcp_received] = *octets else { return None };
        Some(Self {
            raised: *raised,
            raises: *raises,
            lowers: *lowers,
            wake_ups: *wake_ups,
            sent: (sent, tcp_sent),
            received: (received, tcp_received),
            withdrawals: *withdrawals,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_read_back_and_are_no_row() {
        let totals = Totals {
            raised: 1,
            raises: 2,
            lowers: 3,
            wake_ups: 4,
            sent: (5, 6),
            received: (7, 8),
            withdrawals: 9,
        };
        let line = totals.encode();
        assert_eq!(Totals::decode(line.trim_end()), Some(totals));
        assert_eq!(Row::decode(line.trim_end()), None);
        for line in ["", "totals", "totals 1 2", "totals 1 2 3 4 5 6 7 8 x", "7 a b 1 2 3 4 5 6"] {
            assert_eq!(Totals::decode(line), None, "{line}");
        }
    }

    #[test]
    fn a_row_is_read_back() {
        let row = Row {
            fd: 7,
            addresses: ("127.0.0.1:6379".into(), "[::1]:4000".into()),
            reason: Reason::Shared,
            sent: (1, 2),
            received: (3, 4),
            withdrawals: 5,
        };
        assert_eq!(Row::decode(row.encode().trim_end()), Some(row));
        for line in ["", "7", "7 a b 1 2 3 4 5", "7 a b 1 2 3 4 5 x", "x a b 1 2 3 4 5 6"] {
            assert_eq!(Row::decode(line), None, "{line}");
        }
    }

    #[test]
    fn the_mark_is_no_row() {
        assert_eq!(Row::decode(MARK.trim_end()), None);
        assert_eq!(Totals::decode(MARK.trim_end()), None);
    }

    #[test]
    fn reasons_have_their_numbers() {
        for (number, reason) in (0..).zip(Reason::ALL) {
            assert_eq!((Reason::from_number(number), reason as u8), (reason, number));
        }
        assert_eq!(Reason::from_number(200), Reason::Fault);
    }
}
