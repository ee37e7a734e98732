//! Shard request: the charges of a request that live in one shard or slot, owned, in the order that scripts take them.

use super::compact::{self, Short};
use super::data_loss::DataLoss;
use super::envoy_keys::{self, EnvoyKeys};
use super::key_encoding::{self, Hashing, Name};
use smallvec::SmallVec;
use tollgate_core::{
    Algorithm, Charge, Cost, Enforcement, Limit, LimitParams, LossPolicy, Mode, Permit, PermitId, Scope,
    TimeDelta, Timestamp, UnitReturn,
};

/// One charge, or one permit to release.
#[derive(Clone, Debug)]
pub(super) struct ShardCharge {
    pub(super) limit: Limit,
    pub(super) cost: Cost,
    pub(super) enforcement: Enforcement,
    pub(super) permit: PermitId,
    pub(super) loss_policy: LossPolicy,
    /// Shift of this key's windows.
    pub(super) phase: TimeDelta,
    /// Index of the request's counter.
    pub(super) counter: usize,
    /// Index of the charge in the original request.
    pub(super) index: usize,
    /// Seconds after which the key of a plain number expires.
    pub(super) expiry: u64,
}

/// A counter of a bundle.
#[derive(Clone, Debug)]
pub(super) struct BundleCounter {
    /// Index of the bundle.
    pub(super) bundle: usize,
    pub(super) name: Name,
    pub(super) short: Short,
}

/// Charges that live in one place: one Redis, or one slot of a cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct ShardRequest {
    pub(super) bundles: SmallVec<[String; 2]>,
    pub(super) counters: SmallVec<[BundleCounter; 4]>,
    /// The charges, independent ones first: the others see what those take.
    pub(super) charges: SmallVec<[ShardCharge; 4]>,
    /// For each charge of a partial request, the name of the mark that leases of its counter may be outstanding; empty
    /// if its counter is never leased.
    pub(super) marks: Vec<Name>,
    /// Other charges of the same request are decided in another slot: what is taken here may have to be undone.
    pub(super) is_partial: bool,
    /// The server's time, if this node's clock proved to be far off.
    pub(super) server_time: Option<Timestamp>,
    /// When the servers that it was sent to may have lost state.
    pub(super) loss: DataLoss,
    /// Its counters are plain numbers under keys of envoyproxy/ratelimit, of the windows at this time.
    pub(super) envoy_at: Option<Timestamp>,
}

impl ShardRequest {
    /// Returns whether the request has only buckets in whole microseconds that refill continuously, all required and taken
    /// from, each once, all in one bundle: the common request, for which there is a faster script.
    pub(super) fn is_plain(&self) -> bool {
        const MAX_BUCKETS: usize = 16;
        self.bundles.len() == 1
            && self.charges.len() == self.counters.len()
            && self.charges.len() <= MAX_BUCKETS
            && !self.is_partial
            && self.charges.iter().all(|want| {
                want.enforcement == Enforcement::Required
                    && !want.cost.is_refund()
                    && !want.cost.is_peek()
                    && self.loss.applies_to(want).is_none()
                    && want.limit.refill_interval().is_none()
                    && matches!(want.limit.params(), LimitParams::Bucket { k: 1, .. })
            })
    }

    /// Returns whether the request has only windows and buckets that are alone in their bundles, if they have their short
    /// form, all required or independent and taken from: `lua/short.lua` decides it.
    pub(super) fn is_short(&self) -> bool {
        self.bundles.len() == self.counters.len()
            && self.envoy_at.is_none()
            && self.charges.iter().all(|want| {
                want.enforcement != Enforcement::Alternative
                    && !want.cost.is_refund()
                    && !want.cost.is_peek()
                    && self.loss.applies_to(want).is_none()
                    && compact::is_stepped_short(&want.limit, &self.counters[want.counter].short, want.phase)
            })
    }

    /// Returns whether an undo needs to know what the bundles held before: always if another slot may deny the request,
    /// and for permits, because a renewed permit is held without the renewal.
    pub(super) fn needs_priors(&self) -> bool {
        let is_permit = |want: &ShardCharge| want.limit.algorithm() == Algorithm::Concurrency;
        self.is_partial || self.charges.iter().any(is_permit)
    }

    fn add(&mut self, bundle: String, name: Name, short: &Short, want: impl FnOnce(usize) -> ShardCharge) {
        let place = self.bundles.iter().position(|known| *known == bundle).unwrap_or_else(|| {
            self.bundles.push(bundle);
            self.bundles.len() - 1
        });
        let known = self.counters.iter().position(|known| known.bundle == place && known.name == name);
        let counter = known.unwrap_or_else(|| {
            self.counters.push(BundleCounter { bundle: place, name, short: short.clone() });
            self.counters.len() - 1
        });
        // A bucket of two scales has no short form here.
        if self.counters[counter].short != *short {
            self.counters[counter].short = Short::new();
        }
        self.charges.push(want(counter));
    }
}

