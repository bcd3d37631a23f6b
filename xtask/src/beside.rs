//! What the gate runs beside its tests. They wait for much of their time; builds, which never wait, fill it
//! at a low priority: not the lowest, at which a fuzz target could be taken for one that hangs.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

/// A task of this program that goes on by itself.
pub(crate) struct Beside {
    child: Child,
    /// What it says, which would otherwise be mixed with what others say.
    log: PathBuf,
}

impl Beside {
    /// Starts `cargo xtask NAME`.
    pub(crate) fn start(name: &str) -> Result<Self> {
        let mut command = Command::new("nice");
        command.args(["-n", "10"]).arg(crate::own_file()?).arg(name);
        Self::start_command(name, command)
    }

    fn start_command(name: &str, mut command: Command) -> Result<Self> {
        let log = crate::target_dir().join(format!("{name}-{}.log", std::process::id()));
        let file =
            File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        command.stdin(Stdio::null()).stderr(file.try_clone()?).stdout(file);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self { child, log })
    }

    /// Waits for its end, and prints what it has said, which it returns too.
    ///
    /// # Errors
    ///
    /// It has failed; with its last complaint.
    pub(crate) fn finish(mut self) -> Result<String> {
        let status = self.child.wait().context("wait")?;
        let said = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
        let _ = fs::remove_file(&self.log);
        print!("{said}");
        if !status.success() {
            let complaint = said.rsplit("error: ").next().unwrap_or_default().trim();
            bail!("{complaint}");
        }
        Ok(said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &str) -> Beside {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Beside::start_command(name, command).unwrap()
    }

    #[test]
    fn what_it_says_is_kept_for_the_end() {
        let (good, bad) = (
            shell("good", "echo one; echo two >&2"),
            shell("bad", "echo error: first; echo 'error: second: why' >&2; exit 1"),
        );
        let logs = [good.log.clone(), bad.log.clone()];
        assert_eq!(good.finish().unwrap(), "one\ntwo\n");
        assert_eq!(bad.finish().unwrap_err().to_string(), "second: why");
        assert!(logs.iter().all(|log| !log.exists()));
    }
}
