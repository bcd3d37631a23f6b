//! Descriptors and the events that they tell of.

use super::*;
use crate::sys::is_readable;

#[test]
fn descriptors_are_readable_exactly_while_events_are_queued() {
    let mut events = Events::new();
    let (context, async_fd) = events.open_context(Device::Quipu0).unwrap();
    let (channel, fd) = events.create_channel().unwrap();
    let (cq, other) = (CqId(5), CqId(6));
    events.add_object(Object::Cq(cq), context, Some(channel));
    events.add_object(Object::Cq(other), context, Some(channel));
    let event = CompletionEvent { cq, context: 77 };
    assert!(!is_readable(fd));
    events.completion(channel, event);
    events.completion(channel, CompletionEvent { cq: other, context: 78 });
    assert!(is_readable(fd));
    assert_eq!(events.take_completion(channel).unwrap(), Some(event));
    assert!(is_readable(fd));
    // The other queue's event vanishes with it.
    assert_eq!(events.remove_object(Object::Cq(other)), EventsReported::default());
    assert!(!is_readable(fd));
    assert_eq!(events.take_completion(channel).unwrap(), None);

    events.asynchronous(AsyncEvent::CqErr(cq));
    events.asynchronous(AsyncEvent::PortErr);
    events.asynchronous(AsyncEvent::CqErr(other));
    assert!(is_readable(async_fd));
    assert_eq!(events.take_asynchronous(context).unwrap(), Some(AsyncEvent::CqErr(cq)));
    assert_eq!(events.take_asynchronous(context).unwrap(), Some(AsyncEvent::PortErr));
    assert!(!is_readable(async_fd));
    assert!(matches!(
        events.destroy_channel(channel),
        Err(EngineError::Fault(quipu_nic::Fault::Busy))
    ));
    let reported = events.remove_object(Object::Cq(cq));
    assert_eq!(reported, EventsReported { completion: 1, asynchronous: 1 });
    events.destroy_channel(channel).unwrap();
    assert!(events.take_completion(channel).is_err());
}

#[test]
fn an_attended_channel_needs_no_descriptor_until_the_thread_leaves() {
    let mut events = Events::new();
    let (context, _) = events.open_context(Device::Quipu0).unwrap();
    let (channel, fd) = events.create_channel().unwrap();
    events.add_object(Object::Cq(CqId(1)), context, Some(channel));
    assert!(events.waits_outside(CqId(1)));
    events.attend(channel);
    assert!(!events.waits_outside(CqId(1)));
    events.completion(channel, CompletionEvent { cq: CqId(1), context: 0 });
    assert!(!is_readable(fd));
    events.leave();
    assert!(is_readable(fd));
}

#[test]
fn an_event_that_is_taken_at_once_leaves_the_descriptor_alone() {
    let mut events = Events::new();
    let (context, _) = events.open_context(Device::Quipu0).unwrap();
    let (channel, fd) = events.create_channel().unwrap();
    events.add_object(Object::Cq(CqId(1)), context, Some(channel));
    let event = |context| CompletionEvent { cq: CqId(1), context };
    events.hold(channel);
    events.completion(channel, event(1));
    assert!(!is_readable(fd));
    assert_eq!(events.take_completion(channel).unwrap(), Some(event(1)));
    assert!(!is_readable(fd));
    // What is left is said, also to those who wait for the descriptor.
    events.completion(channel, event(2));
    events.leave();
    assert!(is_readable(fd));
    assert!(events.waits_outside(CqId(1)));
}
