//! A user, from a JSON Web Token. It is believed if a key of ours signed it and it is valid now, or, by setting, if a peer
//! that we trust sends it, having verified it. A token that is not believed tells nothing: its caller is then known by its
//! address, like anyone without one. Turning it away is the business of whoever authenticates.
//!
//! Keys are read again when their file changes, and what the former ones verified is forgotten with them: a token of a key
//! that was removed is worth nothing from then on.

use super::api_key;
use super::config::{self, IdentityConfig, IdentityConfigError, JwtConfig};
use super::jwks::JwkSet;
use super::verified_cache::{Validity, Values, VerifiedJwts};
use super::{AmbiguousIdentity, ResolvedCaller};
use crate::headers::HeaderLookup;
use arc_swap::ArcSwap;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::HeaderName;
use ring::digest;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use tollgate_core::Timestamp;

/// Longer than any token of ours.
const MAX_TOKEN: usize = 16 * 1024;

/// Reads users from tokens. One is shared by all that read by the same settings: what one has verified, all know.
pub struct JwtVerifier {
    settings: JwtConfig,
    header: HeaderName,
    /// None where a trusted peer has verified them.
    verification: Option<Verification>,
    /// Attribute and claim.
    claims: Vec<(String, String)>,
}

/// What tokens are verified by, and where that stands.
struct Verification {
    path: PathBuf,
    generation: ArcSwap<KeyGeneration>,
    stamp: Mutex<FileStamp>,
}

/// Keys, and the tokens that they have verified: they go together.
struct KeyGeneration {
    keys: JwkSet,
    verified: VerifiedJwts,
}

/// What a look at a file shows without reading it.
type FileStamp = Option<(u64, Option<SystemTime>)>;

fn file_stamp(path: &Path) -> FileStamp {
    let seen = std::fs::metadata(path).ok()?;
    Some((seen.len(), seen.modified().ok()))
}

impl Verification {
    fn new(path: &Path) -> Result<Self, IdentityConfigError> {
        // Before the file is read: a change in between must not be missed.
        let seen = Mutex::new(file_stamp(path));
        Ok(Self {
            path: path.to_owned(),
            generation: ArcSwap::from_pointee(KeyGeneration::read(path)?),
            stamp: seen,
        })
    }
}

impl KeyGeneration {
    fn read(path: &Path) -> Result<Self, IdentityConfigError> {
        let keys = JwkSet::parse(&config::read_file(path)?);
        let keys = keys.map_err(|wrong| IdentityConfigError::File { path: path.to_owned(), wrong })?;
        Ok(Self { keys, verified: VerifiedJwts::default() })
    }
}

impl std::fmt::Debug for JwtVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JwtVerifier")
            .field("header", &self.header)
            .field("claims", &self.claims)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

impl JwtVerifier {
    /// The field that tokens are sent in.
    pub(super) const fn header(&self) -> &HeaderName {
        &self.header
    }

    /// Reads the settings and the key file that they name; nothing where they say nothing of tokens.
    ///
    /// # Errors
    /// What cannot be used.
    pub fn new(settings: &IdentityConfig) -> Result<Option<Arc<Self>>, IdentityConfigError> {
        let Some(settings) = &settings.jwt else { return Ok(None) };
        let verification = match (&settings.jwks, settings.verified_by_proxy) {
            (Some(path), false) => Some(Verification::new(path)?),
            (None, true) => None,
            _ => return Err(IdentityConfigError::Verification),
        };
        let mut claims = vec![("user_id".to_owned(), settings.user_id.clone())];
        for (attribute, claim) in &settings.claims {
            config::check_attribute(attribute)?;
            claims.push((attribute.clone(), claim.clone()));
        }
        let header = config::header(&settings.header)?;
        Ok(Some(Arc::new(Self { settings: settings.clone(), header, verification, claims })))
    }

    /// Whether these are the settings that it reads by.
    #[must_use]
    pub fn matches_config(&self, settings: &IdentityConfig) -> bool {
        settings.jwt.as_ref() == Some(&self.settings)
    }

    /// Looks whether the key file has changed, and if so takes its keys: true where new ones act from now on. For someone
    /// who asks every second.
    ///
    /// # Errors
    /// What is wrong with a changed file, once; the keys that it held before still act.
    pub fn reload_if_changed(&self) -> Result<bool, IdentityConfigError> {
        let Some(verification) = &self.verification else { return Ok(false) };
        let now = file_stamp(&verification.path);
        let mut seen = verification.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        if *seen == now {
            return Ok(false);
        }
        *seen = now;
        verification.generation.store(Arc::new(KeyGeneration::read(&verification.path)?));
        Ok(true)
    }

