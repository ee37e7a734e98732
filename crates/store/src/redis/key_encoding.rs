//! Redis key encoding: the key of a counter's bundle, and the counter's name in it. `docs/internals/redis-format.md`
//! has every byte.
//!
//! `tg1:{alice}Xk3_9aQz:POST /login` is the bundle of all counters whose values are `alice` and `POST /login`, with
//! names from the group `Xk3_9aQz`. The first value is the hash tag, so that a tenant's bundles share a slot of a
//! cluster. Values are escaped, never joined: the delimiter of one cannot occur in another. Of a value that may be a
//! secret only 128 bits of a hash are written: Redis, its backups and its logs are read by more people than may use
//! another caller's credentials.

use ring::{digest, hmac};
use smallvec::SmallVec;
use std::fmt::Write;
use std::sync::Arc;
use tollgate_core::{CounterKey, KeyPart, Scope};

/// A counter's name within its bundle, in as many bytes as it needs.
pub(super) type Name = SmallVec<[u8; 12]>;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// What an operator decides about keys; the same on every node, because nodes share counters. Values that may be secrets
/// are hashed by SHA-256, or by HMAC-SHA-256 with a secret, so that guesses cannot be tested.
#[derive(Clone, Default)]
pub(super) struct Hashing {
    secret: Option<Arc<hmac::Key>>,
    /// Text before every key.
    prefix: Arc<str>,
}

impl Hashing {
    #[must_use]
    pub(super) fn with_secret(self, secret: &[u8]) -> Self {
        Self { secret: Some(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret))), ..self }
    }

    #[must_use]
    pub(super) fn with_prefix(self, prefix: &str) -> Self {
        Self { prefix: prefix.into(), ..self }
    }

    /// Returns the text before every key.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the beginning of every key.
    pub(super) fn start(&self) -> String {
        let mut key = String::with_capacity(48 + self.prefix.len());
        key.push_str(&self.prefix);
        key.push_str("tg1:{");
        key
    }

    /// Half of the hash: finding two values that share a counter still takes 2^64 tries, and has no use.
    fn put(&self, name: &mut String, value: &str) {
        let mut half = |hash: &[u8]| {
            for word in hash[..16].chunks(8) {
                digits(name, u64::from_le_bytes(word.try_into().unwrap_or_default()), 11);
            }
        };
        match &self.secret {
            Some(key) => half(hmac::sign(key, value.as_bytes()).as_ref()),
            None => half(digest::digest(&digest::SHA256, value.as_bytes()).as_ref()),
        }
    }
}

/// Returns the key of the bundle that a counter lives in.
pub(super) fn bundle(key: &CounterKey<'_>, hashing: &Hashing) -> String {
    let mut name = hashing.start();
    let mut values = key.parts.iter();
    match values.next() {
        Some(first) => {
            part(&mut name, first, hashing);
            name.push('}');
            digits(&mut name, key.scope.group(), 8);
        }
        None => {
            digits(&mut name, key.scope.group(), 8);
            name.push('}');
        }
    }
    for value in values {
        name.push(':');
        part(&mut name, value, hashing);
    }
    name
}

/// Returns a counter's name in its bundle: three digits if digits identify it unambiguously, otherwise its scope's id.
/// Three digits make the bundle of a single bucket a whole number, which Redis stores without extra memory.
pub(super) fn member(scope: &Scope) -> Name {
    if let Some(code) = scope.member().and_then(code) {
        return [code / 100, code / 10 % 10, code % 10].iter().map(|digit| b'0' + *digit as u8).collect();
    }
    let mut name = String::with_capacity(11);
    digits(&mut name, scope.id(), 11);
    name.bytes().collect()
}

/// Returns the three-digit code of a scope that is alone, or of the common periods of the common algorithm. No two
/// scopes of a group share a code.
fn code(member: &str) -> Option<u16> {
    if member.is_empty() {
        return Some(0);
    }
    let period = member.strip_prefix("|gcra|")?;
    let (count, unit) = period.split_at(period.find(|c: char| !c.is_ascii_digit())?);
    if count.starts_with('0') {
        return None;
    }
    let count: u16 = count.parse().ok()?;
    match unit {
        "s" if count < 600 => Some(count),
        "m" if count < 100 => Some(600 + count),
        "h" if count < 100 => Some(700 + count),
        "d" if count < 100 => Some(800 + count),
        _ => None,
    }
}

