//! Whether a text of a request tells a secret of the same request, so that whoever writes it down can leave it out: some
//! callers put their key into the path as well.

use super::{IdentityResolver, jwt};
use crate::headers::HeaderLookup;
use http::header::AUTHORIZATION;
use std::borrow::Cow;
use tollgate_rules::may_be_secret;

/// Nothing shorter is looked for: it would be found everywhere.
const MIN_SECRET: usize = 4;
/// How often an escape may have been escaped.
const MAX_LAYERS: usize = 3;

impl IdentityResolver {
    /// Whether a path holds the request's own key, token, or what else of its fields may be a secret, escaped or not.
    #[must_use]
    pub fn contains_secret(&self, headers: &impl HeaderLookup, path: &str) -> bool {
        let known = [self.key.header(), self.jwt.as_ref().map(|tokens| tokens.header())];
        let mapped = self.headers.iter().filter(|mapped| may_be_secret(&mapped.attribute));
        let named = known.into_iter().flatten().chain(mapped.map(|mapped| &mapped.header));
        let own = named.flat_map(|name| headers.all(name)).map(<[u8]>::trim_ascii);
        let credentials = headers.all(&AUTHORIZATION).map(|value| jwt::bearer(value).unwrap_or(value));
        let mut secrets = own.chain(credentials).filter(|secret| secret.len() >= MIN_SECRET);
        secrets.any(|secret| holds(path.as_bytes(), secret))
    }
}

fn holds(path: &[u8], secret: &[u8]) -> bool {
    let is_there = |text: &[u8]| text.windows(secret.len()).any(|part| part == secret);
    if is_there(path) {
        return true;
    }
    let mut text = Cow::Borrowed(path);
    for _ in 0..MAX_LAYERS {
        if text.len() < secret.len() || !text.contains(&b'%') {
            return false;
        }
        text = Cow::Owned(decoded(&text));
        if is_there(&text) {
            return true;
        }
    }
    false
}

/// With one layer of escapes taken away; what is no escape stays.
fn decoded(text: &[u8]) -> Vec<u8> {
    let digit = |at: usize| text.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut decoded = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        match (text[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                // Two digits are a byte.
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
        let who = IdentityResolver::new(&settings).expect("settings");
        let tells = |header: &'static str, value: &str, path: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header, value.parse().expect("a value"));
            who.contains_secret(&headers, path)
        };
        for path in [
            "/bot/12:ab/x",
            "/bot12:ab",
            "/bot/12%3Aab/x",
            "/bot/%31%32%3aa%62",
            "/bot/12%253Aab",
            "/%/12:ab",
        ] {
            assert!(tells("x-api-key", "12:ab", path), "{path}");
            assert!(tells("authorization", "Bearer 12:ab", path), "{path}");
            assert!(tells("authorization", "12:ab", path), "{path}");
            assert!(tells("x-proof", "12:ab", path), "{path}");
            assert!(!tells("x-region", "12:ab", path), "{path}");
        }
        for path in ["/", "/bot/12:a/b", "/bot/12%3Ba", "/bot/%", "/bot/%3"] {
            assert!(!tells("x-api-key", "12:ab", path), "{path}");
        }
        assert!(!tells("x-api-key", "bot", "/bot/x"), "too short to be told from a word");
    }
}
