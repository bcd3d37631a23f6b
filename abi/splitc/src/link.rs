//! Messages to other processes: accesses to memory that is not mapped, calls at the owner, and what barriers
//! and reductions send to other hosts. All are requests of Active Messages with one reply each.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quipu::am::{self, Arg, Bundle, CallError, Endpoint, Kind, Message, Mode, Name, Port, Tag};
use quipu::{Device, Error};
use quipu_launch::Job;

use crate::registered::Registered;
use crate::runtime::IN_HANDLER;
use crate::segment::{BASE, Control, SLOT};

/// Bytes of one message.
const PIECE: usize = 32 * 1024;
/// Bytes of one write into the peer's memory.
const LONG_PIECE: usize = 1 << 20;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum What {
    Read = 1,
    Write = 2,
    Store = 3,
    Call = 4,
    CallDouble = 5,
    Flag = 6,
    Show = 7,
    /// A write whose bytes are in their place already.
    Written = 8,
}

/// In place of a function: allocate memory. The library lies elsewhere in each process, so its functions
/// cannot be named.
pub(crate) const ALLOCATE: u64 = 0;

/// A function that `atomic` names.
type Function = unsafe extern "C" fn(*mut u8, i64, i64, i64, i64) -> i64;
type DoubleFunction = unsafe extern "C" fn(*mut u8, i64, i64, i64, i64) -> f64;

/// What a process has shown, for two collective calls in turn: the number of the call, and the bytes.
type Shown = [(u64, Vec<u8>); 2];

/// What is under way, and what has come.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// Reads and writes without a reply, and stores.
    pub(crate) accesses: AtomicU64,
    pub(crate) stores: AtomicU64,
    /// The last call's result, and how many have come.
    result: AtomicU64,
    results: AtomicU64,
    /// A message came back: the reason.
    failure: Mutex<Option<String>>,
    /// What each process has shown, for two collective calls in turn, and for which call.
    shown: Mutex<Vec<Shown>>,
}

/// The endpoint of this process, whose translations are the ranks.
pub(crate) struct Link {
    bundle: Bundle,
    endpoint: Endpoint,
    registered: Registered,
    pub(crate) books: Arc<Books>,
}

/// Why a message was not sent. Handlers also run while a message waits until it can be sent.
fn not_sent(to: u32, error: &am::Error) -> String {
    match error {
        am::Error::Call(CallError::InHandler) => IN_HANDLER.into(),
        error => format!("a message to rank {to} cannot be sent: {error}"),
    }
}

/// A 64-bit number in two arguments.
fn halves(value: u64) -> [Arg; 2] {
    [value as u32 as Arg, (value >> 32) as u32 as Arg]
}

fn joined(args: &[Arg], at: usize) -> u64 {
    let half = |at: usize| u64::from(args.get(at).copied().unwrap_or(0) as u32);
    half(at) | half(at + 1) << 32
}

