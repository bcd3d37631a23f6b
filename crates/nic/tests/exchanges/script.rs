//! How the exchanges are written. One step a line; a line that begins with blanks goes on with the one
//! before; `#` begins a comment.
//!
//! | line | meaning |
//! |---|---|
//! | `case TITLE` | a new case; the title begins with the RFC and section |
//! | `as ROLE OPTION...` | which end this is, and what its connection management wants |
//! | `> BYTES` | the peer sends |
//! | `< BYTES` | since the last such line, exactly this was sent to the peer |
//! | `= EXPECTATION` | a completion, an event, or another fact, in order within its kind |
//! | anything else | a call of the program, or an act of the peer: see `peer.rs` |
//!
//! `full` leaves no room for what is to be sent, `room N` makes some for N bytes, and `room` for all.
//!
//! Options: `open` (start-up is over: CRCs, no markers, no peer-to-peer mode), `rev=N`, `crc=off`, `ird=N`,
//! `ord=N` (4 if not given), `p2p` or `p2p=write,read,send`, `data=TEXT`, `refuse`, `rfc7306`,
//! `speaks=TIME` (the silence after which a responder speaks first). A time is a number of seconds, or of
//! milliseconds with `ms` behind it.
//!
//! Bytes: hexadecimal digits; `"text"`; `zero*N`; `fill*N` (a pattern; `fill*N@M`: from its byte M on); `pad`
//! (zeros up to a multiple of four bytes of the FPDU); `crc` (CRC32C of all since the last one, the
//! beginning of the line, or `fpdu`); `badcrc`; `$NAME` and `$NAME+N`, which stand for a key (4 bytes) or
//! an address (8 bytes) of the program.

use std::collections::BTreeMap;

/// One exchange.
pub struct Case {
    pub file: String,
    pub title: String,
    pub options: Vec<String>,
    pub steps: Vec<Step>,
}

/// A line.
pub struct Step {
    pub line: usize,
    pub text: String,
}

impl Case {
    /// An upper bound of the bytes of the longest `>`.
    pub fn longest_arrival(&self) -> usize {
        let names =
            BTreeMap::from(["stag", "ro", "wo", "mw", "other"].map(|name| (name, Symbol::Key(0))))
                .into_iter()
                .chain([("addr", Symbol::Address(0))])
                .collect();
        let lengths = self.steps.iter().filter_map(|step| step.text.strip_prefix('>'));
        lengths.map(|text| bytes(text, &names).len()).max().unwrap_or(0)
    }
}

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub enum Symbol {
    Key(u32),
    Address(u64),
}

pub type Symbols = BTreeMap<&'static str, Symbol>;

/// All cases of a file.
pub fn parse(file: &str, text: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim_end();
        let place = format!("{file}:{}", number + 1);
        if line.is_empty() {
            continue;
        }
        if let Some(title) = line.strip_prefix("case ") {
            assert!(title.starts_with("RFC "), "{place}: a case cites its section");
            let (file, title) = (file.to_owned(), title.to_owned());
            cases.push(Case { file, title, options: Vec::new(), steps: Vec::new() });
            continue;
        }
        let case = cases.last_mut().unwrap_or_else(|| panic!("{place}: outside of a case"));
        if let Some(options) = line.strip_prefix("as ") {
            case.options = options.split_whitespace().map(str::to_owned).collect();
        } else if line.starts_with(' ') {
            let step = case.steps.last_mut().unwrap_or_else(|| panic!("{place}: goes on what?"));
            step.text.push_str(line);
        } else {
            case.steps.push(Step { line: number + 1, text: line.to_owned() });
        }
    }
    cases
}

/// The words of a line; text in quotation marks is one word, marks included.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let end = match rest.strip_prefix('"') {
            Some(quoted) => quoted.find('"').expect("a closing quotation mark") + 2,
            None => rest.find(' ').unwrap_or(rest.len()),
        };
        words.push(rest[..end].to_owned());
        rest = rest[end..].trim_start();
    }
    words
}

/// The pattern of `fill*N`.
fn fill(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| (at % 251) as u8).collect()
}

/// The value of `$NAME` or `$NAME+N`.
pub fn symbol(word: &str, symbols: &Symbols) -> Symbol {
    let name = word.strip_prefix('$').expect("a symbol begins with $");
    let (name, plus) = name.split_once('+').unwrap_or((name, "0"));
    let plus: u64 = plus.parse().expect("a number behind the plus");
    match symbols.get(name).unwrap_or_else(|| panic!("no symbol {name}")) {
        Symbol::Key(key) => Symbol::Key(key.wrapping_add(plus as u32)),
        Symbol::Address(address) => Symbol::Address(address + plus),
    }
}

/// The bytes that a line stands for.
pub fn bytes(text: &str, symbols: &Symbols) -> Vec<u8> {
    let mut out = Vec::new();
    let mut fpdu = 0;
    for word in words(text) {
        match word.as_str() {
            "fpdu" => fpdu = out.len(),
            "pad" => out.resize(fpdu + (out.len() - fpdu).next_multiple_of(4), 0),
            "crc" | "badcrc" => {
                let wrong = u32::from(word == "badcrc");
                let crc = crc32c(&out[fpdu..]) ^ wrong;
                out.extend(crc.to_le_bytes());
                fpdu = out.len();
            }
            _ => out.extend(plain_bytes(&word, symbols)),
        }
    }
    out
}

fn plain_bytes(word: &str, symbols: &Symbols) -> Vec<u8> {
    if let Some(text) = word.strip_prefix('"') {
        return text.trim_end_matches('"').into();
    }
    if word.starts_with('$') {
        return match symbol(word, symbols) {
            Symbol::Key(key) => key.to_be_bytes().into(),
            Symbol::Address(address) => address.to_be_bytes().into(),
        };
    }
    let number = |text: &str| text.parse::<usize>().expect("a number");
    if let Some(len) = word.strip_prefix("zero*") {
        return vec![0; number(len)];
    }
    if let Some(len) = word.strip_prefix("fill*") {
        let (len, from) = len.split_once('@').unwrap_or((len, "0"));
        return fill(number(from), number(len));
    }
    assert!(word.len().is_multiple_of(2), "half a byte: {word}");
    let byte = |at| u8::from_str_radix(&word[at..at + 2], 16).expect("hexadecimal digits");
    (0..word.len()).step_by(2).map(byte).collect()
}

/// CRC32C bit by bit, so that the library is not checked against itself (RFC 3720 B.4, RFC 5044 4.4).
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[test]
fn crc_of_the_examples() {
    // RFC 3720 B.4.
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
}
