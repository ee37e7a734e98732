//! Sensitivity of attributes: whether their values identify a caller, and whether they may be secrets. Both are derived
//! from the attribute's name; the values themselves reveal neither.

/// Keys whose values do not identify a caller.
const NOT_IDENTIFYING: [&str; 9] = [
    "destination_cluster",
    "endpoint",
    "generic_key",
    "host",
    "method",
    "path",
    "route",
    "service",
    "source_cluster",
];

/// How a word marks an attribute as a possible secret.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occurrence {
    /// Anywhere in the name: no usual word contains it.
    Anywhere,
    /// As a part of the name, as in `userPin`, `x-pin-code` and `PIN2`, since other words contain it: `pinned`, `spinner`.
    Part,
}

/// Words that mark an attribute as a possible secret, by their first letter: names may be long and chosen by callers.
const fn secret_words(first: u8) -> &'static [(&'static str, Occurrence)] {
    use Occurrence::{Anywhere, Part};
    match first {
        b'2' => &[("2fa", Part)],
        b'a' => &[("auth", Anywhere), ("assertion", Part)],
        b'b' => &[("bearer", Anywhere)],
        b'c' => &[
            ("cookie", Anywhere),
            ("credential", Anywhere),
            ("creds", Part),
            ("cred", Part),
            ("csrf", Anywhere),
            ("cvc", Part),
            ("cvv", Part),
        ],
        b'h' => &[("hmac", Anywhere), ("hotp", Part)],
        b'j' => &[("jwe", Part), ("jws", Part), ("jwt", Anywhere)],
        b'k' => &[("key", Anywhere)],
        b'm' => &[("mfa", Part), ("mnemonic", Part)],
        b'n' => &[("nonce", Part)],
        b'o' => &[("otp", Part), ("otpcode", Part)],
        b'p' => &[
            ("pass", Anywhere),
            ("pat", Part),
            ("pin", Part),
            ("pincode", Part),
            ("psk", Part),
            ("pw", Part),
            ("pwd", Anywhere),
        ],
        b'r' => &[("refresh", Part)],
        b's' => &[
            ("saml", Anywhere),
            ("secret", Anywhere),
            ("sess", Part),
            ("sessid", Anywhere),
            ("session", Anywhere),
            ("sid", Part),
            ("sig", Part),
            ("signature", Anywhere),
            ("ssn", Part),
            ("sso", Part),
        ],
        b't' => &[("token", Anywhere), ("totp", Part)],
        b'x' => &[("xsrf", Anywhere)],
        _ => &[],
    }
}

/// Returns whether values of this key identify a caller.
#[must_use]
pub fn identifies_caller(key: &str) -> bool {
    !NOT_IDENTIFYING.contains(&key)
}

/// Returns whether values of this key may be secrets. Keys that do not identify a caller never are, whatever their
/// name: the `generic_key` of Envoy is a constant in its configuration.
///
/// ```
/// use tollgate_rules::may_be_secret;
/// assert!(may_be_secret("api_key") && may_be_secret("X-Auth-Token") && may_be_secret("userPin"));
/// assert!(!may_be_secret("user") && !may_be_secret("generic_key") && !may_be_secret("pinned"));
/// ```
#[must_use]
pub fn may_be_secret(key: &str) -> bool {
    let name = key.as_bytes();
    let holds = |at: usize| {
        let rest = &name[at..];
        secret_words(rest[0].to_ascii_lowercase()).iter().any(|(word, occurrence)| {
            rest.get(..word.len()).is_some_and(|part| part.eq_ignore_ascii_case(word.as_bytes()))
                && (*occurrence == Occurrence::Anywhere || is_part(name, at, at + word.len()))
        })
    };
    identifies_caller(key) && (0..name.len()).any(holds)
}

/// Returns whether `name[from..to]` is a part of a name by itself: between separators, digits, changes of case, or the
/// name's ends. A plural counts as the same part.
fn is_part(name: &[u8], from: usize, to: usize) -> bool {
    let plural = name.get(to).is_some_and(|next| next.eq_ignore_ascii_case(&b's'));
    begins_part(name, from) && (ends_part(name, from, to) || plural && ends_part(name, from, to + 1))
}

