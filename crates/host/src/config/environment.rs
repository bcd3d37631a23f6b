//! Reads the settings from the environment.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use quipu_nic::qos::parse_rate;
use quipu_nic::{Crc, LinkLayer, WriteOrder};

use super::*;

impl Config {
    /// The settings that the process's environment asks for.
    ///
    /// # Errors
    ///
    /// A variable with a value that is not allowed.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with the variables looked up by `lookup`.
    ///
    /// # Errors
    ///
    /// A variable with a value that is not allowed.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        // Files may have names that are no text.
        let file = |name| {
            let value = lookup(name).filter(|value| !value.as_bytes().trim_ascii().is_empty());
            value.map(PathBuf::from)
        };
        let lookup = |name| match lookup(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value).filter(|value| !value.trim().is_empty())),
            Some(Err(value)) => Err(bad(name, value.to_string_lossy().into(), "text in UTF-8")),
        };
        let mut config = Self::default();
        if let Some(value) = lookup("QUIPU_ADDRESS")? {
            let address = value.trim().parse();
            config.address = Some(address.map_err(|_| {
                bad(
                    "QUIPU_ADDRESS",
                    value,
                    "an IP address, or one with its interface (fe80::1%eth0)",
                )
            })?);
        }
        if let Some(value) = lookup("QUIPU_LINK_LAYER")? {
            config.link_layer = match value.trim() {
                "ethernet" => LinkLayer::Ethernet,
                "infiniband" => LinkLayer::InfiniBand,
                _ => return Err(bad("QUIPU_LINK_LAYER", value, "ethernet or infiniband")),
            };
        }
        if let Some(value) = lookup("QUIPU_SAME_HOST")? {
            config.same_host = match value.trim() {
                "auto" => SameHost::Auto,
                "never" => SameHost::Never,
                _ => return Err(bad("QUIPU_SAME_HOST", value, "auto or never")),
            };
        }
        if let Some(value) = lookup("QUIPU_PEER_MEMORY")? {
            config.peer_memory = match value.trim() {
                "auto" => PeerMemoryPolicy::Auto,
                "allow" => PeerMemoryPolicy::Allow,
                "never" => PeerMemoryPolicy::Never,
                _ => return Err(bad("QUIPU_PEER_MEMORY", value, "auto, allow or never")),
            };
        }
        if let Some(value) = lookup("QUIPU_SHARED_PAGES")? {
            config.shared_pages = match value.trim() {
                "never" => SharedPages::Never,
                "own" => SharedPages::Own,
                "registered" => SharedPages::Registered,
                _ => return Err(bad("QUIPU_SHARED_PAGES", value, "never, own or registered")),
            };
        }
        if let Some(value) = lookup("QUIPU_CRC")? {
            config.crc = match value.trim() {
                "auto" => Crc::BetweenHosts,
                "always" => Crc::Always,
                "never" => Crc::Never,
                _ => return Err(bad("QUIPU_CRC", value, "auto, always or never")),
            };
        }
        if let Some(value) = lookup("QUIPU_ARENA_MB")? {
            let megabytes = value.trim().parse().ok().filter(|mb| (1..=65_536).contains(mb));
            let megabytes: usize = megabytes
                .ok_or_else(|| bad("QUIPU_ARENA_MB", value, "a number from 1 to 65536"))?;
            config.arena_bytes = megabytes << 20;
        }
        if let Some(value) = lookup("QUIPU_MULTICAST_PORT")? {
            let port = value.trim().parse().ok().filter(|&port| port > 0);
            config.multicast_port =
                port.ok_or_else(|| bad("QUIPU_MULTICAST_PORT", value, "a number from 1 to 65535"))?;
        }

        config.speak_first = iwarp::speak_first(&lookup)?;
        config.congestion = lookup("QUIPU_CONGESTION")?.map(|value| value.trim().to_owned());
        config.faults = file("QUIPU_FAULTS");
        config.fault_log = file("QUIPU_FAULT_LOG");
        config.fault_replay = file("QUIPU_FAULT_REPLAY");
        if let Some(value) = lookup("QUIPU_STRICT")? {
            config.strict = match value.trim() {
                "1" | "report" => Some(StrictMode::Report),
                "fail" => Some(StrictMode::Fail),
                "abort" => Some(StrictMode::Abort),
                "0" => None,
                _ => return Err(bad("QUIPU_STRICT", value, "report, fail, abort or 0")),
            };
        }
        config.strict_log = file("QUIPU_STRICT_LOG");
        if let Some(rules) = lookup("QUIPU_STRICT_IGNORE")? {
            config.strict_ignore = rules.parse().map_err(|_| {
                bad(
                    "QUIPU_STRICT_IGNORE",
                    rules,
                    "kinds of reports (docs/strict.md), or KIND@PLACE",
                )
            })?;
        }
        config.strict_order = strict_order(&lookup)?;
        config.log = lookup("QUIPU_LOG")?;
        if let Some(value) = lookup("QUIPU_COUNTERS")? {
            config.counters = match value.trim() {
                "auto" => true,
                "never" => false,
                _ => return Err(bad("QUIPU_COUNTERS", value, "auto or never")),
            };
        }
        config.capture = capture(&lookup, file("QUIPU_PCAP"))?;
        let rate = lookup("QUIPU_RATE")?.map(|value| match parse_rate(&value) {
            Some(rate) => Ok(rate),
            None => Err(bad("QUIPU_RATE", value, "a rate from 1kbps to 1Tbps, such as 10Gbps")),
        });
        let qos = QosConfig { file: file("QUIPU_QOS"), rate: rate.transpose()? };
        config.qos = (qos != QosConfig::default()).then_some(qos);
        config.qpip = QpipConfig::from_lookup(&lookup)?;
        let link = config.qpip.as_ref().is_some_and(|qpip| !qpip.link.is_shared());
        (config.devices, config.cm_device) = devices(&lookup, link)?;
        Ok(config)
    }
}

