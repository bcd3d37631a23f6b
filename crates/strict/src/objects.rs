//! Which file of the process an address is of: the program itself, or a library.

use std::collections::HashMap;

/// A mapping of a file.
struct Mapping<'a> {
    start: u64,
    end: u64,
    path: &'a str,
}

/// The files that are mapped, as `/proc/self/maps` tells them.
pub(crate) struct Objects<'a> {
    mappings: Vec<Mapping<'a>>,
    /// Where each file begins.
    bases: HashMap<&'a str, u64>,
}

impl<'a> Objects<'a> {
    /// Reads such a table; lines that are of no file say nothing here.
    pub(crate) fn parse(maps: &'a str) -> Self {
        let mappings: Vec<_> = maps.lines().filter_map(mapping).collect();
        let mut bases = HashMap::new();
        for mapping in &mappings {
            let base = bases.entry(mapping.path).or_insert(mapping.start);
            *base = mapping.start.min(*base);
        }
        Self { mappings, bases }
    }

    /// The name of the file that an address is of, and how far behind its beginning it is.
    pub(crate) fn of(&self, address: u64) -> Option<(&'a str, u64)> {
        let mapping = self.mappings.iter().find(|it| (it.start..it.end).contains(&address))?;
        let name = mapping.path.rsplit('/').next().unwrap_or(mapping.path);
        Some((name, address - self.bases[mapping.path]))
    }
}

/// A line such as `7f00-7f80 r-xp 0000 fe:00 12   /usr/lib/libc.so.6`.
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let path = &rest[rest.find('/')?..];
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    Some(Mapping { start: number(start)?, end: number(end)?, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_in_their_files() {
        let maps = "1000-2000 r--p 00000000 fe:00 12                 /usr/bin/a b\n\
            2000-3000 r-xp 00001000 fe:00 12                 /usr/bin/a b\n\
            7000-8000 rw-p 00000000 00:00 0                  [heap]\n\
            9000-9800 r-xp 00000000 fe:00 13                 /usr/lib/libx.so.1\n";
        let objects = Objects::parse(maps);
        assert_eq!(objects.of(0x2010), Some(("a b", 0x1010)));
        assert_eq!(objects.of(0x9000), Some(("libx.so.1", 0)));
        assert_eq!([0x3000, 0x7000, 0x9800].map(|address| objects.of(address)), [None; 3]);
        assert_eq!(Objects::parse("nonsense\n\n1-x r /y").of(1), None);
    }
}
