//! Builds the command and the libraries in release mode and puts them where the command finds them:
//! `target/quipu/bin/quipu` and `target/quipu/lib/*.so*`; those for another machine into
//! `target/TRIPLE/quipu`.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::profile;

/// What cargo builds, and its name in the staged folder.
const LIBRARIES: [(&str, &str); 11] = [
    ("libibverbs.so", "libibverbs.so.1"),
    ("librdmacm.so", "librdmacm.so.1"),
    ("libquipu_engine.so", "libquipu_engine.so"),
    ("libquipu_shim.so", "libquipu_shim.so"),
    ("libqpip.so", "libqpip.so.1"),
    ("libam.so", "libam.so.1"),
    ("libvipl.so", "libvipl.so.1"),
    ("libsplitc.so", "libsplitc.so"),
    ("libquipu_sockets_preload.so", "libquipu_sockets_preload.so"),
    ("libiwsock.so", "libiwsock.so.1"),
    ("libquipu_sdp_preload.so", "libquipu_sdp_preload.so"),
];
/// What says to tools for finding errors what they cannot know of the libraries.
const SUPPRESSIONS: [&str; 2] = ["quipu-tsan.supp", "quipu-valgrind.supp"];
/// Names under which programs open a library beside its own, or are linked with it.
const LINKS: [(&str, &str); 6] = [
    ("libibverbs.so.1", "libibverbs.so"),
    ("librdmacm.so.1", "librdmacm.so"),
    ("libqpip.so.1", "libqpip.so"),
    ("libam.so.1", "libam.so"),
    ("libiwsock.so.1", "libiwsock.so"),
    ("libvipl.so.1", "libvipl.so"),
];
const PACKAGES: [&str; 12] = [
    "quipu",
    "quipu-ibverbs",
    "quipu-rdmacm",
    "quipu-engine",
    "quipu-shim",
    "quipu-qpip",
    "quipu-libam",
    "quipu-vipl",
    "quipu-splitc-runtime",
    "quipu-sockets-preload",
    "quipu-libiwsock",
    "quipu-sdp-preload",
];

/// What to build, and for which machine.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Build for another machine, which rustc knows by this name, and put it into target/TRIPLE/quipu. The
    /// linker for it is to be set as cargo documents it (`CARGO_TARGET_<TRIPLE>_LINKER`).
    #[arg(long, value_name = "TRIPLE")]
    target: Option<String>,
    /// Build twice: to count in a minute of the benchmark what runs how often, and then for that. It is some
    /// tenth faster in small messages.
    #[arg(long, conflicts_with = "target")]
    profiled: bool,
    /// A feature of the command, such as smoltcp, with which the benchmark measures one contender more.
    #[arg(long, value_name = "NAME")]
    features: Vec<String>,
}

/// Where things were put.
#[derive(Clone, Debug)]
pub(crate) struct Staged {
    /// The command.
    pub(crate) quipu: PathBuf,
    /// The folder of the libraries.
    pub(crate) lib: PathBuf,
}

impl Staged {
    /// The places, whether or not anything is there.
    pub(crate) fn places() -> Self {
        Self::below(&crate::target_dir())
    }

    fn below(target_dir: &Path) -> Self {
        let dir = target_dir.join("quipu");
        Self { quipu: dir.join("bin/quipu"), lib: dir.join("lib") }
    }

    /// `quipu run` with an address; the program and its arguments are to follow.
    pub(crate) fn run(&self, address: &str) -> Vec<String> {
        [&self.quipu.display().to_string(), "run", "--address", address, "--"]
            .map(str::to_owned)
            .into()
    }
}

/// Builds and stages, for this machine.
pub(crate) fn run() -> Result<Staged> {
    run_for(&Options { target: None, profiled: false, features: Vec::new() })
}

/// Builds and stages.
pub(crate) fn run_for(options: &Options) -> Result<Staged> {
    let (target_dir, target) = (crate::target_dir(), options.target.as_deref());
    let built = if options.profiled {
        profile::build(&options.features)?
    } else {
        build(&Build { target_dir: &target_dir, target, features: &options.features, flag: None })?
    };
    place(&built, &target.map_or(target_dir.clone(), |triple| target_dir.join(triple)))
}

/// One run of cargo.
pub(crate) struct Build<'a> {
    /// Where it puts what it builds.
    pub(crate) target_dir: &'a Path,
    /// For which machine, if that is not taken for granted.
    pub(crate) target: Option<&'a str>,
    pub(crate) features: &'a [String],
    /// One more flag for rustc.
    pub(crate) flag: Option<String>,
}

/// Builds everything in release mode; the folder where it is then.
pub(crate) fn build(what: &Build<'_>) -> Result<PathBuf> {
    let mut build = crate::cargo();
    build.args(["build", "--release"]).current_dir(crate::root());
    build.arg("--target-dir").arg(what.target_dir);
    let mut built = what.target_dir.to_path_buf();
    if let Some(triple) = what.target {
        build.args(["--target", triple]);
        built.push(triple);
    }
    if let Some(flag) = &what.flag {
        let before = env::var("RUSTFLAGS").unwrap_or_default();
        let flags: Vec<&str> = before.split_whitespace().chain([flag.as_str()]).collect();
        build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    }
    for package in PACKAGES {
        build.args(["--package", package]);
    }
    for feature in what.features {
        build.arg("--features").arg(format!("quipu/{feature}"));
    }
    ensure!(build.status().context("cargo")?.success(), "the release build failed");
    built.push("release");
    Ok(built)
}

/// Puts what was built where the command finds it, below `dir`.
pub(crate) fn place(built: &Path, dir: &Path) -> Result<Staged> {
    let staged = Staged::below(dir);
    let bin = staged.quipu.parent().context("no folder")?;
    for dir in [bin, &staged.lib] {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    replace(&built.join("quipu"), &staged.quipu)?;
    for (library, name) in LIBRARIES {
        replace(&built.join(library), &staged.lib.join(name))?;
    }
    for (to, name) in LINKS {
        link(to, &staged.lib.join(name))?;
    }
    for name in SUPPRESSIONS {
        let from = crate::root().join("abi/engine/suppressions").join(name);
        replace(&from, &staged.lib.join(name))?;
    }
    println!("staged {} and {}", staged.quipu.display(), staged.lib.display());
    Ok(staged)
}

/// Copies a file to a new one beside `to` and renames it: a program that runs from the old one
/// goes on with the old one.
pub(crate) fn replace(from: &Path, to: &Path) -> Result<()> {
    let fresh = to.with_extension("new");
    let copied = fs::copy(from, &fresh).and_then(|_| fs::rename(&fresh, to));
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Makes `at` a symbolic link to `to`.
pub(crate) fn link(to: &str, at: &Path) -> Result<()> {
    let fresh = at.with_extension("new");
    let _ = fs::remove_file(&fresh);
    let linked = symlink(to, &fresh).and_then(|()| fs::rename(&fresh, at));
    linked.with_context(|| format!("cannot link {}", at.display()))
}
