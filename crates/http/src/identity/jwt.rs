//! JWT verification: the user and other attributes from the claims of a token. A token is accepted if a configured key
//! signed it and it is valid now or, with `verified_by_proxy`, if a trusted peer sends it. A request whose token is not
//! accepted is refused: an upstream that is more lenient would serve it as a user whose limits do not apply. With
//! `unreadable: anonymous` the caller is identified by its address instead, like one without a token.
//!
//! Keys are reloaded when their file changes, and the cache of tokens that the previous keys verified is dropped with
//! them: tokens of a removed key are invalid from then on.

use super::api_key;
use super::config::{self, IdentityConfig, IdentityConfigError, JwtConfig, Unreadable};
use super::credential::{self, Authorization};
use super::jwks::JwkSet;
use super::verified_cache::{Validity, Values, VerifiedJwts};
use super::watched_file::{PartialFile, WatchedFile};
use super::{AmbiguousIdentity, ResolvedCaller};
use crate::headers::HeaderLookup;
use crate::value;
use arc_swap::ArcSwap;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::{AUTHORIZATION, HeaderName};
use ring::digest;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use tollgate_core::Timestamp;

/// Maximum length of a token in bytes; real tokens are shorter.
const MAX_TOKEN: usize = 16 * 1024;
/// Maximum size of a key file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Verifies tokens.
pub(super) struct JwtVerifier {
    settings: JwtConfig,
    header: HeaderName,
    /// `None` if trusted peers verify the tokens.
    verification: Option<Verification>,
    /// Pairs of attribute and claim.
    claims: Vec<(String, String)>,
}

/// The verification keys and their file.
struct Verification {
    file: WatchedFile,
    generation: ArcSwap<KeyGeneration>,
}

/// Keys, and the cache of tokens that they verified; both are replaced together.
struct KeyGeneration {
    keys: JwkSet,
    verified: VerifiedJwts,
}

impl KeyGeneration {
    fn read(path: &Path) -> Result<Self, IdentityConfigError> {
        let keys = JwkSet::parse(&config::read_file(path, MAX_FILE)?);
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
    /// Returns the header that contains tokens.
    pub(super) const fn header(&self) -> &HeaderName {
        &self.header
    }

    /// Creates a verifier and reads its key file; `None` if `settings` has no `jwt` section.
    pub(super) fn new(settings: &IdentityConfig) -> Result<Option<Self>, IdentityConfigError> {
        let Some(settings) = &settings.jwt else { return Ok(None) };
        let verification = match (&settings.jwks, settings.verified_by_proxy) {
            (Some(path), false) => {
                let file = WatchedFile::new(path, PartialFile::Invalid);
                Some(Verification { file, generation: ArcSwap::from_pointee(KeyGeneration::read(path)?) })
            }
            (None, true) => None,
            _ => return Err(IdentityConfigError::Verification),
        };
        let mut claims = vec![("user_id".to_owned(), settings.user_id.clone())];
        for (attribute, claim) in &settings.claims {
            config::check_attribute(attribute)?;
            claims.push((attribute.clone(), claim.clone()));
        }
        let header = config::header(&settings.header)?;
        Ok(Some(Self { settings: settings.clone(), header, verification, claims }))
    }

    pub(super) const fn settings(&self) -> &JwtConfig {
        &self.settings
    }

    /// Reads the key file if it has changed; returns whether it has, and what is wrong with it.
    pub(super) fn reload(&self) -> Option<(bool, Option<String>)> {
        let Verification { file, generation } = self.verification.as_ref()?;
        let has_changed =
            file.poll(|path| KeyGeneration::read(path).map(|keys| generation.store(Arc::new(keys))));
        Some((has_changed, file.error()))
    }

    /// Adds the attributes of the request's token. `has_bearer_keys` says that a bearer value may be an API key.
    pub(super) fn read<'r>(
        &'r self,
        headers: &'r impl HeaderLookup,
        now: Timestamp,
        (unreadable, has_bearer_keys): (Unreadable, bool),
        caller: &mut ResolvedCaller<'r>,
    ) -> Result<(), AmbiguousIdentity> {
        if self.verification.is_none() && !caller.is_trusted {
            return Ok(());
        }
        // With a made-up token before the real one, the caller would be anonymous here and authenticated upstream.
        let mut found = None;
        for value in headers.all(&self.header) {
            api_key::only(&mut found, value).map_err(|_| AmbiguousIdentity::Twice(self.header.clone()))?;
        }
        let Some(value) = found.map(<[u8]>::trim_ascii).filter(|value| !value.is_empty()) else {
            return Ok(());
        };
        let is_authorization = self.header == AUTHORIZATION;
        let token = match Authorization::read(value) {
            Authorization::Bearer(token) => token,
            Authorization::Other if is_authorization => return Ok(()),
            // A token without `Bearer`.
            _ => value,
        };
        if let Some(values) = self.values_of(token, now.as_secs()) {
            for ((attribute, _), value) in self.claims.iter().zip(values.iter()) {
                if let Some(value) = value {
                    caller.add(attribute, value.clone());
                }
            }
            return Ok(());
        }
        let may_be_key = is_authorization && has_bearer_keys && !credential::looks_like_jwt(token);
        match unreadable {
            Unreadable::Refuse if !may_be_key => Err(AmbiguousIdentity::Token(self.header.clone())),
            _ => Ok(()),
        }
    }