/// Which devices programs see, and from which one connection management connects.
/// `link`: whether there is one of the engine's own for QPIP.
fn devices(lookup: &impl Lookup, link: bool) -> Result<(Vec<Device>, Device), ConfigError> {
    let expected =
        "some of quipu0, quipu_iw0 and, with QUIPU_QPIP_LINK, quipu_qp0, separated by commas";
    let is_there = |device: &Device| link || *device != Device::QuipuQp0;
    let shown = match lookup("QUIPU_DEVICES")? {
        None => Device::ALL.into_iter().filter(is_there).collect(),
        Some(value) => {
            let find = |name: &str| Device::named(name.trim()).filter(is_there);
            let named: Option<Vec<_>> = value.split(',').map(find).collect();
            let twice =
                |named: &[Device]| (1..named.len()).any(|at| named[..at].contains(&named[at]));
            let named = named.filter(|named| !twice(named));
            named.ok_or_else(|| bad("QUIPU_DEVICES", value, expected))?
        }
    };
    let cm = match lookup("QUIPU_CM_DEVICE")? {
        None if shown.contains(&Device::Quipu0) => Device::Quipu0,
        None => shown[0],
        Some(value) => {
            let named = Device::named(value.trim()).filter(|named| shown.contains(named));
            named.ok_or_else(|| bad("QUIPU_CM_DEVICE", value, "one of the visible devices"))?
        }
    };
    Ok((shown, cm))
}

/// Where packets are captured.
fn capture(
    lookup: &impl Lookup,
    path: Option<PathBuf>,
) -> Result<Option<CaptureConfig>, ConfigError> {
    let megabytes = "a number from 1 to 1048576";
    let megabytes = number(lookup, "QUIPU_PCAP_MB", 1024, 1..=1 << 20, megabytes)?;
    let snaplen = "a number from 0 to 65535";
    let snaplen = number(lookup, "QUIPU_PCAP_SNAPLEN", 0, 0..=65_535, snaplen)?;
    let file_bytes = u64::from(megabytes) << 20;
    Ok(path.map(|path| CaptureConfig { path, file_bytes, snaplen }))
}

