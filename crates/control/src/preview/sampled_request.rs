//! A request of the last traffic, as it is kept: what it asked, when, and how many it stands for.

use tollgate_core::{Cost, Timestamp};
use tollgate_engine::{Check, CheckInput};
use tollgate_rules::{Descriptor, Unit};

/// Bytes of a request; longer ones are not kept.
const MAX_BYTES: usize = 2 << 10;

/// A request that was kept.
#[derive(Clone, Debug)]
pub struct SampledRequest {
    /// When.
    pub at: Timestamp,
    /// Whose.
    pub caller: u64,
    /// How many of its caller's own requests it stands for.
    pub own: u64,
    /// How many callers its caller stands for.
    pub callers: u64,
    /// Which node remembers it; this one is the first, 0.
    pub node: u32,
    pub(crate) domain: Box<str>,
    pub(crate) input: SampledInput,
    pub(crate) cost: Cost,
    pub(crate) bytes: usize,
}

pub(crate) type Entries = Box<[(Box<str>, Box<str>)]>;

/// Its entries, hits and limit.
pub(crate) type SampledDescriptor = (Entries, Option<Cost>, Option<(u32, Unit)>);

#[derive(Clone, Debug)]
pub(crate) enum SampledInput {
    Attributes(Entries),
    Descriptors(Vec<SampledDescriptor>),
}

impl SampledRequest {
    /// What is kept of a request; nothing of one that is too long.
    pub(crate) fn new(check: &Check<'_>, at: Timestamp, caller: u64, own: u64) -> Option<Self> {
        let entries =
            |all: &[(&str, &str)]| all.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let long: usize = match check.input {
            CheckInput::Attributes(all) => length(all),
            CheckInput::Descriptors(all) => all.iter().map(|one| length(one.entries)).sum(),
        };
        if long > MAX_BYTES {
            return None;
        }
        let form = match check.input {
            CheckInput::Attributes(all) => SampledInput::Attributes(entries(all)),
            CheckInput::Descriptors(all) => SampledInput::Descriptors(
                all.iter().map(|one| (entries(one.entries), one.hits, one.limit)).collect(),
            ),
        };
        let kept = Self {
            at,
            caller,
            own,
            callers: 1,
            node: 0,
            domain: check.domain.into(),
            input: form,
            cost: check.cost,
            bytes: 0,
        };
        let bytes = kept.size();
        (bytes <= MAX_BYTES).then_some(Self { bytes, ..kept })
    }

    /// The memory that it takes, about.
    pub(crate) fn size(&self) -> usize {
        let entries = self.entries().map(|(key, value)| key.len() + value.len() + 32).sum::<usize>();
        size_of::<Self>() + self.domain.len() + entries
    }

    /// Whether it charged nothing: whoever only looks is denied nothing, so says nothing about whom rules would deny.
    pub(crate) fn is_peek(&self) -> bool {
        match &self.input {
            SampledInput::Attributes(_) => self.cost == Cost::PEEK,
            SampledInput::Descriptors(all) => {
                all.iter().all(|(_, hits, _)| hits.unwrap_or(self.cost) == Cost::PEEK)
            }
        }
    }

    /// All keys and values.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        let (attributes, descriptors): (&[_], &[SampledDescriptor]) = match &self.input {
            SampledInput::Attributes(all) => (all, &[]),
            SampledInput::Descriptors(all) => (&[], all),
        };
        let all = attributes.iter().chain(descriptors.iter().flat_map(|(entries, ..)| entries));
        all.map(|(key, value)| (&**key, &**value))
    }

    /// Asks it again.
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

/// The bytes of its entries; a long request is not even copied.
fn length(entries: &[(&str, &str)]) -> usize {
    entries.iter().map(|(key, value)| key.len() + value.len()).sum()
}
