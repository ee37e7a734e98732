//! Counter keys: the scope from the rule, and the values from the request.
//!
//! Parts are stored separately, never joined: `[a=b_c]` and `[a_b=c]` are two counters. Each store encodes them as it
//! needs (a seeded hash in memory, escaped text in Redis). A value that may be a secret has its own variant, so that
//! code that stores or displays it can treat it differently.

use crate::region::{self, CounterOwner, RegionMode};
use std::fmt;

/// The part of a counter key that comes from the rule: domain, rule and limit.
///
/// It contains what makes two counters incomparable (path, algorithm, period) and omits what an operator may change
/// while traffic flows (count, burst), so that usage survives a changed number.
#[derive(Clone, Debug)]
pub struct Scope {
    id: u64,
    label: String,
    group: u64,
    /// Length of the group's name within the label; the whole label if the scope has no group.
    shared: Option<usize>,
    /// Parsed from the label, because every charge between cells reads it.
    region: RegionMode,
    /// Whether consumption is also written to a database; not part of the label, because operators may change it.
    is_durable: bool,
}

/// Scopes are equal if their counters are: durability does not count.
impl PartialEq for Scope {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
            && self.label == other.label
            && self.group == other.group
            && self.shared == other.shared
    }
}

impl Eq for Scope {}

impl Scope {
    /// Creates a scope with this label; equal labels are equal scopes, also across restarts and machines.
    ///
    /// ```
    /// use tollgate_core::Scope;
    /// assert_eq!(Scope::new("api/user").id(), Scope::new("api/user").id());
    /// ```
    #[must_use]
    pub fn new(label: impl Into<String>) -> Self {
        let label = label.into();
        let (id, shared) = (stable_hash_of(&label), Some(label.len()));
        Self { region: region_of(&label).0, id, label, group: id, shared, is_durable: false }
    }

    /// Creates a scope in a group of scopes whose counters have the same values for the same keys: a store may keep the
    /// counters of one group and the same values together, and read and write them at once. The group is only a
    /// placement hint; the label identifies a counter.
    ///
    /// ```
    /// use tollgate_core::Scope;
    /// let (second, day) = (Scope::in_group("api|user|gcra|1s", "api|user"), Scope::in_group("api|user|gcra|1d", "api|user"));
    /// assert_eq!(second.group(), day.group());
    /// assert_ne!(second.id(), day.id());
    /// assert_eq!(second.member(), Some("|gcra|1s"));
    /// ```
    #[must_use]
    pub fn in_group(label: impl Into<String>, group: &str) -> Self {
        let label = label.into();
        let shared = label.starts_with(group).then_some(group.len());
        let (id, region) = (stable_hash_of(&label), region_of(&label).0);
        Self { id, label, group: stable_hash_of(group), shared, region, is_durable: false }
    }

    /// Returns the beginning of labels and groups whose counters a store with this name keeps. No other label begins so,
    /// as long as names of domains are escaped.
    ///
    /// ```
    /// use tollgate_core::Scope;
    /// let group = format!("{}api|user", Scope::store_prefix("eu"));
    /// let scope = Scope::in_group(format!("{group}|gcra|1s"), &group);
    /// assert_eq!((scope.store(), scope.sibling("|escrow").store()), (Some("eu"), Some("eu")));
    /// assert_eq!(Scope::new("api|user").store(), None);
    /// ```
    #[must_use]
    pub fn store_prefix(store: &str) -> String {
        format!("{STORE_MARK}{store}|")
    }

    /// Returns the name of the store that keeps the counters of this scope; `None` for the default store. It is part of
    /// the label, so whatever keeps a label (a lease, a reservation of another node) has it.
    #[must_use]
    #[inline]
    pub fn store(&self) -> Option<&str> {
        self.label.strip_prefix(STORE_MARK).and_then(|rest| rest.split_once('|')).map(|(store, _)| store)
    }

    /// Returns a scope of the same group with a longer label, for data that a store keeps about this scope's counters.
    ///
    /// ```
    /// use tollgate_core::Scope;
    /// let second = Scope::in_group("api|user|gcra|1s", "api|user");
    /// let escrow = second.sibling("|escrow");
    /// assert_eq!((escrow.label(), escrow.group()), ("api|user|gcra|1s|escrow", second.group()));
    /// ```
    #[must_use]
    pub fn sibling(&self, suffix: &str) -> Self {
        let label = format!("{}{suffix}", self.label);
        Self {
            id: stable_hash_of(&label),
            label,
            group: self.group,
            shared: self.shared,
            region: self.region,
            is_durable: false,
        }
    }

