//! The manual pages in `man/`, made from the command's own description of its arguments.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Writes the pages, or compares them.
pub(crate) fn run(check: bool) -> Result<()> {
    let fresh = crate::target_dir().join("man");
    let _ = fs::remove_dir_all(&fresh);
    let quipu = if check {
        // The gate has built it already.
        crate::stage::run()?.quipu
    } else {
        built()?
    };
    let status = Command::new(quipu).arg("man-pages").arg(&fresh).status().context("quipu")?;
    ensure!(status.success(), "the pages cannot be made");
    let (made, dir) = (pages(&fresh)?, crate::root().join("man"));
    if check {
        let committed = pages(&dir)?;
        ensure!(made == committed, "man/ is out of date: run `cargo xtask man`");
        println!("{} manual pages are up to date", made.len());
        return Ok(());
    }
    fs::create_dir_all(&dir)?;
    for name in pages(&dir)?.keys().filter(|name| !made.contains_key(*name)) {
        fs::remove_file(dir.join(name))?;
    }
    for (name, text) in &made {
        fs::write(dir.join(name), text)?;
    }
    println!("wrote {} manual pages", made.len());
    Ok(())
}

/// The command, built without optimisation: the pages are the same, and the build takes a minute.
fn built() -> Result<PathBuf> {
    let status = crate::cargo()
        .args(["build", "--package", "quipu"])
        .current_dir(crate::root())
        .status()
        .context("cargo")?;
    ensure!(status.success(), "the command cannot be built");
    Ok(crate::target_dir().join("debug/quipu"))
}

fn pages(dir: &Path) -> Result<BTreeMap<String, String>> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(BTreeMap::new()) };
    entries
        .map(|entry| {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            Ok((name, fs::read_to_string(entry.path())?))
        })
        .collect()
}
