//! Limits for acknowledgements that a stranger could provoke (RFC 5961 7).

/// A second.
const PERIOD: u64 = 1_000_000_000;
/// Challenges in a period. Of one connection: a limit for the whole host would be a channel through which a
/// stranger finds out about others' connections (CVE-2016-5696).
const LIMIT: u8 = 10;

#[derive(Clone, Debug, Default)]
pub(crate) struct Limiter {
    since: u64,
    used: u8,
}

impl Limiter {
    /// Whether one more may be sent.
    pub(crate) fn allows(&mut self, now: u64) -> bool {
        if now >= self.since + PERIOD {
            (self.since, self.used) = (now, 0);
        }
        let allowed = self.used < LIMIT;
        self.used += u8::from(allowed);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_a_second() {
        let mut limiter = Limiter::default();
        let count = |limiter: &mut Limiter, now| (0..100).filter(|_| limiter.allows(now)).count();
        assert_eq!(count(&mut limiter, 5), 10);
        assert_eq!(count(&mut limiter, PERIOD - 1), 0);
        assert_eq!(count(&mut limiter, PERIOD + 5), 10);
    }
}