fn part(name: &mut String, part: &KeyPart<'_>, hashing: &Hashing) {
    match part {
        // An empty tag would not count as a tag; a lone escape sign stands for nothing else.
        KeyPart::Text("") => name.push('%'),
        KeyPart::Text(text) => {
            for (at, c) in text.char_indices() {
                if matches!(c, '%' | ':' | '{' | '}') || c.is_ascii_control() || (at == 0 && c == '@') {
                    let _ = write!(name, "%{:02x}", u32::from(c));
                } else {
                    name.push(c);
                }
            }
        }
        // Every network has a slash, and no hash has one.
        KeyPart::Secret(value) => {
            name.push('@');
            hashing.put(name, value);
        }
        KeyPart::Network { .. } => {
            name.push('@');
            let from = name.len();
            let _ = write!(name, "{part}");
            let readable = name[from..].replace(':', "-");
            name.replace_range(from.., &readable);
        }
    }
}

fn digits(name: &mut String, number: u64, count: u32) {
    for digit in 0..count {
        let at = (number >> (6 * digit)) & 63;
        name.push(char::from(ALPHABET[usize::try_from(at).unwrap_or(0)]));
    }
}

/// Returns the cluster slot of a key: CRC16 of its hash tag.
pub(super) fn slot(key: &str) -> u16 {
    let tagged = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tagged.filter(|tag| !tag.is_empty()).unwrap_or(key);
    hashed.bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(byte) << 8,
            |crc, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
            },
        )
    }) % 16_384
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(group: &str, parts: &[KeyPart<'_>]) -> String {
        bundle(&CounterKey { scope: &Scope::new(group), parts }, &Hashing::default())
    }

    /// Readers of names must not be able to use another caller's key, and all nodes must write the same names.
    #[test]
    fn secrets_are_written_as_their_hash_alone() {
        let key = "sk_live_4242424242424242";
        let plain = named("g", &[KeyPart::Secret(key), KeyPart::Secret("")]);
        // The same as `printf %s KEY | sha256sum`: eight bytes at a time, lowest bits first.
        assert!(plain.starts_with(PINNED), "{plain}");
        assert_eq!(plain.len(), "tg1:{@}:@".len() + 8 + 2 * 22, "{plain}");
        assert_ne!(named("g", &[KeyPart::Secret("a")]), named("g", &[KeyPart::Secret("b")]));
        let parts = [KeyPart::Secret(key)];
        let keyed = |secret: &[u8]| {
            bundle(
                &CounterKey { scope: &Scope::new("g"), parts: &parts },
                &Hashing::default().with_secret(secret),
            )
        };
        assert_ne!(keyed(b"one"), keyed(b"two"));
        assert_ne!(keyed(b"one"), named("g", &parts));
        assert_eq!(keyed(b"one"), keyed(b"one"));
        // A value that is spelled like a hash is not mistaken for one.
        let spelled = plain["tg1:{".len()..][..23].to_owned();
        assert!(named("g", &[KeyPart::Text(&spelled)]).starts_with("tg1:{%40"), "{spelled}");
    }

    const PINNED: &str = "tg1:{@xY4StNj3ocKWUOcEXem8XP}";

    #[test]
    fn values_never_run_into_each_other() {
        let name = named("g", &[KeyPart::Text("a:{b}%"), KeyPart::Text("@x"), KeyPart::Text("")]);
        assert!(name.starts_with("tg1:{a%3a%7bb%7d%25}") && name.ends_with(":%40x:%"), "{name}");
        let network = named("g", &[KeyPart::Network { address: 0xffff_0a00_0000, prefix: 104 }]);
        assert!(network.starts_with("tg1:{@10.0.0.0/8}"), "{network}");
        assert_ne!(named("g", &[]), named("g", &[KeyPart::Text("")]));
    }

    #[test]
    fn a_sixteen_byte_tenant_fits_the_smallest_key() {
        assert_eq!(named("g", &[KeyPart::Text("0123456789abcdef")]).len(), 30);
    }

    #[test]
    fn digits_are_added_only_to_distinguish_names() {
        let name = |label: &str| String::from_utf8(member(&Scope::in_group(label, "api|user")).to_vec());
        assert_eq!(name("api|user|gcra|1s"), Ok("001".to_owned()));
        assert_eq!(name("api|user|gcra|1m"), Ok("601".to_owned()));
        assert_eq!(name("api|user|gcra|1d"), Ok("801".to_owned()));
        for other in [
            "api|user|gcra|600s",
            "api|user|shadow:gcra|1s",
            "api|user|x=1|gcra|1s",
            "api|user|fixed_window|1s",
        ] {
            assert_eq!(name(other).map(|name| name.len()), Ok(11), "{other}");
        }
        assert_eq!(member(&Scope::new("alone")).as_slice(), b"000");
    }

    #[test]
    fn slots_are_those_of_the_cluster() {
        assert_eq!(slot("123456789"), 12_739);
        assert_eq!(slot("foo{bar}baz"), slot("bar"));
        assert_ne!(slot("foo{}{bar}"), slot("bar"));
    }
}
