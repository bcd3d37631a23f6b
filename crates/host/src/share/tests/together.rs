//! Sends that one slot says are done, as the adapter tells of them and as a program hears of it.

use quipu_mem::ring::{Incoming, SlotHeader};

use super::*;
use crate::share::slots::{MAX_SENT, Teller};

/// Both ends of the rings, the adapter's first.
fn rings() -> [Channel; 2] {
    let memory = Segment::heap(crate::share::rings_len());
    let adapter = Channel::create(&memory, 0, RINGS).unwrap();
    [adapter, Channel::attach(&memory, 0, RINGS).unwrap()]
}

fn send(qp: u32, sequence: u32) -> Tag {
    Tag { qp, receive: false, sequence }
}

fn done(tag: Tag) -> Completion {
    Completion { wr_id: tag.bits(), ..Completion::default() }
}

fn told(adapter: &mut Channel, done: &[Completion]) {
    let mut teller = Teller::new(&mut adapter.outgoing.requests, &adapter.outgoing.control);
    done.iter().for_each(|done| teller.tell(done));
    teller.finish().unwrap();
}

fn heard(incoming: &mut Incoming) -> Vec<News> {
    let news = std::iter::from_fn(|| slots::hear(&mut incoming.requests).unwrap()).collect();
    incoming.publish();
    news
}

#[test]
fn sends_that_follow_each_other_are_told_together() {
    let [mut adapter, mut program] = rings();
    let received = done(Tag { receive: true, ..send(5, 7) });
    let failed = Completion { status: WcStatus::LocProtErr, ..done(send(5, 3)) };
    let last = |qp, sequence, count| News::Sent { last: send(qp, sequence), count };
    // The number wraps; another queue, one that was not asked for between, and a failure are for themselves.
    let sent = |qp: u32, of: [u32; 3]| of.map(|sequence| done(send(qp, sequence)));
    let mut all = sent(5, [u32::MAX, 0, 1]).to_vec();
    all.push(received);
    all.extend(sent(5, [2, 4, 5]));
    all.extend(sent(6, [6, 7, 8]));
    all.push(failed);
    told(&mut adapter, &all);
    let wire = |done: Completion| News::Completion(done);
    let opcode = quipu_nic::WcOpcode::Recv;
    let expected = [
        last(5, 1, 3),
        wire(Completion { opcode, ..received }),
        last(5, 2, 1),
        last(5, 5, 2),
        last(6, 8, 3),
        wire(Completion { opcode: quipu_nic::WcOpcode::Send, ..failed }),
    ];
    assert_eq!(heard(&mut program.incoming), expected);
    let many: Vec<_> = (0..MAX_SENT + 1).map(|sequence| done(send(5, sequence))).collect();
    told(&mut adapter, &many);
    assert_eq!(heard(&mut program.incoming), [last(5, 63, 64), last(5, 64, 1)]);
    // Whoever sleeps until there is enough has each of them counted.
    program.incoming.control.arm_at(100);
    told(&mut adapter, &many[..2]);
    assert_eq!(heard(&mut program.incoming), [last(5, 0, 1), last(5, 1, 1)]);
}

#[test]
fn more_or_other_requests_than_one_slot_tells_of_make_no_sense() {
    let [mut adapter, mut program] = rings();
    let receive = Tag { receive: true, ..send(5, 0) };
    for (tag, count) in [(send(5, 0), 0), (send(5, 0), MAX_SENT + 1), (receive, 1)] {
        let header = SlotHeader { opcode: 3, imm: count, raddr: tag.bits(), ..Default::default() };
        adapter.outgoing.requests.push(&header, &[]).unwrap();
        let heard = slots::hear(&mut program.incoming.requests);
        assert_eq!(heard, Err(RingError::Corrupt), "{count}");
        program.incoming.requests.pop();
    }
}
