//! The state machine of a queue pair: which transitions exist and which attributes each needs and allows
//! (IBA 11.2.4.2, table of "Modify Queue Pair" attributes; the man page of `ibv_modify_qp`).

use crate::error::Fault;
use crate::types::{QpAttrMask as M, QpState, QpType};

/// One row of the table: the attributes that a transition must and may set.
pub(crate) struct Transition {
    pub(crate) required: M,
    pub(crate) optional: M,
}

const NONE: M = M::empty();

/// The row for a transition, or `None` if there is no such transition.
pub(crate) fn transition(qp_type: QpType, from: QpState, to: QpState) -> Option<Transition> {
    use QpState::*;
    if qp_type.is_plain() {
        return iwarp(from, to);
    }
    match qp_type {
        QpType::Ud => return unreliable_datagram(from, to),
        QpType::RawPacket => return raw_packet(from, to),
        QpType::Tcp => return tcp(from, to),
        QpType::Udp => return udp(from, to),
        // It is ready from the beginning (`ibv_create_qp_ex(3)` with an indirection table).
        QpType::Hashed(_) => return None,
        _ => {}
    }
    if (from, to) == (Sqe, Rts) {
        let optional = M::CUR_STATE | M::ACCESS_FLAGS;
        return (!qp_type.is_reliable()).then_some(Transition { required: NONE, optional });
    }
    let row = reliable_connected(from, to)?;
    let lacking = qp_type.lacks();
    Some(Transition { required: row.required - lacking, optional: row.optional - lacking })
}