fn begins_part(name: &[u8], at: usize) -> bool {
    let Some(before) = at.checked_sub(1).map(|before| name[before]) else { return true };
    let is_lower = |at: usize| name.get(at).is_some_and(u8::is_ascii_lowercase);
    // `userPin`, and the second word of `APIPin`.
    !before.is_ascii_alphabetic()
        || !name[at].is_ascii_alphabetic()
        || name[at].is_ascii_uppercase() && (before.is_ascii_lowercase() || is_lower(at + 1))
        || name[at].is_ascii_lowercase() && is_acronym(&name[..at])
}

fn ends_part(name: &[u8], from: usize, at: usize) -> bool {
    let Some(next) = name.get(at) else { return true };
    // `PINCode` and `pinCode`, but not the beginning of `PINNED`; `OTPcode`.
    let begins_next = next.is_ascii_uppercase()
        && (name[at - 1].is_ascii_lowercase() || name.get(at + 1).is_some_and(u8::is_ascii_lowercase));
    !next.is_ascii_alphabetic()
        || begins_next
        || next.is_ascii_lowercase() && name[from..at].iter().all(u8::is_ascii_uppercase)
}

/// Returns whether a name so far ends with several capitals, so that a small letter begins another part: `APIpin`.
fn is_acronym(name: &[u8]) -> bool {
    name.len() > 1 && name[name.len() - 2..].iter().all(u8::is_ascii_uppercase)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all_words() -> Vec<(&'static str, Occurrence)> {
        (0..=u8::MAX).flat_map(secret_words).copied().collect()
    }

    fn capitalized(word: &str) -> String {
        word[..1].to_uppercase() + &word[1..]
    }

    /// An undetected word would put a key into the logs.
    #[test]
    fn every_word_is_found_in_any_position() {
        for (word, occurrence) in all_words() {
            for name in [
                word.to_owned(),
                word.to_uppercase(),
                format!("x-{word}"),
                format!("{word}_code"),
                format!("user.{word}.2"),
                format!("{word}s"),
                format!("é{word}s"),
                format!("user{}", capitalized(word)),
                format!("user{}Code", capitalized(word)),
                format!("user{}", word.to_uppercase()),
                format!("API{}", capitalized(word)),
            ] {
                assert!(may_be_secret(&name), "{name}");
            }
            if occurrence == Occurrence::Anywhere {
                assert!(may_be_secret(&format!("my{word}value")), "{word}");
            }
        }
        assert!(!may_be_secret("") && !may_be_secret("user") && !may_be_secret("generic_key"));
    }

    #[test]
    fn secrets_are_told_from_words_that_merely_contain_one() {
        for name in [
            "userPwd",
            "userpwd",
            "x-otp-code",
            "refresh_token",
            "RefreshValue",
            "JSESSIONID",
            "PHPSESSID",
            "connect.sid",
            "sid2",
            "OTPcode",
            "APIpin",
            "PINCode",
            "pins",
            "id-jwt",
            "Proxy-Authorization",
            "webhook_sig",
            "2fa",
        ] {
            assert!(may_be_secret(name), "{name}");
        }
        for name in [
            "pinned",
            "spinner",
            "Pinned",
            "PINNED",
            "mapping",
            "residual",
            "side",
            "inside",
            "SideBar",
            "resident_id",
            "footprint",
            "hotplate",
            "refreshing",
            "design",
            "sign",
            "patch",
            "path_id",
            "sassy",
            "associate",
            "announced",
            "powder",
            "country",
            "user_id",
            "remote_address",
        ] {
            assert!(!may_be_secret(name), "{name}");
        }
    }

    proptest! {
        /// However the parts of a name are joined, one secret part marks it, and none does not.
        #[test]
        fn one_secret_part_marks_a_name(
            parts in prop::collection::vec(prop::sample::select(vec!["user", "code", "value", "id", "x", "app"]), 0..4),
            secret in prop::option::of(prop::sample::select(vec!["pin", "otp", "sid", "refresh", "pwd", "jwt", "bearer", "pw"])),
            at in 0_usize..4,
            style in 0..5,
        ) {
            let mut words = parts.clone();
            if let Some(secret) = secret {
                words.insert(at.min(words.len()), secret);
            }
            let name = match style {
                0 => words.join("_"),
                1 => words.join("-").to_uppercase(),
                2 => words.join("."),
                3 => words.iter().map(|word| capitalized(word)).collect(),
                _ => words.iter().enumerate().map(|(i, word)| if i == 0 { (*word).to_owned() } else { capitalized(word) }).collect(),
            };
            prop_assert_eq!(may_be_secret(&name), secret.is_some(), "{}", name);
        }
    }
}
