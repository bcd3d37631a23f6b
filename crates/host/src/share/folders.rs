//! Where shared adapters are found: in folders into which nobody but the user who shares puts anything.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::file_name;
use crate::accounts::{Account, AccountError, own_user};
use crate::counters::{first_of, own_folder, private_folders};

const ROOT: u32 = 0;

/// A place where a user may share an adapter, and no other can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) path: PathBuf,
    pub(super) owner: u32,
}

/// Where this process may share an adapter of this name: with programs of its own user only, or with others,
/// too.
pub(super) fn own_place(name: &str, with_others: bool) -> io::Result<PathBuf> {
    let folder = match with_others {
        false => own_folder()?,
        true => {
            let own = own_user();
            first_of(&public_folders(own), 0o755, |folder| is_only_of(folder, own))?
        }
    };
    Ok(folder.join(file_name(name)))
}

/// Where this user may share one already.
pub(super) fn own_places(name: &str) -> impl Iterator<Item = PathBuf> {
    places_of(own_user(), name).into_iter().map(|spot| spot.path)
}

/// Where an adapter of this name is looked for: one that a user shares who was named, or one of this user's,
/// or else of root.
pub(super) fn places(name: &str, user: Option<&str>) -> Result<Vec<Spot>, AccountError> {
    let mut owners = match user {
        Some(user) => vec![Account::User.number(user)?],
        None => vec![own_user(), ROOT],
    };
    owners.dedup();
    Ok(owners.into_iter().flat_map(|owner| places_of(owner, name)).collect())
}

fn places_of(owner: u32, name: &str) -> Vec<Spot> {
    let own = if owner == own_user() { private_folders().collect() } else { Vec::new() };
    let public = public_folders(owner).into_iter().filter(|folder| is_only_of(folder, owner));
    let folders = own.into_iter().chain(public);
    folders.map(|folder| Spot { path: folder.join(file_name(name)), owner }).collect()
}

/// Where a user shares with others: the first is root's alone to make, or to give to a user who serves the
/// machine; in the other everybody may make what is not there yet.
fn public_folders(owner: u32) -> [PathBuf; 2] {
    ["/run/quipu".into(), format!("/dev/shm/quipu-public-{owner}").into()]
}

/// Whether nobody but this user can have put anything there.
fn is_only_of(folder: &Path, owner: u32) -> bool {
    // Not what a link leads to: whose that is may change.
    fs::symlink_metadata(folder)
        .is_ok_and(|data| data.is_dir() && data.uid() == owner && data.mode() & 0o022 == 0)
}

#[cfg(test)]
mod tests {
    use std::fs::{DirBuilder, Permissions};
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn what_others_can_have_put_there_is_not_looked_at() {
        let folder = std::env::temp_dir().join(format!("quipu-public-{}", std::process::id()));
        DirBuilder::new().mode(0o755).create(&folder).unwrap();
        let own = own_user();
        assert!(is_only_of(&folder, own) && !is_only_of(&folder, own + 1));
        let link = folder.join("link");
        symlink(&folder, &link).unwrap();
        let file = folder.join("file");
        fs::write(&file, b"").unwrap();
        for other in [&link, &file, &folder.join("none")] {
            assert!(!is_only_of(other, own), "{}", other.display());
        }
        for (mode, only) in [(0o775, false), (0o757, false), (0o1777, false), (0o711, true)] {
            fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_only_of(&folder, own), only, "{mode:o}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_user_is_trusted_with_its_own_and_whoever_was_named_and_root_else() {
        let owners = |user: Option<&str>| {
            let mut owners: Vec<_> =
                places("x", user).unwrap().into_iter().map(|spot| spot.owner).collect();
            owners.dedup();
            owners
        };
        assert!(owners(None).iter().all(|owner| [own_user(), ROOT].contains(owner)));
        assert!(owners(Some("61001")).iter().all(|owner| *owner == 61_001));
        assert!(places("x", Some("no-such-user")).is_err());
        // What is one's own is looked at first.
        let made = own_place("x", false).unwrap();
        assert_eq!(places("x", None).unwrap()[0], Spot { path: made, owner: own_user() });
    }
}