    /// Returns the group's identifier and the length of its name within the label: with the label, all that
    /// [`Scope::from_placement`] needs.
    #[must_use]
    pub const fn placement(&self) -> (u64, Option<usize>) {
        (self.group, self.shared)
    }

    /// Creates the scope with this label and [`Scope::placement`], on another node.
    ///
    /// ```
    /// use tollgate_core::Scope;
    /// let scope = Scope::in_group("api|user|gcra|1s", "api|user");
    /// assert_eq!(Scope::from_placement(scope.label(), scope.placement()), scope);
    /// ```
    #[must_use]
    pub fn from_placement(label: impl Into<String>, (group, shared): (u64, Option<usize>)) -> Self {
        let label = label.into();
        let shared = shared.filter(|length| label.is_char_boundary(*length));
        let region = region_of(&label).0;
        Self { id: stable_hash_of(&label), region, label, group, shared, is_durable: false }
    }

    /// Returns how cells share the limits of its counters.
    #[must_use]
    #[inline]
    pub const fn region_mode(&self) -> RegionMode {
        self.region
    }

    /// Returns which cell owns its counters, if one does.
    #[must_use]
    pub fn owner(&self) -> CounterOwner<'_> {
        region_of(&self.label).1
    }

    /// Sets whether consumption of its counters is also written to a database, so that it survives the store.
    ///
    /// ```
    /// use tollgate_core::Scope;
    /// let scope = Scope::new("api|user|fixed_window|1mo");
    /// assert!(scope.clone().with_durable(true).is_durable() && !scope.is_durable());
    /// assert_eq!(scope.clone().with_durable(true), scope, "the same counters");
    /// ```
    #[must_use]
    pub fn with_durable(mut self, is_durable: bool) -> Self {
        self.is_durable = is_durable;
        self
    }

    /// Returns whether consumption of its counters is also written to a database.
    #[must_use]
    #[inline]
    pub const fn is_durable(&self) -> bool {
        self.is_durable
    }

    /// Returns a stable 64-bit identifier of the group.
    #[must_use]
    pub const fn group(&self) -> u64 {
        self.group
    }

    /// Returns the label's suffix after the group's name, if the label starts with it; empty without a group.
    #[must_use]
    pub fn member(&self) -> Option<&str> {
        self.shared.map(|shared| &self.label[shared..])
    }

    /// Returns a stable 64-bit identifier.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Returns the readable label.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }
}

/// What a label begins with whose counters a named store keeps: not what an escaped character begins with.
const STORE_MARK: &str = "%@";

/// Returns how cells share the counters of a label, and who owns them.
fn region_of(label: &str) -> (RegionMode, CounterOwner<'_>) {
    let stored = label.strip_prefix(STORE_MARK).and_then(|rest| rest.split_once('|'));
    region::parse(stored.map_or(label, |(_, rest)| rest))
}

fn stable_hash_of(name: &str) -> u64 {
    let mut hasher = StableHasher::default();
    hasher.bytes(name.as_bytes());
    hasher.finish()
}

/// One value in a counter key.
///
/// ```
/// use tollgate_core::KeyPart;
/// let part = KeyPart::Secret("sk_live_4242424242424242");
/// assert_eq!((part.to_string().as_str(), format!("{part:?}").as_str()), ("sk_liv…", "Secret(sk_liv…)"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyPart<'a> {
    /// A value as the caller sent it.
    Text(&'a str),
    /// A value that may be a secret, such as an API key: compared as it is, stored outside of this process only as a
    /// hash, and displayed as its first characters. The attribute's key determines the variant, so one key never has
    /// both.
    Secret(&'a str),
    /// A network: the address with the host bits cleared, and the prefix length (IPv4 as ::ffff:0:0/96 and longer).
    Network {
        /// The address as a number.
        address: u128,
        /// Prefix length in bits, out of 128.
        prefix: u8,
    },
}

impl fmt::Display for KeyPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Secret(text) => write!(f, "{}…", secret_prefix(text)),
            Self::Network { address, prefix } => {
                let v6 = std::net::Ipv6Addr::from(*address);
                match v6.to_ipv4_mapped() {
                    Some(v4) if *prefix >= 96 => write!(f, "{v4}/{}", prefix - 96),
                    _ => write!(f, "{v6}/{prefix}"),
                }
            }
        }
    }
}

