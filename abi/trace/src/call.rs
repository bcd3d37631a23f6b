//! A call: what is noted before it, what after it.

use std::cell::Cell;
use std::fmt::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use quipu_abi_types::ibv_qp;
use quipu_cabi::{CReturn, Errno};

use crate::show::{Show, peek};
use crate::value::Value;
use crate::{sink, words};

/// An argument.
pub struct Arg<'a> {
    /// Its name in the entry point.
    pub name: &'static str,
    /// Its type, as the entry point has it.
    pub kind: &'static str,
    /// The argument itself.
    pub value: &'a dyn Show,
}

impl Arg<'_> {
    /// The name to show: that of the manual page. Objects that the entry point calls `raw` are named
    /// by their type.
    fn shown_name(&self) -> &'static str {
        match self.name {
            "raw" => {
                let kind = self.kind.trim_start_matches("*mut ").trim_start_matches("*const ");
                kind.trim_start_matches("ibv_").trim_start_matches("rdma_")
            }
            "bad" => "bad_wr",
            "max" => "num_entries",
            "mask" => "attr_mask",
            "init" => "init_attr",
            "number" => "port_num",
            name => name.trim_start_matches('_'),
        }
    }
}

/// A call, as far as it has come.
pub struct Call<'a> {
    function: &'a str,
    args: &'a [Arg<'a>],
    /// What it returned, if it has, and did not fail.
    result: Option<i128>,
    failed: bool,
}

impl<'a> Call<'a> {
    /// A call of `function`, named as in C, that has returned that number, if it is one.
    pub(crate) fn new(
        function: &'a str,
        args: &'a [Arg<'a>],
        result: Option<i128>,
        failed: bool,
    ) -> Self {
        Self { function, args, result, failed }
    }

    /// The name of the function in C.
    pub fn function(&self) -> &str {
        self.function
    }

    /// An argument that is a number, by its name.
    pub fn number(&self, name: &str) -> Option<i128> {
        self.args.iter().find(|arg| arg.name == name)?.value.number()
    }

    /// The type of the queue pair that the function is about, if it can be read.
    pub(crate) fn qp_type(&self) -> Option<u32> {
        let of_type = |arg: &&Arg<'_>| arg.kind == "*mut ibv_qp";
        let qp: *const ibv_qp = self.args.iter().find(of_type)?.value.pointer()?.cast();
        // SAFETY: a number; what is no queue pair may not be readable.
        unsafe { peek(&raw const (*qp).qp_type, 1) }.map(|found| found[0])
    }

    /// What the function returned, if it has and that is a number.
    pub fn result(&self) -> Option<i128> {
        self.result
    }

    /// Whether it has failed.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Whether the function writes to the structures that its pointers name.
    pub(crate) fn asks(&self) -> bool {
        ["query", "get", "poll", "raccept", "recvfrom", "init_ah"]
            .iter()
            .any(|word| self.function.contains(word))
    }

    /// Whether the function takes what its pointers name away from the program: they are not followed.
    pub(crate) fn ends(&self) -> bool {
        let ends = ["destroy", "free", "dealloc", "dereg", "close", "ack_"];
        ends.iter().any(|word| self.function.contains(word))
    }

    /// Shows the arguments that are known at this moment.
    ///
    /// # Safety
    ///
    /// Pointers among the arguments are as the function demands.
    unsafe fn show(&self, after: bool, shown: &mut [Option<Value>]) {
        for (arg, place) in self.args.iter().zip(shown) {
            if arg.value.is_output(self, arg.name) == after {
                // SAFETY: passed on from the caller.
                let value = unsafe { arg.value.show(self, arg.name) };
                *place = Some(words::of(self.function, arg.name, &value).unwrap_or(value));
            }
        }
    }
}

/// A call that has returned, or several without a result.
pub(crate) struct Finished<'a> {
    pub(crate) function: &'a str,
    pub(crate) args: Vec<(&'static str, Value)>,
    pub(crate) result: Option<Value>,
    pub(crate) errno: Option<Errno>,
    /// When it began, since 1970.
    pub(crate) began: Duration,
    pub(crate) lasted: Duration,
    /// How many calls this stands for.
    pub(crate) times: u64,
}