impl Link {
    /// Opens an adapter, and maps all ranks. The symmetric memory has `len` bytes.
    pub(crate) fn open(job: &Job, len: usize) -> Result<Self, String> {
        let text = |error: am::Error| error.to_string();
        let device = Device::from_env().map_err(|error: Error| error.to_string())?;
        let transport = am::Transport::from_env().map_err(|error: Error| error.to_string())?;
        let port = Port::open_over(&device, am::Config::default(), transport).map_err(text)?;
        let bundle = port.bundle(Mode::Sequential);
        let endpoint = bundle.endpoint().map_err(text)?;
        let own = endpoint.name().map_err(text)?;
        // Only processes of this job know the tag. 0 and 1 have meanings of their own.
        let secret = own.incarnation.rotate_left(17) ^ u64::from(std::process::id()) << 32 | 2;
        let mut hello = own.to_bytes().to_vec();
        hello.extend_from_slice(&secret.to_le_bytes());
        let all = job.all_gather("splitc.am", &hello).map_err(|error| error.to_string())?;
        let tag =
            |bytes: &[u8]| bytes.get(Name::WIRE_LEN..).and_then(|rest| rest.first_chunk().copied());
        let job_tag = all.first().and_then(|bytes| tag(bytes)).map(u64::from_le_bytes);
        let job_tag = Tag(job_tag.ok_or("rank 0 has sent no tag")?);
        endpoint.set_tag(job_tag).map_err(text)?;
        let registered = Registered::new(&port, &endpoint, len).map_err(text)?;
        let books = Arc::new(Books::default());
        let empty = || [(0, Vec::new()), (0, Vec::new())];
        books.lock_shown().resize_with(all.len(), empty);
        endpoint.set_translation_count(all.len().max(256) as u32).map_err(text)?;
        for (rank, bytes) in (0..).zip(&all) {
            let name = bytes.first_chunk().and_then(Name::from_bytes);
            let name = name.ok_or_else(|| format!("rank {rank} has sent no name"))?;
            endpoint.map(rank, name, job_tag).map_err(text)?;
        }
        let link = Self { bundle, endpoint, registered, books };
        link.set_handlers().map_err(text)?;
        Ok(link)
    }

    fn set_handlers(&self) -> Result<(), am::Error> {
        let books = Arc::clone(&self.books);
        self.endpoint.set_handler(0, move |message| books.handle_returned(message))?;
        let books = Arc::clone(&self.books);
        self.endpoint.set_handler(REQUEST.into(), move |message| {
            if let Err(error) = books.handle_request(message) {
                books.fail(&format!("a request of another process cannot be answered: {error}"));
            }
        })?;
        let books = Arc::clone(&self.books);
        self.endpoint.set_handler(REPLY.into(), move |message| books.handle_reply(message))
    }

    /// Makes progress: runs what other processes have sent. How many handlers have run.
    pub(crate) fn poll(&self) -> Result<usize, String> {
        let ran = self.bundle.poll().map_err(|error| error.to_string())?;
        match self.books.failure.lock().map(|mut failure| failure.take()) {
            Ok(Some(why)) => Err(why),
            _ => Ok(ran),
        }
    }

    /// Sleeps until a message may have come, or `most` is over.
    pub(crate) fn sleep(&self, most: Duration) -> Result<(), String> {
        self.bundle.sleep(most).map_err(|error| error.to_string())
    }

    fn send(&self, to: u32, args: &[Arg], payload: &[u8]) -> Result<(), String> {
        if let Some(counter) = self.books.counter(args) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        let sent = match payload {
            [] => self.endpoint.request(to, REQUEST, args),
            _ => self.endpoint.request_medium(to, REQUEST, args, payload),
        };
        sent.map_err(|error| not_sent(to, &error))
    }

    /// Reads memory of another process into memory of this one. It is there when nothing is under way.
    pub(crate) fn read(
        &self,
        to: *mut u8,
        (proc, from): (u32, u64),
        len: usize,
    ) -> Result<(), String> {
        for at in (0..len).step_by(PIECE) {
            let [a, b] = halves(from + at as u64);
            let [c, d] = halves(to as u64 + at as u64);
            let piece = PIECE.min(len - at) as Arg;
            self.send(proc, &[What::Read as Arg, a, b, c, d, piece], &[])?;
        }
        Ok(())
    }

    /// Writes to memory of another process, or stores. The bytes are copied before it returns.
    pub(crate) fn write(
        &self,
        what: What,
        (proc, to): (u32, u64),
        bytes: &[u8],
    ) -> Result<(), String> {
        for (number, piece) in bytes.chunks(PIECE).enumerate() {
            let [a, b] = halves(to + (number * PIECE) as u64);
            self.send(proc, &[what as Arg, a, b], piece)?;
        }
        Ok(())
    }

