//! Users and groups: names and numbers, and whose a number is.

use std::ffi::CString;
use std::fmt;
use std::io;

/// The longest entry of the user database that makes sense.
const MAX_ENTRY: usize = 1 << 20;

/// What a number is one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// Users.
    User,
    /// Groups.
    Group,
}

/// Why a word is nobody's name.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    /// There is none.
    #[error("there is no {0} {1}")]
    Unknown(Account, String),
    /// It is one of many that this process sees under one and the same number.
    #[error("{0} {1} has no number of its own in this user namespace")]
    Nobodys(Account, String),
    /// The user database fails.
    #[error("cannot look up the {0} {1}: {2}")]
    System(Account, String, #[source] io::Error),
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::User => "user",
            Self::Group => "group",
        })
    }
}

impl Account {
    /// The number of whoever has this name, or this number.
    ///
    /// # Errors
    ///
    /// There is nobody, or more than one.
    pub fn number(self, text: &str) -> Result<u32, AccountError> {
        // The greatest is none: it stands for no change of user (chown(2)).
        let given = text.parse().ok().filter(|number| *number != u32::MAX);
        let number = match (self.named(text), given) {
            (Ok(Some(number)), _) | (_, Some(number)) => number,
            (Ok(None), None) => return Err(AccountError::Unknown(self, text.into())),
            (Err(error), None) => return Err(AccountError::System(self, text.into(), error)),
        };
        match self.is_one(number) {
            true => Ok(number),
            false => Err(AccountError::Nobodys(self, text.into())),
        }
    }

    /// Whether a number is that of one, and of nobody else. In a user namespace all that have no number there
    /// appear under one and the same (user_namespaces(7)).
    pub(crate) fn is_one(self, number: u32) -> bool {
        number != self.overflow() || self.all_have_numbers()
    }

    /// The number of those who have none.
    fn overflow(self) -> u32 {
        let text = crate::sys::read_text(match self {
            Self::User => "/proc/sys/kernel/overflowuid",
            Self::Group => "/proc/sys/kernel/overflowgid",
        });
        text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65_534)
    }

    fn all_have_numbers(self) -> bool {
        let map = crate::sys::read_text(match self {
            Self::User => "/proc/self/uid_map",
            Self::Group => "/proc/self/gid_map",
        });
        map.is_ok_and(|map| maps_everybody(&map))
    }

    fn named(self, name: &str) -> io::Result<Option<u32>> {
        // No name has a zero in it.
        let Ok(name) = CString::new(name) else { return Ok(None) };
        let mut room = vec![0; 1024];
        loop {
            // These calls give the number of an error.
            match self.find(&name, &mut room) {
                Ok(found) => return Ok(found),
                Err(libc::ERANGE) if room.len() < MAX_ENTRY => room.resize(2 * room.len(), 0),
                // As some sources say that there is none (getpwnam(3)).
                Err(libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM) => return Ok(None),
                Err(error) => return Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    fn find(self, name: &CString, room: &mut [libc::c_char]) -> Result<Option<u32>, libc::c_int> {
        let (name, len, room) = (name.as_ptr(), room.len(), room.as_mut_ptr());
        // SAFETY: all zeroes is a valid entry of either kind. The calls write to live variables, and at most
        // `len` bytes to `room`; what they have found is the entry that they were given.
        unsafe {
            match self {
                Self::User => {
                    let (mut entry, mut found) = (std::mem::zeroed(), std::ptr::null_mut());
                    match libc::getpwnam_r(name, &raw mut entry, room, len, &raw mut found) {
                        0 => Ok((!found.is_null()).then_some(entry.pw_uid)),
                        error => Err(error),
                    }
                }
                Self::Group => {
                    let (mut entry, mut found) = (std::mem::zeroed(), std::ptr::null_mut());
                    match libc::getgrnam_r(name, &raw mut entry, room, len, &raw mut found) {
                        0 => Ok((!found.is_null()).then_some(entry.gr_gid)),
                        error => Err(error),
                    }
                }
            }
        }
    }
}

/// The user that this process acts as.
pub(crate) fn own_user() -> libc::uid_t {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether a user number of a peer is that of this process and of nobody else.
pub(crate) fn is_own_user(user: libc::uid_t) -> bool {
    user == own_user() && Account::User.is_one(user)
}

/// Whether a uid_map is that of the initial user namespace.
fn maps_everybody(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_those_without_one_is_nobodys() {
        assert!(maps_everybody("         0          0 4294967295\n"));
        for map in ["", "0 1000 1\n", "0 0 65536\n", "0 100000 4294967295", "0 0 1\n1 1 9\n"] {
            assert!(!maps_everybody(map), "{map}");
        }
        assert!(!is_own_user(own_user() + 1));
        assert!(is_own_user(own_user()) || own_user() == Account::User.overflow());
        for account in [Account::User, Account::Group] {
            assert_eq!(account.is_one(account.overflow()), account.all_have_numbers());
            assert!(account.is_one(0));
        }
    }

    #[test]
    fn names_and_numbers_are_found_and_others_are_named() {
        for account in [Account::User, Account::Group] {
            assert_eq!(account.number("root").unwrap(), 0);
            assert_eq!(account.number("61007").unwrap(), 61_007);
            for nobody in ["", "no-such-account", "no\0such", "-1", "4294967295", "4294967296"] {
                let unknown = account.number(nobody).unwrap_err();
                assert!(matches!(unknown, AccountError::Unknown(..)), "{nobody:?}: {unknown}");
                assert!(unknown.to_string().starts_with(&format!("there is no {account}")));
            }
        }
    }
}
