//! Merges the traffic samples of several nodes, as if one node had seen all requests. Pure.
//!
//! All nodes select callers by the same hash, so for a caller that every node selected, all requests are present,
//! whichever node received them. A node with more traffic keeps fewer callers: for each time slice the merge keeps
//! those that the node with the most traffic keeps, with that node's weight. A caller that makes up a large share of
//! any node's traffic is always kept, and represents only itself.

use crate::preview::sample_slice::{SampleSlice, is_in, keep_one_in};
use crate::preview::sampled_request::SampledRequest;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Upper bound of a mask, which selects one in 2^20 callers.
pub(crate) const MAX_MASK: u64 = (1 << 20) - 1;
/// A caller with at least this many requests, and more than one in this many of a node's requests, is large.
const LARGE: u64 = 32;

/// Maximum number of requests and bytes of one slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SliceBudget {
    pub(crate) requests: usize,
    pub(crate) bytes: usize,
}

impl SliceBudget {
    fn fits(self, requests: &[SampledRequest]) -> bool {
        requests.len() <= self.requests && requests.iter().map(|one| one.bytes).sum::<usize>() <= self.bytes
    }
}

impl SampleSlice {
    /// Thins the slice until it fits: drops half of the callers each time and doubles the weight of the others; if
    /// only large callers are left, drops half of their requests.
    pub(crate) fn fit(&mut self, budget: SliceBudget) {
        let large = self.large();
        while !budget.fits(&self.requests) {
            if self.mask < MAX_MASK && self.requests.iter().any(|one| !large.contains(&one.caller)) {
                self.narrow(self.mask << 1 | 1, &large);
            } else {
                self.requests.retain_mut(|one| {
                    one.own = one.own.saturating_mul(2);
                    keep_one_in(2)
                });
            }
        }
    }

    /// Returns the callers that are kept regardless of the mask; while the mask selects all callers, those that would
    /// be.
    fn large(&self) -> HashSet<u64> {
        let alone = || self.requests.iter().filter(|one| one.callers == 1);
        if self.mask > 0 {
            return alone().map(|one| one.caller).collect();
        }
        let mut of_caller: HashMap<u64, u64> = HashMap::new();
        alone().for_each(|one| *of_caller.entry(one.caller).or_default() += one.own);
        let all: u64 = of_caller.values().sum();
        let large = of_caller.into_iter().filter(|(_, own)| *own >= LARGE && *own * LARGE > all);
        large.map(|(caller, _)| caller).collect()
    }

    fn narrow(&mut self, mask: u64, large: &HashSet<u64>) {
        self.mask = mask;
        self.requests.retain_mut(|one| {
            let large = large.contains(&one.caller);
            one.callers = if large { 1 } else { mask.saturating_add(1) };
            large || is_in(one.caller, mask)
        });
    }
}

/// Merges the samples of all nodes, in time order.
pub(crate) fn merge(
    nodes: impl IntoIterator<Item = Vec<SampleSlice>>,
    budget: SliceBudget,
) -> Vec<SampledRequest> {
    let mut slices: BTreeMap<u64, (SampleSlice, HashSet<u64>)> = BTreeMap::new();
    for (node, sample) in (0..).zip(nodes) {
        for mut one in sample {
            let (all, large) = slices.entry(one.number).or_default();
            large.extend(one.large());
            all.mask = all.mask.max(one.mask);
            one.requests.iter_mut().for_each(|request| request.node = node);
            all.requests.append(&mut one.requests);
        }
    }
    let mut merged = Vec::new();
    for (mut slice, large) in slices.into_values() {
        slice.narrow(slice.mask, &large);
        slice.fit(budget);
        merged.append(&mut slice.requests);
    }
    merged.sort_by_key(|one| one.at);
    merged
}

#[cfg(test)]
mod tests;
