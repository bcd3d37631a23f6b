//! What may move to another thread: an engine is driven by whoever polls, and by a helper.

use quipu_mem::ring::{Channel, Incoming, Outgoing};
use quipu_mem::{Arena, Directory, DirectoryReader, Guard, Regions, Segment};

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}

#[test]
fn engines_can_move_between_threads() {
    is_send::<Regions>();
    is_send::<Directory>();
    is_send::<DirectoryReader>();
    is_send::<Channel>();
    is_send::<Outgoing>();
    is_send::<Incoming>();
    is_send::<Arena>();
    is_send::<Guard>();
    is_send::<Segment>();
    is_sync::<Segment>();
    is_sync::<Guard>();
}
