//! Known API keys. Without them any text is a key: a client that invents one for each request has a fresh limit each time,
//! and never the one that callers without a key have.
//!
//! A key is known by any of: its format (a prefix, and a checksum that only the issuer can compute), a list, a quota, or
//! the trusted proxy that sent it. A list is stored as SHA-256, looked up by a hash whose secret is drawn at the start, so
//! that neither the memory nor the time of a lookup reveals a key. Nothing here allocates for a request.

use super::config::{
    self, ApiKeyConfig, ChecksumKind, IdentityConfigError, KeyFormatConfig, KnownKeysConfig, QuotaKeys,
};
use super::credential;
use super::watched_file::{PartialFile, WatchedFile};
use arc_swap::ArcSwap;
use ring::{digest, hmac};
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of formats: each that begins like a key is computed for it.
const MAX_FORMATS: usize = 16;
/// Maximum number of keys in a list, and of its bytes.
const MAX_LISTED: usize = 1_000_000;
const MAX_FILE: u64 = 64 << 20;
/// Maximum length of a key whose checksum is computed.
const MAX_CHECKED: usize = 512;
/// Marks a line of a list as the hash of a key.
const HASHED: &[u8] = b"sha256:";
/// Number of digits of a CRC-32.
const CRC_DIGITS: usize = 8;

/// What is known of API keys.
pub(super) struct KnownKeys {
    settings: KnownKeysConfig,
    formats: Vec<KeyFormat>,
    list: Option<KeyList>,
    quotas: Option<QuotaKeys>,
    unknown_seen: AtomicU64,
}

struct KeyList {
    file: WatchedFile,
    keys: ArcSwap<HashedKeys>,
}

/// The first half of each key's SHA-256, by a keyed hash of it.
type HashedKeys = HashSet<[u8; 16]>;

struct KeyFormat {
    prefix: String,
    checksum: Checksum,
}

enum Checksum {
    Crc32,
    Hmac { key: hmac::Key, digits: usize },
}

impl std::fmt::Debug for KnownKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KnownKeys").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl KnownKeys {
    /// Reads the files of the settings; `None` if any key counts.
    pub(super) fn new(settings: &ApiKeyConfig) -> Result<Option<Self>, IdentityConfigError> {
        let Some(known) = &settings.known else {
            return match settings.unknown {
                None | Some(config::UnknownKeys::Key) => Ok(None),
                Some(_) => Err(IdentityConfigError::Known(
                    "`api_key.unknown` says what unknown keys count as, and nothing says which are known; add `known`, \
                     such as `known: {file: keys.txt}`"
                        .to_owned(),
                )),
            };
        };
        if known.formats.is_empty() && known.file.is_none() && !known.quotas && !known.verified_by_proxy {
            return Err(IdentityConfigError::Known(
                "`api_key.known` is empty; write `formats`, `file`, `quotas: true` or `verified_by_proxy: true`, or, if no \
                 request has a key, `api_key: {header: null, bearer: false}`"
                    .to_owned(),
            ));
        }
        if known.formats.len() > MAX_FORMATS {
            return Err(IdentityConfigError::Known(format!(
                "`api_key.known.formats` has more than {MAX_FORMATS} formats"
            )));
        }
        if known.quotas && settings.quota_keys.is_none() {
            return Err(IdentityConfigError::Known(
                "`api_key.known.quotas` needs a control plane, whose quotas say which keys are known; set --db, or list \
                 the keys in `file`"
                    .to_owned(),
            ));
        }
        let list = known.file.as_deref().map(|path| {
            let file = WatchedFile::new(path, PartialFile::Valid);
            Ok(KeyList { file, keys: ArcSwap::from_pointee(read_list(path)?) })
        });
        Ok(Some(Self {
            settings: known.clone(),
            formats: known.formats.iter().map(KeyFormat::new).collect::<Result<_, _>>()?,
            list: list.transpose()?,
            quotas: settings.quota_keys.clone().filter(|_| known.quotas),
            unknown_seen: AtomicU64::new(0),
        }))
    }

    pub(super) fn matches_config(&self, settings: &ApiKeyConfig) -> bool {
        settings.known.as_ref() == Some(&self.settings)
            && self.quotas == settings.quota_keys.clone().filter(|_| self.settings.quotas)
    }

    /// Reads the list if it has changed; returns whether it has, and what is wrong with it.
    pub(super) fn reload(&self) -> Option<(bool, Option<String>)> {
        let list = self.list.as_ref()?;
        let has_changed = list.file.poll(|path| read_list(path).map(|keys| list.keys.store(keys.into())));
        Some((has_changed, list.file.error()))
    }

    pub(super) fn unknown_seen(&self) -> u64 {
        self.unknown_seen.load(Ordering::Relaxed)
    }

    /// Returns whether a key is known: `value` as it was sent, `text` as the attribute has it.
    pub(super) fn knows(&self, value: &[u8], text: &str, is_trusted: bool) -> bool {
        let is_listed = |list: &KeyList| list.keys.load().contains(&hashed(value));
        let is_known = self.settings.verified_by_proxy && is_trusted
            || self.formats.iter().any(|format| format.is_of(value))
            || self.list.as_ref().is_some_and(is_listed)
            || self.quotas.as_ref().is_some_and(|quotas| quotas.contains(text));
        if !is_known {
            self.unknown_seen.fetch_add(1, Ordering::Relaxed);
        }
        is_known
    }
}

