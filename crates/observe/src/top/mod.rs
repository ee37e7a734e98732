//! Top callers: by request rate, by denials, near a limit, and networks shared by many callers near a limit. All in fixed
//! memory at any traffic: sketches and tables with a bounded number of entries.
//!
//! | module | contents |
//! |---|---|
//! | `sketch` | heavy hitters of a stream (Space-Saving) |
//! | `near_limit` | callers that have been near a limit for minutes |
//! | `shared_network` | networks that many such callers share |
//!
//! The worker records every denial that was captured, and a weighted sample of all decisions; at low traffic the sample is
//! complete.

mod near_limit;
mod shared_network;
mod sketch;

pub(crate) use near_limit::NearLimit;
pub(crate) use shared_network::SharedNetwork;
pub(crate) use sketch::Sketch;

use crate::mask::{ApiKey, MaskedCaller};
use crate::metrics::labels::RuleLabel;
use crate::recorder::capture::CallerUtilization;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use tollgate_core::{TimeDelta, Timestamp};

/// Length of one slice of the window, and number of slices.
const SLICE: TimeDelta = TimeDelta::from_secs(10);
const SLICES: usize = 6;
/// Utilization from which a caller is near its limit.
pub(crate) const NEAR_THRESHOLD: f32 = 0.8;
/// Utilization from which a caller is about to be denied.
const AT_90_PERCENT: f32 = 0.9;
/// Maximum length of a list.
const MAX_LISTED: usize = 50;

/// The part of a captured decision that concerns its caller.
#[derive(Debug)]
pub(crate) struct CallerSample<'a> {
    pub(crate) caller: &'a Arc<MaskedCaller>,
    pub(crate) network: Option<&'a str>,
    /// The rule that the decision is attributed to, or what else denied it.
    pub(crate) name: &'a RuleLabel,
    pub(crate) denied: bool,
    /// Utilization of the caller's own limits, and the label of the rule.
    pub(crate) utilization: Option<(CallerUtilization, &'a RuleLabel)>,
    /// Number of decisions it represents; 0 if it was not captured as a sample.
    pub(crate) weight: u32,
}

/// Counts of one slice of the window.
#[derive(Debug)]
struct WindowSlice {
    since: Timestamp,
    by_rate: Sketch<u64, Arc<MaskedCaller>>,
    /// By the caller's id and a hash of the name of what denied it.
    by_denials: Sketch<(u64, u64), (Arc<MaskedCaller>, RuleLabel)>,
}

impl WindowSlice {
    fn new(since: Timestamp) -> Self {
        Self { since, by_rate: Sketch::new(), by_denials: Sketch::new() }
    }
}

/// Top callers in a sliding window.
#[derive(Debug, Default)]
pub(crate) struct TopCallers {
    now: Timestamp,
    slices: VecDeque<WindowSlice>,
    /// Since the last [`TopCallers::take_minute`], if minutes are counted.
    minute: Option<WindowSlice>,
    near: near_limit::NearLimitTracker,
    shared: shared_network::SharedNetworkTracker,
}

/// A caller with its requests in the window.
#[derive(Debug)]
pub(crate) struct ByRate {
    pub(crate) caller: Arc<MaskedCaller>,
    pub(crate) requests: u64,
}

/// A caller with its denials by one rule in the window.
#[derive(Debug)]
pub(crate) struct ByDenials {
    pub(crate) caller: Arc<MaskedCaller>,
    pub(crate) name: RuleLabel,
    pub(crate) denied: u64,
}

impl TopCallers {
    pub(crate) fn record(&mut self, sample: &CallerSample<'_>) {
        let (caller, id) = (sample.caller, sample.caller.id);
        let denied_by = BuildHasherDefault::<DefaultHasher>::default().hash_one(sample.name);
        for slice in self.slices.back_mut().into_iter().chain(&mut self.minute) {
            if sample.weight > 0 {
                slice.by_rate.add(id, u64::from(sample.weight), || Arc::clone(caller));
            }
            if sample.denied {
                // Every denial is captured, sampled or not, so each counts once.
                slice.by_denials.add((id, denied_by), 1, || (Arc::clone(caller), sample.name.clone()));
            }
        }
        if let Some((own, name)) = &sample.utilization {
            self.near.record(caller, name, own);
        }
        if let Some(network) = sample.network {
            // A caller without a per-caller limit is counted on the network, as not near.
            let near = sample.utilization.is_some_and(|(own, _)| own.used >= NEAR_THRESHOLD);
            self.shared.record(network, id, near, self.now);
        }
    }

