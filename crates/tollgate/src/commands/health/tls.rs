//! TLS of `tollgate health`. The server is on this machine, so its certificate can be read from its file: it must present
//! that one, whatever names it is valid for. Rejected: the system's authorities and the name `localhost`, which hardly any
//! certificate of a server has.

use crate::admin_client::trusting;
use anyhow::Context;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use std::path::Path;
use std::sync::Arc;
use tollgate_http::tls;

/// Returns the configuration for a server that must present the certificate in this file; `own` is the client certificate
/// and its key.
pub(super) fn config(certificate: &Path, own: Option<(&Path, &Path)>) -> anyhow::Result<ClientConfig> {
    let chain = tls::certificates(certificate).map_err(anyhow::Error::msg).context("--http-tls-cert")?;
    let expected = chain.into_iter().next().context("--http-tls-cert: the file has no certificate")?;
    let mut config = trusting(Some(("--http-tls-cert", certificate)), own)?;
    config.dangerous().set_certificate_verifier(Arc::new(Expected(expected)));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Accepts one certificate.
#[derive(Debug)]
struct Expected(CertificateDer<'static>);

impl ServerCertVerifier for Expected {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if *end_entity == self.0 {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &tls::provider().signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &tls::provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        tls::provider().signature_verification_algorithms.supported_schemes()
    }
}
