//! Sensitivity of attributes: whether their values identify a caller, and whether they may be secrets. Both are derived
//! from the attribute's name; the values themselves reveal neither.

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
            ("creditcard", Anywhere),
            ("csc", Part),
            ("csrf", Anywhere),
            ("cvc", Part),
            ("cvn", Part),
            ("cvv", Part),
        ],
        b'd' => &[("dsn", Part)],
        b'h' => &[("hmac", Anywhere), ("hotp", Part)],
        b'i' => &[("iban", Part)],
        b'j' => &[("jwe", Part), ("jws", Part), ("jwt", Anywhere)],
        b'k' => &[("key", Anywhere)],
        b'm' => &[("mfa", Part), ("mnemonic", Part)],
        b'n' => &[("nonce", Part)],
        b'o' => &[("otp", Part), ("otpcode", Part)],
        b'p' => &[
            ("pan", Part),
            ("pass", Anywhere),
            ("pat", Part),
            ("pem", Part),
            ("pfx", Part),
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

/// Pairs of words that mark an attribute as a possible secret, by the first letter of the first word: each word alone is
/// innocent. `recovery_code`, `recoveryCode` and `recoverycode` are the same.
const fn secret_pairs(first: u8) -> &'static [(&'static str, &'static [&'static str])] {
    const CODES: &[&str] = &["code", "link", "url", "uri"];
    const URLS: &[&str] = &["url", "uri", "dsn", "string", "str"];
    const NUMBERS: &[&str] = &["number", "num", "no", "nr"];
    match first {
        b'a' => &[("access", &["code", "link"]), ("activation", CODES), ("amqp", URLS)],
        b'b' => &[("backup", &["code", "phrase"]), ("bank", &["account", "number"]), ("broker", URLS)],
        b'c' => &[
            ("card", NUMBERS),
            ("cc", NUMBERS),
            ("confirmation", CODES),
            ("conn", URLS),
            ("connection", URLS),
        ],
        b'd' => &[("database", URLS), ("db", URLS)],
        b'i' => &[("invitation", CODES), ("invite", CODES)],
        b'j' => &[("jdbc", URLS)],
        b'l' => &[("license", NUMBERS), ("licence", NUMBERS), ("login", &["code", "link"])],
        b'm' => &[("magic", &["link", "url", "code"]), ("mongo", URLS), ("mongodb", URLS), ("mysql", URLS)],
        b'n' => &[("national", &["id", "number"])],
        b'o' => &[("one", &["time"]), ("onetime", &["code", "link"])],
        b'p' => &[("postgres", URLS), ("presigned", URLS)],
        b'r' => &[
            ("recovery", &["code", "phrase", "link", "url", "words"]),
            ("redis", URLS),
            ("reset", CODES),
            ("routing", NUMBERS),
        ],
        b's' => &[
            ("sas", URLS),
            ("security", &["code", "answer"]),
            ("seed", &["phrase", "words"]),
            ("signed", URLS),
            ("sms", &["code"]),
            ("social", &["security"]),
            ("sort", &["code"]),
        ],
        b't' => &[("tax", &["id", "number"])],
        b'u' => &[("unlock", CODES)],
        b'v' => &[("verification", CODES), ("verify", CODES)],
        b'w' => &[("webhook", URLS), ("webhooks", URLS)],
        _ => &[],
    }
}

/// Returns whether a pair of words that marks a secret begins at `at`: two parts with or without a separator between
/// them, and nothing around them.
fn pair_begins(name: &[u8], at: usize) -> bool {
    let follows = |from: usize, word: &str| {
        let to = from + word.len();
        let is_there = name.get(from..to).is_some_and(|part| part.eq_ignore_ascii_case(word.as_bytes()));
        is_there.then_some(to)
    };
    let ends = |from: usize, to: usize| {
        ends_part(name, from, to)
            || name.get(to).is_some_and(|next| next.eq_ignore_ascii_case(&b's'))
                && ends_part(name, from, to + 1)
    };
    begins_part(name, at)
        && secret_pairs(name[at].to_ascii_lowercase()).iter().any(|(first, seconds)| {
            let Some(middle) = follows(at, first) else { return false };
            let is_separated = name.get(middle).is_some_and(|byte| !byte.is_ascii_alphanumeric());
            let from = middle + usize::from(is_separated);
            seconds.iter().any(|second| follows(from, second).is_some_and(|to| ends(from, to)))
        })
}

/// Returns whether values of this key identify a caller.
#[must_use]
#[inline]
pub fn identifies_caller(key: &str) -> bool {
    // Patterns are compared as numbers; names in a list by a call for each of the same length.
    !matches!(
        key,
        "destination_cluster"
            | "endpoint"
            | "generic_key"
            | "host"
            | "method"
            | "path"
            | "route"
            | "service"
            | "source_cluster"
    )
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
    identifies_caller(key) && (0..name.len()).any(|at| holds(at) || pair_begins(name, at))
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
    fn secrets_are_distinguished_from_words_that_contain_one() {
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
            "recovery_code",
            "recoveryCodes",
            "x-magic-link",
            "connection_string",
            "ConnectionString",
            "connectionstring",
            "db.url",
            "dsn",
            "sentry-dsn",
            "webhook_url",
            "slackWebhookUrl",
            "card_number",
            "cardNumber",
            "CARD_NO",
            "cardnum",
            "pan",
            "userPan",
            "cvv2",
            "iban",
            "customer_iban",
            "ssn",
            "social_security_number",
            "verification-code",
            "one_time_code",
            "bank_account",
            "seed_phrase",
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
            "company",
            "company_id",
            "panel",
            "japan",
            "span",
            "expand",
            "pinterest",
            "urban",
            "discard_number",
            "card",
            "card_type",
            "number",
            "connection",
            "connection_id",
            "recovery",
            "webhook",
            "webhook_id",
            "url",
            "link",
            "magic",
            "dashboard_url",
            "postcode",
            "country_code",
            "status_code",
            "language_code",
            "database",
            "database_id",
            "reset",
            "login",
            "asset_uri",
            "preset_url",
        ] {
            assert!(!may_be_secret(name), "{name}");
        }
    }

    proptest! {
        /// However the parts of a name are joined, one secret part marks it, and none does not.
        #[test]
        fn one_secret_part_marks_a_name(
            parts in prop::collection::vec(prop::sample::select(vec!["user", "code", "value", "id", "x", "app"]), 0..4),
            secret in prop::option::of(prop::sample::select(vec!["pin", "otp", "sid", "refresh", "pwd", "jwt", "bearer", "pw", "pan", "iban", "dsn", "cvv", "ssn", "cardnumber", "magiclink"])),
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
