//! Mounting: by the system call where that is allowed, otherwise by `fusermount3`.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};

/// A mounted file system, which the kernel asks over `device`.
pub(super) struct Mount {
    pub(super) device: File,
    folder: PathBuf,
    /// `fusermount3` has mounted it.
    helped: bool,
}

impl Mount {
    /// Mounts at a folder.
    pub(super) fn new(folder: &Path, read_only: bool) -> io::Result<Self> {
        let folder = folder.canonicalize()?;
        if !folder.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let direct = direct(&folder, read_only);
        if let Ok(device) = direct {
            return Ok(Self { device, folder, helped: false });
        }
        let denied = direct.expect_err("seen above");
        match helped(&folder, read_only) {
            Ok(device) => Ok(Self { device, folder, helped: true }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(io::Error::new(
                denied.kind(),
                format!(
                    "{denied}, and fusermount3, which may mount without root, is not installed"
                ),
            )),
            Err(error) => Err(error),
        }
    }

    /// What unmounts it from another thread.
    pub(super) fn handle(&self) -> Handle {
        Handle { folder: self.folder.clone(), helped: self.helped }
    }
}

/// Ends a mount.
pub(super) struct Handle {
    folder: PathBuf,
    helped: bool,
}

impl Handle {
    /// Unmounts. With `lazily` also while programs use it: it ends with the last of them.
    pub(super) fn unmount(&self, lazily: bool) -> io::Result<()> {
        if !self.helped {
            let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
            return Ok(rustix::mount::unmount(&self.folder, flags)?);
        }
        let flag = if lazily { "-uz" } else { "-u" };
        let status = Command::new("fusermount3").arg(flag).arg("--").arg(&self.folder).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other("fusermount3 failed")) }
    }
}

fn direct(folder: &Path, read_only: bool) -> io::Result<File> {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let device = device.map_err(|error| {
        io::Error::new(error.kind(), format!("/dev/fuse cannot be opened: {error}"))
    })?;
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let data = format!("fd={},rootmode=40000,user_id={user},group_id={group}", device.as_raw_fd());
    let data = CString::new(data).expect("numbers have no zero bytes");
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, read_only);
    rustix::mount::mount(c"quipu-nbd", folder, c"fuse.quipu-nbd", flags, data.as_c_str())?;
    Ok(device)
}

/// `fusermount3` mounts, and passes the device over a socket that it inherits.
fn helped(folder: &Path, read_only: bool) -> io::Result<File> {
    let socket =
        |flags| rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (ours, theirs) = socket(SocketFlags::empty())?;
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC)?;
    let options = if read_only { "ro,nosuid,nodev" } else { "nosuid,nodev" };
    let options = format!("{options},fsname=quipu-nbd,subtype=quipu-nbd");
    let outcome = Command::new("fusermount3")
        .args(["-o", &options, "--"])
        .arg(folder)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .output()?;
    drop(theirs);
    if !outcome.status.success() {
        let text = String::from_utf8_lossy(&outcome.stderr).trim().to_owned();
        return Err(io::Error::other(text));
    }
    receive(&ours).map(File::from)
}

fn receive(socket: &impl AsFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let found = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    found.ok_or_else(|| io::Error::other("fusermount3 passed no descriptor"))
}
