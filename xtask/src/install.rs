//! Copies what was staged, the manual pages and the shell completions to their place in a system.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::stage::{self, Staged};

/// Where to.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The folder that the system is to find it in.
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
    /// A folder to put in front of all paths, for those who make packages.
    #[arg(long)]
    destdir: Option<PathBuf>,
    /// Remove what was installed instead.
    #[arg(long)]
    remove: bool,
}

/// One file to install: from where, to where below the prefix.
type Item = (PathBuf, PathBuf);

/// Installs or removes.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.prefix.is_absolute(), "PREFIX must be an absolute path");
    let staged = Staged::places();
    ensure!(staged.quipu.exists(), "nothing is built: run `make build`");
    let completions = crate::target_dir().join("quipu/completions");
    write_completions(&staged, &completions)?;
    let pkgconfig = crate::target_dir().join("quipu/pkgconfig");
    write_pkgconfig(&options.prefix, &pkgconfig)?;
    let base = under(options.destdir.as_deref(), &options.prefix);
    for (from, to) in items(&staged, &completions, &pkgconfig)? {
        let to = base.join(to);
        if options.remove {
            let _ = fs::remove_file(&to);
            continue;
        }
        let dir = to.parent().context("no folder")?;
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        match fs::read_link(&from) {
            Ok(target) => stage::link(&target.display().to_string(), &to)?,
            Err(_) => stage::replace(&from, &to)?,
        }
    }
    let done = if options.remove { "removed from" } else { "installed in" };
    println!("{done} {}", base.display());
    if options.remove {
        let _ = fs::remove_dir(base.join("lib/quipu"));
    }
    Ok(())
}

/// `destdir` followed by `prefix`.
fn under(destdir: Option<&Path>, prefix: &Path) -> PathBuf {
    let Some(destdir) = destdir else {
        return prefix.to_owned();
    };
    destdir.join(prefix.strip_prefix("/").unwrap_or(prefix))
}

fn items(staged: &Staged, completions: &Path, pkgconfig: &Path) -> Result<Vec<Item>> {
    let mut items: Vec<Item> = vec![(staged.quipu.clone(), "bin/quipu".into())];
    let of = |library: &str| crate::root().join("abi").join(library);
    let (qpip, am, vipl) = (of("qpip"), of("am"), of("vipl"));
    let folders = [
        (qpip.join("include"), "include"),
        (qpip.join("man"), "share/man/man7"),
        (qpip.join("examples"), "share/doc/quipu/qpip"),
        (am.join("include"), "include"),
        (am.join("man"), "share/man/man7"),
        (am.join("examples"), "share/doc/quipu/am"),
        (of("iwsock").join("include/quipu"), "include/quipu"),
        (of("iwsock").join("man"), "share/man/man7"),
        (vipl.join("include"), "include"),
        (vipl.join("man"), "share/man/man7"),
        (vipl.join("examples"), "share/doc/quipu/vipl"),
        (pkgconfig.to_owned(), "lib/pkgconfig"),
        (staged.lib.clone(), "lib/quipu"),
        (crate::root().join("man"), "share/man/man1"),
        (completions.join("bash"), "share/bash-completion/completions"),
        (completions.join("zsh"), "share/zsh/site-functions"),
        (completions.join("fish"), "share/fish/vendor_completions.d"),
    ];
    for (from, to) in folders {
        let entries = fs::read_dir(&from).with_context(|| format!("{}", from.display()))?;
        for entry in entries {
            let entry = entry?;
            items.push((entry.path(), Path::new(to).join(entry.file_name())));
        }
    }
    Ok(items)
}

/// What `pkg-config` says of the libraries that are Quipu's own. They lie next to those that take the
/// place of the system's, so programs are told where they are.
fn write_pkgconfig(prefix: &Path, into: &Path) -> Result<()> {
    fs::create_dir_all(into)?;
    let libraries = [
        ("qpip", "Queue pairs over TCP and UDP"),
        ("am", "Active Messages"),
        ("iwsock", "iWARP on connected sockets"),
        ("vipl", "The Virtual Interface Architecture"),
    ];
    for (name, what) in libraries {
        fs::write(into.join(format!("{name}.pc")), pkgconfig(prefix, name, what))?;
    }
    Ok(())
}

fn pkgconfig(prefix: &Path, name: &str, what: &str) -> String {
    format!(
        "prefix={}\nlibdir=${{prefix}}/lib/quipu\n\nName: {name}\n\
         Description: {what}\nVersion: {}\n\
         Cflags: -I${{prefix}}/include\nLibs: -L${{libdir}} -Wl,-rpath,${{libdir}} -l{name}\n",
        prefix.display(),
        env!("CARGO_PKG_VERSION")
    )
}

fn write_completions(staged: &Staged, into: &Path) -> Result<()> {
    for (shell, name) in [("bash", "quipu"), ("zsh", "_quipu"), ("fish", "quipu.fish")] {
        let output = Command::new(&staged.quipu).args(["completion", shell]).output()?;
        ensure!(output.status.success(), "quipu completion {shell} failed");
        let dir = into.join(shell);
        fs::create_dir_all(&dir)?;
        fs::write(dir.join(name), output.stdout)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_where_the_library_is() {
        let text = pkgconfig(Path::new("/opt/quipu"), "qpip", "Queue pairs");
        assert!(text.starts_with("prefix=/opt/quipu\n"), "{text}");
        assert!(text.ends_with(" -Wl,-rpath,${libdir} -lqpip\n"), "{text}");
    }

    #[test]
    fn destdir_goes_in_front_of_the_prefix() {
        let join = |dest: Option<&str>, prefix| under(dest.map(Path::new), Path::new(prefix));
        assert_eq!(join(None, "/usr"), Path::new("/usr"));
        assert_eq!(join(Some("/pkg"), "/usr"), Path::new("/pkg/usr"));
    }
}