impl KeyFormat {
    fn new(settings: &KeyFormatConfig) -> Result<Self, IdentityConfigError> {
        const DIGITS: std::ops::RangeInclusive<usize> = 16..=64;
        let KeyFormatConfig { prefix, checksum, secret_file, digits } = settings;
        let wrong = |text: &str| Err(IdentityConfigError::Known(format!("format `{prefix}`: {text}")));
        if prefix.is_empty() || !credential::is_readable(prefix.as_bytes()) {
            return wrong("write a `prefix` of visible characters, such as `tg_live_`");
        }
        let checksum = match (checksum, secret_file, digits) {
            (ChecksumKind::Crc32, None, None) => Checksum::Crc32,
            (ChecksumKind::Crc32, ..) => return wrong("`crc32` takes neither `secret_file` nor `digits`"),
            (ChecksumKind::HmacSha256, None, _) => {
                return wrong("`hmac-sha256` needs `secret_file`, the secret by which keys are issued");
            }
            (ChecksumKind::HmacSha256, Some(path), digits) => {
                let digits = digits.unwrap_or(*DIGITS.start());
                if !DIGITS.contains(&digits) {
                    return wrong("`digits` must be 16 to 64: fewer can be guessed");
                }
                Checksum::Hmac { key: hmac::Key::new(hmac::HMAC_SHA256, &config::read_secret(path)?), digits }
            }
        };
        Ok(Self { prefix: prefix.clone(), checksum })
    }

    /// Returns whether a key has the prefix, and ends with the checksum of everything before it, in small hexadecimal
    /// digits: of several spellings, each would be another caller.
    fn is_of(&self, key: &[u8]) -> bool {
        let digits = match &self.checksum {
            Checksum::Crc32 => CRC_DIGITS,
            Checksum::Hmac { digits, .. } => *digits,
        };
        if key.len() > MAX_CHECKED
            || key.len() <= self.prefix.len() + digits
            || !key.starts_with(self.prefix.as_bytes())
        {
            return false;
        }
        let (body, check) = key.split_at(key.len() - digits);
        match &self.checksum {
            Checksum::Crc32 => is_hex_of(&crc32(body).to_be_bytes(), check),
            Checksum::Hmac { key, .. } => is_hex_of(hmac::sign(key, body).as_ref(), check),
        }
    }
}

/// Returns whether `text` is the beginning of `bytes` in hexadecimal, in a time that does not depend on where they differ.
fn is_hex_of(bytes: &[u8], text: &[u8]) -> bool {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| DIGITS[usize::from(digit)]);
    digits.zip(text).fold(0, |differing, (digit, given)| differing | (digit ^ given)) == 0
}

/// The CRC-32 of Ethernet, gzip and PNG.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

fn hashed(key: &[u8]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&digest::digest(&digest::SHA256, key).as_ref()[..16]);
    half
}

fn read_list(path: &Path) -> Result<HashedKeys, IdentityConfigError> {
    let text = config::read_file(path, MAX_FILE)?;
    let keys = parse_list(&text);
    keys.map_err(|wrong| IdentityConfigError::File { path: path.to_owned(), wrong })
}

/// Parses a list: a key or its hash on each line. Errors never repeat a line.
fn parse_list(text: &[u8]) -> Result<HashedKeys, String> {
    let mut keys = HashedKeys::new();
    for (at, line) in text.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let key = match line.strip_prefix(HASHED) {
            Some(digits) => unhex(digits),
            None => credential::is_readable(line).then(|| hashed(line)),
        };
        let key = key.ok_or_else(|| {
            format!(
                "line {}: neither a key (visible ASCII without commas, semicolons and quotes) nor `sha256:` with the 64 \
                 hexadecimal digits of its hash",
                at + 1
            )
        })?;
        keys.insert(key);
        if keys.len() > MAX_LISTED {
            return Err(format!("line {}: more than {MAX_LISTED} keys", at + 1));
        }
    }
    if keys.is_empty() {
        return Err("the file has no keys; write one on each line, or its hash as `sha256:…`".to_owned());
    }
    Ok(keys)
}

/// Returns the first half of a SHA-256 in hexadecimal.
fn unhex(digits: &[u8]) -> Option<[u8; 16]> {
    let text = std::str::from_utf8(digits).ok().filter(|text| text.len() == 64)?;
    if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(&text[..32], 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_other_programs() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert!(is_hex_of(&[0x0a, 0xf0], b"0af0") && is_hex_of(&[0x0a, 0xf0], b"0a"));
        for other in [&b"0AF0"[..], b"0af1", b"0bf0"] {
            assert!(!is_hex_of(&[0x0a, 0xf0], other), "{other:?}");
        }
    }

    /// A wrong line would make a caller unknown; a line in a message would be a key in the log.
    #[test]
    fn a_list_is_read_whole_or_not_at_all() {
        let keys = parse_list(b"# issued\r\nkey-1\r\n\n  key-2 \nsha256:2C70E12B7A0646F92279F427C7B38E7334D8E5389CFF167A1DC30E73F826B683\n");
        let keys = keys.expect("a list");
        assert_eq!(keys.len(), 3);
        assert!([&b"key-1"[..], b"key-2", b"key"].iter().all(|key| keys.contains(&hashed(key))));
        for (text, wrong) in [
            (&b"key-1\nsecret key\n"[..], "line 2: "),
            (b"secret,key", "line 1: "),
            (b"\n\nsha256:12", "line 3: "),
            (b"secret\xff", "line 1: "),
            (b"", "no keys"),
            (b"# none\n", "no keys"),
        ] {
            let error = parse_list(text).expect_err(wrong);
            assert!(error.contains(wrong) && !error.contains("secret"), "{error}");
        }
    }
}
