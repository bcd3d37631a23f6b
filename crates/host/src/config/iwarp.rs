//! Settings of plain iWARP.

use std::time::Duration;

use super::{ConfigError, Lookup, bad};

/// The silence after which a server sends first, if nothing else is set. Linux siw as a client ends the
/// connection if bytes arrive before it has read the MPA reply, which its kernel thread does within a few
/// milliseconds on a busy machine.
pub(super) const SPEAK_FIRST: Duration = Duration::from_millis(100);

const NAME: &str = "QUIPU_IWARP_SPEAK_FIRST_MS";

/// The silence after which a server sends first; `None` if it never does.
///
/// # Errors
///
/// The variable is neither a number in its range nor `never`.
pub(super) fn speak_first(lookup: &impl Lookup) -> Result<Option<Duration>, ConfigError> {
    let Some(value) = lookup(NAME)? else { return Ok(Some(SPEAK_FIRST)) };
    if value.trim() == "never" {
        return Ok(None);
    }
    let after = value.trim().parse().ok().filter(|ms| (1..=10_000).contains(ms));
    let after = after.map(|ms| Some(Duration::from_millis(ms)));
    after.ok_or_else(|| bad(NAME, value, "a number of milliseconds from 1 to 10000, or never"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_sends_first_after_a_while_or_never() {
        let read = |value: &'static str| {
            speak_first(&|_| Ok(Some(value.to_owned()).filter(|value| !value.is_empty())))
        };
        assert_eq!(read(""), Ok(Some(SPEAK_FIRST)));
        assert_eq!(read(" 250 "), Ok(Some(Duration::from_millis(250))));
        assert_eq!(read("never"), Ok(None));
        for wrong in ["0", "10001", "strict", "-1"] {
            let error = read(wrong).unwrap_err();
            assert_eq!((error.name, error.value.as_str()), (NAME, wrong));
        }
    }
}
