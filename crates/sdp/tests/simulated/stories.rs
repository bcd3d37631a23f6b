//! One behaviour each.

use quipu_sdp::{
    ADVERT_NS, CANCEL_NS, Config, FIN_WAIT_NS, Mode, PeerMisbehaved, Readable, Reset, SourceEnd,
};

use crate::bench::Pair;

fn small() -> Config {
    Config { buffers: 8, buffer_size: 1024, max_buffer_size: 4096, ..Config::default() }
}

fn pair() -> Pair {
    Pair::new([small(); 2])
}

#[test]
fn data_stop_at_two_credits_and_go_on_when_the_peer_reads() {
    let mut pair = pair();
    let mut sent = 0;
    while pair.send_data(0, 100, false) > 0 {
        sent += 1;
    }
    assert_eq!(sent, 6);
    pair.settle();
    assert_eq!(pair.send_data(0, 100, false), 0, "the peer has read nothing");
    pair.drain(1);
    assert_eq!(pair.ends[1].received, 600);
    assert!(pair.send_data(0, 100, false) > 0);
}

#[test]
fn a_message_fits_the_receive_buffers_of_the_peer() {
    let wide = Config { buffer_size: 4096, ..small() };
    let mut pair = Pair::new([small(), wide]);
    assert_eq!(pair.send_data(0, u32::MAX, false), 4096 - 16);
    assert_eq!(pair.send_data(1, u32::MAX, false), 1024 - 16);
    pair.settle();
}

#[test]
fn a_buffer_is_read_without_a_copy_and_its_owner_hears_of_it() {
    let mut pair = pair();
    assert!(pair.advertise(0, 100_000, 64));
    assert_eq!(pair.send_data(0, 1, false), 0, "no data pass an advertised buffer");
    pair.settle();
    assert_eq!(pair.receive(1, u32::MAX), 64);
    assert!(
        matches!(pair.ends[1].connection.readable(), Readable::Remote(rest) if rest.len == 99_936)
    );
    // Two reads of a reader with less room.
    for room in [60_000, u32::MAX] {
        pair.receive(1, room);
        assert_eq!(pair.source_end(0), None);
        pair.finish_read(1);
        pair.settle();
    }
    assert_eq!(pair.source_end(0), Some(SourceEnd { taken: 100_000 }));
    assert_eq!(pair.ends[1].received, 100_000);
    assert!(pair.advertise(0, 2, 1));
}

#[test]
fn a_sink_that_cannot_read_has_the_rest_sent() {
    let mut pair = pair();
    assert!(pair.advertise(0, 5000, 1));
    pair.settle();
    pair.receive(1, 1);
    pair.receive(1, 999);
    pair.finish_read(1);
    pair.ends[1].connection.refuse_sink();
    pair.settle();
    assert_eq!(pair.source_end(0), Some(SourceEnd { taken: 1000 }));
    assert!(pair.send_data(0, 500, false) > 0);
    pair.settle();
    pair.drain(1);
    assert_eq!(pair.ends[1].received, 1500);
}

#[test]
fn an_advertised_buffer_is_taken_back_before_and_while_it_is_read() {
    for reads in [false, true] {
        let mut pair = pair();
        assert!(pair.advertise(0, 5000, 1));
        pair.settle();
        pair.receive(1, 1);
        if reads {
            pair.receive(1, 2000);
        }
        pair.ends[0].connection.cancel_source();
        pair.pump(0);
        pair.settle();
        let early = pair.source_end(0);
        assert_eq!(early.is_some(), !reads, "a read that is under way ends first");
        pair.finish_read(1);
        pair.settle();
        let end = early.or(pair.source_end(0)).unwrap();
        assert_eq!(end.taken, if reads { 2001 } else { 1 });
        assert!(pair.advertise(0, 5000, 1), "the next one");
    }
}

