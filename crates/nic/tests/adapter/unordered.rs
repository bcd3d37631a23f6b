//! Writes that are placed out of order: what a program sees that takes memory for a completion, and that
//! one which waits for completions sees nothing of it.

use crate::pair::{Buffer, Pair, Way, connected, connected_with};
use quipu_nic::*;

const MS: u64 = 1_000_000;
const HOLD: u64 = 5 * MS;

/// The ways on which the receiving adapter places writes itself.
const WAYS: [Way; 3] = [Way::Stream(usize::MAX), Way::Stream(97), Way::LinkCopying];

/// A connected pair whose second host places the writes of the first out of order, and a buffer at each.
fn unordered(way: Way, order: WriteOrder) -> (Pair, [QpId; 2], [Buffer; 2]) {
    let (mut pair, qps) = connected(way);
    pair.hosts[1].adapter.place_unordered(order, HOLD);
    let buffers = [pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20)];
    (pair, qps, buffers)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) | 1).collect()
}

/// Writes `bytes` to `offset` of the other host's buffer.
fn write(
    pair: &mut Pair,
    qp: QpId,
    buffers: &[Buffer; 2],
    wr_id: u64,
    offset: usize,
    bytes: &[u8],
) {
    let [from, to] = buffers;
    from.fill(offset, bytes);
    let op = SendOp::Write { addr: to.addr() + offset as u64, rkey: to.key() };
    pair.send(0, qp, wr_id, op, &[from.sge(offset, bytes.len())]);
    pair.run();
}

fn disturbed(pair: &mut Pair) -> Vec<QpId> {
    pair.hosts[1].adapter.take_disturbed()
}

#[test]
fn the_last_word_of_a_write_is_there_before_the_rest() {
    for way in WAYS {
        let (mut pair, [qp, _], buffers) = unordered(way, WriteOrder::Reverse);
        for (n, len) in [9, 16, 33, 97, 1000, 4096, 65_536, 100_000].into_iter().enumerate() {
            let bytes = pattern(len, n as u8);
            let word = (len - 1) / 8 * 8;
            write(&mut pair, qp, &buffers, 1, 0, &bytes);
            pair.later(HOLD - MS);
            assert_eq!(buffers[1].bytes(word, len - word), bytes[word..], "{way:?} {len}");
            assert_eq!(buffers[1].bytes(0, word), vec![0; word], "{way:?} {len}");
            assert_eq!(pair.polled(0), [], "it is not acknowledged before all is there");
            pair.later(2 * MS);
            assert_eq!(buffers[1].bytes(0, len), bytes, "{way:?} {len}");
            assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?} {len}");
            buffers[1].fill(0, &vec![0; len]);
        }
        assert_eq!(disturbed(&mut pair), []);
    }
}

#[test]
fn a_word_is_placed_whole_and_at_once() {
    for way in WAYS {
        let (mut pair, [qp, _], buffers) = unordered(way, WriteOrder::Reverse);
        for (wr_id, len) in [(1, 8), (2, 1), (3, 0)] {
            write(&mut pair, qp, &buffers, wr_id, 16, &pattern(len, 3));
            assert_eq!(buffers[1].bytes(16, len), pattern(len, 3));
            pair.later(MS);
            assert_eq!(pair.polled(0), [(wr_id, WcStatus::Success)], "{way:?} {len}");
        }
    }
}

#[test]
fn a_flag_overtakes_what_it_is_the_flag_of() {
    for way in WAYS {
        let (mut pair, [qp, _], buffers) = unordered(way, WriteOrder::Reverse);
        write(&mut pair, qp, &buffers, 1, 0, &pattern(100, 1));
        write(&mut pair, qp, &buffers, 2, 4096, &[7; 8]);
        assert_eq!(buffers[1].bytes(4096, 8), [7; 8], "{way:?}");
        assert_eq!(buffers[1].bytes(0, 96), [0; 96], "{way:?}");
        pair.later(MS);
        assert_eq!(pair.polled(0), [], "an acknowledgement is of all before it");
        pair.later(HOLD);
        assert_eq!(buffers[1].bytes(0, 100), pattern(100, 1), "{way:?}");
        let both = [(1, WcStatus::Success), (2, WcStatus::Success)];
        assert_eq!(pair.polled(0), both, "{way:?}");
    }
}

