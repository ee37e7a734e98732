//! `match: all`: the descriptors of a request match every rule whose keys their entries contain, as attributes do.
//!
//! The entries of all descriptors together are the attributes, so that nested rules match whether a proxy sends their keys
//! as one descriptor or as several. A rule belongs to each descriptor that has the last key of its path, and counts with
//! that descriptor's hits; a key that occurs in several has the descriptor's own value for its rules. What two
//! descriptors match alike, with the same values, is one counter of one request and is charged once.
//!
//! Rejected: each descriptor as attributes of its own, because rules on keys of two descriptors would never match; and
//! one set for all, because a key that is sent with two values (`generic_key`) would lose one, and hits could not differ.

use super::{AttributeMatcher, Matches, find};
use crate::overrides::general_tier;
use crate::plan::{Descriptor, MatchKind, MatchedLimit, Plan};
use crate::rule::Rule;
use crate::ruleset::Domain;
use crate::tree::GLOBAL;
use smallvec::SmallVec;
use tollgate_core::{Cost, KeyPart};

/// The maximum number of entries of other descriptors that are searched for a rule's keys, so that a message of many
/// descriptors costs no more than its length.
const MAX_OTHERS: usize = 1_024;

impl Domain {
    #[cold]
    pub(super) fn plan_all<'p>(&'p self, descriptors: &'p [Descriptor<'p>], hits: Cost, plan: &mut Plan<'p>) {
        if self.depends_on_tier {
            let declared = || descriptors.iter().find_map(|one| find(one.entries, &self.tier_key));
            plan.tier = general_tier(plan.quotas).or_else(declared);
        }
        let mut replacing: SmallVec<[&Rule; 1]> = SmallVec::new();
        let mut uncharged: SmallVec<[(MatchKind, Option<&Rule>); 4]> = SmallVec::new();
        for (i, descriptor) in descriptors.iter().enumerate() {
            let at = u16::try_from(i).unwrap_or(u16::MAX);
            let cost = descriptor.cost(hits);
            if let Some(limit) = descriptor.limit {
                uncharged.push(self.inline_limit(descriptor, limit, cost, at, plan));
                continue;
            }
            // Its own entries come first: they win where a key occurs twice.
            let others = descriptors.iter().enumerate().filter(|(other, _)| *other != i);
            let mut entries: SmallVec<[(&str, &str); 16]> = descriptor.entries.iter().copied().collect();
            entries.extend(others.flat_map(|(_, other)| other.entries.iter().copied()).take(MAX_OTHERS));
            let from = plan.limits.len();
            let mut found = Matches::new(plan);
            let walk = AttributeMatcher {
                descriptor: at,
                ending: descriptor.entries.len(),
                ..AttributeMatcher::new(self, &entries, cost)
            };
            walk.match_tree(&mut found);
            uncharged.push(found.uncharged);
            replacing.extend(found.replacing);
            drop_repeated(plan, from);
        }
        plan.limits.sort_by_key(|matched| (matched.descriptor, matched.rule.map(|rule| rule.id)));
        if !replacing.is_empty() {
            super::drop_replaced(plan, &replacing);
        }
        for (at, other) in (0..).zip(uncharged) {
            let first = plan.limits.iter().find(|matched| matched.descriptor == at);
            plan.matches.push(first.map_or(other, |matched| (MatchKind::Limited, matched.rule)));
        }
    }
}

/// Drops the limits from `from` on whose counters earlier descriptors charge already. One that was only read is charged.
fn drop_repeated(plan: &mut Plan<'_>, from: usize) {
    let mut at = from;
    while at < plan.limits.len() {
        let one = &plan.limits[at];
        let earlier = plan.limits[..from].iter().position(|other| {
            other.limit.scope == one.limit.scope && values(plan, other).eq(values(plan, one))
        });
        match earlier {
            Some(earlier) => {
                if plan.limits[earlier].cost.is_peek() {
                    plan.limits[earlier].cost = plan.limits[at].cost;
                }
                plan.limits.remove(at);
            }
            None => at += 1,
        }
    }
}

/// Returns the values of a limit's counter. Which shard of a split counter is next differs from one match to another.
fn values<'a, 'p>(plan: &'a Plan<'p>, one: &'a MatchedLimit<'p>) -> impl Iterator<Item = &'a KeyPart<'p>> {
    let shard = one.limit.shards.is_some().then_some(usize::from(one.shard_at));
    let parts = &plan.parts[usize::from(one.parts.0)..usize::from(one.parts.1)];
    parts.iter().enumerate().filter(move |(at, _)| Some(*at) != shard).map(|(_, part)| part)
}

impl AttributeMatcher<'_, '_> {
    /// Returns whether a rule whose path ends with this key belongs to the descriptor.
    pub(super) fn may_end(&self, key: &str) -> bool {
        if key == GLOBAL.0 {
            self.descriptor == 0
        } else {
            self.look.attributes[..self.ending].iter().any(|(own, _)| *own == key)
        }
    }
}
