//! What is reported: kinds, words, and how often.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::trace::Trace;

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $why:literal, $fix:literal;)*) => {
        /// What a program did.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {$(
            $(#[$doc])*
            $variant,
        )*}

        impl Kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Its name in reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// What hardware does about it, and where that is said.
            #[must_use]
            pub const fn why(self) -> &'static str {
                match self { $(Self::$variant => $why,)* }
            }

            /// What to do instead.
            #[must_use]
            pub const fn fix(self) -> &'static str {
                match self { $(Self::$variant => $fix,)* }
            }
        }
    };
}

kinds! {
    /// A request names memory whose registration has ended.
    UseAfterDereg = "use-after-dereg",
        "an adapter may still read or write the pages, which may have another use by now; \
         otherwise the request fails (IBA 10.6.6, 10.6.7.2)",
        "deregister memory only when no request that names it is outstanding, including requests \
         of peers that have its rkey";
    /// A request names a key that is of no region, a range that is not in the region, or memory that it has
    /// no right to.
    WrongKey = "wrong-key",
        "the request fails with a protection error, and the queue pair with it (IBA 10.6.4)",
        "use the lkey, or the rkey from the peer, of a region that contains the whole buffer and \
         is registered in the queue pair's protection domain with the access that the request \
         needs";
    /// Memory was deregistered while a request that names it was outstanding.
    DeregInUse = "dereg-in-use",
        "the adapter may still read or write the memory, or fails the request (IBA 10.6.6.2)",
        "poll the completion of the request, or of a later signalled one, before ibv_dereg_mr or \
         ibv_rereg_mr; receives that are left end with their queue pair, or when it goes to the \
         error state";
    /// The payload of a send was not the same at its completion as when it was posted.
    BufferChanged = "buffer-changed",
        "an adapter reads the buffer any time until the request completes, and again when it \
         retransmits: the peer gets a mixture of old and new bytes (IBA 10.7.2.2)",
        "write to a buffer only after the completion of its request was polled, or post it inline";
    /// Memory that a request has lent to the adapter to write to was changed meanwhile.
    TargetChanged = "target-changed",
        "an adapter writes to the memory of a receive or a read any time until the request completes: \
         data that the program puts there before is lost, or damages the message \
             (ibv_post_recv(3), ibv_post_send(3))",
        "write to the memory of a receive, a read or an atomic before it is posted, or after its \
         completion was polled; use memory that serves no other purpose";
    /// More requests are outstanding than the send queue holds.
    SendQueueOverflow = "send-queue-overflow",
        "an entry of the send queue becomes free only when its completion, or a later one, is \
         polled; ibv_post_send fails with ENOMEM (IBA 10.8.6, 10.7.3.1)",
        "signal at least one request in each max_send_wr, and poll it before posting more";
    /// The completions that may come do not fit their queue.
    CqTooSmall = "cq-too-small",
        "a completion queue that overruns is lost, with all its queue pairs (IBA 11.6.3.1)",
        "create the queue with an entry for each signalled send and each receive that may be \
         outstanding at once, or poll it before posting more";
    /// A message found no receive.
    MissingReceive = "missing-receive",
        "the sender must wait and retry, which costs milliseconds, and after rnr_retry retries \
         its request fails (IBA 9.7.5.2.8); an unreliable message is lost",
        "post receives before the peer may send, and keep enough of them posted";
    /// A queue pair was asked for a transition that does not exist.
    IllegalTransition = "illegal-transition",
        "ibv_modify_qp fails with EINVAL, and it is unknown which attributes the adapter has \
         applied (IBA 11.2.5.2, table 91)",
        "go through INIT, RTR and RTS with the attributes that ibv_modify_qp(3) requires for \
         each";
    /// A request was refused when it was posted.
    RefusedPost = "refused-post",
        "ibv_post_send and ibv_post_recv fail on every adapter; some write the request before \
         they notice (IBA 11.4.1)",
        "stay within the queue pair's caps (max_send_sge, max_inline_data), post only in states \
         that allow it, and check the result of the call";
    /// A queue pair was destroyed while sends were outstanding.
    DestroyedInUse = "destroyed-in-use",
        "it is unknown whether the requests are still executed, and no completion arrives; the \
         adapter may access their buffers until it has stopped (IBA 10.2.4.5)",
        "poll the completions of the sends, or go to the error state and poll the flushed \
         requests, before ibv_destroy_qp";
    /// A queue pair was moved to RESET while sends were outstanding.
    ResetInUse = "reset-in-use",
        "the requests vanish without completions, so it is unknown whether they were executed, \
         and completions that were not polled may vanish, too (IBA 10.3.1)",
        "poll the completions of the sends, or go to the error state and poll the flushed \
         requests, before the queue pair goes to RESET";
    /// An address handle was destroyed while a datagram to it was outstanding.
    AhInUse = "ah-in-use",
        "an adapter may read the address when it sends, not when the request is posted: the datagram \
         goes nowhere, or somewhere else (IBA 11.2.2.4)",
        "poll the completions of the sends to it before ibv_destroy_ah";
    /// A datagram does not fit the MTU.
    DatagramTooLong = "datagram-too-long",
        "an unreliable datagram is one packet: a message longer than the MTU is not sent, and \
         may still complete successfully (IBA C10-93.1.1)",
        "send at most active_mtu bytes (ibv_query_port(3)), in several datagrams if necessary";
    /// More private data were given than connection management of InfiniBand carries.
    PrivateData = "private-data",
        "rdma_connect, rdma_accept and rdma_reject fail with EINVAL on InfiniBand and RoCE, where a REQ \
         has room for 56 bytes, a REP for 196, a REJ for 148 (IBA 12.6), less the addresses of rdma_cm",
        "use at most 56 bytes for rdma_connect (180 for datagrams), 196 for rdma_accept (136 for \
         datagrams) and 148 for rdma_reject; send longer data over the connection";
    /// Memory was used while a write of a peer to it was only partly placed.
    WriteOrder = "write-order",
        "the bytes of writes become visible in any order until a completion orders them: when \
         the last byte or a later flag is there, the bytes before it may not be (IBA 9.5; RFC \
         5040 5.5)",
        "let the peer end with a send or a write with immediate, and wait for its completion; or \
         poll a word that the peer changes by an atomic; or call ibv_query_qp_data_in_order(3), \
         which reports adapters that keep the order within a write";
}

