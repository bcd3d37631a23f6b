//! Hosts, and how many ranks each gets.

use super::THIS_HOST;

/// Most ranks of a job, and most hosts.
const MAX_RANKS: u32 = 4096;

/// A host, and how many ranks it is meant for, if that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, as ssh understands it.
    pub name: String,
    /// Ranks it is meant for.
    pub slots: Option<u32>,
}

/// Why hosts and ranks do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// A word that names no host.
    #[error("{0:?} names no host; write NAME or NAME:RANKS, and an IPv6 address in brackets")]
    Syntax(String),
    /// Fewer slots than ranks.
    #[error(
        "{ranks} ranks do not fit the {slots} slots of the hosts; give them more (NAME:RANKS), or lower -n"
    )]
    TooFew {
        /// Ranks that are asked for.
        ranks: u32,
        /// Slots that there are.
        slots: u32,
    },
    /// No rank, or too many.
    #[error("a job cannot have {0} ranks; it has 1 to 4096")]
    Ranks(u32),
}

/// Hosts from a list such as `a,b:2,[::1]:4`.
///
/// # Errors
/// If a word is no host.
pub fn parse_hosts(list: &str) -> Result<Vec<Host>, HostsError> {
    list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(parse_host).collect()
}

/// Hosts from a file: one a line, as in a list, or `NAME slots=RANKS`; `#` begins a comment.
///
/// # Errors
/// If a line is no host.
pub fn parse_host_file(text: &str) -> Result<Vec<Host>, HostsError> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let host = |line: &str| {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let mut host = parse_host(name)?;
        for word in rest.split_whitespace() {
            let slots = word.strip_prefix("slots=").and_then(|slots| slots.parse().ok());
            host.slots = Some(slots.ok_or_else(|| HostsError::Syntax(line.into()))?);
        }
        Ok(host)
    };
    lines.filter(|line| !line.is_empty()).map(host).collect()
}

fn parse_host(word: &str) -> Result<Host, HostsError> {
    let bad = || HostsError::Syntax(word.into());
    let (name, slots) = match word.strip_prefix('[') {
        Some(rest) => {
            let (name, rest) = rest.split_once(']').ok_or_else(bad)?;
            let slots =
                if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(bad)?) };
            (name, slots)
        }
        None => match word.split_once(':') {
            Some((name, slots)) => (name, Some(slots)),
            None => (word, None),
        },
    };
    let slots = slots.map(|slots| slots.parse().ok().filter(|slots| *slots > 0).ok_or_else(bad));
    // A name that begins with a dash would be an option of ssh.
    let legal = |c: char| c.is_ascii_alphanumeric() || "._-:%@".contains(c);
    if name.is_empty() || name.starts_with('-') || !name.chars().all(legal) {
        return Err(bad());
    }
    Ok(Host { name: name.into(), slots: slots.transpose()? })
}

/// How many ranks each host gets, in order: its slots, or an equal share where no host has slots.
///
/// # Errors
/// If there are more ranks than slots, or not 1 to 4096 ranks.
pub fn place(ranks: Option<u32>, hosts: &[Host]) -> Result<Vec<(String, u32)>, HostsError> {
    if hosts.is_empty() {
        let ranks = ranks.unwrap_or(1);
        check_count(ranks)?;
        return Ok(vec![(THIS_HOST.into(), ranks)]);
    }
    let explicit = hosts.iter().any(|host| host.slots.is_some());
    let total = hosts.iter().map(|host| host.slots.unwrap_or(1)).fold(0, u32::saturating_add);
    let ranks = ranks.unwrap_or(total);
    check_count(ranks)?;
    if explicit && ranks > total {
        return Err(HostsError::TooFew { ranks, slots: total });
    }
    let share = ranks.div_ceil(hosts.len() as u32);
    let mut left = ranks;
    let mut placed = Vec::new();
    for host in hosts {
        let here = if explicit { host.slots.unwrap_or(1) } else { share }.min(left);
        left -= here;
        if here > 0 {
            placed.push((host.name.clone(), here));
        }
    }
    Ok(placed)
}

fn check_count(ranks: u32) -> Result<(), HostsError> {
    if (1..=MAX_RANKS).contains(&ranks) { Ok(()) } else { Err(HostsError::Ranks(ranks)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(ranks: Option<u32>, hosts: &str) -> Result<Vec<(String, u32)>, HostsError> {
        place(ranks, &parse_hosts(hosts)?)
    }

    #[test]
    fn ranks_fill_hosts_in_order() {
        let list = |items: &[(&str, u32)]| {
            items.iter().map(|(name, ranks)| ((*name).to_owned(), *ranks)).collect::<Vec<_>>()
        };
        assert_eq!(placed(Some(5), "a,b").unwrap(), list(&[("a", 3), ("b", 2)]));
        assert_eq!(placed(Some(5), "a:1,[::1]:4").unwrap(), list(&[("a", 1), ("::1", 4)]));
        assert_eq!(placed(None, "a,b:2").unwrap(), list(&[("a", 1), ("b", 2)]));
        assert_eq!(placed(Some(1), "a,b").unwrap(), list(&[("a", 1)]));
        assert_eq!(placed(Some(3), "").unwrap(), list(&[("localhost", 3)]));
        assert_eq!(placed(Some(4), "a:2,b"), Err(HostsError::TooFew { ranks: 4, slots: 3 }));
        assert_eq!(placed(Some(0), "a"), Err(HostsError::Ranks(0)));
    }

    #[test]
    fn names_are_checked() {
        for word in ["-oProxyCommand=x", "a:b", "a:0", "[::1", "a b", "a;b", ":3", "[::1]4"] {
            assert!(parse_hosts(word).is_err(), "{word}");
        }
        let hosts = parse_host_file("# ours\na slots=2\n\nuser@b:3 # theirs\n").unwrap();
        let host = |name: &str, slots| Host { name: name.into(), slots: Some(slots) };
        assert_eq!(hosts, [host("a", 2), host("user@b", 3)]);
        assert!(parse_host_file("a cpus=2").is_err());
    }
}
