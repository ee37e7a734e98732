//! TLS certificates: a server's certificate and key, reloaded when their files change without dropping a connection,
//! and the trusted authorities. The workspace's only crypto provider is chosen here.

mod names;
mod server_tls;

pub use server_tls::{ClientAuth, ServerTls, ServerTlsConfig, watch};

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

/// A server's certificate, from the last version of its files that was valid.
#[derive(Debug)]
pub struct ServerCertificate {
    current: ArcSwap<CertifiedKey>,
    certificate: PathBuf,
    key: PathBuf,
    watch: Mutex<FileWatch<2>>,
}

/// The size, modification time and inode of a file; different after a change, also of a link to it.
type FileStamp = Option<(u64, SystemTime, u64)>;

/// Detects changes of files that are polled about once a second.
#[derive(Debug)]
pub struct FileWatch<const N: usize> {
    loaded: [FileStamp; N],
    /// The last error since then, and the stamps of the files that caused it.
    failed: Option<([FileStamp; N], String)>,
}

impl<const N: usize> FileWatch<N> {
    /// Starts a watch. Call it before reading the files, so that no change in between is missed.
    #[must_use]
    pub fn new(paths: [&Path; N]) -> Self {
        Self { loaded: paths.map(file_stamp), failed: None }
    }

    /// Calls `read` if the files have changed since they were last valid. It retries until they are valid, because
    /// their readability may change without their stamps; it returns the same error only once.
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
                let failed = Some((now, error.clone()));
                let is_known = self.failed == failed;
                self.failed = failed;
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
    /// Reads a certificate chain and its key, both in PEM format.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn load(certificate: &Path, key: &Path) -> Result<Arc<Self>, String> {
        let watch = Mutex::new(FileWatch::new([certificate, key]));
        let current = ArcSwap::from_pointee(certified(certificate, key)?);
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Arc::new(Self { current, certificate, key, watch }))
    }

    /// Loads the files if they have changed and are valid. A task calls it about once a second.
    pub fn refresh(&self) {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let (certificate, key) = (&*self.certificate, &*self.key);
        match watch.retry_if_changed([certificate, key], || certified(certificate, key)) {
            None => {}
            Some(Ok(certified)) => {
                self.current.store(Arc::new(certified));
                tracing::info!(certificate = %certificate.display(), "certificate reloaded");
            }
            // The two files are written one after the other, so the pair may be incomplete.
            Some(Err(error)) => {
                tracing::warn!(%error, "certificate reload failed; keeping the previous certificate");
            }
        }
    }
}

/// Returns the stamp of a file without reading it.
fn file_stamp(path: &Path) -> FileStamp {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.len(), metadata.modified().ok()?, std::os::unix::fs::MetadataExt::ino(&metadata)))
}

fn certified(certificate: &Path, key: &Path) -> Result<CertifiedKey, String> {
    CertifiedKey::from_der(certificates(certificate)?, private_key(key)?, &provider()).map_err(|error| {
        format!("certificate {} and key {} do not match: {error}", certificate.display(), key.display())
    })
}

/// Returns the crypto provider.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Reads all certificates of a PEM file.
///
/// # Errors
/// The path of the file, and why it is invalid.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let with_path = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let all = CertificateDer::pem_file_iter(path).map_err(|error| with_path(&error))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(|error| with_path(&error))?;
    if all.is_empty() { Err(with_path(&"no PEM certificate found")) } else { Ok(all) }
}

/// Reads the private key of a PEM file.
///
/// # Errors
/// The path of the file, and why it is invalid.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads the trusted authorities of a PEM file.
///
/// # Errors
/// The path of the file, and why it is invalid.
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
        let file = std::env::temp_dir().join(format!("tollgate-watch-{}.pem", std::process::id()));
        let write = |text: &str| std::fs::write(&file, text).expect("written");
        write("good");
        let mut watch = FileWatch::new([&file]);
        let mut poll =
            |read: Result<u8, &str>| watch.retry_if_changed([&file], || read.map_err(str::to_owned));
        assert_eq!(poll(Ok(1)), None, "the file has not changed");
        write("broken");
        assert_eq!(poll(Err("broken")), Some(Err("broken".to_owned())));
        assert_eq!(poll(Err("broken")), None, "already reported");
        assert_eq!(poll(Err("permission denied")), Some(Err("permission denied".to_owned())));
        std::fs::remove_file(&file).expect("removed");
        assert_eq!(
            poll(Err("permission denied")),
            Some(Err("permission denied".to_owned())),
            "the same error, but of a changed file"
        );
        assert_eq!(poll(Err("permission denied")), None);
        write("better");
        assert_eq!(poll(Err("not yet")), Some(Err("not yet".to_owned())));
        assert_eq!(poll(Ok(2)), Some(Ok(2)), "retried although the stamp is unchanged");
        assert_eq!(poll(Ok(3)), None);
        std::fs::remove_file(&file).expect("removed");
    }
}
