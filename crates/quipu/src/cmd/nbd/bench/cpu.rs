//! Processor time of a client: of its program, of what the user runs, and of the kernel's threads, which
//! do the work of the file system and the block device.
//!
//! Times come from `/proc/PID/schedstat`, in nanoseconds. So what else runs on the machine does not
//! count, as it would in the counters of a processor.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::process::command;

/// `PF_KTHREAD`: a thread of the kernel.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Nanoseconds on a processor.
fn nanoseconds(task: &Path) -> Option<u64> {
    let text = fs::read_to_string(task.join("schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Of all threads of a process that there are now.
fn process(id: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| nanoseconds(&task.path())).sum()
}

fn is_kernel_thread(task: &Path) -> bool {
    let text = fs::read_to_string(task.join("stat")).unwrap_or_default();
    // The name, which may have spaces, ends with the last parenthesis; flags are the seventh field after it.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let flags = rest.split_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

/// Of each of the kernel's threads.
fn kernel() -> HashMap<u32, u64> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let threads = entries.filter_map(|entry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        let path = entry.path();
        is_kernel_thread(&path).then(|| Some((id, nanoseconds(&path)?)))?
    });
    threads.collect()
}

/// How much the kernel's threads have used since then.
fn kernel_since(before: &HashMap<u32, u64>) -> u64 {
    let used = |(id, now): (&u32, &u64)| now.saturating_sub(before.get(id).copied().unwrap_or(0));
    kernel().iter().map(used).sum()
}

/// Runs a program to its end: the nanoseconds that it took of a processor.
fn work(line: &[&str]) -> io::Result<u64> {
    let mut child = command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut text = String::new();
    if let Some(errors) = &mut child.stderr {
        let _ = errors.read_to_string(&mut text);
    }
    let id = Pid::from_child(&child);
    // It stays for its counters to be read.
    waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    let used = process(child.id());
    if !child.wait()?.success() {
        return Err(io::Error::other(format!("{}: {}", line.join(" "), text.trim())));
    }
    Ok(used)
}

/// What the kernel's threads use while nothing is measured, as a share of one processor.
pub(super) fn idle_share() -> f64 {
    let (begun, before) = (Instant::now(), kernel());
    std::thread::sleep(Duration::from_secs(1));
    kernel_since(&before) as f64 / begun.elapsed().as_nanos() as f64
}

/// Runs programs one after the other: how long they took, and the processor time of the client, in seconds.
/// `client` is its process, if it has one; `idle` the share that kernel threads use anyway.
pub(super) fn timed(lines: &[&[&str]], client: Option<u32>, idle: f64) -> io::Result<(f64, f64)> {
    let of_client = || client.map_or(0, process);
    let (begun, threads, before) = (Instant::now(), kernel(), of_client());
    let mut used = 0;
    for line in lines {
        used += work(line)?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    used += of_client().saturating_sub(before);
    let threads = (kernel_since(&threads) as f64 / 1e9 - idle * seconds).max(0.0);
    Ok((seconds, (used as f64 / 1e9 + threads).max(1e-6)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_uses_is_counted() {
        let spin = ["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"];
        let (seconds, used) = timed(&[&spin], Some(std::process::id()), 0.0).unwrap();
        assert!(seconds > 0.0 && used > 0.001 && used < 60.0, "{used} of {seconds}");
        let error = timed(&[&["sh", "-c", "echo why >&2; exit 1"]], None, 0.0).unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
        assert!(!kernel().contains_key(&std::process::id()));
    }
}