/// The rows of unreliable datagrams, which have no peer to speak of.
fn unreliable_datagram(from: QpState, to: QpState) -> Option<Transition> {
    use QpState::*;
    let row = |required, optional| Some(Transition { required, optional });
    match (from, to) {
        (_, Reset | Err) => row(NONE, NONE),
        (Reset, Init) => row(M::PKEY_INDEX | M::PORT | M::QKEY, NONE),
        (Init, Init) => row(NONE, M::PKEY_INDEX | M::PORT | M::QKEY),
        (Init, Rtr) => row(NONE, M::PKEY_INDEX | M::QKEY),
        (Rtr, Rts) => row(M::SQ_PSN, M::CUR_STATE | M::QKEY),
        (Rts | Sqd | Sqe, Rts) => row(NONE, M::CUR_STATE | M::QKEY),
        (Rts, Sqd) => row(NONE, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => row(NONE, M::PKEY_INDEX | M::QKEY),
        _ => None,
    }
}

/// The rows of raw packets, of which the port is all that is to be known.
fn raw_packet(from: QpState, to: QpState) -> Option<Transition> {
    use QpState::*;
    let row = |required, optional| Some(Transition { required, optional });
    match (from, to) {
        (_, Reset | Err) | (Init, Rtr) => row(NONE, NONE),
        (Reset, Init) => row(M::PORT, NONE),
        (Init, Init) => row(NONE, M::PORT),
        (Rtr | Rts, Rts) => row(NONE, M::CUR_STATE | M::RATE_LIMIT),
        (Sqd | Sqe, Rts) => row(NONE, M::CUR_STATE),
        (Rts, Sqd) => row(NONE, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => row(NONE, NONE),
        _ => None,
    }
}

/// The rows of a reliable connection, which has all attributes of a connection.
fn reliable_connected(from: QpState, to: QpState) -> Option<Transition> {
    use QpState::*;
    let row = |required, optional| Some(Transition { required, optional });
    let path = M::ALT_PATH.union(M::PATH_MIG_STATE);
    let rights = M::ACCESS_FLAGS.union(M::MIN_RNR_TIMER);
    match (from, to) {
        (_, Reset | Err) => row(NONE, NONE),
        (Reset, Init) => row(M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS, NONE),
        (Init, Init) => row(NONE, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
        (Init, Rtr) => row(
            M::AV
                | M::PATH_MTU
                | M::DEST_QPN
                | M::RQ_PSN
                | M::MAX_DEST_RD_ATOMIC
                | M::MIN_RNR_TIMER,
            M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX,
        ),
        (Rtr, Rts) => row(
            M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
            M::CUR_STATE | path | rights | M::RATE_LIMIT,
        ),
        (Rts, Rts) => row(NONE, M::CUR_STATE | path | rights | M::RATE_LIMIT),
        (Rts, Sqd) => row(NONE, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Rts) => row(NONE, M::CUR_STATE | path | rights),
        (Sqd, Sqd) => row(
            NONE,
            M::PORT
                | M::AV
                | M::TIMEOUT
                | M::RETRY_CNT
                | M::RNR_RETRY
                | M::MAX_QP_RD_ATOMIC
                | M::MAX_DEST_RD_ATOMIC
                | M::PKEY_INDEX
                | path
                | rights,
        ),
        _ => None,
    }
}

/// What an iWARP adapter lets a program do: connection management does the rest. SQD is the graceful end of
/// the connection (RDMAC verbs 6.2.4: RTS to CLOSING), as librdmacm and the kernel use it.
fn iwarp(from: QpState, to: QpState) -> Option<Transition> {
    use QpState::*;
    let row = |optional| Some(Transition { required: NONE, optional });
    let basic = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    match (from, to) {
        (_, Reset | Err) | (Rts, Sqd) => row(M::PORT),
        (Reset | Init, Init) => row(basic),
        (Rts, Rts) => row(M::CUR_STATE | M::TIMEOUT | M::RETRY_CNT | basic),
        _ => None,
    }
}

/// What a program may do to a TCP queue pair: connecting takes it to RTS. SQD waits for what was sent to be
/// acknowledged, as on a reliable connection.
fn tcp(from: QpState, to: QpState) -> Option<Transition> {
    use QpState::*;
    let row = |optional| Some(Transition { required: NONE, optional });
    let basic = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    match (from, to) {
        (_, Reset | Err) => row(NONE),
        (Reset | Init, Init) => row(basic),
        (Rts | Sqd, Rts) => row(M::CUR_STATE),
        (Rts, Sqd) => row(M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => row(NONE),
        _ => None,
    }
}

/// The same for a UDP queue pair: binding takes it to RTS.
fn udp(from: QpState, to: QpState) -> Option<Transition> {
    match (from, to) {
        (QpState::Sqe, QpState::Rts) => Some(Transition { required: NONE, optional: M::CUR_STATE }),
        _ => tcp(from, to),
    }
}

/// Checks a change of state with these attributes against the table.
///
/// # Errors
/// [`Fault::Transition`] that names what is wrong: no such transition, an attribute missing, or one that
/// this transition does not allow.
pub(crate) fn check(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<(), Fault> {
    let row = transition(qp_type, from, to).ok_or(match (qp_type, to) {
        (QpType::Iwarp, QpState::Rtr | QpState::Rts) => Fault::ConnectedElsewhere,
        (QpType::Tcp, QpState::Rtr | QpState::Rts) => {
            Fault::Transition("a TCP queue pair goes to RTS by being connected")
        }
        (QpType::Udp, QpState::Rtr | QpState::Rts) => {
            Fault::Transition("a UDP queue pair goes to RTS by being bound to a port")
        }
        _ => Fault::Transition("no such transition between these states"),
    })?;
    let given = mask - M::STATE;
    if !given.contains(row.required) {
        return Err(Fault::Transition("a required attribute is missing from the mask"));
    }
    if !(row.required | row.optional).contains(given) {
        return Err(Fault::Transition(
            "the mask has an attribute that this transition does not allow",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::XrcdId;
    use QpState::*;

    /// The whole matrix as text, so that a change of it is seen.
    fn matrix(qp_type: QpType) -> String {
        let states = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        let mut text = String::new();
        for from in states {
            let row: Vec<String> = states
                .iter()
                .filter_map(|&to| {
                    transition(qp_type, from, to).map(|row| {
                        let (required, optional) = (row.required.bits(), row.optional.bits());
                        format!("{to:?}({required:x}/{optional:x})")
                    })
                })
                .collect();
            text += &format!("{from:?}: {}\n", row.join(" "));
        }
        text
    }

    #[test]
    fn matrix_of_reliable_connected() {
        let expected = "\
Reset: Reset(0/0) Init(38/0) Err(0/0)
Init: Reset(0/0) Init(0/38) Rtr(129180/4018) Err(0/0)
Rtr: Reset(0/0) Rts(12e00/204c00a) Err(0/0)
Rts: Reset(0/0) Rts(0/204c00a) Sqd(0/4) Err(0/0)
Sqd: Reset(0/0) Rts(0/4c00a) Sqd(0/6eeb8) Err(0/0)
Sqe: Reset(0/0) Err(0/0)
Err: Reset(0/0) Err(0/0)
";
        assert_eq!(matrix(QpType::Rc), expected);
    }

    #[test]
    fn matrix_of_unreliable_connected() {
        let expected = "\
Reset: Reset(0/0) Init(38/0) Err(0/0)
Init: Reset(0/0) Init(0/38) Rtr(101180/4018) Err(0/0)
Rtr: Reset(0/0) Rts(10000/204400a) Err(0/0)
Rts: Reset(0/0) Rts(0/204400a) Sqd(0/4) Err(0/0)
Sqd: Reset(0/0) Rts(0/4400a) Sqd(0/440b8) Err(0/0)
Sqe: Reset(0/0) Rts(0/a) Err(0/0)
Err: Reset(0/0) Err(0/0)
";
        assert_eq!(matrix(QpType::Uc), expected);
    }

    #[test]
    fn matrix_of_unreliable_datagrams() {
        let expected = "\
Reset: Reset(0/0) Init(70/0) Err(0/0)
Init: Reset(0/0) Init(0/70) Rtr(0/50) Err(0/0)
Rtr: Reset(0/0) Rts(10000/42) Err(0/0)
Rts: Reset(0/0) Rts(0/42) Sqd(0/4) Err(0/0)
Sqd: Reset(0/0) Rts(0/42) Sqd(0/50) Err(0/0)
Sqe: Reset(0/0) Rts(0/42) Err(0/0)
Err: Reset(0/0) Err(0/0)
";
        assert_eq!(matrix(QpType::Ud), expected);
    }

    #[test]
    fn matrix_of_raw_packets() {
        let expected = "\
Reset: Reset(0/0) Init(20/0) Err(0/0)
Init: Reset(0/0) Init(0/20) Rtr(0/0) Err(0/0)
Rtr: Reset(0/0) Rts(0/2000002) Err(0/0)
Rts: Reset(0/0) Rts(0/2000002) Sqd(0/4) Err(0/0)
Sqd: Reset(0/0) Rts(0/2) Sqd(0/0) Err(0/0)
Sqe: Reset(0/0) Rts(0/2) Err(0/0)
Err: Reset(0/0) Err(0/0)
";
        assert_eq!(matrix(QpType::RawPacket), expected);
        assert_eq!(matrix(QpType::Hashed(crate::types::TableId::NONE)).matches('(').count(), 0);
    }

    #[test]
    fn matrices_of_extended_reliable_connections() {
        let expected = "\
Reset: Reset(0/0) Init(38/0) Err(0/0)
Init: Reset(0/0) Init(0/38) Rtr(101180/4018) Err(0/0)
Rtr: Reset(0/0) Rts(12e00/204400a) Err(0/0)
Rts: Reset(0/0) Rts(0/204400a) Sqd(0/4) Err(0/0)
Sqd: Reset(0/0) Rts(0/4400a) Sqd(0/46eb8) Err(0/0)
Sqe: Reset(0/0) Err(0/0)
Err: Reset(0/0) Err(0/0)
";
        assert_eq!(matrix(QpType::XrcSend), expected);
        let expected = "\
Reset: Reset(0/0) Init(38/0) Err(0/0)
Init: Reset(0/0) Init(0/38) Rtr(129180/4018) Err(0/0)
Rtr: Reset(0/0) Rts(10200/204c00a) Err(0/0)
Rts: Reset(0/0) Rts(0/204c00a) Sqd(0/4) Err(0/0)
Sqd: Reset(0/0) Rts(0/4c00a) Sqd(0/6c2b8) Err(0/0)
Sqe: Reset(0/0) Err(0/0)
Err: Reset(0/0) Err(0/0)
";
        assert_eq!(matrix(QpType::XrcRecv(XrcdId(1))), expected);
    }

    #[test]
    fn iwarp_queue_pairs_are_connected_by_connection_management() {
        let states = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        let pairs = |from| states.map(|to| transition(QpType::Iwarp, from, to).is_some());
        assert_eq!(pairs(Reset), [true, true, false, false, false, false, true]);
        assert_eq!(pairs(Init), [true, true, false, false, false, false, true]);
        assert_eq!(pairs(Rts), [true, false, false, true, true, false, true]);
        assert_eq!(pairs(Err), [true, false, false, false, false, false, true]);
        let refused = check(QpType::Iwarp, Init, Rtr, M::STATE);
        assert_eq!(refused, Result::Err(Fault::ConnectedElsewhere));
        assert_eq!(check(QpType::Iwarp, Rts, Rts, M::PORT), Ok(()));
    }

    #[test]
    fn missing_and_superfluous_attributes_are_refused() {
        let good = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
        assert_eq!(check(QpType::Rc, Reset, Init, good), Ok(()));
        assert!(check(QpType::Rc, Reset, Init, good - M::PORT).is_err());
        assert!(check(QpType::Rc, Reset, Init, good | M::QKEY).is_err());
        assert!(check(QpType::Rc, Reset, Rts, good).is_err());
        assert!(check(QpType::Rc, Init, Rts, M::STATE).is_err());
    }
}