    /// Sets the current time for the samples that follow, starts a new slice when due and drops old ones.
    ///
    /// The worker calls this once per run with its own clock. Capture times are not used: buffers are drained thread by thread,
    /// so that they are not in order.
    pub(crate) fn rotate(&mut self, now: Timestamp) {
        if now < self.now {
            return;
        }
        self.now = now;
        if self.slices.back().is_none_or(|last| now.since(last.since) >= SLICE) {
            self.slices.push_back(WindowSlice::new(now));
        }
        let whole = TimeDelta::from_micros(SLICE.as_micros() * SLICES as u64);
        while self.slices.len() > SLICES
            || self.slices.front().is_some_and(|first| now.since(first.since) > whole)
        {
            if self.slices.len() == 1 {
                break;
            }
            self.slices.pop_front();
        }
        self.near.rotate(now);
        self.shared.rotate(now);
    }

    /// Starts to count minutes.
    pub(crate) fn count_minutes(&mut self) {
        self.minute.get_or_insert_with(|| WindowSlice::new(self.now));
    }

    /// Returns the callers with the most requests and with the most denials since the last call, and starts over.
    pub(crate) fn take_minute(&mut self) -> (Vec<ByRate>, Vec<ByDenials>) {
        let Some(minute) = &mut self.minute else { return (Vec::new(), Vec::new()) };
        let slice = std::mem::replace(minute, WindowSlice::new(self.now));
        let by_rate = merged(std::iter::once(&slice.by_rate));
        let by_denials = merged(std::iter::once(&slice.by_denials));
        (
            by_rate.into_iter().map(|(_, caller, requests)| ByRate { caller, requests }).collect(),
            by_denials
                .into_iter()
                .map(|(_, (caller, name), denied)| ByDenials { caller, name, denied })
                .collect(),
        )
    }

    /// Returns the length of the window so far, and the number of requests in it.
    pub(crate) fn window(&self, now: Timestamp) -> (TimeDelta, u64) {
        let since = self.slices.front().map_or(now, |first| first.since);
        (now.since(since), self.slices.iter().map(|slice| slice.by_rate.total()).sum())
    }

    pub(crate) fn by_rate(&self) -> Vec<ByRate> {
        let all = merged(self.slices.iter().map(|slice| &slice.by_rate));
        all.into_iter().map(|(_, caller, requests)| ByRate { caller, requests }).collect()
    }

    pub(crate) fn by_denials(&self) -> Vec<ByDenials> {
        let all = merged(self.slices.iter().map(|slice| &slice.by_denials));
        all.into_iter().map(|(_, (caller, name), denied)| ByDenials { caller, name, denied }).collect()
    }

    /// Returns the API key of a listed caller, which is stored with the list entry for operator actions; the inner
    /// `None` if the caller is listed and has none.
    pub(crate) fn key(&self, id: u64) -> Option<Option<&str>> {
        let rates = self.slices.iter().filter_map(|slice| slice.by_rate.value_of(&id));
        let denials = self.slices.iter().flat_map(|slice| slice.by_denials.counts());
        let denials = denials.map(|(_, (caller, _), _)| caller);
        let listed = rates.chain(denials).chain(self.near.callers()).filter(|caller| caller.id == id);
        // Callers of two kinds may share a value, and so an id: the one with a key can be acted on.
        listed.map(|caller| caller.key.as_ref().map(ApiKey::expose)).reduce(Option::or)
    }

    pub(crate) fn near(&self) -> Vec<NearLimit> {
        self.near.top_n(MAX_LISTED)
    }

    pub(crate) fn near_keys(&self) -> usize {
        self.near.top_n(usize::MAX).len()
    }

    /// Returns the number of callers at 90% or more of a limit, by domain and rule.
    pub(crate) fn at_90_percent(&self) -> BTreeMap<(Arc<str>, Arc<str>), usize> {
        self.near.count_from(AT_90_PERCENT)
    }

    pub(crate) fn shared(&self, now: Timestamp) -> Vec<SharedNetwork> {
        self.shared.top_n(now, MAX_LISTED)
    }
}

/// Merges the sketches of all slices and returns the heaviest entries.
fn merged<'s, K: Copy + Eq + std::hash::Hash + 's, T: Clone + 's>(
    slices: impl Iterator<Item = &'s Sketch<K, T>>,
) -> Vec<(K, T, u64)> {
    let mut sums: HashMap<K, (T, u64)> = HashMap::new();
    for (key, value, count) in slices.flat_map(Sketch::counts) {
        sums.entry(*key).or_insert_with(|| (value.clone(), 0)).1 += count;
    }
    let mut all: Vec<(K, T, u64)> =
        sums.into_iter().map(|(key, (value, count))| (key, value, count)).collect();
    all.sort_by_key(|(.., count)| std::cmp::Reverse(*count));
    all.truncate(MAX_LISTED);
    all
}
