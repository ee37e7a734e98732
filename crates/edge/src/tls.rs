//! Certificates, for all who speak TLS: a server's own, read again when its files change without a connection being dropped,
//! and those of the authorities that are trusted. The one provider of cryptography is named here.

use arc_swap::ArcSwap;
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// A server's certificate: the one that its files held when they were last good.
#[derive(Debug)]
pub struct ServerCertificate {
    current: ArcSwap<CertifiedKey>,
    certificate: PathBuf,
    key: PathBuf,
    seen: Mutex<[Glimpse; 2]>,
}

/// The size and the time of a file: another one, if it has changed.
pub type Glimpse = Option<(u64, SystemTime)>;

impl ResolvesServerCert for ServerCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load_full())
    }
}

impl ServerCertificate {
    /// Reads a chain and its key, both in PEM form.
    ///
    /// # Errors
    /// Which file is wrong, and why.
    pub fn load(certificate: &Path, key: &Path) -> Result<Arc<Self>, String> {
        let seen = Mutex::new([certificate, key].map(glimpse));
        let current = ArcSwap::from_pointee(certified(certificate, key)?);
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Arc::new(Self { current, certificate, key, seen }))
    }

    /// Takes what the files hold if they have changed and are good; for a task that calls it every second or so.
    pub fn refresh(&self) {
        let now = [&*self.certificate, &*self.key].map(glimpse);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if now == *seen {
            return;
        }
        match certified(&self.certificate, &self.key) {
            Ok(certified) => {
                *seen = now;
                self.current.store(Arc::new(certified));
                tracing::info!(certificate = %self.certificate.display(), "a new certificate acts");
            }
            // Files are written one after the other: this may be half of a change.
            Err(error) => tracing::warn!("{error}; the last good certificate stays"),
        }
    }
}

/// A look at a file, to tell whether it has changed since another.
#[must_use]
pub fn glimpse(path: &Path) -> Glimpse {
    let seen = std::fs::metadata(path).ok()?;
    Some((seen.len(), seen.modified().ok()?))
}

fn certified(certificate: &Path, key: &Path) -> Result<CertifiedKey, String> {
    CertifiedKey::from_der(certificates(certificate)?, private_key(key)?, &provider()).map_err(|error| {
        format!("{} and {} do not make a pair: {error}", certificate.display(), key.display())
    })
}

/// The provider of cryptography.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// All certificates of a file in PEM form.
///
/// # Errors
/// What is wrong with the file.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let all = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(|error| wrong(&error))?;
    if all.is_empty() { Err(wrong(&"there is no certificate in PEM form")) } else { Ok(all) }
}

/// The private key of a file in PEM form.
///
/// # Errors
/// What is wrong with the file.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The authorities of a file.
///
/// # Errors
/// What is wrong with the file.
pub fn authorities(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(roots)
}
