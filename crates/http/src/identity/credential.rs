//! Credentials as a caller spells them: one canonical value, or none that can be read.
//!
//! Servers read `Authorization` loosely: many split it at any white space, take the first word after the scheme, or
//! ignore characters that base64 does not have. A value that was read whole here would then be another caller for each
//! suffix, so only values that every server reads alike are read: one word after the scheme, without list separators,
//! and for what looks like a JWT the one base64url form.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// The content of an `Authorization` field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Authorization<'r> {
    /// An empty field.
    Absent,
    /// A bearer value.
    Bearer(&'r [u8]),
    /// Credentials of another scheme, which identify no caller here.
    Other,
    /// Anything else.
    Unreadable,
}

impl<'r> Authorization<'r> {
    /// Reads a field's value. The scheme has any case, and any number of spaces and tabs separate it from its value.
    pub(super) fn read(value: &'r [u8]) -> Self {
        let value = value.trim_ascii();
        if value.is_empty() {
            return Self::Absent;
        }
        let end = value.iter().position(|byte| !is_token(*byte)).unwrap_or(value.len());
        let (scheme, rest) = value.split_at(end);
        let credentials = rest.trim_ascii();
        if scheme.is_empty() || credentials.is_empty() || !matches!(rest[0], b' ' | b'\t') {
            return Self::Unreadable;
        }
        match scheme.eq_ignore_ascii_case(b"bearer") {
            true if is_readable(credentials) => Self::Bearer(credentials),
            // A server that searches the field for `Bearer` would find it.
            false if !has_word(credentials, b"bearer") && is_of_scheme(scheme, credentials) => Self::Other,
            _ => Self::Unreadable,
        }
    }
}

/// Schemes whose credentials are not a token. Servers that take the second word of the field, whatever the first is, would
/// accept a token under any other name.
const SCHEMES: [&str; 16] = [
    "aws4-hmac-sha256",
    "basic",
    "concealed",
    "digest",
    "gnap",
    "hawk",
    "hoba",
    "mutual",
    "negotiate",
    "ntlm",
    "oauth",
    "scram-sha-1",
    "scram-sha-256",
    "sharedkey",
    "sharedkeylite",
    "vapid",
];

/// Returns whether credentials are those of a known scheme, and not a token under its name.
fn is_of_scheme(scheme: &[u8], credentials: &[u8]) -> bool {
    let is = |name: &str| scheme.eq_ignore_ascii_case(name.as_bytes());
    if is("basic") {
        let padded = credentials.len() - credentials.iter().rev().take_while(|byte| **byte == b'=').count();
        return STANDARD_NO_PAD.decode(&credentials[..padded]).is_ok_and(|pair| pair.contains(&b':'));
    }
    let first = credentials.split(u8::is_ascii_whitespace).next().unwrap_or_default();
    SCHEMES.iter().any(|name| is(name)) && !looks_like_jwt(first)
}

const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

fn has_word(text: &[u8], word: &[u8]) -> bool {
    let mut words = text.split(|byte| !byte.is_ascii_alphanumeric());
    words.any(|other| other.eq_ignore_ascii_case(word))
}

/// Returns whether every server reads this value as one credential.
pub(super) fn is_readable(value: &[u8]) -> bool {
    let is_part = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b',' | b';' | b'"');
    value.iter().all(is_part) && (!looks_like_jwt(value) || is_strict_jwt(value))
}

/// Returns whether a value starts with a JSON object in base64, as a JWT does, and has several parts.
pub(super) fn looks_like_jwt(value: &[u8]) -> bool {
    let Some(head) = value.get(..4).filter(|_| value.contains(&b'.')) else { return false };
    let mut start = [0; 3];
    STANDARD_NO_PAD.decode_slice(head, &mut start).is_ok()
        && start[0] == b'{'
        && (start[1] == b'"' || start[1].is_ascii_whitespace())
}

/// Returns whether a token has the number of parts of a JWS or a JWE, each in the one form of base64url that decodes to
/// its content. Other forms verify too in lenient libraries.
fn is_strict_jwt(value: &[u8]) -> bool {
    let mut parts = 0;
    let all_strict = value.split(|byte| *byte == b'.').all(|part| {
        parts += 1;
        URL_SAFE_NO_PAD.decode(part).is_ok()
    });
    all_strict && matches!(parts, 3 | 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that was read whole here and in part by a server would be a fresh caller for each suffix.
    #[test]
    fn spellings_of_a_bearer_are_one_value_or_unreadable() {
        for value in ["Bearer key", "bearer\tkey", "BEARER \t key ", "Bearer  key"] {
            assert_eq!(Authorization::read(value.as_bytes()), Authorization::Bearer(b"key"), "{value:?}");
        }
        for value in [
            "Basic YTpi",
            "basic YTpiYw==",
            "Digest a=\"b\", c=d",
            "AWS4-HMAC-SHA256 Credential=x/y, Signature=z",
        ] {
            assert_eq!(Authorization::read(value.as_bytes()), Authorization::Other, "{value}");
        }
        for value in [
            "Bearer",
            "Bearer ",
            "key",
            "Bearer:key",
            "Bearer=key",
            "Bearer,key",
            "Bearer key x",
            "Bearer key\tx",
            "Bearer key,x",
            "Bearer key, Bearer x",
            "Bearer key;x",
            "Bearer \"key\"",
            "Bearer Bearer key",
            "Basic x, Bearer key",
            "Basic key",
            "Token key",
            "x key",
            "BearerX key",
            "Digest eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.AAAA_-8",
            "Bearer caf\u{e9}",
            "Bearer\u{a0}key",
            "\"Bearer\" key",
        ] {
            assert_eq!(Authorization::read(value.as_bytes()), Authorization::Unreadable, "{value}");
        }
        assert_eq!(Authorization::read(b" "), Authorization::Absent);
    }

    /// A lenient library verifies all of these as the first.
    #[test]
    fn a_jwt_has_one_spelling() {
        let jwt = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.AAAA_-8";
        assert!(is_readable(jwt.as_bytes()) && looks_like_jwt(jwt.as_bytes()));
        for other in ["=", "!", ".", ".x", "~"] {
            assert!(!is_readable(format!("{jwt}{other}").as_bytes()), "{other}");
        }
        // The last character of this signature has two unused bits.
        assert!(!is_readable(jwt.replace("-8", "-9").as_bytes()));
        assert!(!is_readable(jwt.replace("_-8", "/+8").as_bytes()));
        for opaque in ["SG.abc.def", "1|abc", "sk_live_4eC39", "eyJrIjoiYWJj=="] {
            assert!(is_readable(opaque.as_bytes()) && !looks_like_jwt(opaque.as_bytes()), "{opaque}");
        }
    }
}