/// How the strict mode places writes.
fn strict_order(lookup: &impl Lookup) -> Result<Option<StrictOrder>, ConfigError> {
    let StrictOrder { order, hold } = StrictOrder::default();
    let order = match lookup("QUIPU_STRICT_ORDER")? {
        None => Some(order),
        Some(value) => parse_order(value.trim()).ok_or_else(|| {
            let expected = "reverse, shuffle, shuffle:SEED with a number, or off";
            bad("QUIPU_STRICT_ORDER", value, expected)
        })?,
    };
    let (default, expected) = (hold.as_micros() as u32, "a number from 1 to 60000000");
    let hold = number(lookup, "QUIPU_STRICT_HOLD_US", default, 1..=60_000_000, expected)?;
    let hold = Duration::from_micros(hold.into());
    Ok(order.map(|order| StrictOrder { order, hold }))
}

/// `None` for what is no order, `Some(None)` for none.
fn parse_order(text: &str) -> Option<Option<WriteOrder>> {
    Some(match (text, text.strip_prefix("shuffle:")) {
        ("off", _) => None,
        ("reverse", _) => Some(WriteOrder::Reverse),
        ("shuffle", _) => Some(WriteOrder::Shuffle { seed: 1 }),
        (_, seed) => Some(WriteOrder::Shuffle { seed: seed?.parse().ok()? }),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn reads_the_environment() {
        let config = Config::from_lookup(|name| match name {
            "QUIPU_ADDRESS" => Some(" ::1 ".into()),
            "QUIPU_SAME_HOST" => Some("never".into()),
            "QUIPU_CRC" => Some(" always".into()),
            "QUIPU_LINK_LAYER" => Some("infiniband".into()),
            "QUIPU_ARENA_MB" => Some("16".into()),
            "QUIPU_MULTICAST_PORT" => Some("7000".into()),
            "QUIPU_CONGESTION" => Some(OsString::new()),
            _ => None,
        })
        .unwrap();
        assert_eq!(config.address, Some("::1".parse().unwrap()));
        assert_eq!((config.same_host, config.crc), (SameHost::Never, Crc::Always));
        assert_eq!(config.link_layer, LinkLayer::InfiniBand);
        assert_eq!((config.arena_bytes, config.multicast_port), (16 << 20, 7000));
        assert_eq!(config.congestion, None);
        assert_eq!(config.capture, None);
        let config = Config::from_lookup(|name| match name {
            "QUIPU_PCAP" => Some("/tmp/a b.pcapng".into()),
            "QUIPU_PCAP_MB" => Some("2".into()),
            "QUIPU_COUNTERS" => Some("never".into()),
            _ => None,
        });
        let config = config.unwrap();
        assert!(!config.counters);
        let capture = config.capture.unwrap();
        assert_eq!(capture.path, PathBuf::from("/tmp/a b.pcapng"));
        assert_eq!((capture.file_bytes, capture.snaplen), (2 << 20, 0));
        let devices = |shown: &'static str, cm: &'static str| {
            Config::from_lookup(move |name| match name {
                "QUIPU_DEVICES" => Some(shown.into()),
                "QUIPU_CM_DEVICE" => Some(cm.into()),
                _ => None,
            })
            .map(|config| (config.devices, config.cm_device))
        };
        let (ca, rnic) = (Device::Quipu0, Device::QuipuIw0);
        assert_eq!(devices("", "").unwrap(), (vec![ca, rnic], ca));
        assert_eq!(devices("quipu0", "").unwrap(), (vec![ca], ca));
        assert_eq!(devices("quipu_iw0", "").unwrap(), (vec![rnic], rnic));
        assert_eq!(devices("quipu_iw0, quipu0", "quipu_iw0").unwrap(), (vec![rnic, ca], rnic));
        assert!(devices("quipu1", "").is_err() && devices("quipu0,quipu0", "").is_err());
        assert!(devices("quipu0", "quipu_iw0").is_err());
        // Without a packet link there is none of QPIP.
        assert!(devices("quipu_qp0", "").is_err() && devices("", "quipu_qp0").is_err());
        let linked = |shown: &'static str, cm: &'static str| {
            Config::from_lookup(move |name| match name {
                "QUIPU_DEVICES" => Some(shown.into()),
                "QUIPU_CM_DEVICE" => Some(cm.into()),
                "QUIPU_QPIP_LINK" => Some("tap:qp0".into()),
                _ => None,
            })
            .map(|config| (config.devices, config.cm_device))
        };
        let tcp = Device::QuipuQp0;
        assert_eq!(linked("", "").unwrap(), (vec![ca, rnic, tcp], ca));
        assert_eq!(linked("quipu_qp0", "").unwrap(), (vec![tcp], tcp));
        assert_eq!(linked("", "quipu_qp0").unwrap(), (vec![ca, rnic, tcp], tcp));
        let error = Config::from_lookup(|n| (n == "QUIPU_CRC").then(|| "on".into()));
        assert!(error.unwrap_err().to_string().contains("auto, always or never"));
        let error = Config::from_lookup(|n| (n == "QUIPU_PCAP_MB").then(|| "0".into()));
        assert!(error.unwrap_err().to_string().contains("from 1 to 1048576"));
        let error = Config::from_lookup(|n| (n == "QUIPU_ADDRESS").then(|| "eth0".into()));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("QUIPU_ADDRESS=eth0") && text.contains("an IP address"));
    }

    #[test]
    fn a_file_may_have_any_name_and_other_values_are_text() {
        let odd = |name: &'static str| {
            let value = OsString::from_vec(b"/tmp/\xff".to_vec());
            Config::from_lookup(move |asked| (asked == name).then(|| value.clone()))
        };
        let file = Some(PathBuf::from(OsString::from_vec(b"/tmp/\xff".to_vec())));
        let named = |name, of: fn(Config) -> Option<PathBuf>| odd(name).map(of);
        assert_eq!(named("QUIPU_FAULTS", |it| it.faults).unwrap(), file);
        assert_eq!(named("QUIPU_FAULT_LOG", |it| it.fault_log).unwrap(), file);
        assert_eq!(named("QUIPU_FAULT_REPLAY", |it| it.fault_replay).unwrap(), file);
        assert_eq!(named("QUIPU_STRICT_LOG", |it| it.strict_log).unwrap(), file);
        assert_eq!(named("QUIPU_PCAP", |it| Some(it.capture?.path)).unwrap(), file);
        for name in ["QUIPU_ADDRESS", "QUIPU_QPIP_LINK", "QUIPU_LOG", "QUIPU_DEVICES"] {
            let error = odd(name).unwrap_err();
            assert_eq!((error.name, error.expected), (name, "text in UTF-8"));
        }
        let blank = |name: &str| (name == "QUIPU_FAULTS").then(|| OsString::from("  "));
        assert_eq!(Config::from_lookup(blank).unwrap().faults, None);
    }

    #[test]
    fn reads_how_writes_are_placed() {
        let read = |order: &'static str, hold: &'static str| {
            Config::from_lookup(|name| match name {
                "QUIPU_STRICT_ORDER" => Some(order.into()),
                "QUIPU_STRICT_HOLD_US" => Some(hold.into()),
                _ => None,
            })
            .map(|config| config.strict_order)
        };
        let (ms, hold) = (Duration::from_millis(1), Duration::from_micros(7));
        let shuffled = |seed| WriteOrder::Shuffle { seed };
        for (order, hold_us, expected) in [
            ("", "", Some((WriteOrder::Reverse, ms))),
            ("reverse", "7", Some((WriteOrder::Reverse, hold))),
            ("shuffle", "", Some((shuffled(1), ms))),
            (" shuffle:12 ", "7", Some((shuffled(12), hold))),
            ("off", "7", None),
        ] {
            let expected = expected.map(|(order, hold)| StrictOrder { order, hold });
            assert_eq!(read(order, hold_us), Ok(expected), "{order}");
        }
        for (order, hold) in
            [("shuffle:", ""), ("shuffle:x", ""), ("back", ""), ("", "0"), ("", "x")]
        {
            assert!(read(order, hold).is_err(), "{order} {hold}");
        }
    }
}
