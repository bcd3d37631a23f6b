//! The files of SPECweb99, and which of them clients ask for.
//!
//! Four classes of nine sizes each (SPECweb99 release 1.02, run and reporting rules, "Workload"): class
//! sizes are tenths, units, tens and hundreds of kilobytes; 35 %, 50 %, 14 % and 1 % of requests go to them.
//! Directories are drawn from a Zipf distribution, as Surge does (Barford and Crovella, SIGMETRICS 1998).

use crate::rng::Rng;

/// Directories of the file set: few, so that it fits the page cache, as in M5's runs.
pub(super) const DIRECTORIES: u64 = 20;
/// Requests to each class, of 100.
const CLASSES: [u64; 4] = [35, 50, 14, 1];
/// Requests to each size within a class, of 1000.
const SIZES: [u64; 9] = [39, 59, 88, 177, 353, 118, 71, 50, 45];
/// Bytes of a directory: the sum of all sizes of all classes.
pub(super) const DIRECTORY_BYTES: u64 = 45 * (102 + 1024 + 10_240 + 102_400);

/// The index that a draw below the sum of the weights falls on.
fn weighted(weights: &[u64], mut draw: u64) -> u64 {
    for (index, weight) in weights.iter().enumerate() {
        if draw < *weight {
            return index as u64;
        }
        draw -= weight;
    }
    weights.len() as u64 - 1
}

/// A file: its size, and where it begins in the file set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct File {
    pub(super) size: u64,
    pub(super) at: u64,
}

/// Draws the next file.
pub(super) fn draw(rng: &mut Rng) -> File {
    let class = weighted(&CLASSES, rng.below(100));
    let size = weighted(&SIZES, rng.below(1000)) + 1;
    let unit = [102, 1024, 10_240, 102_400][class as usize];
    // Zipf with exponent 1 over the directories.
    let harmonic: f64 = (1..=DIRECTORIES).map(|rank| 1.0 / rank as f64).sum();
    let mut left = rng.unit() * harmonic;
    let mut directory = 0;
    while directory + 1 < DIRECTORIES {
        left -= 1.0 / (directory + 1) as f64;
        if left < 0.0 {
            break;
        }
        directory += 1;
    }
    let before: u64 = [102u64, 1024, 10_240, 102_400][..class as usize].iter().sum();
    let at = directory * DIRECTORY_BYTES + 45 * before + unit * size * (size - 1) / 2;
    File { size: unit * size, at }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_that_of_specweb99() {
        let mut rng = Rng::new(1, 1);
        let files: Vec<File> = (0..200_000).map(|_| draw(&mut rng)).collect();
        let mean = files.iter().map(|file| file.size).sum::<u64>() / files.len() as u64;
        // 0.35 x 0.5 KB + 0.5 x 5 KB + 0.14 x 50 KB + 0.01 x 500 KB: about 14.7 KB.
        assert!((14_000..15_800).contains(&mean), "{mean}");
        let end = DIRECTORIES * DIRECTORY_BYTES;
        assert!(files.iter().all(|file| file.at + file.size <= end));
    }
}