    /// Writes to memory of another process from memory that stays as it is until nothing is under way:
    /// without a copy where that pays.
    ///
    /// # Safety
    ///
    /// There are `len` bytes at `from`.
    pub(crate) unsafe fn write_from(
        &self,
        (proc, to): (u32, u64),
        from: *const u8,
        len: usize,
    ) -> Result<(), String> {
        let Some(offset) = self.registered.offset(to, from, len) else {
            // SAFETY: passed on from the caller.
            return self
                .write(What::Write, (proc, to), unsafe { std::slice::from_raw_parts(from, len) });
        };
        for at in (0..len).step_by(LONG_PIECE) {
            let source = self.registered.source(from.wrapping_add(at), LONG_PIECE.min(len - at));
            let args = [What::Written as Arg];
            self.books.accesses.fetch_add(1, Ordering::Relaxed);
            let send =
                || self.endpoint.try_request_bulk(proc, REQUEST, &args, source, offset + at as u64);
            self.until_sent(proc, send)?;
        }
        Ok(())
    }

    /// Tries to send until there is room, and runs handlers meanwhile.
    fn until_sent(
        &self,
        to: u32,
        mut send: impl FnMut() -> Result<(), am::Error>,
    ) -> Result<(), String> {
        loop {
            match send() {
                Err(am::Error::Call(CallError::WouldBlock)) => {
                    if self.poll()? == 0 {
                        // The peer may need this processor.
                        std::thread::yield_now();
                    }
                }
                sent => return sent.map_err(|error| not_sent(to, &error)),
            }
        }
    }

    /// Asks the owner to call a function. How many results have come before: the next one is this call's.
    pub(crate) fn call(
        &self,
        what: What,
        (proc, at): (u32, u64),
        function: u64,
        numbers: [i64; 4],
    ) -> Result<u64, String> {
        let before = self.books.results.load(Ordering::Relaxed);
        let mut args = vec![what as Arg];
        args.extend([at, function].into_iter().flat_map(halves));
        args.extend(numbers.into_iter().flat_map(|number| halves(number as u64)));
        self.send(proc, &args, &[])?;
        Ok(before)
    }

    /// The result of a call, when it has come.
    pub(crate) fn result(&self, before: u64) -> Option<u64> {
        let has_come = self.books.results.load(Ordering::Relaxed) != before;
        has_come.then(|| self.books.result.load(Ordering::Relaxed))
    }

    /// Tells the partner of a round of a barrier that this process has come.
    pub(crate) fn flag(&self, to: u32, round: usize, epoch: u64) -> Result<(), String> {
        let [a, b] = halves(epoch);
        self.send(to, &[What::Flag as Arg, a, b, round as Arg], &[])
    }

    /// Shows bytes to another process, in a collective call.
    pub(crate) fn show(&self, to: u32, me: u32, call: u64, bytes: &[u8]) -> Result<(), String> {
        let [a, b] = halves(call);
        self.send(to, &[What::Show as Arg, a, b, me as Arg], bytes)
    }

    /// What a process has shown in a collective call, when it has come.
    pub(crate) fn shown(&self, by: u32, call: u64) -> Option<Vec<u8>> {
        let shown = self.books.lock_shown();
        let (of, bytes) = &shown.get(by as usize)?[(call & 1) as usize];
        (*of == call).then(|| bytes.clone())
    }
}

/// The control words of this process.
pub(crate) fn control() -> &'static Control {
    // SAFETY: the segment is mapped there as long as the process lives; all fields are atomic.
    unsafe { &*(BASE as *const Control) }
}

impl Books {
    fn lock_shown(&self) -> std::sync::MutexGuard<'_, Vec<Shown>> {
        self.shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn fail(&self, why: &str) {
        if let Ok(mut failure) = self.failure.lock() {
            failure.get_or_insert_with(|| why.into());
        }
    }

    fn handle_returned(&self, message: &mut Message<'_>) {
        let Kind::Returned { status, to, .. } = message.kind() else { return };
        self.fail(&format!("the process at {to} is lost: {status}"));
    }

