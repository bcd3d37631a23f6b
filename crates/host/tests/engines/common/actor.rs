//! A test that starts the test program again as a child process, with `HOST_TEST_PART` naming its part. The
//! part is played by the test `child` of the same module.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

/// The variable that names a child's part.
pub const PART: &str = "HOST_TEST_PART";

/// A child that plays a part.
pub struct Actor {
    pub child: Child,
    stdin: ChildStdin,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Actor {
    /// Starts a child that plays a part in `module` (`module_path!()`), once `prepare` has had its way.
    pub fn start(module: &str, part: &str, prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let (_, module) = module.split_once("::").unwrap();
        command
            .args(["--exact", &format!("{module}::child"), "--nocapture", "--test-threads=1"])
            .env(PART, part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: alarm is async-signal-safe. Its signal ends the child, after exec too (alarm(2)), so
        // that a child that hangs does not make its parent hang.
        unsafe {
            command.pre_exec(|| {
                libc::alarm(60);
                Ok(())
            })
        };
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, stdin, lines }
    }

    /// The numbers that the child says after `word`.
    pub fn hear(&mut self, word: &str) -> Vec<u64> {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if let Some(at) = line.find(word) {
                let rest = &line[at + word.len()..];
                return rest.split_whitespace().map(|n| n.parse().unwrap()).collect();
            }
        }
        panic!("the child ended without saying {word}");
    }

    /// Says numbers to the child.
    pub fn tell(&mut self, numbers: &[u64]) {
        let text: Vec<_> = numbers.iter().map(u64::to_string).collect();
        writeln!(self.stdin, "{}", text.join(" ")).unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