fn thread() -> i64 {
    // SAFETY: it takes no arguments and cannot fail.
    i64::from(unsafe { libc::gettid() })
}

impl Finished<'_> {
    /// As a line of text.
    pub(crate) fn text(&self) -> String {
        let mut line = String::with_capacity(200);
        let (process, thread, began) = (std::process::id(), thread(), self.began);
        let _ = write!(line, "{}.{:06} {process}", began.as_secs(), began.subsec_micros());
        if thread != i64::from(process) {
            let _ = write!(line, "/{thread}");
        }
        let _ = write!(line, " {}(", self.function);
        for (index, (name, value)) in self.args.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let _ = write!(line, "{comma}{name}={value}");
        }
        line.push(')');
        if let Some(result) = &self.result {
            let _ = write!(line, " = {result}");
        }
        if let Some(errno) = self.errno {
            let _ = write!(line, " {}", words::errno(errno));
        }
        let lasted = self.lasted;
        let _ = write!(line, " <{}.{:06}>", lasted.as_secs(), lasted.subsec_micros());
        if self.times > 1 {
            let _ = write!(line, " {} times", self.times);
        }
        line.push('\n');
        line
    }

    /// As a line of JSON.
    pub(crate) fn json(&self) -> String {
        let mut line = String::with_capacity(300);
        let (process, thread, began) = (std::process::id(), thread(), self.began);
        let _ = write!(
            line,
            "{{\"time\":{}.{:06},\"pid\":{process},\"tid\":{thread},\"call\":\"{}\",\"args\":{{",
            began.as_secs(),
            began.subsec_micros(),
            self.function
        );
        for (index, (name, value)) in self.args.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let _ = write!(line, "{comma}\"{name}\":{}", value.json());
        }
        line.push('}');
        if let Some(result) = &self.result {
            let _ = write!(line, ",\"result\":{}", result.json());
        }
        if let Some(errno) = self.errno {
            let _ = write!(line, ",\"errno\":\"{}\"", words::errno(errno));
        }
        let _ = write!(line, ",\"duration_ns\":{}", self.lasted.as_nanos());
        if self.times > 1 {
            let _ = write!(line, ",\"times\":{}", self.times);
        }
        line.push_str("}\n");
        line
    }
}

/// Polls of a thread that found nothing: they are shown as one line.
#[derive(Clone, Copy)]
struct Idle {
    function: &'static str,
    times: u64,
    began: Duration,
    lasted: Duration,
}

/// Polls that find nothing are shown after this time though nothing else happens.
const IDLE_SHOWN: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this thread is in a traced call of this library.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static IDLE: Cell<Option<Idle>> = const { Cell::new(None) };
}

#[cfg(test)]
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// Writes the polls that found nothing, if there were any.
fn flush_idle() {
    let Some(idle) = IDLE.try_with(Cell::take).ok().flatten() else { return };
    sink::write(&Finished {
        function: idle.function,
        args: Vec::new(),
        result: Some(Value::Number(0)),
        errno: None,
        began: idle.began,
        lasted: idle.lasted,
        times: idle.times,
    });
}

/// Counts a poll that found nothing.
fn count_idle(function: &'static str, began: Duration, lasted: Duration) {
    let one = Idle { function, times: 1, began, lasted };
    let same = |idle: &Idle| idle.function == function && began < idle.began + IDLE_SHOWN;
    let counted = IDLE.try_with(Cell::get).ok().flatten();
    let next = match counted.filter(same) {
        Some(idle) => Idle { times: idle.times + 1, lasted: idle.lasted + lasted, ..idle },
        None => {
            flush_idle();
            one
        }
    };
    let _ = IDLE.try_with(|idle| idle.set(Some(next)));
}

/// The name in C of an entry point. Those in the tables of verbs have no prefix here, and some that inline
/// functions of the header call have an underline.
fn c_name(path: &'static str) -> String {
    let name = path.rsplit("::").next().unwrap_or(path).trim_start_matches('_');
    // Two tables have a function of this name.
    if path.contains("::wq::") && name == "post_recv" {
        return "ibv_post_wq_recv".into();
    }
    let prefix =
        if path.starts_with("ibverbs::") && !name.starts_with("ibv_") { "ibv_" } else { "" };
    let middle = if name.starts_with("read_") { "wc_" } else { "" };
    match prefix {
        "" => name.to_owned(),
        _ => format!("{prefix}{middle}{name}"),
    }
}

