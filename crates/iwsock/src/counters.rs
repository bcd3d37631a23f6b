//! What a process shows of its sockets in the mode (`quipu top`): a file of counters, in the process's own
//! byte order. Its library writes it through a mapping, so that counting costs no call.

/// A counter of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Sockets in the mode now.
    Sockets,
    /// Sockets that were switched.
    Switched,
    /// Sends that are complete.
    Sends,
    /// Writes that are complete.
    Writes,
    /// Reads that are complete.
    Reads,
    /// Receives that are complete.
    Receives,
    /// Bytes of sends and writes.
    BytesOut,
    /// Bytes of reads and receives.
    BytesIn,
    /// Works that failed or were flushed.
    Failed,
}

/// How many there are.
pub const COUNTERS: usize = 9;
/// Length of the file.
pub const FILE_LEN: usize = 8 * (COUNTERS + 1);
/// The first word of the file.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"IWSOCK01");

/// Name, type and help of each counter, in the order of the file.
pub const DESCRIPTIONS: [(&str, &str, &str); COUNTERS] = [
    ("sockets", "gauge", "Sockets in iWARP mode."),
    ("switched_total", "counter", "Sockets that were switched to iWARP."),
    ("sends_total", "counter", "Sends that completed."),
    ("writes_total", "counter", "RDMA writes that completed."),
    ("reads_total", "counter", "RDMA reads that completed."),
    ("receives_total", "counter", "Receives that completed."),
    ("sent_bytes_total", "counter", "Bytes of sends and writes."),
    ("received_bytes_total", "counter", "Bytes of receives and reads."),
    ("failed_total", "counter", "Works that failed or were flushed."),
];

/// The folder of a user's files; each has the number of its process for a name.
pub fn folder(user: u32) -> String {
    format!("/dev/shm/quipu-iwsock-{user}")
}

/// The counters of a file; none if it is another file.
pub fn parse(file: &[u8]) -> Option<[u64; COUNTERS]> {
    let (words, []) = file.as_chunks::<8>() else { return None };
    let (first, rest) = words.split_first()?;
    let rest: &[[u8; 8]; COUNTERS] = rest.try_into().ok()?;
    (u64::from_ne_bytes(*first) == MAGIC).then(|| rest.map(u64::from_ne_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_of_counters_is_one() {
        let mut file = [0; FILE_LEN];
        assert_eq!(parse(&file), None);
        file[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        file[8 * (1 + Counter::Reads as usize)..][..8].copy_from_slice(&7u64.to_ne_bytes());
        assert_eq!(parse(&file).map(|all| all[Counter::Reads as usize]), Some(7));
        assert_eq!((parse(&file[..FILE_LEN - 1]), parse(&file[..8])), (None, None));
        assert_eq!(DESCRIPTIONS[Counter::Failed as usize].0, "failed_total");
    }
}