#[test]
fn a_cancellation_that_crosses_the_last_report_leaves_nothing_behind() {
    let mut pair = pair();
    assert!(pair.advertise(0, 5000, 1));
    pair.settle();
    pair.receive(1, 1);
    pair.receive(1, u32::MAX);
    pair.finish_read(1);
    pair.pump(1);
    pair.ends[0].connection.cancel_source();
    pair.pump(0);
    // The report arrives, but not yet the cancellation.
    pair.deliver(0).unwrap();
    assert_eq!(pair.source_end(0), Some(SourceEnd { taken: 5000 }));
    assert!(!pair.ends[0].connection.may_advertise(), "until the cancellation is acknowledged");
    pair.settle();
    assert!(pair.send_data(0, 10, false) > 0);
    pair.settle();
    pair.drain(1);
    assert!(pair.send_data(1, 10, false) > 0);
    pair.settle();
    assert!(pair.advertise(0, 5000, 1));
}

#[test]
fn buffers_that_cross_are_both_taken_back() {
    let mut pair = pair();
    assert!(pair.advertise(0, 5000, 1) && pair.advertise(1, 5000, 1));
    pair.settle();
    assert_eq!(pair.source_end(0), Some(SourceEnd { taken: 1 }));
    assert_eq!(pair.source_end(1), Some(SourceEnd { taken: 1 }));
}

#[test]
fn a_buffer_that_nobody_reads_is_taken_back_after_a_second_and_a_mute_peer_is_given_up() {
    let mut pair = pair();
    assert!(pair.advertise(0, 5000, 1));
    assert_eq!(pair.ends[0].connection.poll_timeout(), Some(ADVERT_NS));
    pair.now = ADVERT_NS;
    pair.ends[0].connection.handle_timeout(pair.now);
    pair.pump(0);
    assert_eq!(pair.ends[0].connection.poll_timeout(), Some(ADVERT_NS + CANCEL_NS));
    pair.now += CANCEL_NS;
    pair.ends[0].connection.handle_timeout(pair.now);
    assert_eq!(pair.ends[0].connection.reset(), Some(Reset::TimedOut));
    assert_eq!(pair.ends[0].connection.poll_timeout(), None);
}

#[test]
fn the_mode_changes_to_buffered_and_back() {
    let mut pair = pair();
    assert!(pair.ends[0].connection.send_buffered());
    pair.pump(0);
    pair.settle();
    assert_eq!(pair.ends[1].connection.modes(), (Mode::Combined, Mode::Buffered));
    assert!(!pair.advertise(0, 5000, 1));
    assert!(pair.ends[1].connection.ask_for_combined());
    pair.pump(1);
    pair.settle();
    assert_eq!(pair.ends[0].connection.modes().0, Mode::Combined);
    assert!(pair.advertise(0, 5000, 1));
}

#[test]
fn receive_buffers_grow_when_those_of_the_old_size_are_used_up() {
    let mut pair = pair();
    pair.ends[0].connection.ask_for_buffers(1 << 20);
    pair.pump(0);
    pair.settle();
    let room = |pair: &Pair| pair.ends[0].connection.data_room();
    assert_eq!(room(&pair), 1024 - 16, "receives of the old size are posted");
    for _ in 0..8 {
        pair.send_data(0, 1, false);
        pair.settle();
        pair.drain(1);
    }
    assert_eq!(room(&pair), 4096 - 16);
    assert_eq!(pair.send_data(0, u32::MAX, false), 4096 - 16);
    pair.settle();
}

#[test]
fn an_urgent_byte_leaves_the_stream_or_stays_in_it() {
    for inline in [false, true] {
        let mut pair = pair();
        pair.ends[1].connection.set_urgent_inline(inline);
        pair.send_data(0, 10, false);
        pair.send_data(0, 5, true);
        pair.settle();
        let sink = &mut pair.ends[1].connection;
        assert!(sink.take_urgent_notice() && !sink.take_urgent_notice());
        assert!(!sink.is_at_mark());
        let urgent = crate::bench::byte_at(0, 14);
        assert_eq!(sink.urgent(true), (!inline).then_some(urgent));
        assert_eq!(sink.urgent(false), (!inline).then_some(urgent));
        assert_eq!(sink.unread(), if inline { 15 } else { 14 });
        assert_eq!(pair.receive(1, 10) + pair.receive(1, 10), 14);
        assert!(pair.ends[1].connection.is_at_mark());
        assert_eq!(pair.receive(1, 10), u32::from(inline));
        assert_eq!(pair.ends[1].connection.is_at_mark(), !inline);
    }
}

