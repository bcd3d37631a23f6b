//! `quipu top` in a terminal.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::{Command, Stdio};
use std::ptr;

/// A new terminal of 80 columns: the end of who looks at it, and that of programs.
fn terminal() -> (File, File) {
    let (mut ours, mut theirs) = (0, 0);
    let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: two places for descriptors, no place for a name, the settings of the system, and a size.
    let made = unsafe {
        libc::openpty(&mut ours, &mut theirs, ptr::null_mut(), ptr::null(), &raw const size)
    };
    assert_eq!(made, 0);
    // SAFETY: both are new.
    unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) }
}

/// Whether what is typed is shown, and comes line by line.
fn is_cooked(terminal: &File) -> bool {
    // SAFETY: plain data, for which zeros are valid, and which is filled in.
    let settings = unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        assert_eq!(libc::tcgetattr(terminal.as_raw_fd(), &mut settings), 0);
        settings
    };
    let bits = libc::ICANON | libc::ECHO;
    settings.c_lflag & bits == bits
}

fn top() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quipu"));
    command.arg("top");
    command
}

#[test]
fn a_signal_leaves_the_terminal_as_it_was() {
    for (signal, code) in [("TERM", 143), ("INT", 130), ("HUP", 129)] {
        let (ours, theirs) = terminal();
        let mut command = top();
        let end = || Stdio::from(theirs.try_clone().unwrap());
        let mut top = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        // Where nobody has the other end, a read fails.
        drop((theirs, command));
        let mut seen = Vec::new();
        let mut read_until = |text: &[u8]| {
            while !seen.windows(text.len()).any(|part| part == text) {
                let mut piece = [0; 4096];
                let count = (&ours).read(&mut piece).unwrap();
                seen.extend_from_slice(&piece[..count]);
            }
        };
        read_until(b"q quit");
        assert!(!is_cooked(&ours));
        let id = top.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
        // Back from the alternate screen.
        read_until(b"\x1b[?1049l");
        assert_eq!(top.wait().unwrap().code(), Some(code));
        assert!(is_cooked(&ours));
    }
}

#[test]
fn what_is_no_terminal_is_not_drawn_to() {
    let (_ours, theirs) = terminal();
    let mut command = top();
    let output = command.stdin(theirs.try_clone().unwrap()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("--once"), "{said}");
    assert!(output.stdout.is_empty() && is_cooked(&theirs));
}
