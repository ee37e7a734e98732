//! Cache of masked descriptions of callers and limits. Denied callers are mostly denied again, by the same limit; masks
//! and keyed hashes are expensive, and in a flood every request produces a record.
//!
//! A request is identified by a hash of its attributes and stored in masked form only, except for the caller's API key,
//! which operator actions on a listed caller need.

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

/// Maximum number of entries per map, and of bytes for callers; when either is reached the cache is cleared.
const MAX_ENTRIES: usize = 4_096;
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// Masked description of a request's caller and attributes.
#[derive(Debug)]
pub(crate) struct CallerDescription {
    pub(crate) domain: Box<str>,
    pub(crate) attributes: Box<[(String, String)]>,
    /// Keyed hashes of the attribute values, for searching by value.
    pub(crate) ids: Box<[u64]>,
    pub(crate) caller: Option<Arc<MaskedCaller>>,
    /// Id by which operators can act on the caller, if ids are shown.
    pub(crate) key_id: Option<u64>,
    /// Network of the client address, if the caller is identified by something other than its address.
    pub(crate) network: Option<Box<str>>,
    /// Number of in-memory log records that refer to this description.
    pub(crate) references: AtomicUsize,
}

impl CallerDescription {
    /// Returns its memory use in bytes.
    pub(crate) fn bytes(&self) -> usize {
        // Allocator overhead per string.
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

/// A limit as shown in records.
#[derive(Debug)]
pub(crate) struct LimitDescription {
    pub(crate) limit: u64,
    pub(crate) capacity: u64,
    pub(crate) window: String,
    pub(crate) algorithm: &'static str,
    /// What it counts, if that is an attribute of requests.
    pub(crate) unit: Option<Box<str>>,
}

impl LimitDescription {
    pub(crate) fn from_limit(limit: &Limit, unit: Option<&str>) -> Self {
        Self {
            limit: limit.rate().count,
            capacity: limit.capacity(),
            window: Window::from_limit(limit).to_string(),
            algorithm: limit.algorithm().name(),
            unit: unit.map(Into::into),
        }
    }
}

/// Descriptions of recent callers and limits, owned by the worker.
#[derive(Debug, Default)]
pub(crate) struct DescriptionCache {
    /// Keyed by two independent hashes of the domain and all attributes: one alone could collide.
    callers: HashMap<(u64, u64), Arc<CallerDescription>, RandomState>,
    /// Memory used by the callers, in bytes.
    bytes: usize,
    second: RandomState,
    limits: HashMap<u32, Arc<LimitDescription>, RandomState>,
    /// Label layout whose limit numbers are the keys of `limits`.
    layout: Option<Arc<LabelLayout>>,
}

impl DescriptionCache {
    pub(crate) fn caller(
        &mut self,
        buffer: &CaptureBuffer,
        capture: &CapturedDecision,
        mask: &Mask,
    ) -> Arc<CallerDescription> {
        let attributes = buffer.attribute_text(capture);
        let hashed = |mut hasher: <RandomState as BuildHasher>::Hasher| {
            attributes.hash(&mut hasher);
            hasher.finish()
        };
        let key = (hashed(self.callers.hasher().build_hasher()), hashed(self.second.build_hasher()));
        if let Some(known) = self.callers.get(&key) {
            return Arc::clone(known);
        }
        let (domain, pairs) = buffer.attributes(capture);
        let rules = buffer.layout(capture).map(|layout| &layout.rules);
        let is_cost = |name: &str| rules.is_some_and(|rules| rules.is_cost_attribute(name));
        let (attributes, ids) = mask.display(&pairs, is_cost);
        let caller = mask.caller(&pairs, &attributes, &ids);
        let network = network(&pairs, &attributes);
        let acted_on = caller.as_ref().filter(|caller| caller.key.is_some() && mask.keeps_distinct());
        let description = Arc::new(CallerDescription {
            domain: domain.into(),
            attributes: attributes.into(),
            ids: ids.into(),
            key_id: acted_on.map(|caller| caller.id),
            caller: caller.map(Arc::new),
            network: network.map(Into::into),
            references: AtomicUsize::new(0),
        });
        if self.callers.len() >= MAX_ENTRIES || self.bytes >= MAX_BYTES {
            self.callers.clear();
            self.bytes = 0;
        }
        self.bytes += description.bytes();
        self.callers.insert(key, Arc::clone(&description));
        description
    }

    /// Returns the description of the limit that a decision is attributed to.
    pub(crate) fn limit(
        &mut self,
        buffer: &CaptureBuffer,
        capture: &CapturedDecision,
    ) -> Option<Arc<LimitDescription>> {
        let status = capture.meta.status?;
        let Some(number) = status.number() else {
            let own = capture.own.as_deref();
            return own.map(|(own, unit)| Arc::new(LimitDescription::from_limit(own, unit.as_deref())));
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
        let limit = layout.rules.limit(number)?;
        let unit = limit.unit_name(status.rule.and_then(|rule| layout.rules.rule(rule)));
        let description = Arc::new(LimitDescription::from_limit(&limit.limit, unit));
        self.limits.insert(number, Arc::clone(&description));
        Some(description)
    }
}