    pub(super) fn read<'r>(
        &'r self,
        headers: &'r impl HeaderLookup,
        is_trusted: bool,
        now: Timestamp,
        caller: &mut ResolvedCaller<'r>,
    ) -> Result<(), AmbiguousIdentity> {
        if self.verification.is_none() && !is_trusted {
            return Ok(());
        }
        // A made-up one before the real one would make its caller a stranger here and itself behind us.
        let mut found = None;
        api_key::only(&mut found, headers.all(&self.header))
            .map_err(|_| AmbiguousIdentity::Twice(self.header.clone()))?;
        let Some(value) = found else { return Ok(()) };
        let token = bearer(value).unwrap_or(value);
        let Some(values) = self.values_of(token, now.as_secs()) else { return Ok(()) };
        for ((attribute, _), value) in self.claims.iter().zip(values.iter()) {
            if let Some(value) = value {
                caller.add(attribute, value.clone());
            }
        }
        Ok(())
    }

    /// What a token says that is believed.
    fn values_of(&self, token: &[u8], now: u64) -> Option<Values> {
        let token = std::str::from_utf8(token).ok().filter(|token| token.len() <= MAX_TOKEN)?;
        let Some(verification) = &self.verification else {
            let (message, _) = token.rsplit_once('.')?;
            let (_, payload) = message.split_once('.')?;
            return Some(self.values(&object(payload)?));
        };
        let ring = verification.generation.load();
        let name = digest::digest(&digest::SHA256, token.as_bytes()).as_ref().try_into().ok()?;
        if let Some(values) = ring.verified.get(&name, now) {
            return Some(values);
        }
        let claims = verified_claims(&ring.keys, token)?;
        let validity = self.validity(&claims).filter(|validity| validity.holds(now))?;
        let values = self.values(&claims);
        ring.verified.put(name, validity, Arc::clone(&values));
        Some(values)
    }

    fn values(&self, claims: &Map<String, Value>) -> Values {
        let text = |claim: &String| match claims.get(claim)? {
            Value::String(text) => Some(api_key::bounded(text.into()).into_owned()),
            Value::Number(number) => Some(number.to_string()),
            Value::Bool(flag) => Some(flag.to_string()),
            _ => None,
        };
        self.claims.iter().map(|(_, claim)| text(claim)).collect()
    }

    /// When a token is valid here, if it ever is: by its times, issuer and audience. A time that is there but is no number
    /// is not valid.
    fn validity(&self, claims: &Map<String, Value>) -> Option<Validity> {
        let time = |name: &str| claims.get(name).map(|value| value.as_f64().unwrap_or(f64::NAN));
        let leeway = self.settings.leeway as f64;
        let from = time("nbf").map_or(f64::NEG_INFINITY, |nbf| nbf - leeway);
        let until = time("exp").map_or(f64::INFINITY, |exp| exp + leeway);
        let issuer = self.settings.issuer.as_deref();
        let issued = issuer.is_none_or(|issuer| claims.get("iss").and_then(Value::as_str) == Some(issuer));
        let meant = self.settings.audience.as_ref().is_none_or(|audience| match claims.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(all)) => all.iter().any(|one| one.as_str() == Some(audience)),
            _ => false,
        });
        (issued && meant).then_some(Validity { from, until })
    }
}

/// The claims of a token that one of the keys signed.
fn verified_claims(keys: &JwkSet, token: &str) -> Option<Map<String, Value>> {
    let (message, signature) = token.rsplit_once('.')?;
    let (head, payload) = message.split_once('.')?;
    let head: JwtHeader = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(head).ok()?).ok()?;
    let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
    // What we do not understand and must (`crit`), we cannot believe.
    let known =
        head.crit.is_none() && keys.verify(&head.alg, head.kid.as_deref(), message.as_bytes(), &signature);
    object(payload).filter(|_| known)
}

fn object(payload: &str) -> Option<Map<String, Value>> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

/// What follows `Bearer`, in whichever letters.
pub(super) fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(7)?;
    let rest = rest.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !rest.is_empty()).then_some(rest)
}

/// Three parts, the first of which is an object in base64url.
pub(super) fn looks_like_jwt(value: &[u8]) -> bool {
    value.starts_with(b"eyJ") && value.iter().filter(|byte| **byte == b'.').count() == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signature is checked once for each token, not once for each request; what did not verify is not kept.
    #[test]
    fn verified_tokens_are_cached() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jwt/pyjwt.json");
        let fixture: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        let jwt = serde_json::from_value(serde_json::json!({ "jwks": path })).expect("settings");
        let settings = IdentityConfig { jwt: Some(jwt), ..IdentityConfig::default() };
        let tokens = JwtVerifier::new(&settings).expect("settings").expect("tokens");
        let ring = tokens.verification.as_ref().expect("keys").generation.load_full();
        let good = fixture["tokens"]["RS256"].as_str().expect("a token").as_bytes();
        let mut forged = good.to_vec();
        *forged.last_mut().expect("a byte") ^= 1;
        for _ in 0..3 {
            let values = tokens.values_of(good, 1_001_000).expect("believed");
            assert_eq!(values[0].as_deref(), Some("alice"));
            assert_eq!(tokens.values_of(&forged, 1_001_000), None);
            assert_eq!(ring.verified.len(), 1);
        }
        assert_eq!(tokens.values_of(good, 1_003_660), None, "it has expired since");
    }
}
