//! The client at the other end of an admin connection, and the names that its certificate proves. A client without a
//! certificate may still send a token.

use rustls::pki_types::CertificateDer;
use std::net::IpAddr;
use std::sync::Arc;

/// Protocols that the admin listener offers.
pub const ALPN: &[&[u8]] = &[b"http/1.1"];

/// The client at the other end of a connection; an extension of its requests.
#[derive(Clone, Debug)]
pub(crate) struct ClientPeer {
    pub(crate) address: IpAddr,
    /// Whether the connection uses TLS.
    pub(crate) encrypted: bool,
    /// Names that the client certificate proves, if one was presented.
    pub(crate) names: Arc<[String]>,
}

impl ClientPeer {
    pub(crate) fn plain(address: IpAddr) -> Self {
        Self { address, encrypted: false, names: Arc::default() }
    }

    /// Creates a peer after a handshake in which its certificates were verified.
    pub(crate) fn over_tls(address: IpAddr, certificates: Option<&[CertificateDer<'_>]>) -> Self {
        let names = certificates.and_then(<[_]>::first).map(names).unwrap_or_default();
        Self { address, encrypted: true, names: names.into() }
    }
}

/// Returns the certificate's `subjectAltName` entries: host names, and URIs such as `spiffe://…`.
fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else { return Vec::new() };
    let hosts = certificate.valid_dns_names().map(str::to_owned);
    hosts.chain(certificate.valid_uri_names().map(str::to_owned)).collect()
}
