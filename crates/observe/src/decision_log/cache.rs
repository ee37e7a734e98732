//! What is told of a decision beside its numbers, worked out once and remembered: those who are denied are mostly denied again,
//! by the same limit. Masks and keyed hashes are dear, and in a flood there is a decision to log for every request.
//!
//! What a request said is remembered by a hash alone, and by what may be told; but for the API key of its caller, for those who
//! act on somebody without knowing the key.

use crate::mask::{ApiKey, Mask, MaskedCaller, network};
use crate::metrics::labels::LabelLayout;
use crate::recorder::capture::{CaptureBuffer, CapturedDecision};
use foldhash::quality::RandomState;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use tollgate_core::Limit;
use tollgate_engine::Window;

/// So many of each are remembered, and of those who ask so many bytes; then it begins anew.
const MAX_ENTRIES: usize = 4_096;
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// Who asked, and for what.
#[derive(Debug)]
pub(crate) struct CallerDescription {
    pub(crate) domain: Box<str>,
    pub(crate) attributes: Box<[(String, String)]>,
    /// What values hash to: for searching by one.
    pub(crate) ids: Box<[u64]>,
    pub(crate) caller: Option<Arc<MaskedCaller>>,
    /// What the caller can be acted on by, if it is told.
    pub(crate) key_id: Option<u64>,
    /// The network that it came from, if its caller is known by more than that.
    pub(crate) network: Option<Box<str>>,
    /// How many decisions of the log in memory it is part of.
    pub(crate) masked_key: AtomicUsize,
}

impl CallerDescription {
    /// What it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        // What the allocator adds to each text.
        const EACH: usize = 16;
        let text = |text: &str| text.len() + EACH;
        let pair = |(name, value): &(String, String)| {
            size_of::<(String, String)>() + size_of::<u64>() + text(name) + text(value)
        };
        let key = |key: &ApiKey| text(key.expose());
        let caller = self.caller.as_ref().map_or(0, |caller| {
            size_of::<MaskedCaller>() + EACH + text(&caller.display) + caller.key.as_ref().map_or(0, key)
        });
        let attributes: usize = self.attributes.iter().map(pair).sum();
        size_of::<Self>()
            + 3 * EACH
            + text(&self.domain)
            + attributes
            + caller
            + self.network.as_deref().map_or(0, text)
    }
}

/// A limit, as it is told.
#[derive(Debug)]
pub(crate) struct LimitDescription {
    pub(crate) limit: u64,
    pub(crate) capacity: u64,
    pub(crate) window: String,
    pub(crate) algorithm: &'static str,
}

impl LimitDescription {
    pub(crate) fn from_limit(limit: &Limit) -> Self {
        Self {
            limit: limit.rate().count,
            capacity: limit.capacity(),
            window: Window::from_limit(limit).to_string(),
            algorithm: limit.algorithm().name(),
        }
    }
}

/// The worker's memory.
#[derive(Debug, Default)]
pub(crate) struct DescriptionCache {
    /// By two hashes of the domain and all attributes: one alone could be somebody else's, once in a long while.
    callers: HashMap<(u64, u64), Arc<CallerDescription>, RandomState>,
    /// What they take.
    bytes: usize,
    second: RandomState,
    limits: HashMap<u32, Arc<LimitDescription>, RandomState>,
    /// Whose numbers the limits have.
    layout: Option<Arc<LabelLayout>>,
}

impl DescriptionCache {
    pub(crate) fn caller(
        &mut self,
        buffer: &CaptureBuffer,
        capture: &CapturedDecision,
        mask: &Mask,
    ) -> Arc<CallerDescription> {
        let said = buffer.attributes(capture);
        let hashed = |mut hasher: <RandomState as BuildHasher>::Hasher| {
            said.hash(&mut hasher);
            hasher.finish()
        };
        let key = (hashed(self.callers.hasher().build_hasher()), hashed(self.second.build_hasher()));
        if let Some(known) = self.callers.get(&key) {
            return Arc::clone(known);
        }
        let (domain, pairs) = buffer.values(capture);
        let (attributes, ids) = mask.display(&pairs);
        let caller = mask.caller(&pairs, &attributes, &ids);
        let network = network(&pairs, &attributes);
        let acted_on = caller.as_ref().filter(|caller| caller.key.is_some() && mask.is_injective());
        let asker = Arc::new(CallerDescription {
            domain: domain.into(),
            attributes: attributes.into(),
            ids: ids.into(),
            key_id: acted_on.map(|caller| caller.id),
            caller: caller.map(Arc::new),
            network: network.map(Into::into),
            masked_key: AtomicUsize::new(0),
        });
        if self.callers.len() >= MAX_ENTRIES || self.bytes >= MAX_BYTES {
            self.callers.clear();
            self.bytes = 0;
        }
        self.bytes += asker.bytes();
        self.callers.insert(key, Arc::clone(&asker));
        asker
    }

    /// The limit that a decision is about.
    pub(crate) fn limit(
        &mut self,
        buffer: &CaptureBuffer,
        capture: &CapturedDecision,
    ) -> Option<Arc<LimitDescription>> {
        let Some(number) = capture.meta.status?.number() else {
            return capture.own.as_deref().map(|own| Arc::new(LimitDescription::from_limit(own)));
        };
        let layout = buffer.layout(capture)?;
        if !self.layout.as_ref().is_some_and(|known| Arc::ptr_eq(known, layout))
            || self.limits.len() >= MAX_ENTRIES
        {
            self.limits.clear();
            self.layout = Some(Arc::clone(layout));
        }
        if let Some(known) = self.limits.get(&number) {
            return Some(Arc::clone(known));
        }
        let told = Arc::new(LimitDescription::from_limit(&layout.rules.limit(number)?.limit));
        self.limits.insert(number, Arc::clone(&told));
        Some(told)
    }
}
