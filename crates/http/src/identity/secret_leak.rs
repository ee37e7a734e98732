//! Detects secrets of a request in its path, so that logs can omit the path: some callers also put their key into the
//! path.

use super::IdentityResolver;
use super::credential::Authorization;
use super::jwt::JwtVerifier;
use crate::headers::HeaderLookup;
use http::header::AUTHORIZATION;
use std::borrow::Cow;
use tollgate_rules::may_be_secret;

/// Minimum length of a secret to search for, in bytes; a shorter one would match too many paths.
const MIN_SECRET: usize = 4;
/// Maximum number of nested percent-encodings that are decoded.
const MAX_LAYERS: usize = 3;

impl IdentityResolver {
    /// Returns whether a path contains the request's own key, token or another possible secret, percent-encoded or not.
    #[must_use]
    pub fn contains_secret(&self, headers: &impl HeaderLookup, path: &str) -> bool {
        let known = [self.key.header(), self.verifier.jwt.as_ref().map(JwtVerifier::header)];
        let mapped = self.headers.iter().filter(|mapped| may_be_secret(&mapped.attribute));
        let named = known.into_iter().flatten().chain(mapped.map(|mapped| &mapped.header));
        let values = named.flat_map(|name| headers.all(name)).map(<[u8]>::trim_ascii);
        let credentials = headers.all(&AUTHORIZATION).map(|value| match Authorization::read(value) {
            Authorization::Bearer(value) => value,
            _ => value,
        });
        let mut secrets = values.chain(credentials).filter(|secret| secret.len() >= MIN_SECRET);
        secrets.any(|secret| holds(path.as_bytes(), secret))
    }
}

fn holds(path: &[u8], secret: &[u8]) -> bool {
    let contains = |text: &[u8]| text.windows(secret.len()).any(|part| part == secret);
    if contains(path) {
        return true;
    }
    let mut text = Cow::Borrowed(path);
    for _ in 0..MAX_LAYERS {
        if text.len() < secret.len() || !text.contains(&b'%') {
            return false;
        }
        text = Cow::Owned(decoded(&text));
        if contains(&text) {
            return true;
        }
    }
    false
}

/// Decodes one layer of percent-encoding; invalid escapes stay as they are.
fn decoded(text: &[u8]) -> Vec<u8> {
    let digit = |at: usize| text.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut decoded = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        match (text[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                // Two hexadecimal digits fit a byte.
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::super::IdentityConfig;
    use super::*;
    use http::HeaderMap;

    #[test]
    fn a_path_that_contains_a_possible_secret_is_detected() {
        let mut settings = IdentityConfig::default();
        settings.headers.insert("client_secret".to_owned(), "x-proof".to_owned());
        settings.headers.insert("region".to_owned(), "x-region".to_owned());
        let resolver = IdentityResolver::new(&settings).expect("settings");
        let leaks = |header: &'static str, value: &str, path: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header, value.parse().expect("a value"));
            resolver.contains_secret(&headers, path)
        };
        for path in [
            "/bot/12:ab/x",
            "/bot12:ab",
            "/bot/12%3Aab/x",
            "/bot/%31%32%3aa%62",
            "/bot/12%253Aab",
            "/%/12:ab",
        ] {
            assert!(leaks("x-api-key", "12:ab", path), "{path}");
            assert!(leaks("authorization", "Bearer 12:ab", path), "{path}");
            assert!(leaks("authorization", "12:ab", path), "{path}");
            assert!(leaks("x-proof", "12:ab", path), "{path}");
            assert!(!leaks("x-region", "12:ab", path), "{path}");
        }
        for path in ["/", "/bot/12:a/b", "/bot/12%3Ba", "/bot/%", "/bot/%3"] {
            assert!(!leaks("x-api-key", "12:ab", path), "{path}");
        }
        assert!(!leaks("x-api-key", "bot", "/bot/x"), "too short to distinguish from a word");
    }
}
