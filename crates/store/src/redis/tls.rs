//! TLS towards Redis with files of its own: a client certificate, an authority beside the system's, and servers whose
//! certificates bear another name.
//!
//! The files are read again for each new connection, so that certificates are rotated without a restart; connections are
//! few and long. Without such files the system's authorities are used, as the client library has them.

use redis::{ConnectionAddr, RedisResult, TlsCertificates};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Whether the name in a server's certificate must be that of its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerNameCheck {
    /// It must.
    #[default]
    Required,
    /// Any name will do; the chain is verified all the same.
    Skipped,
}

/// Files for TLS towards Redis.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisTls {
    /// Certificates of authorities that are trusted beside the system's (PEM).
    pub authority: Option<PathBuf>,
    /// This client's certificate chain and private key (PEM).
    pub client: Option<(PathBuf, PathBuf)>,
    /// Whether names are checked.
    pub server_name: ServerNameCheck,
}

impl RedisTls {
    /// Reads the files once, to find out what is wrong with them.
    pub(super) fn check(&self) -> Result<(), String> {
        let certificates = self.certificates().map_err(|error| error.to_string())?;
        if let Some(client) = &certificates.client_tls {
            let (certificate, key) = self.client.clone().unwrap_or_default();
            let chain = CertificateDer::pem_slice_iter(&client.client_cert).next();
            if !matches!(chain, Some(Ok(_))) {
                return Err(format!("{}: no PEM certificate found", certificate.display()));
            }
            rustls::pki_types::PrivateKeyDer::from_pem_slice(&client.client_key)
                .map_err(|error| format!("{}: {error}", key.display()))?;
        }
        Ok(())
    }

    /// Returns the address of a server that is reached with these files.
    pub(super) fn address(&self, host: &str, port: u16) -> RedisResult<ConnectionAddr> {
        let plain = ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None };
        let client = redis::Client::build_with_tls(info(plain)?, self.certificates()?)?;
        let mut address = client.get_connection_info().addr().clone();
        if self.server_name == ServerNameCheck::Skipped {
            address.set_danger_accept_invalid_hostnames(true);
        }
        Ok(address)
    }

    fn certificates(&self) -> std::io::Result<TlsCertificates> {
        let client = self.client.as_ref().map(|(certificate, key)| {
            Ok::<_, std::io::Error>(redis::ClientTlsConfig {
                client_cert: read(certificate)?,
                client_key: read(key)?,
            })
        });
        let root_cert = self.authority.as_deref().map(authorities).transpose()?;
        Ok(TlsCertificates { client_tls: client.transpose()?, root_cert })
    }
}

fn info(address: ConnectionAddr) -> RedisResult<redis::ConnectionInfo> {
    redis::IntoConnectionInfo::into_connection_info(address)
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
        .map_err(|error| std::io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Returns the certificates of a file and the system's, as one PEM file: the library takes either its own or ours.
fn authorities(path: &Path) -> std::io::Result<Vec<u8>> {
    let wrong = |why: &dyn std::fmt::Display| std::io::Error::other(format!("{}: {why}", path.display()));
    let own = CertificateDer::pem_slice_iter(&read(path)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| wrong(&error))?;
    if own.is_empty() {
        return Err(wrong(&"no PEM certificate found"));
    }
    let mut usable = RootCertStore::empty();
    for certificate in &own {
        usable.add(certificate.clone()).map_err(|error| wrong(&error))?;
    }
    let mut text = String::new();
    own.iter().for_each(|certificate| pem(&mut text, certificate));
    for certificate in rustls_native_certs::load_native_certs().certs {
        // One that cannot be used must not make the others useless.
        if usable.add(certificate.clone()).is_ok() {
            pem(&mut text, &certificate);
        }
    }
    Ok(text.into_bytes())
}

/// Appends a certificate in PEM format.
fn pem(text: &mut String, certificate: &[u8]) {
    use base64::Engine;
    let body = base64::engine::general_purpose::STANDARD.encode(certificate);
    text.push_str("-----BEGIN CERTIFICATE-----\n");
    for line in body.as_bytes().chunks(64) {
        let _ = writeln!(text, "{}", String::from_utf8_lossy(line));
    }
    text.push_str("-----END CERTIFICATE-----\n");
}