    /// Returns the attribute values of a token, if it is accepted.
    fn values_of(&self, token: &[u8], now: u64) -> Option<Values> {
        let token = std::str::from_utf8(token).ok().filter(|token| token.len() <= MAX_TOKEN)?;
        let Some(verification) = &self.verification else {
            let (message, _) = token.rsplit_once('.')?;
            let (_, payload) = message.split_once('.')?;
            return Some(self.values(&object(payload)?));
        };
        let generation = verification.generation.load();
        let digest = digest::digest(&digest::SHA256, token.as_bytes()).as_ref().try_into().ok()?;
        if let Some(values) = generation.verified.get(&digest, now) {
            return Some(values);
        }
        let claims = verified_claims(&generation.keys, token)?;
        let validity = self.validity(&claims).filter(|validity| validity.holds(now))?;
        let values = self.values(&claims);
        generation.verified.put(digest, validity, Arc::clone(&values));
        Some(values)
    }

    fn values(&self, claims: &Map<String, Value>) -> Values {
        let text = |claim: &String| match claims.get(claim)? {
            Value::String(text) => Some(value::bounded(text.into()).into_owned()),
            Value::Number(number) => Some(number.to_string()),
            Value::Bool(flag) => Some(flag.to_string()),
            _ => None,
        };
        self.claims.iter().map(|(_, claim)| text(claim)).collect()
    }

    /// Returns when a token is valid, by its times, issuer and audience; `None` if never. A time claim that is not a
    /// number makes it invalid.
    fn validity(&self, claims: &Map<String, Value>) -> Option<Validity> {
        let time = |name: &str| claims.get(name).map(|value| value.as_f64().unwrap_or(f64::NAN));
        let leeway = self.settings.leeway as f64;
        let from = time("nbf").map_or(f64::NEG_INFINITY, |nbf| nbf - leeway);
        let until = time("exp").map_or(f64::INFINITY, |exp| exp + leeway);
        let issuer = self.settings.issuer.as_deref();
        let issued = issuer.is_none_or(|issuer| claims.get("iss").and_then(Value::as_str) == Some(issuer));
        let intended = self.settings.audience.as_ref().is_none_or(|audience| match claims.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(all)) => all.iter().any(|one| one.as_str() == Some(audience)),
            _ => false,
        });
        (issued && intended).then_some(Validity { from, until })
    }
}

/// Returns the claims of a token if one of the keys signed it.
fn verified_claims(keys: &JwkSet, token: &str) -> Option<Map<String, Value>> {
    let (message, signature) = token.rsplit_once('.')?;
    let (head, payload) = message.split_once('.')?;
    let head: JwtHeader = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(head).ok()?).ok()?;
    let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
    // `crit` lists extensions that a verifier must support; none is supported.
    let known =
        head.crit.is_none() && keys.verify(&head.alg, head.kid.as_deref(), message.as_bytes(), &signature);
    object(payload).filter(|_| known)
}

fn object(payload: &str) -> Option<Map<String, Value>> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signature is checked once per token, not once per request; tokens that fail are not cached.
    #[test]
    fn verified_tokens_are_cached() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jwt/pyjwt.json");
        let fixture: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        let jwt = serde_json::from_value(serde_json::json!({ "jwks": path })).expect("settings");
        let settings = IdentityConfig { jwt: Some(jwt), ..IdentityConfig::default() };
        let tokens = JwtVerifier::new(&settings).expect("settings").expect("tokens");
        let generation = tokens.verification.as_ref().expect("keys").generation.load_full();
        let good = fixture["tokens"]["RS256"].as_str().expect("a token").as_bytes();
        let mut forged = good.to_vec();
        *forged.last_mut().expect("a byte") ^= 1;
        for _ in 0..3 {
            let values = tokens.values_of(good, 1_001_000).expect("accepted");
            assert_eq!(values[0].as_deref(), Some("alice"));
            assert_eq!(tokens.values_of(&forged, 1_001_000), None);
            assert_eq!(generation.verified.len(), 1);
        }
        assert_eq!(tokens.values_of(good, 1_003_660), None, "expired while cached");
    }
}