    /// Carries out a request. Addresses are those of this program's own memory: the peers are the same
    /// program.
    fn handle_request(&self, message: &mut Message<'_>) -> Result<(), am::Error> {
        let args = message.args().to_vec();
        let at = joined(&args, 1);
        let what = args.first().copied().unwrap_or(0);
        let len = message.payload_len() as usize;
        let is = |known: What| what == known as Arg;
        if is(What::Read) {
            let len = (args.get(5).copied().unwrap_or(0) as usize).min(PIECE);
            // SAFETY: the language lets every process read the memory of all others.
            let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, len) };
            return message.reply_medium(REPLY, &[what, args[3], args[4]], bytes);
        }
        if is(What::Write) || is(What::Store) {
            // SAFETY: the language lets every process write to the memory of all others.
            message.read(0, unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) })?;
            if is(What::Store) {
                control().stored.fetch_add(len as u64, Ordering::Release);
            }
        } else if is(What::Call) || is(What::CallDouble) {
            let number = |index: usize| joined(&args, 5 + 2 * index) as i64;
            let numbers = [number(0), number(1), number(2), number(3)];
            let [a, b] = halves(call_here(is(What::CallDouble), joined(&args, 3), at, numbers));
            return message.reply(REPLY, &[what, a, b]);
        } else if is(What::Flag) {
            let round = args.get(3).copied().unwrap_or(0) as usize;
            if let Some(flag) = control().flags.get(round) {
                flag.0.fetch_max(at, Ordering::Release);
            }
        } else if is(What::Show) {
            let bytes = message.to_vec()?;
            let by = args.get(3).copied().unwrap_or(-1) as usize;
            if let (Some(slots), true) = (self.lock_shown().get_mut(by), bytes.len() <= SLOT) {
                slots[(at & 1) as usize] = (at, bytes);
            }
        }
        // Nobody waits for the replies to the others.
        match self.counter(&args) {
            Some(_) => message.reply(REPLY, &[what]),
            None => Ok(()),
        }
    }

    /// What counts requests of a kind that are under way.
    fn counter(&self, args: &[Arg]) -> Option<&AtomicU64> {
        let is = |known: What| args.first() == Some(&(known as Arg));
        match () {
            () if is(What::Read) || is(What::Write) || is(What::Written) => Some(&self.accesses),
            () if is(What::Store) => Some(&self.stores),
            () => None,
        }
    }

    fn handle_reply(&self, message: &mut Message<'_>) {
        let args = message.args().to_vec();
        let is = |known: What| args.first() == Some(&(known as Arg));
        if is(What::Read) {
            let (to, len) = (joined(&args, 1), message.payload_len() as usize);
            // SAFETY: this process has asked for the bytes to be put there, and what it asked for was no
            // longer.
            let bytes = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, len) };
            if let Err(error) = message.read(0, bytes) {
                self.fail(&error.to_string());
            }
        } else if is(What::Call) || is(What::CallDouble) {
            self.result.store(joined(&args, 1), Ordering::Relaxed);
            self.results.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(counter) = self.counter(&args) {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Calls a function of the program for `atomic`; the bits of its result.
pub(crate) fn call_here(is_double: bool, function: u64, at: u64, [a, b, c, d]: [i64; 4]) -> u64 {
    if function == ALLOCATE {
        // SAFETY: malloc takes any size.
        return unsafe { libc::malloc(a as usize) } as u64;
    }
    let function = function as *const ();
    // SAFETY: the compiler has checked that the program names a function that takes a pointer and integers,
    // and what it returns. It is at the same address in all processes.
    unsafe {
        if is_double {
            let function = std::mem::transmute::<*const (), DoubleFunction>(function);
            function(at as *mut u8, a, b, c, d).to_bits()
        } else {
            let function = std::mem::transmute::<*const (), Function>(function);
            function(at as *mut u8, a, b, c, d) as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_being_halved() {
        for value in [0, 1, u64::MAX, 0x8000_0000_7fff_ffff] {
            assert_eq!(joined(&halves(value), 0), value);
        }
        assert_eq!(joined(&[], 3), 0);
    }
}
