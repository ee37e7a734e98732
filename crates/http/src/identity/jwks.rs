//! JWKS (RFC 7517): the keys that verify tokens. The key determines the algorithm, never the token: otherwise a forger
//! could choose an algorithm whose key they have.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::Deserialize;

const MAX_KEYS: usize = 64;
/// Minimum length of an HS256 key in bytes: that of the hash (RFC 7518).
const MIN_SECRET: usize = 32;

pub(super) struct JwkSet(Vec<VerificationKey>);

struct VerificationKey {
    id: Option<String>,
    kind: KeyAlgorithm,
}

enum KeyAlgorithm {
    Rs256 { n: Vec<u8>, e: Vec<u8> },
    Es256(Vec<u8>),
    EdDsa(Vec<u8>),
    Hs256(hmac::Key),
}

#[derive(Deserialize)]
struct JwksFile {
    keys: Vec<Jwk>,
}

/// The members that are read; others are ignored.
#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
    k: Option<String>,
}

impl JwkSet {
    /// Parses a JWKS file. Keys for other uses and algorithms are skipped; a file without a usable key is an error.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let file: JwksFile =
            serde_json::from_slice(text).map_err(|error| format!("invalid JWKS: {error}"))?;
        let mut keys = Vec::new();
        for (at, jwk) in file.keys.iter().enumerate() {
            if jwk.usage.as_deref().is_some_and(|usage| usage != "sig") {
                continue;
            }
            if let Some(kind) = jwk.kind().map_err(|wrong| format!("keys[{at}]: {wrong}"))? {
                keys.push(VerificationKey { id: jwk.kid.clone(), kind });
            }
        }
        match keys.len() {
            0 => Err("no key for RS256, ES256, EdDSA or HS256".to_owned()),
            1..=MAX_KEYS => Ok(Self(keys)),
            _ => Err(format!("more than {MAX_KEYS} keys")),
        }
    }

    /// Returns whether one of the keys signed the message.
    pub(super) fn verify(&self, algorithm: &str, id: Option<&str>, message: &[u8], signature: &[u8]) -> bool {
        let mut candidates = self.0.iter().filter(|key| match (id, &key.id) {
            (Some(id), Some(key_id)) => id == key_id,
            _ => true,
        });
        candidates.any(|key| key.kind.algorithm() == algorithm && key.kind.verify(message, signature))
    }
}

impl Jwk {
    fn kind(&self) -> Result<Option<KeyAlgorithm>, String> {
        let bytes = |name: &str, value: &Option<String>| {
            let text = value.as_ref().ok_or_else(|| format!("`{name}` is missing"))?;
            let text = text.trim_end_matches('=');
            URL_SAFE_NO_PAD.decode(text).map_err(|_| format!("`{name}` is not valid base64url"))
        };
        let kind = match (self.kty.as_str(), self.crv.as_deref()) {
            ("RSA", _) => KeyAlgorithm::Rs256 { n: bytes("n", &self.n)?, e: bytes("e", &self.e)? },
            ("EC", Some("P-256")) => {
                let (x, y) = (bytes("x", &self.x)?, bytes("y", &self.y)?);
                if x.len() != 32 || y.len() != 32 {
                    return Err("`x` and `y` of P-256 must be 32 bytes each".to_owned());
                }
                KeyAlgorithm::Es256([&[4], &x[..], &y[..]].concat())
            }
            ("OKP", Some("Ed25519")) => KeyAlgorithm::EdDsa(bytes("x", &self.x)?),
            ("oct", _) => {
                let secret = bytes("k", &self.k)?;
                if secret.len() < MIN_SECRET {
                    return Err(format!("`k` of HS256 must be at least {MIN_SECRET} bytes"));
                }
                KeyAlgorithm::Hs256(hmac::Key::new(hmac::HMAC_SHA256, &secret))
            }
            _ => return Ok(None),
        };
        let fits = self.alg.as_deref().is_none_or(|alg| alg == kind.algorithm());
        Ok(fits.then_some(kind))
    }
}

impl KeyAlgorithm {
    const fn algorithm(&self) -> &'static str {
        match self {
            Self::Rs256 { .. } => "RS256",
            Self::Es256(_) => "ES256",
            Self::EdDsa(_) => "EdDSA",
            Self::Hs256(_) => "HS256",
        }
    }

    fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        let verified = match self {
            Self::Rs256 { n, e } => RsaPublicKeyComponents { n, e }.verify(
                &signature::RSA_PKCS1_2048_8192_SHA256,
                message,
                signature,
            ),
            Self::Es256(point) => {
                UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, point).verify(message, signature)
            }
            Self::EdDsa(point) => {
                UnparsedPublicKey::new(&signature::ED25519, point).verify(message, signature)
            }
            Self::Hs256(key) => hmac::verify(key, message, signature),
        };
        verified.is_ok()
    }
}
