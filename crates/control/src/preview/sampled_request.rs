//! A sampled request: its input, its time, and how many requests it represents.

use tollgate_core::{Cost, TimeDelta, Timestamp};
use tollgate_engine::{Check, CheckInput};
use tollgate_rules::Descriptor;

/// Maximum size of a request, in bytes; larger ones are not sampled.
const MAX_BYTES: usize = 2 << 10;

/// A sampled request.
#[derive(Clone, Debug)]
pub struct SampledRequest {
    /// Time of the request.
    pub at: Timestamp,
    /// Hash of the caller.
    pub caller: u64,
    /// Number of its caller's requests that it represents.
    pub own: u64,
    /// Number of callers that its caller represents.
    pub callers: u64,
    /// Index of the node that sampled it; 0 is this node.
    pub node: u32,
    pub(crate) domain: Box<str>,
    pub(crate) input: SampledInput,
    pub(crate) cost: Cost,
    pub(crate) bytes: usize,
}

pub(crate) type Entries = Box<[(Box<str>, Box<str>)]>;

/// Entries, hits and inline limit.
pub(crate) type SampledDescriptor = (Entries, Option<Cost>, Option<(u32, TimeDelta)>);

#[derive(Clone, Debug)]
pub(crate) enum SampledInput {
    Attributes(Entries),
    Descriptors(Vec<SampledDescriptor>),
}

impl SampledRequest {
    /// Copies a request; returns `None` if it is too large.
    pub(crate) fn new(check: &Check<'_>, at: Timestamp, caller: u64, own: u64) -> Option<Self> {
        let entries =
            |all: &[(&str, &str)]| all.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let length: usize = match check.input {
            CheckInput::Attributes(all) => entry_bytes(all),
            CheckInput::Descriptors(all) => all.iter().map(|one| entry_bytes(one.entries)).sum(),
        };
        if length > MAX_BYTES {
            return None;
        }
        let input = match check.input {
            CheckInput::Attributes(all) => SampledInput::Attributes(entries(all)),
            CheckInput::Descriptors(all) => SampledInput::Descriptors(
                all.iter().map(|one| (entries(one.entries), one.hits, one.limit)).collect(),
            ),
        };
        let sampled = Self {
            at,
            caller,
            own,
            callers: 1,
            node: 0,
            domain: check.domain.into(),
            input,
            cost: check.cost,
            bytes: 0,
        };
        let bytes = sampled.size();
        (bytes <= MAX_BYTES).then_some(Self { bytes, ..sampled })
    }

    /// Returns the approximate memory size, in bytes.
    pub(crate) fn size(&self) -> usize {
        let entries = self.entries().map(|(key, value)| key.len() + value.len() + 32).sum::<usize>();
        size_of::<Self>() + self.domain.len() + entries
    }

    /// Returns whether it charged nothing: a peek is never denied, so it shows nothing about whom rules would deny.
    #[must_use]
    pub fn is_peek(&self) -> bool {
        match &self.input {
            SampledInput::Attributes(_) => self.cost == Cost::PEEK,
            SampledInput::Descriptors(all) => {
                all.iter().all(|(_, hits, _)| hits.unwrap_or(self.cost) == Cost::PEEK)
            }
        }
    }

    /// Returns the value of an attribute.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.entries().find_map(|(key, value)| (key == name).then_some(value))
    }

    /// Returns all keys and values.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        let (attributes, descriptors): (&[_], &[SampledDescriptor]) = match &self.input {
            SampledInput::Attributes(all) => (all, &[]),
            SampledInput::Descriptors(all) => (&[], all),
        };
        let all = attributes.iter().chain(descriptors.iter().flat_map(|(entries, ..)| entries));
        all.map(|(key, value)| (&**key, &**value))
    }

    /// Calls `ask` with the request as a check.
    pub fn with<T>(&self, ask: impl FnOnce(&Check<'_>) -> T) -> T {
        fn of(entries: &Entries) -> Vec<(&str, &str)> {
            entries.iter().map(|(key, value)| (&**key, &**value)).collect()
        }
        match &self.input {
            SampledInput::Attributes(entries) => {
                let entries = of(entries);
                ask(&Check::attributes(&self.domain, &entries).with_cost(self.cost))
            }
            SampledInput::Descriptors(all) => {
                let entries: Vec<_> = all.iter().map(|(entries, ..)| of(entries)).collect();
                let all = entries.iter().zip(all);
                let all: Vec<_> = all
                    .map(|(entries, (_, hits, limit))| Descriptor { entries, hits: *hits, limit: *limit })
                    .collect();
                ask(&Check::descriptors(&self.domain, &all).with_cost(self.cost))
            }
        }
    }
}

/// Returns the bytes of the entries, so that a large request is not even copied.
fn entry_bytes(entries: &[(&str, &str)]) -> usize {
    entries.iter().map(|(key, value)| key.len() + value.len()).sum()
}
