//! Two engines whose queue pairs are memory: to measure what the engine costs, and nothing else.

use std::net::SocketAddr;

use crate::conn::ConnId;
pub use crate::core::code_short;
use crate::core::{Body, Core, Delivery, Outgoing};
use crate::endpoint::{BundleId, EndpointId};
use crate::fabric::{Event, Fabric, Hello, Local, Remote, Welcome};
use crate::name::Name;
use crate::types::{CallError, Config, Mode, Status, Tag};

const TAG: Tag = Tag(7);
const SLOT: usize = 256;
/// The handler of both ends.
const HANDLER: u16 = 1;

/// Queue pairs that are memory: one message is under way at a time.
#[derive(Debug)]
pub struct Wire {
    conn: Option<ConnId>,
    hello: Option<Hello>,
    welcome: Option<Welcome>,
    sent: Vec<u8>,
    slots: Vec<[u8; SLOT]>,
    free: Vec<u32>,
}

impl Fabric for Wire {
    fn connect(&mut self, conn: ConnId, _: &Name, hello: &Hello) {
        (self.conn, self.hello) = (Some(conn), Some(*hello));
    }

    fn accept(&mut self, _: u64, conn: ConnId, welcome: &Welcome) -> bool {
        (self.conn, self.welcome) = (Some(conn), Some(*welcome));
        true
    }

    fn reject(&mut self, _: u64, _: Status) {}

    fn close(&mut self, _: ConnId) {}

    #[inline]
    fn send(&mut self, _: ConnId, bytes: &[u8], _: Option<u64>) -> bool {
        self.sent.clear();
        self.sent.extend_from_slice(bytes);
        true
    }

    fn send_buffer(&mut self, _: ConnId, _: u32, _: usize, _: u64) -> bool {
        false
    }

    fn write(&mut self, _: ConnId, _: Local, _: Remote, _: Option<u64>) -> bool {
        false
    }

    fn read(&mut self, _: ConnId, _: Local, _: Remote, _: u64) -> bool {
        false
    }

    fn inline_limit(&self) -> usize {
        SLOT
    }

    fn store(&mut self, _: u32, _: usize, _: &[u8]) {}

    #[inline]
    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.slots[slot as usize][at..at + out.len()]);
    }

    fn repost(&mut self, slots: &[u32]) {
        self.free.extend_from_slice(slots);
    }

    fn provide(&mut self, slots: u32) -> bool {
        while (self.slots.len() as u32) < slots {
            self.free.push(self.slots.len() as u32);
            self.slots.push([0; SLOT]);
        }
        true
    }
}

/// An engine with one endpoint.
#[derive(Debug)]
struct End {
    core: Core<Wire, ()>,
    bundle: BundleId,
    endpoint: EndpointId,
}

impl End {
    fn new(port: u16) -> Result<Self, CallError> {
        let config = Config { shared_credits: 64, max_outstanding: 64, ..Config::default() };
        let (slots, free, sent) = (Vec::new(), Vec::new(), Vec::new());
        let wire = Wire { conn: None, hello: None, welcome: None, sent, slots, free };
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut core = Core::new(wire, config, address, 1)?;
        let bundle = core.create_bundle(Mode::Sequential);
        let endpoint = core.create_endpoint(bundle)?;
        core.set_tag(endpoint, TAG)?;
        core.set_handler(endpoint, HANDLER.into(), Some(()))?;
        Ok(Self { core, bundle, endpoint })
    }

    /// Takes in the message that another end has sent, and gives out the handler that it runs.
    #[inline]
    fn take(&mut self, from: &mut Self) -> Option<Box<Delivery<()>>> {
        let wire = self.core.fabric_mut();
        let (conn, slot) = (wire.conn?, wire.free.pop()?);
        let bytes = &from.core.fabric().sent;
        wire.slots[slot as usize][..bytes.len()].copy_from_slice(bytes);
        let event = Event::Received { conn: Some(conn), slot, len: bytes.len() };
        self.core.deliver_event(self.bundle, event)
    }
}

#[inline]
fn request() -> Outgoing<'static> {
    Outgoing { handler: HANDLER, args: &[1, 2], body: Body::Short }
}

/// Two engines that are connected.
///
/// ```
/// let mut pair = quipu_am::pair::Pair::new()?;
/// pair.round(&[])?;
/// pair.round(b"a medium reply")?;
/// assert_eq!(pair.rounds(), 3);
/// # Ok::<(), quipu_am::CallError>(())
/// ```
#[derive(Debug)]
pub struct Pair([End; 2]);

impl Pair {
    /// Connects two engines, and sends one request.
    ///
    /// # Errors
    ///
    /// There are none.
    pub fn new() -> Result<Self, CallError> {
        let mut ends = [End::new(1)?, End::new(2)?];
        let [here, there] = &mut ends;
        here.core.map(here.endpoint, 0, there.core.name(there.endpoint)?, TAG)?;
        // This one only connects.
        let _ = here.core.request(here.endpoint, 0, &request());
        let hello = here.core.fabric().hello.ok_or(CallError::NoSuchObject)?;
        there.core.handle_event(Event::Incoming { incoming: 0, hello });
        let welcome = there.core.fabric().welcome.ok_or(CallError::NoSuchObject)?;
        let conn = here.core.fabric().conn.ok_or(CallError::NoSuchObject)?;
        here.core.handle_event(Event::Connected { conn, welcome });
        let mut pair = Self(ends);
        pair.round(&[])?;
        Ok(pair)
    }

    /// A request with two arguments and its reply, which has a payload if `payload` is not empty,
    /// through both engines.
    ///
    /// # Errors
    ///
    /// An engine refuses its part.
    #[inline]
    pub fn round(&mut self, payload: &[u8]) -> Result<(), CallError> {
        let [here, there] = &mut self.0;
        here.core.request(here.endpoint, 0, &request())?;
        let gone = CallError::NoSuchObject;
        let mut delivery = there.take(here).ok_or(gone)?;
        let body = if payload.is_empty() { Body::Short } else { Body::Medium(payload) };
        let reply = Outgoing { handler: HANDLER, args: &[1, 2], body };
        there.core.reply(&mut delivery, &reply)?;
        there.core.finish(&mut delivery);
        there.core.recycle(delivery);
        let mut delivery = here.take(there).ok_or(gone)?;
        here.core.finish(&mut delivery);
        here.core.recycle(delivery);
        Ok(())
    }

    /// How many requests have been answered.
    #[must_use]
    pub fn rounds(&self) -> u64 {
        let [here, _] = &self.0;
        here.core.counters(here.endpoint).map_or(0, |counters| counters.replies_received)
    }
}
