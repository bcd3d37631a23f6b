//! The variables that put Quipu in front of the system's libraries.
//!
//! Both LD_LIBRARY_PATH and LD_PRELOAD are needed: the first serves programs that open
//! libibverbs.so at run time, the second those that are linked with it and have a search path of
//! their own.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::ExitCode;

use super::DeviceOptions;
use super::failure::Failure;
use super::libraries::{self, Libraries};

/// What to set in addition to the libraries.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    device: DeviceOptions,
    /// What the adapter logs to standard error, such as `debug` or `quipu_host=trace`.
    #[arg(long, short, env = "QUIPU_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// Print plain `NAME=value` lines, for the file `$GITHUB_ENV` and for `docker --env-file`.
    #[arg(long)]
    plain: bool,
    /// Print the variables of `quipu sockets` instead.
    #[arg(long, conflicts_with_all = ["address", "log"])]
    sockets: bool,
}

const EXAMPLES: &str = "\
Examples:
  eval \"$(quipu env)\"                     for the rest of this shell
  eval \"$(quipu env --address 10.0.0.1)\"  with that address
  env $(quipu env --plain --address ::1) ibv_devices
  eval \"$(quipu env --sockets)\"           sockets through memory, in this shell
  quipu env --plain >> \"$GITHUB_ENV\"      for all later steps of a job

To undo it, leave the shell.
`unset LD_PRELOAD LD_LIBRARY_PATH ASAN_OPTIONS TSAN_OPTIONS VALGRIND_OPTS QUIPU_ADDRESS QUIPU_LOG`
also removes the earlier values of these variables.";

/// Prints the variables as a POSIX shell reads them.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let variables = if options.sockets {
        vec![("LD_PRELOAD", super::sockets::preload()?)]
    } else {
        variables(&Libraries::find()?, &options.device, options.log.as_deref())
    };
    for (name, value) in variables {
        let value = value.to_string_lossy();
        if options.plain {
            println!("{name}={value}");
        } else {
            println!("export {name}={}", quote(&value));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// All variables to set.
pub(crate) fn variables(
    libraries: &Libraries,
    device: &DeviceOptions,
    log: Option<&str>,
) -> Vec<(&'static str, OsString)> {
    let mut set = vec![
        ("LD_LIBRARY_PATH", search_path(libraries, env::var_os("LD_LIBRARY_PATH"))),
        ("LD_PRELOAD", preload(libraries, env::var_os("LD_PRELOAD"))),
        ("ASAN_OPTIONS", in_front(ASAN, b':', env::var_os("ASAN_OPTIONS"))),
    ];
    for (name, option, file, separator) in SUPPRESSIONS {
        let file = libraries.folder().join(file);
        if file.exists() {
            let ours = [option.as_bytes(), file.as_os_str().as_bytes()].concat();
            set.push((name, in_front(&ours, separator, env::var_os(name))));
        }
    }
    if let Some(address) = &device.address {
        set.push(("QUIPU_ADDRESS", address.to_string().into()));
    }
    if let Some(log) = log {
        set.push(("QUIPU_LOG", log.into()));
    }
    set
}

/// The folder in front of what was there, less other folders of Quipu (of a run around this one).
fn search_path(libraries: &Libraries, old: Option<OsString>) -> OsString {
    let old = old.unwrap_or_default();
    let kept = old
        .as_bytes()
        .split(|byte| *byte == b':')
        .filter(|part| !libraries::is_folder_of_ours(&String::from_utf8_lossy(part)));
    join([libraries.folder().as_os_str().as_bytes()].into_iter().chain(kept))
}

/// The files in front of what was there, less other ones of Quipu. The loader takes blanks for
/// separators too.
fn preload(libraries: &Libraries, old: Option<OsString>) -> OsString {
    let old = old.unwrap_or_default();
    let ours = libraries.preloaded();
    let kept = old
        .as_bytes()
        .split(|byte| *byte == b':' || *byte == b' ')
        .filter(|part| !libraries::is_ours(&String::from_utf8_lossy(part)));
    join(ours.iter().map(|file| file.as_os_str().as_bytes()).chain(kept))
}

/// Has GCC's AddressSanitizer start though its library is not the first: none of ours is in front of what it
/// watches but the shim, which calls what comes next.
const ASAN: &[u8] = b"verify_asan_link_order=0";

/// Variables that name files with what such tools cannot know of the libraries; the option, the file, and
/// what is between options. Of several files that are named to ThreadSanitizer, the last one counts.
const SUPPRESSIONS: [(&str, &str, &str, u8); 2] = [
    ("TSAN_OPTIONS", "suppressions=", "quipu-tsan.supp", b':'),
    ("VALGRIND_OPTS", "--suppressions=", "quipu-valgrind.supp", b' '),
];

/// An option of ours in front of those of the user, which have precedence.
fn in_front(ours: &[u8], separator: u8, old: Option<OsString>) -> OsString {
    let old = old.unwrap_or_default();
    match old.as_bytes() {
        [] => OsStr::from_bytes(ours).to_owned(),
        theirs if theirs.starts_with(ours) => old,
        theirs => OsString::from_vec([ours, theirs].join(&separator)),
    }
}

/// Joins what is not empty. (An empty part of a search path would mean the current folder.)
fn join<'a>(parts: impl Iterator<Item = &'a [u8]>) -> OsString {
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty()).collect();
    OsString::from_vec(parts.join(OsStr::new(":").as_bytes()))
}

/// A word that a POSIX shell reads as `text`.
fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=,@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quote("/usr/lib:/a.b"), "/usr/lib:/a.b");
        assert_eq!(quote("a b"), "'a b'");
        assert_eq!(quote("it's"), "'it'\\''s'");
        assert_eq!(quote(""), "''");
    }

    #[test]
    fn the_user_has_the_last_word_about_tools() {
        let of = |old: Option<&str>| in_front(ASAN, b':', old.map(OsString::from));
        assert_eq!(of(None), "verify_asan_link_order=0");
        assert_eq!(of(Some("")), "verify_asan_link_order=0");
        let both = of(Some("detect_leaks=0 verify_asan_link_order=1"));
        assert_eq!(both, "verify_asan_link_order=0:detect_leaks=0 verify_asan_link_order=1");
        assert_eq!(of(both.to_str()), both, "a run in a run");
    }

    #[test]
    fn empty_parts_vanish() {
        let parts: [&[u8]; 4] = [b"/a", b"", b"/b", b""];
        assert_eq!(join(parts.into_iter()), "/a:/b");
    }
}