/// Where a part of a request is decided: a store, and a slot of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// 0 for the default store, then the named ones in order; [`Place::UNKNOWN`] for one that is not configured.
    pub(super) store: u16,
    pub(super) slot: u16,
}

impl Place {
    pub(super) const UNKNOWN: u16 = u16::MAX;
}

/// A request by place. Boxed, because futures that hold a part are moved as a whole.
pub(super) type Parts = SmallVec<[(Place, Box<ShardRequest>); 1]>;

/// Splits charges by store and slot; `layout` returns the store of a scope's counters, and how it spreads them.
pub(super) fn from_charges(
    charges: &[Charge<'_>],
    layout: impl Fn(&Scope) -> (u16, KeyLayout),
    hashing: &Hashing,
    envoy: Option<(EnvoyKeys, Timestamp)>,
) -> Parts {
    let mut parts = SmallVec::new();
    // All limits of a request, or none: one script decides them.
    let plain = envoy.and_then(|(keys, now)| {
        let all = charges.iter().map(|charge| envoy_keys::key(charge, hashing.prefix(), now));
        Some((all.collect::<Option<Vec<String>>>()?, keys, now))
    });
    let independent = |charge: &Charge<'_>| charge.enforcement == Enforcement::Independent;
    for first in [true, false] {
        for (index, charge) in charges.iter().enumerate().filter(|(_, one)| independent(one) == first) {
            let phase = if charge.limit.is_jittered() {
                charge.limit.phase(charge.key.stable_hash())
            } else {
                TimeDelta::ZERO
            };
            let (bundle, name, expiry) = match &plain {
                Some((all, keys, now)) => {
                    (all[index].clone(), Name::new(), envoy_keys::expiry(charge.limit, *keys, *now))
                }
                None => {
                    (key_encoding::bundle(&charge.key, hashing), key_encoding::member(charge.key.scope), 0)
                }
            };
            let short = compact::short(charge.key.scope, &name, charge.limit);
            let (store, layout) = layout(charge.key.scope);
            let part = request_at(&mut parts, Place { store, slot: layout.slot(&bundle) });
            part.envoy_at = plain.as_ref().map(|(_, _, now)| *now);
            part.add(bundle, name, &short, |counter| ShardCharge {
                limit: charge.limit.clone(),
                cost: charge.cost,
                enforcement: charge.enforcement,
                permit: charge.permit,
                loss_policy: charge.loss_policy,
                phase,
                counter,
                index,
                expiry,
            });
        }
    }
    let is_partial = parts.len() > 1;
    for (_, part) in parts.iter_mut().filter(|_| is_partial) {
        part.is_partial = true;
        part.marks = part.charges.iter().map(|want| mark(&charges[want.index])).collect();
    }
    parts
}

/// Returns the name of the mark that leases of a bucket may be outstanding.
pub(super) fn mark(charge: &Charge<'_>) -> Name {
    let is_bucket = matches!(charge.limit.params(), LimitParams::Bucket { .. });
    match charge.mode {
        Mode::Adaptive | Mode::Leased if is_bucket => {
            key_encoding::member(&charge.key.scope.sibling(crate::MARK_SUFFIX))
        }
        _ => Name::new(),
    }
}

/// Builds a request that returns units; the mark that they were returned lies in the same slot.
pub(super) fn from_unit_return(
    back: &UnitReturn<'_>,
    layout: impl Fn(&Scope) -> (u16, KeyLayout),
    hashing: &Hashing,
) -> Parts {
    let charge = Charge::new(back.key, back.limit, Cost::new(back.units));
    let mut parts = from_charges(&[charge], layout, hashing, None);
    for (_, part) in &mut parts {
        let mark = format!("{}~{:x}", part.bundles[0], back.id.0);
        part.bundles.push(mark);
    }
    parts
}

/// Builds requests that release permits, by slot.
pub(super) fn from_permits(
    permits: &[Permit<'_>],
    layout: impl Fn(&Scope) -> (u16, KeyLayout),
    hashing: &Hashing,
) -> Parts {
    let charges: SmallVec<[Charge<'_>; 4]> = permits
        .iter()
        .map(|permit| Charge { permit: permit.id, ..Charge::new(permit.key, permit.limit, Cost::PEEK) })
        .collect();
    from_charges(&charges, layout, hashing, None)
}

/// Whether keys are spread over cluster slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyLayout {
    /// All keys in one Redis.
    Single,
    /// Keys by cluster slot.
    Slots,
}

impl KeyLayout {
    fn slot(self, bundle: &str) -> u16 {
        match self {
            Self::Single => 0,
            Self::Slots => key_encoding::slot(bundle),
        }
    }
}

fn request_at(parts: &mut Parts, place: Place) -> &mut ShardRequest {
    let known = parts.iter().position(|(known, _)| *known == place).unwrap_or_else(|| {
        parts.push((place, Box::default()));
        parts.len() - 1
    });
    &mut parts[known].1
}