/// A peer may announce the byte (OOB_PEND) in a message before the one that has it.
#[test]
fn an_urgent_byte_is_announced_once() {
    let mut pair = pair();
    pair.send_data(0, 10, false);
    pair.ends[1].inbox.back_mut().unwrap()[1] |= 2;
    pair.settle();
    let sink = &mut pair.ends[1].connection;
    assert!(sink.take_urgent_notice() && sink.is_urgent_due());
    assert_eq!(sink.urgent(true), None);
    pair.send_data(0, 5, true);
    pair.settle();
    let sink = &mut pair.ends[1].connection;
    assert!(!sink.take_urgent_notice() && !sink.is_urgent_due());
    assert_eq!(sink.urgent(false), Some(crate::bench::byte_at(0, 14)));
}

#[test]
fn both_halves_end_after_all_data() {
    let mut pair = pair();
    pair.send_data(0, 10, false);
    pair.ends[0].connection.shut_write();
    assert_eq!(pair.send_data(0, 10, false), 0);
    pair.pump(0);
    pair.settle();
    assert!(pair.ends[1].connection.peer_has_ended());
    assert_eq!(pair.receive(1, 100), 10);
    assert_eq!(pair.ends[1].connection.readable(), Readable::End);
    // The other half goes on.
    pair.send_data(1, 7, false);
    pair.ends[1].connection.close(pair.now);
    pair.pump(1);
    pair.settle();
    assert_eq!(pair.receive(0, 100), 7);
    assert!(pair.ends.iter().all(|end| end.connection.is_finished()));
    assert!(pair.ends.iter().all(|end| end.connection.poll_timeout().is_none()));
}

#[test]
fn a_close_with_unread_data_and_data_for_a_closed_end_reset() {
    let mut pair = pair();
    pair.send_data(0, 10, false);
    pair.settle();
    pair.ends[1].connection.close(pair.now);
    pair.pump(1);
    pair.settle();
    assert_eq!(pair.ends[0].connection.reset(), Some(Reset::ByPeer));

    let mut pair = self::pair();
    pair.ends[1].connection.close(pair.now);
    pair.pump(1);
    pair.send_data(0, 10, false);
    pair.settle();
    assert_eq!(pair.ends[1].connection.reset(), Some(Reset::Own));
    assert_eq!(pair.ends[0].connection.reset(), Some(Reset::ByPeer));
}

#[test]
fn a_closed_end_gives_up_a_peer_that_never_ends() {
    let mut pair = pair();
    pair.ends[0].connection.close(5);
    pair.pump(0);
    assert_eq!(pair.ends[0].connection.poll_timeout(), Some(5 + FIN_WAIT_NS));
    pair.ends[0].connection.handle_timeout(5 + FIN_WAIT_NS);
    assert_eq!(pair.ends[0].connection.reset(), Some(Reset::TimedOut));
}

#[test]
fn after_a_fault_nothing_is_taken_and_nothing_sent() {
    let mut pair = pair();
    pair.send(0, vec![0xff; 16]);
    let fault = pair.deliver(1).unwrap_err();
    assert!(matches!(fault, PeerMisbehaved::Malformed(_)) && fault.malformed().is_some());
    assert_eq!(pair.ends[1].connection.reset(), Some(Reset::Misbehaviour(fault)));
    assert!(!pair.pump(1));
    assert_eq!(pair.ends[1].connection.data_room(), 0);
    pair.send_data(0, 5, false);
    assert_eq!(pair.deliver(1), Ok(true));
    assert_eq!(pair.ends[1].connection.unread(), 0);
}
