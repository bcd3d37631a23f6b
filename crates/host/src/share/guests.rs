//! Who may use a shared adapter beside programs of the user who shares it.
//!
//! Two ask, each for itself. The kernel does when a program connects, by the access list of the socket: a
//! stranger does not get so far as to cost anything. The process that shares does when it has been called,
//! by what the kernel says of the caller; also where the file system knows no such lists.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::accounts::{Account, AccountError, is_own_user};
use crate::link::socket;
use crate::sys::check;

/// Users and groups whose programs may attach to a shared adapter, beside those of the user who shares it.
///
/// Members of a group are those of whom the kernel knows: programs that were started before somebody became
/// one are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guests {
    users: Vec<u32>,
    groups: Vec<u32>,
}

impl Guests {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty()
    }

    /// A user, by name or number.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn add_user(&mut self, user: &str) -> Result<(), AccountError> {
        self.users.push(Account::User.number(user)?);
        Ok(())
    }

    /// A group, by name or number: all who are in it.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn add_group(&mut self, group: &str) -> Result<(), AccountError> {
        self.groups.push(Account::Group.number(group)?);
        Ok(())
    }

    /// Whether somebody may attach, who is in all these groups.
    fn has(&self, user: u32, groups: impl IntoIterator<Item = u32>) -> bool {
        let is_one = |account: Account, named: &[u32], number: u32| {
            named.contains(&number) && account.is_one(number)
        };
        is_one(Account::User, &self.users, user)
            || groups.into_iter().any(|group| is_one(Account::Group, &self.groups, group))
    }

    /// Who is at the other end of a socket.
    pub(super) fn caller(&self, socket: &OwnedFd) -> io::Result<Identity> {
        let peer = socket::peer_credentials(socket)?;
        let own = is_own_user(peer.uid);
        let others = || match self.groups[..] {
            [] => Vec::new(),
            // Where they cannot be told he is in none.
            _ => socket::peer_groups(socket).unwrap_or_default(),
        };
        let admitted = own || self.has(peer.uid, std::iter::once(peer.gid).chain(others()));
        Ok(Identity { user: peer.uid, own, admitted })
    }

    /// Lets the kernel admit to a socket in the file system, which nobody listens at yet: these, and who
    /// shares. Where there are no such lists everybody, and it is asked later who they are.
    pub(super) fn admit_to(&self, path: &Path) -> io::Result<()> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let list = self.access_list();
        // SAFETY: the strings end with a zero, and the pointer and the length describe `list`.
        let outcome = check(unsafe {
            libc::lsetxattr(
                name.as_ptr(),
                c"system.posix_acl_access".as_ptr(),
                list.as_ptr().cast(),
                list.len(),
                0,
            )
        });
        match outcome {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let why = "a guest has no number in this user namespace";
                Err(io::Error::new(io::ErrorKind::InvalidInput, why))
            }
            outcome => outcome.map(drop),
        }
    }

    /// What xattr(7) and acl(5) call `system.posix_acl_access`, as the kernel has it: version 2, and entries
    /// of a tag, rights and a number.
    fn access_list(&self) -> Vec<u8> {
        const READ_WRITE: u16 = 6;
        const NOBODY: u32 = u32::MAX;
        let all = |tag: u16, named: &[u32]| -> Vec<(u16, u16, u32)> {
            named.iter().map(|number| (tag, READ_WRITE, *number)).collect()
        };
        let entries = [
            vec![(0x01, READ_WRITE, NOBODY)],
            all(0x02, &self.users),
            // The group that the socket happens to have, and everybody else, have no rights.
            vec![(0x04, 0, NOBODY)],
            all(0x08, &self.groups),
            vec![(0x10, READ_WRITE, NOBODY), (0x20, 0, NOBODY)],
        ];
        let mut list = 2u32.to_le_bytes().to_vec();
        for (tag, rights, number) in entries.concat() {
            list.extend(tag.to_le_bytes());
            list.extend(rights.to_le_bytes());
            list.extend(number.to_le_bytes());
        }
        list
    }
}

/// Who a caller is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) user: u32,
    /// The user who shares.
    pub(super) own: bool,
    pub(super) admitted: bool,
}

/// Whether a user may have one more program attached, of so many at a time. Others than the user who shares
/// leave as many places as each of them has: so no user keeps all others away.
pub(super) fn has_place(own: bool, of_user: usize, of_all: usize, most: usize) -> bool {
    let free = most.saturating_sub(of_all);
    if own { free > 0 } else { of_user < free }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guests(users: &[&str], groups: &[&str]) -> Guests {
        let mut guests = Guests::default();
        users.iter().for_each(|user| guests.add_user(user).unwrap());
        groups.iter().for_each(|group| guests.add_group(group).unwrap());
        guests
    }

    #[test]
    fn who_is_named_is_admitted_and_nobody_else() {
        assert!(Guests::default().is_empty() && !Guests::default().has(61_001, [61_001]));
        let some = guests(&["61001", "61002"], &["61010"]);
        assert!(some.has(61_001, [61_001]) && some.has(61_002, []));
        // A group's number is no user's, nor the other way round.
        assert!(!some.has(61_010, [61_001]) && !some.has(61_003, [61_003, 61_002]));
        // By any of his groups.
        assert!(some.has(61_003, [61_003, 61_009, 61_010]));
        // Root is admitted where it is named, and else, as the owner, by others.
        assert!(!some.has(0, [0]) && guests(&["root"], &[]).has(0, []));
        assert!(matches!(Guests::default().add_user("no-such"), Err(AccountError::Unknown(..))));
    }

    #[test]
    fn a_user_leaves_room_for_others() {
        let fill = |own: bool, others: usize| {
            (0..).find(|&count| !has_place(own, count, others + count, 64)).unwrap()
        };
        assert_eq!((fill(true, 0), fill(true, 60), fill(true, 64)), (64, 4, 0));
        assert_eq!((fill(false, 0), fill(false, 32), fill(false, 48)), (32, 16, 8));
        assert_eq!((fill(false, 63), fill(false, 64), fill(false, 70)), (1, 0, 0));
    }

    #[test]
    fn the_kernel_admits_who_is_named() {
        let list = guests(&["61001"], &["61002"]).access_list();
        let entry = |tag: u8, rights: u8, number: u32| {
            [&[tag, 0, rights, 0][..], &number.to_le_bytes()].concat()
        };
        let entries = [
            entry(1, 6, u32::MAX),
            entry(2, 6, 61_001),
            entry(4, 0, u32::MAX),
            entry(8, 6, 61_002),
            entry(16, 6, u32::MAX),
            entry(32, 0, u32::MAX),
        ];
        assert_eq!(list, [vec![2, 0, 0, 0], entries.concat()].concat());
    }
}
