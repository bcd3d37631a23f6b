//! Tokens of preprocessed C, with the file and line that the preprocessor's markers give them.

use std::rc::Rc;

use crate::error::Error;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Name,
    Number,
    Text,
    Char,
    Punct,
    End,
}

/// One token: where it stands in the source text, and where its line came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) line: u32,
    pub(crate) file: u32,
    /// It is of a header of the system.
    pub(crate) system: bool,
}

/// All tokens of a text.
#[derive(Debug)]
pub(crate) struct Tokens {
    pub(crate) list: Vec<Token>,
    pub(crate) files: Vec<Rc<str>>,
}

/// Punctuators of more than one character, longest first.
const LONG: [&str; 23] = [
    "...", "<<=", ">>=", "->", "++", "--", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+=",
    "-=", "*=", "/=", "%=", "&=", "|=", "^=", "::",
];

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    file: u32,
    system: bool,
    tokens: Tokens,
}

/// Cuts preprocessed text into tokens. The last one is an [`Kind::End`].
pub(crate) fn lex(text: &str) -> Result<Tokens, Error> {
    let tokens = Tokens { list: Vec::new(), files: vec!["<input>".into()] };
    let mut lexer = Lexer { text, at: 0, line: 1, file: 0, system: false, tokens };
    lexer.run()?;
    Ok(lexer.tokens)
}

impl Lexer<'_> {
    fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    fn run(&mut self) -> Result<(), Error> {
        let mut line_begins = true;
        while self.at < self.text.len() {
            let byte = self.byte(0);
            match byte {
                b'\n' => {
                    self.at += 1;
                    self.line += 1;
                    line_begins = true;
                    continue;
                }
                b' ' | b'\t' | b'\r' | 0x0b | 0x0c => {
                    self.at += 1;
                    continue;
                }
                b'#' if line_begins => {
                    self.directive();
                    continue;
                }
                _ => {}
            }
            line_begins = false;
            let start = self.at;
            let kind = self.token(byte)?;
            self.push(kind, start);
        }
        self.push(Kind::End, self.text.len());
        Ok(())
    }

    fn push(&mut self, kind: Kind, start: usize) {
        let (line, file, system) = (self.line, self.file, self.system);
        self.tokens.list.push(Token { kind, start, end: self.at, line, file, system });
    }

    fn token(&mut self, byte: u8) -> Result<Kind, Error> {
        let is_name =
            |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$' || byte >= 0x80;
        if matches!(byte, b'L' | b'u' | b'U') {
            let prefix = if self.byte(0) == b'u' && self.byte(1) == b'8' { 2 } else { 1 };
            if matches!(self.byte(prefix), b'"' | b'\'') {
                self.at += prefix;
                return self.quoted(self.byte(0));
            }
        }
        match byte {
            b'"' | b'\'' => self.quoted(byte),
            b'0'..=b'9' => {
                self.number();
                Ok(Kind::Number)
            }
            b'.' if self.byte(1).is_ascii_digit() => {
                self.number();
                Ok(Kind::Number)
            }
            _ if is_name(byte) => {
                while is_name(self.byte(0)) {
                    self.at += 1;
                }
                Ok(Kind::Name)
            }
            _ => {
                let rest = &self.text[self.at..];
                let long = LONG.iter().find(|long| rest.starts_with(**long));
                self.at += long.map_or(1, |long| long.len());
                Ok(Kind::Punct)
            }
        }
    }

    fn number(&mut self) {
        loop {
            let byte = self.byte(0);
            if matches!(byte, b'e' | b'E' | b'p' | b'P') && matches!(self.byte(1), b'+' | b'-') {
                self.at += 2;
            } else if byte.is_ascii_alphanumeric() || byte == b'.' || byte == b'_' {
                self.at += 1;
            } else {
                return;
            }
        }
    }

    fn quoted(&mut self, quote: u8) -> Result<Kind, Error> {
        let line = self.line;
        self.at += 1;
        while self.at < self.text.len() {
            match self.byte(0) {
                b'\\' => {
                    self.line += u32::from(self.byte(1) == b'\n');
                    self.at += 1 + usize::from(self.at + 1 < self.text.len());
                    // The character after a backslash may have several bytes.
                    while !self.text.is_char_boundary(self.at) {
                        self.at += 1;
                    }
                }
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                }
                byte => {
                    self.at += 1;
                    if byte == quote {
                        return Ok(if quote == b'"' { Kind::Text } else { Kind::Char });
                    }
                }
            }
        }
        let file = self.tokens.files[self.file as usize].clone();
        Err(Error::at(&file, line, "a string or character constant has no end"))
    }

    /// `# 12 "file.c" 1 3`, `#line 12 "file.c"`; others are left alone.
    fn directive(&mut self) {
        let end = self.text[self.at..].find('\n').map_or(self.text.len(), |len| self.at + len);
        let line = self.text[self.at + 1..end].trim();
        let line = line.strip_prefix("line").unwrap_or(line).trim_start();
        self.at = end;
        let Some((number, rest)) = line.split_once(' ') else { return };
        let Ok(number) = number.parse::<u32>() else { return };
        let (name, flags) =
            match rest.trim().strip_prefix('"').and_then(|rest| rest.rsplit_once('"')) {
                Some(found) => found,
                None => return,
            };
        // The line feed after the marker will count.
        self.line = number.saturating_sub(1);
        self.system = flags.split(' ').any(|flag| flag == "3");
        let known = self.tokens.files.iter().rposition(|file| &**file == name);
        self.file = match known {
            Some(known) => known as u32,
            None => {
                self.tokens.files.push(name.into());
                self.tokens.files.len() as u32 - 1
            }
        };
    }
}

