//! Main memory: a latency, and a queue for bandwidth.

/// Main memory.
#[derive(Clone, Debug)]
pub(crate) struct Dram {
    latency: u64,
    /// Picoseconds that a kilobyte occupies it, so that a byte may take a fraction of one.
    ps_per_kb: u64,
    free_at: u64,
    /// Bytes read and written.
    pub(crate) bytes: u64,
}

impl Dram {
    /// Memory with `latency` in picoseconds that moves 1024 bytes in `ps_per_kb`.
    pub(crate) fn new(latency: u64, ps_per_kb: u64) -> Self {
        Self { latency, ps_per_kb, free_at: 0, bytes: 0 }
    }

    /// Requests `bytes` at `now`; when the data is there.
    pub(crate) fn read(&mut self, now: u64, bytes: u64) -> u64 {
        self.occupy(now, bytes) + self.latency
    }

    /// Writes `bytes` at `now`: nobody waits. When the memory has taken them.
    pub(crate) fn write(&mut self, now: u64, bytes: u64) -> u64 {
        self.occupy(now, bytes)
    }

    fn occupy(&mut self, now: u64, bytes: u64) -> u64 {
        self.bytes += bytes;
        self.free_at = self.free_at.max(now) + bytes * self.ps_per_kb / 1024;
        self.free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_wait_for_each_other() {
        // 4 bytes a nanosecond.
        let mut dram = Dram::new(50_000, 256_000);
        assert_eq!(dram.read(0, 64), 16_000 + 50_000);
        assert_eq!(dram.read(0, 64), 32_000 + 50_000);
        assert_eq!(dram.write(100_000, 64), 116_000);
        assert_eq!(dram.bytes, 192);
    }
}