/// What polls are called that may find nothing, over and over.
fn poll(name: &str) -> Option<&'static str> {
    ["ibv_poll_cq", "ibv_start_poll", "ibv_next_poll"].into_iter().find(|poll| *poll == name)
}

/// Runs `call`, the body of the entry point `path`, and writes a line about it.
///
/// # Safety
///
/// The arguments are as the function demands.
#[cold]
#[inline(never)]
pub unsafe fn traced<R: CReturn<Raw: Show>>(
    path: &'static str,
    args: &[Arg<'_>],
    run: impl FnOnce() -> R::Raw,
) -> R::Raw {
    // Where the thread is ending there is no more place to keep count; a line too many does no harm.
    if INSIDE.try_with(|inside| inside.replace(true)) == Ok(true) {
        return run();
    }
    // SAFETY: passed on from the caller.
    let raw = unsafe { line::<R>(path, args, run) };
    let _ = INSIDE.try_with(|inside| inside.set(false));
    raw
}

/// As [`traced`], for calls that may end without a return, as by a jump out of a signal handler. They make no
/// calls of their own library, so it need not be known that the thread is inside of one.
///
/// # Safety
///
/// As of [`traced`].
#[cold]
#[inline(never)]
pub unsafe fn traced_wait<R: CReturn<Raw: Show>>(
    path: &'static str,
    args: &[Arg<'_>],
    run: impl FnOnce() -> R::Raw,
) -> R::Raw {
    if INSIDE.try_with(Cell::get) == Ok(true) {
        return run();
    }
    // SAFETY: passed on from the caller.
    unsafe { line::<R>(path, args, run) }
}

/// The call and its line.
///
/// # Safety
///
/// As of [`traced`].
unsafe fn line<R: CReturn<Raw: Show>>(
    path: &'static str,
    args: &[Arg<'_>],
    run: impl FnOnce() -> R::Raw,
) -> R::Raw {
    let errno = Errno::last();
    let function = c_name(path);
    let mut call = Call::new(&function, args, None, false);
    let mut shown = vec![None; args.len()];
    // SAFETY: passed on from the caller.
    unsafe { call.show(false, &mut shown) };
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let start = Instant::now();
    errno.set();
    let raw = run();
    let errno = Errno::last();
    let lasted = start.elapsed();
    let error = R::error(&raw);
    call.failed = error.is_some();
    call.result = raw.number();
    let idle = poll(&function).filter(|poll| match *poll {
        "ibv_poll_cq" => call.result == Some(0),
        _ => error == Some(Errno::ENOENT),
    });
    match idle {
        Some(function) => count_idle(function, began, lasted),
        None => {
            flush_idle();
            // SAFETY: passed on from the caller; what the function has written is valid if it did
            // not fail.
            let result = unsafe {
                call.show(true, &mut shown);
                raw.show_result(&call)
            };
            let names = args.iter().map(Arg::shown_name);
            let known = names.zip(shown).filter_map(|(name, value)| Some((name, value?)));
            sink::write(&Finished {
                function: &function,
                args: known.collect(),
                result,
                errno: error,
                began,
                lasted,
                times: 1,
            });
        }
    }
    errno.set();
    raw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_named_as_programs_call_them() {
        assert_eq!(c_name("ibverbs::qp::ibv_create_qp"), "ibv_create_qp");
        assert_eq!(c_name("ibverbs::qp::post_send"), "ibv_post_send");
        assert_eq!(c_name("ibverbs::wq::traced::post_recv"), "ibv_post_wq_recv");
        assert_eq!(c_name("ibverbs::query::_ibv_query_gid_table"), "ibv_query_gid_table");
        assert_eq!(c_name("ibverbs::cq_ex::read_opcode"), "ibv_wc_read_opcode");
        assert_eq!(c_name("rdmacm::connect::rdma_connect"), "rdma_connect");
        assert_eq!(c_name("rdmacm::rsocket::calls::rsocket"), "rsocket");
    }
}
