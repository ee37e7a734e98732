//! A user, from a JSON Web Token. It is believed if a key of ours signed it and it is valid now, or, by setting, if a peer
//! that we trust sends it, having verified it. A token that is not believed tells nothing: its caller is then known by its
//! address, like anyone without one. Turning it away is the business of whoever authenticates.

use super::Caller;
use super::keys::Keys;
use super::settings::{self, JwtSettings, WhoError};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::{HeaderMap, HeaderName};
use serde::Deserialize;
use serde_json::{Map, Value};
use tollgate_core::Timestamp;

/// Longer than any token of ours.
const LONGEST: usize = 16 * 1024;

pub(super) struct Tokens {
    header: HeaderName,
    /// None where a trusted peer has verified them.
    keys: Option<Keys>,
    /// Attribute and claim.
    claims: Vec<(String, String)>,
    issuer: Option<String>,
    audience: Option<String>,
    leeway: u64,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens")
            .field("header", &self.header)
            .field("claims", &self.claims)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct Head {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

impl Tokens {
    pub(super) fn new(settings: &JwtSettings) -> Result<Self, WhoError> {
        let keys = match (&settings.jwks, settings.verified_by_proxy) {
            (Some(path), false) => {
                let keys = Keys::read(&settings::read_file(path)?);
                Some(keys.map_err(|wrong| WhoError::File { path: path.clone(), wrong })?)
            }
            (None, true) => None,
            _ => return Err(WhoError::Verification),
        };
        let mut claims = vec![("user_id".to_owned(), settings.user_id.clone())];
        for (attribute, claim) in &settings.claims {
            settings::check_attribute(attribute)?;
            claims.push((attribute.clone(), claim.clone()));
        }
        Ok(Self {
            header: settings::header(&settings.header)?,
            keys,
            claims,
            issuer: settings.issuer.clone(),
            audience: settings.audience.clone(),
            leeway: settings.leeway,
        })
    }

    pub(super) fn read<'r>(
        &'r self,
        headers: &'r HeaderMap,
        is_trusted: bool,
        now: Timestamp,
        caller: &mut Caller<'r>,
    ) {
        if self.keys.is_none() && !is_trusted {
            return;
        }
        let Some(value) = headers.get(&self.header) else { return };
        let token = bearer(value.as_bytes()).unwrap_or(value.as_bytes());
        let Some(claims) = self.claims_of(token, now) else { return };
        for (attribute, claim) in &self.claims {
            match claims.get(claim) {
                Some(Value::String(text)) => caller.add(attribute, text.clone()),
                Some(Value::Number(number)) => caller.add(attribute, number.to_string()),
                Some(Value::Bool(flag)) => caller.add(attribute, if *flag { "true" } else { "false" }),
                _ => {}
            }
        }
    }

    /// The claims of a token that is believed.
    fn claims_of(&self, token: &[u8], now: Timestamp) -> Option<Map<String, Value>> {
        let token = std::str::from_utf8(token).ok().filter(|token| token.len() <= LONGEST)?;
        let (message, signature) = token.rsplit_once('.')?;
        let (head, payload) = message.split_once('.')?;
        let Some(keys) = &self.keys else {
            return serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok();
        };
        let head: Head = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(head).ok()?).ok()?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        // What we do not understand and must (`crit`), we cannot believe.
        let known = head.crit.is_none()
            && keys.verify(&head.alg, head.kid.as_deref(), message.as_bytes(), &signature);
        let claims: Map<String, Value> =
            serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok().filter(|_| known)?).ok()?;
        self.is_valid(&claims, now.as_secs()).then_some(claims)
    }

    /// Times, issuer and audience. A time that is there but is no number is not valid.
    fn is_valid(&self, claims: &Map<String, Value>, now: u64) -> bool {
        let time = |name: &str| claims.get(name).map(|value| value.as_f64().unwrap_or(f64::NAN));
        let (now, leeway) = (now as f64, self.leeway as f64);
        let in_time = time("exp").is_none_or(|exp| now < exp + leeway)
            && time("nbf").is_none_or(|nbf| now + leeway >= nbf);
        let issued = self
            .issuer
            .as_ref()
            .is_none_or(|issuer| claims.get("iss").and_then(Value::as_str) == Some(issuer));
        let meant = self.audience.as_ref().is_none_or(|audience| match claims.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(all)) => all.iter().any(|one| one.as_str() == Some(audience)),
            _ => false,
        });
        in_time && issued && meant
    }
}

/// What follows `Bearer`, in whichever letters.
pub(super) fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(7)?;
    let rest = rest.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !rest.is_empty()).then_some(rest)
}

/// Three parts, the first of which is an object in base64url.
pub(super) fn looks_like_one(value: &[u8]) -> bool {
    value.starts_with(b"eyJ") && value.iter().filter(|byte| **byte == b'.').count() == 2
}
