//! What is shown of a call, as text and as JSON.

use std::fmt::{self, Display, Write};

/// A value of an argument or a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A null pointer.
    Null,
    /// A number, decimal.
    Number(i128),
    /// An address, a key, or bits.
    Hex(u64),
    /// A name, as programs write it: a constant, or several with bars between them.
    Word(String),
    /// A string of the program.
    Text(String),
    /// Bytes of the program, in hexadecimal.
    Bytes(Vec<u8>),
    /// Several.
    List(Vec<Value>),
    /// The fields of a structure.
    Record(Vec<(&'static str, Value)>),
}

impl Value {
    /// The value as JSON. Numbers in hexadecimal and names are strings.
    pub(crate) fn json(&self) -> Json<'_> {
        Json(self)
    }
}

/// Writes elements with commas between them.
fn separated<T>(
    f: &mut fmt::Formatter<'_>,
    all: &[T],
    between: &str,
    mut each: impl FnMut(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    for (index, one) in all.iter().enumerate() {
        if index > 0 {
            f.write_str(between)?;
        }
        each(f, one)?;
    }
    Ok(())
}

fn hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// A string between quotation marks, as both texts and JSON (RFC 8259, section 7) have it.
fn quoted(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' | '\\' => write!(f, "\\{c}")?,
            '\n' => f.write_str("\\n")?,
            c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c))?,
            c => f.write_char(c)?,
        }
    }
    f.write_char('"')
}

impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("NULL"),
            Self::Number(number) => number.fmt(f),
            Self::Hex(number) => write!(f, "{number:#x}"),
            Self::Word(word) => f.write_str(word),
            Self::Text(text) => quoted(f, text),
            Self::Bytes(bytes) => hex(f, bytes),
            Self::List(all) => {
                f.write_str("[")?;
                separated(f, all, ", ", |f, one| one.fmt(f))?;
                f.write_str("]")
            }
            Self::Record(fields) => {
                f.write_str("{")?;
                separated(f, fields, ", ", |f, (name, value)| write!(f, "{name}={value}"))?;
                f.write_str("}")
            }
        }
    }
}

/// A value as JSON.
pub(crate) struct Json<'a>(&'a Value);

impl Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::Null => f.write_str("null"),
            Value::Number(number) => number.fmt(f),
            Value::Hex(number) => write!(f, "\"{number:#x}\""),
            Value::Word(text) | Value::Text(text) => quoted(f, text),
            Value::Bytes(bytes) => {
                f.write_char('"')?;
                hex(f, bytes)?;
                f.write_char('"')
            }
            Value::List(all) => {
                f.write_str("[")?;
                separated(f, all, ",", |f, one| one.json().fmt(f))?;
                f.write_str("]")
            }
            Value::Record(fields) => {
                f.write_str("{")?;
                separated(f, fields, ",", |f, (name, value)| {
                    write!(f, "\"{name}\":{}", value.json())
                })?;
                f.write_str("}")
            }
        }
    }
}