#[test]
fn what_orders_writes_finds_them_placed() {
    for way in WAYS {
        for case in 0..6 {
            let (mut pair, qps, buffers) = unordered(way, WriteOrder::Reverse);
            let (addr, rkey) = (buffers[1].addr() + 8192, buffers[1].key());
            let op = match case {
                0 | 1 => SendOp::Send,
                2 => SendOp::WriteImm { addr, rkey, imm: 1 },
                3 => SendOp::Read { addr, rkey },
                4 => SendOp::FetchAdd { addr, rkey, add: 1 },
                _ => SendOp::CompareSwap { addr, rkey, compare: 0, swap: 1 },
            };
            if case != 1 {
                pair.recv(1, qps[1], 50, &[buffers[1].sge(16_384, 64)]);
            }
            write(&mut pair, qps[0], &buffers, 1, 0, &pattern(3000, 9));
            assert_eq!(buffers[1].bytes(0, 8), [0; 8]);
            pair.send(0, qps[0], 2, op, &[buffers[0].sge(32_768, 8)]);
            pair.run();
            assert_eq!(buffers[1].bytes(0, 3000), pattern(3000, 9), "{way:?} {case}");
            if case == 1 {
                pair.recv(1, qps[1], 50, &[buffers[1].sge(16_384, 64)]);
                pair.later(2 * MS);
            }
            let both = [(1, WcStatus::Success), (2, WcStatus::Success)];
            assert_eq!(pair.polled(0), both, "{way:?} {case}");
            assert_eq!(pair.polled(1).len(), usize::from(case < 3), "{way:?} {case}");
            assert_eq!(disturbed(&mut pair), [], "{way:?} {case}");
        }
    }
}

