//! NBD URIs: `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`, the same with `nbds` for TLS, and two
//! schemes of Quipu's own for queue pairs: `nbd+rdma://` and `nbd+qpip://`.
//!
//! Source: the NBD project's URI specification (`doc/uri.md`).

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::MAX_NAME;

/// The registered port of NBD.
pub const PORT: u16 = 10809;

/// How the server is reached.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Place {
    /// TCP of the kernel.
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A UNIX socket.
    Unix(PathBuf),
    /// Reliable connected queue pairs, by `rdma_cm`.
    Rdma {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A QPIP queue pair: the adapter's own TCP.
    Qpip {
        /// An address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

/// A URI.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Uri {
    /// How the server is reached.
    pub place: Place,
    /// Whether TLS is asked for.
    pub tls: bool,
    /// The folder with `ca-cert.pem` and, for a client certificate, `client-cert.pem` and `client-key.pem`.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have; by default the host.
    pub host_name: Option<String>,
    /// The export.
    pub export: String,
}

/// Why a text is no NBD URI.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "\"{uri}\" is not an NBD URI: {why}; write nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, nbd+rdma://HOST/EXPORT or nbd+qpip://HOST/EXPORT"
)]
pub struct UriError {
    uri: String,
    why: String,
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        parse(text).map_err(|why| UriError { uri: text.to_owned(), why })
    }
}

fn parse(text: &str) -> Result<Uri, String> {
    let (scheme, rest) = text.split_once("://").ok_or("it has no scheme")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let authority = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    let export = decode(path)?;
    if export.len() > MAX_NAME {
        return Err(format!("the export's name is longer than {MAX_NAME} bytes"));
    }
    let mut uri = Uri {
        place: Place::Unix(PathBuf::new()),
        tls: scheme.starts_with("nbds"),
        certificates: None,
        host_name: None,
        export,
    };
    let mut socket = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decode(value)?;
        match key {
            "socket" => socket = Some(PathBuf::from(value)),
            "tls-certificates" => uri.certificates = Some(value.into()),
            "tls-hostname" => uri.host_name = Some(value),
            // Later versions may have more; the specification says to pass over them.
            _ => {}
        }
    }
    uri.place = match scheme {
        "nbd+unix" | "nbds+unix" => Place::Unix(socket.ok_or("it names no socket")?),
        "nbd" | "nbds" | "nbd+rdma" | "nbd+qpip" => {
            let (host, port) = host_and_port(authority)?;
            match scheme {
                "nbd+rdma" => Place::Rdma { host, port },
                "nbd+qpip" => Place::Qpip { host, port },
                _ => Place::Tcp { host, port },
            }
        }
        other => return Err(format!("the scheme \"{other}\" is not known")),
    };
    Ok(uri)
}

fn host_and_port(authority: &str) -> Result<(String, u16), String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("a bracket is not closed")?;
            (host, port.strip_prefix(':'))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let host = if host.is_empty() { "localhost".to_owned() } else { decode(host)? };
    let port = match port {
        None | Some("") => PORT,
        Some(port) => port.parse().map_err(|_| format!("\"{port}\" is not a port"))?,
    };
    Ok((host, port))
}

/// Replaces `%XX`.
fn decode(text: &str) -> Result<String, String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            let digits = bytes.get(at + 1..at + 3).and_then(|two| std::str::from_utf8(two).ok());
            let byte = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
            out.push(byte.ok_or("a % is not followed by two hexadecimal digits")?);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).map_err(|_| "it is not UTF-8 after decoding".to_owned())
}

/// Writes `%XX` for all but letters, digits and `-._~/`.
fn encode(text: &str, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            write!(out, "{}", char::from(byte))?;
        } else {
            write!(out, "%{byte:02X}")?;
        }
    }
    Ok(())
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.tls { "s" } else { "" };
        let place = |host: &str, port: u16| {
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            if port == PORT { host } else { format!("{host}:{port}") }
        };
        match &self.place {
            Place::Tcp { host, port } => write!(f, "nbd{s}://{}/", place(host, *port))?,
            Place::Rdma { host, port } => write!(f, "nbd+rdma://{}/", place(host, *port))?,
            Place::Qpip { host, port } => write!(f, "nbd+qpip://{}/", place(host, *port))?,
            Place::Unix(_) => write!(f, "nbd{s}+unix:///")?,
        }
        encode(&self.export, f)?;
        if let Place::Unix(path) = &self.place {
            f.write_str("?socket=")?;
            encode(&path.to_string_lossy(), f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Place {
        text.parse::<Uri>().unwrap().place
    }

    #[test]
    fn places() {
        let tcp = |host: &str, port| Place::Tcp { host: host.into(), port };
        assert_eq!(place("nbd://example.com"), tcp("example.com", PORT));
        assert_eq!(place("nbd://example.com:1234/a"), tcp("example.com", 1234));
        assert_eq!(place("nbd://[::1]:5/"), tcp("::1", 5));
        assert_eq!(place("nbd:///disk"), tcp("localhost", PORT));
        assert_eq!(place("nbd+unix:///?socket=/tmp/s"), Place::Unix("/tmp/s".into()));
        let rdma = Place::Rdma { host: "10.0.0.1".into(), port: PORT };
        assert_eq!(place("nbd+rdma://10.0.0.1/x"), rdma);
    }

    #[test]
    fn exports_are_decoded_and_texts_go_round() {
        for text in ["nbd://h/a%20b", "nbds+unix:///x?socket=/tmp/a%20b", "nbd+qpip://[fd00::1]:7/"]
        {
            let uri: Uri = text.parse().unwrap();
            assert_eq!(uri.to_string(), text);
        }
        let uri: Uri = "nbds://h/a%2Fb?tls-certificates=/etc/pki".parse().unwrap();
        assert_eq!((uri.export.as_str(), uri.tls), ("a/b", true));
        assert_eq!(uri.certificates, Some("/etc/pki".into()));
    }

    #[test]
    fn wrong_texts_say_why() {
        for (text, why) in [
            ("http://a", "scheme"),
            ("nbd", "scheme"),
            ("nbd://a:b/", "not a port"),
            ("nbd+unix:///x", "no socket"),
            ("nbd://a/%zz", "hexadecimal"),
            ("nbd://[::1", "bracket"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
