//! TLS by rustls: certificates of both ends. Pre-shared keys (`tls-psk`) are not in rustls.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quipu_nbd::uri::{Place, Uri};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

use super::stream::{Socket, TlsStream};

/// Why TLS cannot begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum TlsError {
    #[error("{}: {why}", .path.display())]
    File { path: PathBuf, why: String },
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error(
        "no certificates are named: append ?tls-certificates=DIR to the URI, with ca-cert.pem in DIR"
    )]
    NoCertificates,
    #[error(
        "the server's name is no name that a certificate can have ({0}): append tls-hostname=NAME"
    )]
    Name(#[from] InvalidDnsNameError),
    #[error("bytes came before TLS had begun")]
    Early,
}

fn file_error(path: &Path, why: impl std::fmt::Display) -> TlsError {
    TlsError::File { path: path.to_owned(), why: why.to_string() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_file_iter(path).map_err(|error| file_error(path, error))?;
    let found: Result<Vec<_>, _> = found.collect();
    let found = found.map_err(|error| file_error(path, error))?;
    if found.is_empty() { Err(file_error(path, "it has no certificate")) } else { Ok(found) }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| file_error(path, error))
}

fn authorities(path: &Path) -> Result<Arc<RootCertStore>, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path)? {
        store.add(certificate)?;
    }
    Ok(Arc::new(store))
}

/// The server's certificates.
#[derive(clap::Args, Debug)]
pub(super) struct TlsOptions {
    /// Require TLS (nbds://): the server's certificate chain, as PEM. Clients without TLS are refused.
    #[arg(long, value_name = "FILE", requires = "tls_key", conflicts_with = "rdma")]
    pub(super) tls_certificate: Option<PathBuf>,
    /// The private key of --tls-certificate, as PEM.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Take only clients with a certificate that one of these authorities has signed, as PEM.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
}

impl TlsOptions {
    /// What the server's connections need, if TLS is wanted.
    pub(super) fn load(&self) -> Result<Option<Arc<ServerConfig>>, TlsError> {
        let (Some(chain), Some(secret)) = (&self.tls_certificate, &self.tls_key) else {
            return Ok(None);
        };
        let config = ServerConfig::builder();
        let config = match &self.tls_authority {
            None => config.with_no_client_auth(),
            Some(path) => {
                let verifier = WebPkiClientVerifier::builder(authorities(path)?).build();
                config.with_client_cert_verifier(verifier.map_err(|it| file_error(path, it))?)
            }
        };
        Ok(Some(Arc::new(config.with_single_cert(certificates(chain)?, key(secret)?)?)))
    }
}

/// Begins TLS as a server. The handshake takes place with the first bytes.
pub(super) fn accept(config: &Arc<ServerConfig>, socket: Socket) -> Result<Socket, TlsError> {
    let connection = ServerConnection::new(Arc::clone(config))?;
    Ok(Socket::Tls(TlsStream::server(connection, socket)))
}

/// Begins TLS as a client: `ca-cert.pem` of the URI's folder has to have signed the server's certificate.
pub(super) fn connect(uri: &Uri, socket: Socket) -> Result<Socket, TlsError> {
    let folder = uri.certificates.as_ref().ok_or(TlsError::NoCertificates)?;
    let config = ClientConfig::builder();
    let config = config.with_root_certificates(authorities(&folder.join("ca-cert.pem"))?);
    let own = folder.join("client-cert.pem");
    let config = if own.exists() {
        config.with_client_auth_cert(certificates(&own)?, key(&folder.join("client-key.pem"))?)?
    } else {
        config.with_no_client_auth()
    };
    let name = match (&uri.host_name, &uri.place) {
        (Some(name), _) => name.clone(),
        (None, Place::Tcp { host, .. }) => host.clone(),
        _ => "localhost".to_owned(),
    };
    let name = ServerName::try_from(name)?;
    let connection = ClientConnection::new(Arc::new(config), name)?;
    Ok(Socket::Tls(TlsStream::client(connection, socket)))
}

/// What a handshake that failed means.
pub(super) fn explain(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(tls) => io::Error::new(error.kind(), format!("TLS: {tls}")),
        None => error,
    }
}
