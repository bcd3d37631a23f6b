//! The pages in which registered memory lies. Bytes may be placed there at any moment, by peers and by the
//! own engine, so what is not shared by the time of its registration stays as it is until nothing is
//! registered there.

/// Registered memory: pages, and the registration that they belong to.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// Number of the registration, first page and the end, in no order.
    all: Vec<(u64, usize, usize)>,
    last: u64,
}

impl Live {
    /// Takes note of a registration of the pages from `start` to `end`; its number.
    pub(super) fn add(&mut self, start: usize, end: usize) -> u64 {
        self.last += 1;
        self.all.push((self.last, start, end));
        self.last
    }

    /// Forgets one.
    pub(super) fn remove(&mut self, number: u64) {
        if let Some(at) = self.all.iter().position(|&(other, ..)| other == number) {
            self.all.swap_remove(at);
        }
    }

    /// The parts of the pages from `start` to `end` in which nothing is registered, nor any of `others` lies,
    /// in order.
    pub(super) fn gaps(
        &self,
        start: usize,
        end: usize,
        others: &[(usize, usize)],
    ) -> Vec<(usize, usize)> {
        let registered = self.all.iter().map(|&(_, from, to)| (from, to));
        let meets = |&(from, to): &(usize, usize)| from < end && start < to;
        let mut taken: Vec<_> = registered.chain(others.iter().copied()).filter(meets).collect();
        taken.sort_unstable();
        let (mut gaps, mut at) = (Vec::new(), start);
        for (from, to) in taken {
            if from > at {
                gaps.push((at, from));
            }
            at = at.max(to);
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_no_registration_touches() {
        let mut live = Live::default();
        assert_eq!(live.gaps(10, 20, &[]), [(10, 20)]);
        let one = live.add(12, 14);
        let two = live.add(13, 16);
        live.add(19, 30);
        assert_eq!(live.gaps(10, 20, &[]), [(10, 12), (16, 19)]);
        assert_eq!(live.gaps(12, 16, &[]), []);
        assert_eq!(live.gaps(10, 20, &[(17, 18), (20, 22)]), [(10, 12), (16, 17), (18, 19)]);
        live.remove(one);
        assert_eq!(live.gaps(10, 20, &[]), [(10, 13), (16, 19)]);
        live.remove(two);
        assert_eq!(live.gaps(0, 19, &[]), [(0, 19)]);
        live.add(0, usize::MAX);
        assert_eq!(live.gaps(40, 50, &[]), []);
    }
}