/// Joins strings that contain raw line feeds, which programs of the 1990s have and today's preprocessors
/// refuse: each becomes `\n`, a backslash and a line feed, so that line numbers stay.
pub fn join_strings(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let (mut at, mut quote) = (0, 0u8);
    while at < bytes.len() {
        let (byte, next) = (bytes[at], bytes.get(at + 1).copied().unwrap_or(0));
        match (quote, byte) {
            (0, b'/') if next == b'*' => {
                let len = text[at + 2..].find("*/").map_or(bytes.len() - at, |len| len + 4);
                out.extend_from_slice(&bytes[at..at + len]);
                at += len;
                continue;
            }
            (0, b'/') if next == b'/' => {
                let len = text[at..].find('\n').unwrap_or(bytes.len() - at);
                out.extend_from_slice(&bytes[at..at + len]);
                at += len;
                continue;
            }
            (0, b'"' | b'\'') => quote = byte,
            // An apostrophe in text that is not compiled is no quote.
            (b'\'', b'\n') => quote = 0,
            (b'"', b'\n') => {
                out.extend_from_slice(b"\\n\\");
            }
            (_, b'\\') if quote != 0 && at + 1 < bytes.len() => {
                out.push(byte);
                at += 1;
            }
            _ if quote != 0 && byte == quote => quote = 0,
            _ => {}
        }
        out.push(bytes[at]);
        at += 1;
    }
    // Only ASCII was inserted, next to ASCII.
    String::from_utf8(out).unwrap_or_else(|_| text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<&str> {
        lex(text).unwrap().list.iter().map(|token| &text[token.start..token.end]).collect()
    }

    #[test]
    fn text_falls_into_tokens() {
        let text = "a->b <<= 1.5e+3f ... L\"x\\\"y\" '\\'' A[n]::[m] x:=y p:-q";
        let expected = [
            "a",
            "->",
            "b",
            "<<=",
            "1.5e+3f",
            "...",
            "L\"x\\\"y\"",
            "'\\''",
            "A",
            "[",
            "n",
            "]",
            "::",
            "[",
            "m",
            "]",
            "x",
            ":",
            "=",
            "y",
            "p",
            ":",
            "-",
            "q",
            "",
        ];
        assert_eq!(texts(text), expected);
    }

    #[test]
    fn markers_say_where_lines_come_from() {
        let tokens = lex("a\n# 7 \"x.h\" 1 3\nb\nc\n# 3 \"y.sc\" 2\nd").unwrap();
        let seen: Vec<_> = tokens.list[..4]
            .iter()
            .map(|token| (token.line, &*tokens.files[token.file as usize], token.system))
            .collect();
        assert_eq!(
            seen,
            [(1, "<input>", false), (7, "x.h", true), (8, "x.h", true), (3, "y.sc", false)]
        );
    }

    #[test]
    fn raw_line_feeds_in_strings_are_joined() {
        let text = "f(\"a\nb\"); // don't\n'\"' \"\\\"\" /* \"\n */ x";
        assert_eq!(join_strings(text), "f(\"a\\n\\\nb\"); // don't\n'\"' \"\\\"\" /* \"\n */ x");
        assert!(lex("\"abc").is_err());
    }
}
