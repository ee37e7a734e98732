//! Who asks most, who is turned away most, who is near a limit and stays there, and which addresses many near-limit keys
//! share. All in fixed memory, whatever the traffic: sketches and tables with a bound on their entries.
//!
//! | file | answers |
//! |---|---|
//! | `sketch` | the heaviest of a stream (Space-Saving) |
//! | `near` | who has been near a limit for minutes |
//! | `shared` | addresses that many such callers share |
//!
//! The worker shows it every denial that there was room for, and a sample of all decisions, each of these with a weight; with
//! little traffic the sample is all of them.

mod near_limit;
mod shared_network;
mod sketch;

pub(crate) use near_limit::NearLimit;
pub(crate) use shared_network::SharedNetwork;
pub(crate) use sketch::Sketch;

use crate::mask::{ApiKey, MaskedCaller};
use crate::metrics::labels::RuleLabel;
use crate::recorder::capture::CallerUtilization;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tollgate_core::{TimeDelta, Timestamp};

/// How long is counted in one piece, and how many pieces are kept.
const SLICE: TimeDelta = TimeDelta::from_secs(10);
const SLICES: usize = 6;
/// From this part of a limit on a caller is near it.
pub(crate) const NEAR_THRESHOLD: f32 = 0.8;
/// The longest lists.
const MAX_LISTED: usize = 50;

/// One decision, as far as it concerns who asks.
#[derive(Debug)]
pub(crate) struct CallerSample<'a> {
    pub(crate) caller: &'a Arc<MaskedCaller>,
    pub(crate) network: Option<&'a str>,
    pub(crate) slot: u32,
    pub(crate) name: &'a RuleLabel,
    pub(crate) denied: bool,
    /// What the caller has used of its own, and the name of that rule.
    pub(crate) utilization: Option<(CallerUtilization, &'a RuleLabel)>,
    /// How many decisions it stands for; none, where it was kept for another reason.
    pub(crate) weight: u32,
}

/// Counts of one stretch of time.
#[derive(Debug)]
struct WindowSlice {
    since: Timestamp,
    by_rate: Sketch<u64, Arc<MaskedCaller>>,
    by_denials: Sketch<(u64, u32), (Arc<MaskedCaller>, RuleLabel)>,
}

impl WindowSlice {
    fn new(since: Timestamp) -> Self {
        Self { since, by_rate: Sketch::new(), by_denials: Sketch::new() }
    }
}

/// All that is known of who asks.
#[derive(Debug, Default)]
pub(crate) struct TopCallers {
    now: Timestamp,
    slices: VecDeque<WindowSlice>,
    near: near_limit::NearLimitTracker,
    shared: shared_network::SharedNetworkTracker,
}

/// A caller by its rate.
#[derive(Debug)]
pub(crate) struct ByRate {
    pub(crate) caller: Arc<MaskedCaller>,
    pub(crate) requests: u64,
}

/// A caller by its denials.
#[derive(Debug)]
pub(crate) struct ByDenials {
    pub(crate) caller: Arc<MaskedCaller>,
    pub(crate) name: RuleLabel,
    pub(crate) denied: u64,
}

impl TopCallers {
    pub(crate) fn record(&mut self, seen: &CallerSample<'_>) {
        let (caller, id) = (seen.caller, seen.caller.id);
        if let Some(piece) = self.slices.back_mut() {
            if seen.weight > 0 {
                piece.by_rate.add(id, u64::from(seen.weight), || Arc::clone(caller));
            }
            if seen.denied {
                // Every denial is shown, sampled or not: each stands for itself.
                piece.by_denials.add((id, seen.slot), 1, || (Arc::clone(caller), seen.name.clone()));
            }
        }
        if let Some((own, name)) = &seen.utilization {
            self.near.record(caller, name, own);
        }
        if let Some(network) = seen.network {
            // Who has nothing of its own is there, too, and is not near.
            let near = seen.utilization.is_some_and(|(own, _)| own.used >= NEAR_THRESHOLD);
            self.shared.record(network, id, near, self.now);
        }
    }

    /// It is so late: what is seen next is of this time. Begins a new piece when it is due, and forgets old ones.
    ///
    /// Once a round, by the clock of whoever gathers, and never by the times of what is seen: threads are looked through one
    /// after the other, so that these go back and forth.
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

    /// How long is looked back, and all requests in that time.
    pub(crate) fn window(&self, now: Timestamp) -> (TimeDelta, u64) {
        let since = self.slices.front().map_or(now, |first| first.since);
        (now.since(since), self.slices.iter().map(|piece| piece.by_rate.total()).sum())
    }

    pub(crate) fn by_rate(&self) -> Vec<ByRate> {
        let all = merged(self.slices.iter().map(|piece| &piece.by_rate));
        all.into_iter().map(|(_, caller, requests)| ByRate { caller, requests }).collect()
    }

    pub(crate) fn by_denials(&self) -> Vec<ByDenials> {
        let all = merged(self.slices.iter().map(|piece| &piece.by_denials));
        all.into_iter().map(|(_, (caller, name), denied)| ByDenials { caller, name, denied }).collect()
    }

    /// The API key of somebody who is listed: it is kept with the place in the list, so that whoever has one can be acted on.
    pub(crate) fn key(&self, id: u64) -> Option<&str> {
        let rates = self.slices.iter().filter_map(|piece| piece.by_rate.top_n(&id));
        let denials = self.slices.iter().flat_map(|piece| piece.by_denials.counts());
        let denials = denials.map(|(_, (caller, _), _)| caller);
        let mut listed = rates.chain(denials).chain(self.near.callers()).filter(|caller| caller.id == id);
        listed.find_map(|caller| caller.key.as_ref()).map(ApiKey::expose)
    }

    pub(crate) fn near(&self) -> Vec<NearLimit> {
        self.near.top_n(MAX_LISTED)
    }

    pub(crate) fn near_keys(&self) -> usize {
        self.near.top_n(usize::MAX).len()
    }

    pub(crate) fn shared(&self, now: Timestamp) -> Vec<SharedNetwork> {
        self.shared.top_n(now, MAX_LISTED)
    }
}

/// The heaviest of all pieces together.
fn merged<'s, K: Copy + Eq + std::hash::Hash + 's, T: Clone + 's>(
    pieces: impl Iterator<Item = &'s Sketch<K, T>>,
) -> Vec<(K, T, u64)> {
    let mut sums: HashMap<K, (T, u64)> = HashMap::new();
    for (key, told, count) in pieces.flat_map(Sketch::counts) {
        sums.entry(*key).or_insert_with(|| (told.clone(), 0)).1 += count;
    }
    let mut all: Vec<(K, T, u64)> = sums.into_iter().map(|(key, (told, count))| (key, told, count)).collect();
    all.sort_by_key(|(.., count)| std::cmp::Reverse(*count));
    all.truncate(MAX_LISTED);
    all
}
