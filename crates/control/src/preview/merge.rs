//! What several nodes remember, put together as if one node had seen all of it. Pure.
//!
//! All nodes choose callers by the same hash, so of a caller who is in everywhere all requests are there, wherever they were
//! asked. A node with more traffic keeps fewer callers: for each slice of time those are in whom the node with the most keeps,
//! and each stands for as many as there. Who makes a large part of the traffic of any node is in, and stands for itself.

use crate::preview::sample_slice::{SampleSlice, is_in, keep_one_in};
use crate::preview::sampled_request::SampledRequest;
use std::collections::{BTreeMap, HashMap, HashSet};

/// One in more callers than this is none.
pub(crate) const MAX_MASK: u64 = (1 << 20) - 1;
/// Who asks so often, and makes one part in so many of a node's traffic, is a large one.
const LARGE: u64 = 32;

/// So much may be kept of one slice.
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
    /// Keeps as much as there is room for: of half of the callers each time, each for twice as many; where only large ones
    /// are left, half of their requests.
    pub(crate) fn fit(&mut self, room: SliceBudget) {
        let large = self.large();
        while !room.fits(&self.requests) {
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

    /// Those who are in whatever the mask says, and, where it still lets everybody in, those who would be.
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

/// The traffic of all nodes, in the order of time.
pub(crate) fn merge(
    nodes: impl IntoIterator<Item = Vec<SampleSlice>>,
    room: SliceBudget,
) -> Vec<SampledRequest> {
    let mut slices: BTreeMap<u64, (SampleSlice, HashSet<u64>)> = BTreeMap::new();
    for (node, remembered) in (0..).zip(nodes) {
        for mut one in remembered {
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
        slice.fit(room);
        merged.append(&mut slice.requests);
    }
    merged.sort_by_key(|one| one.at);
    merged
}

#[cfg(test)]
mod tests;