#[test]
fn a_long_write_with_immediate_is_whole_at_its_completion() {
    for way in WAYS {
        let (mut pair, qps, buffers) = unordered(way, WriteOrder::Reverse);
        let bytes = pattern(300_000, 4);
        buffers[0].fill(0, &bytes);
        pair.recv(1, qps[1], 50, &[]);
        let op = SendOp::WriteImm { addr: buffers[1].addr(), rkey: buffers[1].key(), imm: 1 };
        pair.send(0, qps[0], 1, op, &[buffers[0].sge(0, bytes.len())]);
        pair.run();
        let received = pair.hosts[1].poll();
        assert_eq!((received.len(), received[0].byte_len), (1, 300_000), "{way:?}");
        assert_eq!(buffers[1].bytes(0, bytes.len()), bytes, "{way:?}");
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn of_two_writes_to_one_place_the_later_stays() {
    for way in WAYS {
        for order in [WriteOrder::Reverse, WriteOrder::Shuffle { seed: 3 }] {
            let (mut pair, [qp, other], buffers) = unordered(way, order);
            write(&mut pair, qp, &buffers, 1, 0, &pattern(1000, 1));
            write(&mut pair, qp, &buffers, 2, 500, &pattern(1000, 2));
            write(&mut pair, qp, &buffers, 3, 900, &pattern(8, 3));
            pair.later(2 * HOLD);
            let mut expected = pattern(1000, 1)[..500].to_vec();
            expected.extend(pattern(1000, 2));
            expected[900..908].copy_from_slice(&pattern(8, 3));
            assert_eq!(buffers[1].bytes(0, 1500), expected, "{way:?} {order:?}");
            assert_eq!(pair.polled(0).len(), 3);
            assert_eq!(disturbed(&mut pair), [], "{other:?} did nothing");
        }
    }
}

#[test]
fn a_program_that_takes_the_last_byte_for_the_end_is_found() {
    for way in WAYS {
        let (mut pair, [qp, target], buffers) = unordered(way, WriteOrder::Reverse);
        // The byte that it polled, one of those that it read, one of the flag, and one beside them all.
        for (at, found) in [(999, true), (10, true), (4099, true), (1000, false)] {
            buffers[1].fill(0, &[0; 1000]);
            write(&mut pair, qp, &buffers, 1, 0, &pattern(1000, 1));
            write(&mut pair, qp, &buffers, 2, 4096, &[7; 8]);
            buffers[1].fill(at, &[2]);
            pair.later(2 * HOLD);
            let expected = if found { vec![target] } else { vec![] };
            assert_eq!(disturbed(&mut pair), expected, "{way:?} {at}");
        }
    }
}

#[test]
fn what_is_sent_from_a_write_in_progress_is_known() {
    let (mut pair, [qp, target], buffers) = unordered(Way::Stream(97), WriteOrder::Reverse);
    write(&mut pair, qp, &buffers, 1, 1000, &pattern(1000, 1));
    let touches = |pair: &Pair, at, len| {
        pair.hosts[1].adapter.is_in_progress(target, &[buffers[1].sge(at, len)])
    };
    for (at, len, expected) in
        [(0, 1000, false), (0, 1001, true), (1999, 1, true), (2000, 1, false), (1500, 0, false)]
    {
        assert_eq!(touches(&pair, at, len), expected, "{len} at {at}");
    }
    pair.later(2 * HOLD);
    assert!(!touches(&pair, 0, 4096));
}

#[test]
fn nothing_is_placed_after_the_end() {
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    for way in WAYS {
        for case in 0..4 {
            let (mut pair, [qp, target], buffers) = unordered(way, WriteOrder::Reverse);
            write(&mut pair, qp, &buffers, 1, 0, &pattern(1000, 1));
            let now = pair.now;
            let adapter = &mut pair.hosts[1].adapter;
            match case {
                0 => adapter.modify_qp(now, target, &error, QpAttrMask::STATE).unwrap(),
                1 => adapter.modify_qp(now, target, &reset, QpAttrMask::STATE).unwrap(),
                2 => adapter.destroy_qp(now, target).unwrap(),
                _ => adapter.dereg_mr(pair.now, buffers[1].region.id).unwrap(),
            }
            assert_eq!(buffers[1].bytes(0, 1000), pattern(1000, 1), "{way:?} {case}");
            buffers[1].fill(0, &[9; 1000]);
            pair.later(2 * HOLD);
            assert_eq!(buffers[1].bytes(0, 1000), [9; 1000], "{way:?} {case}");
        }
    }
}

#[test]
fn what_was_placed_before_a_refusal_is_acknowledged() {
    for way in WAYS {
        let (mut pair, [qp, target], buffers) = unordered(way, WriteOrder::Reverse);
        write(&mut pair, qp, &buffers, 1, 0, &pattern(1000, 1));
        let op = SendOp::Write { addr: buffers[1].addr(), rkey: 0x666 };
        pair.send(0, qp, 2, op, &[buffers[0].sge(0, 8)]);
        pair.later(MS);
        assert_eq!(buffers[1].bytes(0, 1000), pattern(1000, 1), "{way:?}");
        let expected = [(1, WcStatus::Success), (2, WcStatus::RemAccessErr)];
        assert_eq!(pair.polled(0), expected, "{way:?}");
        let state = pair.hosts[1].adapter.query_qp(target).unwrap().attr.state;
        assert_eq!(state, QpState::Err, "{way:?}");
    }
}

#[test]
fn no_more_is_held_than_there_is_room_for() {
    for way in WAYS {
        let (mut pair, [qp, _], buffers) = unordered(way, WriteOrder::Reverse);
        let bytes = pattern(1 << 20, 5);
        write(&mut pair, qp, &buffers, 1, 0, &bytes);
        assert_ne!(buffers[1].bytes(0, 8), [0; 8], "{way:?}: the beginning had to be placed");
        pair.later(2 * HOLD);
        assert_eq!(buffers[1].bytes(0, 1 << 20), bytes, "{way:?}");
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn a_seed_shuffles_alike_every_time() {
    let picture = |seed| {
        let (mut pair, [qp, _], buffers) =
            unordered(Way::LinkCopying, WriteOrder::Shuffle { seed });
        write(&mut pair, qp, &buffers, 1, 0, &pattern(4096, 1));
        let picture: Vec<bool> = (0..64).map(|n| buffers[1].bytes(n * 64, 1) != [0]).collect();
        pair.later(2 * HOLD);
        assert_eq!(buffers[1].bytes(0, 4096), pattern(4096, 1));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
        picture
    };
    assert_eq!(picture(1), picture(1));
    assert_ne!(picture(1), picture(2));
    assert!(picture(1).contains(&true) && picture(1).contains(&false));
}

#[test]
fn writes_of_unreliable_connections_are_placed_out_of_order_too() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let qps = [0, 1].map(|host| pair.hosts[host].qp_with(|init| init.qp_type = QpType::Uc));
        pair.connect(qps);
        pair.hosts[1].adapter.place_unordered(WriteOrder::Reverse, HOLD);
        let buffers = [pair.buffer(0, 8192), pair.buffer(1, 8192)];
        write(&mut pair, qps[0], &buffers, 1, 0, &pattern(1000, 1));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
        assert_eq!(buffers[1].bytes(0, 992), [0; 992], "{way:?}");
        pair.later(2 * HOLD);
        assert_eq!(buffers[1].bytes(0, 1000), pattern(1000, 1), "{way:?}");
    }
}

#[test]
fn a_process_that_ends_acknowledges_what_it_has() {
    for way in WAYS {
        let (mut pair, [qp, _], buffers) = unordered(way, WriteOrder::Reverse);
        write(&mut pair, qp, &buffers, 1, 0, &pattern(1000, 1));
        pair.hosts[1].adapter.place_held();
        assert_eq!(buffers[1].bytes(0, 1000), pattern(1000, 1), "{way:?}");
        pair.hosts[1].adapter.release_acks();
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn rights_that_are_withdrawn_were_those_of_the_write() {
    let (mut pair, [qp, target], buffers) = unordered(Way::Stream(97), WriteOrder::Reverse);
    write(&mut pair, qp, &buffers, 1, 0, &pattern(1000, 1));
    let (now, attr) = (pair.now, QpAttr::default());
    let adapter = &mut pair.hosts[1].adapter;
    adapter.modify_qp(now, target, &attr, QpAttrMask::ACCESS_FLAGS).unwrap();
    assert_eq!(buffers[1].bytes(0, 1000), pattern(1000, 1));
    pair.later(MS);
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
}

#[test]
fn peers_that_have_access_to_memory_are_not_held_up() {
    // A world that wants order to show gives no such access.
    let (mut pair, [qp, _], buffers) = unordered(Way::Link, WriteOrder::Reverse);
    for len in [100, 100_000] {
        write(&mut pair, qp, &buffers, 1, 0, &pattern(len, 1));
        pair.later(2 * HOLD);
        assert_eq!(buffers[1].bytes(0, len), pattern(len, 1));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    }
}

#[test]
fn acknowledgements_that_wait_do_not_hold_up_what_a_peer_has_no_patience_for() {
    // The peer gives up after about 17 ms without a sign of the oldest request.
    let (mut pair, [qp, _]) = connected_with(Way::Stream(97), |attr| {
        attr.timeout = 10;
        attr.retry_cnt = 0;
    });
    pair.hosts[1].adapter.place_unordered(WriteOrder::Reverse, HOLD);
    let buffers = [pair.buffer(0, 8192), pair.buffer(1, 8192)];
    for round in 0..20 {
        write(&mut pair, qp, &buffers, round, 0, &pattern(1000, round as u8));
        pair.later(HOLD + MS);
        assert_eq!(pair.polled(0), [(round, WcStatus::Success)]);
    }
}