impl fmt::Debug for KeyPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.debug_tuple("Text").field(text).finish(),
            Self::Secret(_) => write!(f, "Secret({self})"),
            Self::Network { .. } => write!(f, "Network({self})"),
        }
    }
}

/// Returns the part of a secret that may be displayed: enough to recognize it, not enough to use it. At most a quarter
/// of it and at most six characters.
#[must_use]
pub fn secret_prefix(secret: &str) -> &str {
    let shown = (secret.chars().count() / 4).min(6);
    secret.char_indices().nth(shown).map_or(secret, |(end, _)| &secret[..end])
}

/// A [`KeyPart`] that owns its value.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum OwnedKeyPart {
    /// See [`KeyPart::Text`].
    Text(Box<str>),
    /// See [`KeyPart::Secret`].
    Secret(Box<str>),
    /// See [`KeyPart::Network`].
    Network {
        /// The address as a number.
        address: u128,
        /// Prefix length in bits, out of 128.
        prefix: u8,
    },
}

impl OwnedKeyPart {
    /// Borrows as a [`KeyPart`].
    #[must_use]
    pub fn as_part(&self) -> KeyPart<'_> {
        match self {
            Self::Text(text) => KeyPart::Text(text),
            Self::Secret(text) => KeyPart::Secret(text),
            Self::Network { address, prefix } => KeyPart::Network { address: *address, prefix: *prefix },
        }
    }
}

impl From<&KeyPart<'_>> for OwnedKeyPart {
    fn from(part: &KeyPart<'_>) -> Self {
        match part {
            KeyPart::Text(text) => Self::Text((*text).into()),
            KeyPart::Secret(text) => Self::Secret((*text).into()),
            KeyPart::Network { address, prefix } => Self::Network { address: *address, prefix: *prefix },
        }
    }
}

impl fmt::Debug for OwnedKeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.as_part(), f)
    }
}

/// The key of one counter.
///
/// ```
/// use tollgate_core::{CounterKey, KeyPart, Scope};
/// let scope = Scope::new("api/user");
/// let (a, b) = ([KeyPart::Text("a"), KeyPart::Text("b_c")], [KeyPart::Text("a_b"), KeyPart::Text("c")]);
/// assert_ne!(CounterKey { scope: &scope, parts: &a }, CounterKey { scope: &scope, parts: &b });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterKey<'a> {
    /// Scope: which limit.
    pub scope: &'a Scope,
    /// Values from the request.
    pub parts: &'a [KeyPart<'a>],
}

impl CounterKey<'_> {
    /// Returns the bytes of the values, for tables that keep keys and are bounded.
    #[must_use]
    pub fn value_bytes(&self) -> usize {
        let bytes = |part: &KeyPart<'_>| match part {
            KeyPart::Text(text) | KeyPart::Secret(text) => text.len(),
            KeyPart::Network { .. } => 17,
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Returns a hash that is the same on every machine, for what machines must agree on (a window's jitter, a shard).
    #[must_use]
    pub fn stable_hash(&self) -> u64 {
        let mut hasher = StableHasher::default();
        hasher.number(self.scope.id);
        for part in self.parts {
            match part {
                KeyPart::Text(text) | KeyPart::Secret(text) => hasher.bytes(text.as_bytes()),
                KeyPart::Network { address, prefix } => {
                    // A length that no text has, so that a network never equals its own bytes as text.
                    hasher.number(u64::MAX);
                    hasher.number((address >> 64) as u64);
                    hasher.number(*address as u64);
                    hasher.number(u64::from(*prefix));
                }
            }
        }
        hasher.finish()
    }
}

/// FNV-1a over length-prefixed fields, finished with a mixer: small, permanently fixed, not for secrets.
#[derive(Clone, Copy, Debug)]
pub struct StableHasher(u64);

impl Default for StableHasher {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl StableHasher {
    /// Adds a field.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    /// Adds a number.
    pub fn number(&mut self, number: u64) {
        for byte in number.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    /// Returns the hash of all fields.
    #[must_use]
    pub const fn finish(self) -> u64 {
        let mut h = self.0;
        h = (h ^ h >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        h = (h ^ h >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        h ^ h >> 32
    }
}