/// Something that a program did.
#[derive(Clone, Debug)]
pub struct Report {
    /// Its number in this process, from 1.
    pub number: u64,
    /// Of which kind.
    pub kind: Kind,
    /// What exactly.
    pub what: String,
    /// Where it was noticed.
    pub here: Trace,
    /// Other places that have to do with it, with what was done there.
    pub related: Vec<(&'static str, Trace)>,
}

/// A report as a line of JSON.
#[derive(Serialize)]
struct Line<'a> {
    report: u64,
    kind: &'static str,
    what: &'a str,
    why: &'static str,
    fix: &'static str,
    here: Vec<String>,
    related: BTreeMap<&'static str, Vec<String>>,
}

impl Report {
    /// A line of JSON.
    #[must_use]
    pub fn json(&self) -> String {
        let related = self.related.iter().map(|(label, trace)| (*label, trace.frames()));
        let line = Line {
            report: self.number,
            kind: self.kind.name(),
            what: &self.what,
            why: self.kind.why(),
            fix: self.kind.fix(),
            here: self.here.frames(),
            related: related.collect(),
        };
        serde_json::to_string(&line).unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frames = |f: &mut fmt::Formatter<'_>, trace: &Trace| {
            trace.frames().iter().try_for_each(|frame| writeln!(f, "quipu:     {frame}"))
        };
        writeln!(f, "quipu: strict {}: {}: {}", self.number, self.kind.name(), self.what)?;
        frames(f, &self.here)?;
        for (label, trace) in &self.related {
            writeln!(f, "quipu:   {label}:")?;
            frames(f, trace)?;
        }
        writeln!(f, "quipu:   on hardware: {}", self.kind.why())?;
        write!(f, "quipu:   instead: {}", self.kind.fix())
    }
}

/// How often each kind was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Of each, but for what is ignored.
    pub found: BTreeMap<Kind, u64>,
    /// What is ignored.
    pub ignored: u64,
}

impl Tally {
    /// Of all kinds together, but for what is ignored.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.found.values().sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.found.iter().map(|(kind, count)| format!("{} {count}", kind.name()));
        match counts.collect::<Vec<_>>().join(", ").as_str() {
            "" => f.write_str("nothing found")?,
            counts => f.write_str(counts)?,
        }
        if self.ignored > 0 { write!(f, "; ignored {}", self.ignored) } else { Ok(()) }
    }
}
