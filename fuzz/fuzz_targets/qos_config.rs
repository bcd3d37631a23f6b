//! QoS configurations: whatever the text is, it is refused with a line and a reason, or it is a configuration
//! that can be written, read again and used. The first octet says how the text is made: as it is, or of words
//! that such files have.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_qos::{Config, Demand, LANES, Port, Service};
use shares::Shares;

static SHARES: Shares<4> = Shares::new(["OpenSM's form", "TOML", "a rule", "a grant"]);

const WORDS: [&str; 40] = [
    "qos_max_vls ",
    "qos_high_limit ",
    "qos_vlarb_high ",
    "qos_vlarb_low ",
    "qos_sl2vl ",
    "qos_ca_high_limit ",
    "qos_ca_vlarb_low ",
    "qos-ulps\n",
    "end-qos-ulps\n",
    "qos-levels\n",
    "end-qos-levels\n",
    "default",
    "sdp",
    "any",
    ", port-num ",
    ", service-id ",
    ", pkey ",
    " : ",
    ":",
    ",",
    "-",
    "\n",
    "0x",
    "0",
    "1",
    "5",
    "14",
    "255",
    "9999",
    "rate = \"1Gbps\"\n",
    "vlarb_low = \"",
    "\"\n",
    "high_limit = ",
    "[dscp]\n",
    "[rates]\n",
    " = ",
    "rules = [\"",
    "\"]\n",
    "strict = true\n",
    "#",
];

fn text(data: &[u8]) -> String {
    match data.split_first() {
        Some((form, words)) if form % 2 == 0 => {
            words.iter().map(|&word| WORDS[usize::from(word) % WORDS.len()]).collect()
        }
        Some((_, bytes)) => String::from_utf8_lossy(bytes).into_owned(),
        None => String::new(),
    }
}

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let text = text(data);
    let (config, notes) = match Config::parse(&text, "file") {
        Ok(read) => read,
        Err(error) => {
            assert!(error.line >= 1 && error.line <= text.lines().count().max(1) + 1, "{error}");
            assert!(!error.what.is_empty() && !error.what.contains('\n'), "{error}");
            return;
        }
    };
    if !text.trim().is_empty() {
        SHARES.reach(if text.contains('=') { "TOML" } else { "OpenSM's form" });
    }
    assert!(notes.iter().all(|note| !note.what.is_empty()));
    let (again, _) = Config::parse(&config.to_toml(), "again").expect("what is written is read");
    assert_eq!(again, config);
    let service = Service { id: Some(0x10000), program: "perf", is_ipoib: false };
    if let Some(sl) = config.service_level(&service) {
        SHARES.reach("a rule");
        assert!(sl < 16);
    }
    let mut port = Port::new(&config, 2);
    let demand = Demand { octets: [9000; LANES], packet: [4122; LANES], ..Demand::default() };
    let granted = port.exchange(1, 1 << 32, &demand);
    let lanes =
        (0..LANES).filter(|&lane| granted[lane] > 0).fold(0u16, |mask, lane| mask | 1 << lane);
    assert_eq!(lanes & config.starved_lanes(), 0, "a starved lane sends nothing");
    if lanes != 0 {
        SHARES.reach("a grant");
    }
});
