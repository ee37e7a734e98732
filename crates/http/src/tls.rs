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
    watch: Mutex<FileWatch<2>>,
}

/// The size and the time of a file: another one, if it has changed.
type FileStamp = Option<(u64, SystemTime)>;

/// What files were like when they were last good, for those who look again every second or so.
#[derive(Debug)]
pub struct FileWatch<const N: usize> {
    loaded: [FileStamp; N],
    /// What was last wrong since, and with which files.
    failed: Option<([FileStamp; N], String)>,
}

impl<const N: usize> FileWatch<N> {
    /// Files that are about to be read: a change in between is not missed.
    #[must_use]
    pub fn new(paths: [&Path; N]) -> Self {
        Self { loaded: paths.map(file_stamp), failed: None }
    }

    /// What is read of files that have changed since they were good. They are tried until they are good again, since
    /// whether they can be read may change alone; what is wrong with them is told once.
    pub fn retry_if_changed<T>(
        &mut self,
        paths: [&Path; N],
        read: impl FnOnce() -> Result<T, String>,
    ) -> Option<Result<T, String>> {
        let now = paths.map(file_stamp);
        if now == self.loaded {
            self.failed = None;
            return None;
        }
        match read() {
            Ok(read) => {
                *self = Self { loaded: now, failed: None };
                Some(Ok(read))
            }
            Err(error) => {
                let wrong = Some((now, error.clone()));
                let is_known = self.failed == wrong;
                self.failed = wrong;
                (!is_known).then_some(Err(error))
            }
        }
    }
}

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
        let seen = Mutex::new(FileWatch::new([certificate, key]));
        let current = ArcSwap::from_pointee(certified(certificate, key)?);
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Arc::new(Self { current, certificate, key, watch: seen }))
    }

    /// Takes what the files hold if they have changed and are good; for a task that calls it every second or so.
    pub fn refresh(&self) {
        let mut seen = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let (certificate, key) = (&*self.certificate, &*self.key);
        match seen.retry_if_changed([certificate, key], || certified(certificate, key)) {
            None => {}
            Some(Ok(certified)) => {
                self.current.store(Arc::new(certified));
                tracing::info!(certificate = %certificate.display(), "certificate reloaded");
            }
            // Files are written one after the other: this may be half of a change.
            Some(Err(error)) => tracing::warn!("{error}; the last good certificate stays"),
        }
    }
}

/// A look at a file, to tell whether it has changed since another.
fn file_stamp(path: &Path) -> FileStamp {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_file_is_reported_once_and_retried_until_it_loads() {
        let file = std::env::temp_dir().join(format!("tollgate-seen-{}.pem", std::process::id()));
        let write = |text: &str| std::fs::write(&file, text).expect("written");
        write("good");
        let mut seen = FileWatch::new([&file]);
        let mut look =
            |read: Result<u8, &str>| seen.retry_if_changed([&file], || read.map_err(str::to_owned));
        assert_eq!(look(Ok(1)), None, "it has not changed");
        write("broken");
        assert_eq!(look(Err("broken")), Some(Err("broken".to_owned())));
        assert_eq!(look(Err("broken")), None, "told already");
        assert_eq!(look(Err("it may not be read")), Some(Err("it may not be read".to_owned())));
        std::fs::remove_file(&file).expect("removed");
        assert_eq!(
            look(Err("it may not be read")),
            Some(Err("it may not be read".to_owned())),
            "of this one"
        );
        assert_eq!(look(Err("it may not be read")), None);
        write("better");
        assert_eq!(look(Err("not yet")), Some(Err("not yet".to_owned())));
        assert_eq!(look(Ok(2)), Some(Ok(2)), "as when it may be read at last");
        assert_eq!(look(Ok(3)), None);
        std::fs::remove_file(&file).expect("removed");
    }
}
