//! The regional store as a counter store: replaces secrets and homes that are no region, and takes the short way where
//! one place decides without waiting.

use super::decide::{is_exchanged, may_be_lost};
use super::{Charges, RegionalStore, WHOLE};
use crate::guarded::is_guarded;
use crate::late_record::record_debited;
use crate::members::Decider;
use crate::owner::Transport;
use crate::pseudonym::{Names, needs_names, renamed};
use crate::used_units::{self, given_back};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::{
    Charge, Charged, Clock, Cost, CounterId, CounterKey, CounterOwner, CounterStore, KeyPart, LastKnown,
    LateAnswer, LateCharge, Mode, Outcome, Outcomes, Permit, RegionMode, RegionStatus, Scope, StoreError,
    UnitReturn,
};

type Parts<'a> = SmallVec<[SmallVec<[KeyPart<'a>; 4]>; 4]>;

/// The charges of a request with secrets and unknown homes replaced, and what they borrow.
macro_rules! renamed_charges {
    ($store:expr, $charges:expr => $renamed:ident) => {
        let names = $store.names_of($charges);
        let parts: Parts<'_> = $charges
            .iter()
            .zip(&names)
            .map(|(charge, names)| {
                $store.with_known_home(charge.key.scope, renamed(charge.key.parts, names.as_ref()))
            })
            .collect();
        let $renamed: Charges<'_> = $charges
            .iter()
            .zip(&parts)
            .map(|(charge, parts)| Charge { key: CounterKey { scope: charge.key.scope, parts }, ..*charge })
            .collect();
    };
}

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> CounterStore for RegionalStore<S, T, C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        renamed_charges!(self, charges => renamed);
        // Before a part of the limit decides: what was used of the whole would not fit the part.
        if self.is_regional_only() || self.late.count() > 0 {
            let shared: Charges<'_> = renamed.iter().copied().filter(is_exchanged).collect();
            self.own.restore_lost_units(&shared).await;
        }
        self.charge_renamed(&renamed).await.map_err(|error| with_ids_of(charges, &renamed, error))
    }

    /// The usual request is inlined as a whole: what other cells add to it is a few loads.
    #[inline(always)]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        match charges {
            [charge] if self.decides_alone(charge) => {
                let charged = self.try_charge_one(charge, self.ledger.key_name(&charge.key));
                charged.is_some_and(|charged| {
                    charged.write_to(charge, outcomes);
                    true
                })
            }
            _ => self.try_charge_list(charges, outcomes),
        }
    }

    #[inline(always)]
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        match self.decides_alone(charge) {
            true => self.try_charge_one(charge, name),
            false => Charged::of_list(charge, |charges, outcomes| self.try_charge_list(charges, outcomes)),
        }
    }

    #[inline]
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        self.own.prefetch(key)
    }

    #[inline]
    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        let is_shared = |charge: &Charge<'_>| {
            charge.key.scope.region_mode() == RegionMode::Shared && !needs_names(charge)
        };
        if !self.decides_by_whole() || !charges.iter().all(is_shared) {
            return false;
        }
        if charges.iter().any(|charge| self.is_reported_refund(charge)) {
            return false;
        }
        let before = outcomes.len();
        let is_charged = self.own.try_charge_each(charges, outcomes);
        if is_charged && !self.outboxes.is_empty() {
            for (charge, outcome) in charges.iter().zip(&outcomes[before..]) {
                if outcome.verdict.is_allowed() && is_exchanged(charge) {
                    self.ledger.record(charge);
                }
            }
        }
        is_charged
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        renamed_charges!(self, charges => renamed);
        let (here, there): (Vec<usize>, Vec<usize>) =
            (0..renamed.len()).partition(|at| self.is_own(&renamed[*at].key));
        let part = |of: &[usize]| -> Vec<Charge<'_>> { of.iter().map(|at| renamed[*at]).collect() };
        let mut errors = Vec::new();
        if !here.is_empty() {
            let own = part(&here);
            let refunds = own.iter().filter(|charge| charge.cost.is_refund() && is_exchanged(charge));
            let _locked = self.locks.lock(refunds.map(|charge| charge.key.id())).await;
            let mut reported = self.as_far_as_held(&own).await;
            // A reset is one in other cells too.
            self.cut_refunds(&mut reported, |refund| refund.cost.units() < refund.limit.refill_cost()).await;
            let result = self.debit_own(&own).await;
            if !self.outboxes.is_empty() {
                record_debited(&self.ledger, &reported, &result, is_exchanged);
                if result.is_ok() {
                    self.shorten_overdrafts(own.iter());
                }
            }
            errors.extend(result.err().map(|error| (here, error)));
        }
        if !there.is_empty() {
            let result = self.leases.debit(&part(&there)).await;
            errors.extend(result.err().map(|error| (there, error)));
        }
        StoreError::of_debits(errors, renamed.len()).map_err(|error| with_ids_of(charges, &renamed, error))
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        let charges: Charges<'_> =
            permits.iter().map(|permit| Charge::new(permit.key, permit.limit, Cost::ONE)).collect();
        renamed_charges!(self, &charges => renamed);
        let all = renamed.iter().zip(permits).map(|(charge, permit)| Permit { key: charge.key, ..*permit });
        let (mut here, there): (Vec<Permit<'_>>, Vec<Permit<'_>>) =
            all.partition(|permit| self.is_own(&permit.key));
        // A permit does not contain the mode of its rule: with `mode: local` its counter has the secret's own name,
        // here.
        here.extend(
            charges.iter().zip(permits).filter(|(charge, _)| needs_names(charge)).map(|(_, permit)| *permit),
        );
        if !here.is_empty() {
            self.own.release(&here).await?;
        }
        if there.is_empty() { Ok(()) } else { self.leases.release(&there).await }
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let charges = [Charge::new(back.key, back.limit, Cost::PEEK)];
        renamed_charges!(self, &charges => renamed);
        let back = UnitReturn { key: renamed[0].key, ..*back };
        if self.is_own(&back.key) {
            self.own.return_units(&back).await
        } else {
            self.leases.return_units(&back).await
        }
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        let charges = [*charge];
        renamed_charges!(self, &charges => renamed);
        if self.is_own(&renamed[0].key) {
            self.own.last_known(&renamed[0])
        } else {
            self.leases.last_known(&renamed[0])
        }
    }

    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus> {
        if self.outboxes.is_empty() || charge.mode == Mode::Local {
            return None;
        }
        let charges = [*charge];
        renamed_charges!(self, &charges => renamed);
        let (charge, now) = (&renamed[0], self.clock.now());
        let mode = charge.key.scope.region_mode();
        let config = self.members.config();
        let (owner, is_own) = match mode.has_owner().then(|| self.members.decider(&charge.key, now)) {
            None => (None, true),
            Some(Decider::Own) => (Some(config.region.clone()), true),
            Some(Decider::Peer(peer)) => (self.members.peer(peer).map(|peer| peer.region), false),
            Some(Decider::Nobody(_)) => (None, false),
        };
        let is_exchanged = is_exchanged(&Charge { cost: Cost::ONE, ..*charge });
        let is_regional_only = is_exchanged && self.is_regional_only();
        Some(RegionStatus {
            mode,
            owner,
            is_own,
            lag: self.lag(now),
            is_regional_only,
            part: is_regional_only
                .then(|| self.division.load().part(charge.limit, charge.key.stable_hash()).capacity()),
            others: is_exchanged.then(|| self.others.used(charge, now)),
        })
    }

    #[inline]
    fn is_regional_only(&self) -> bool {
        self.share.load(Ordering::Relaxed) < WHOLE
    }
}

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Returns whether every limit is decided by the whole of it: no peer is silent or late, and no bucket is overdrawn.
    #[inline(always)]
    fn decides_by_whole(&self) -> bool {
        self.share.load(Ordering::Relaxed) >= WHOLE && self.overdrafts.is_empty() && self.late.count() == 0
    }

    /// Returns whether a charge, of a request of one limit, is decided here by the whole limit, under its own name.
    #[inline(always)]
    fn decides_alone(&self, charge: &Charge<'_>) -> bool {
        self.decides_by_whole() && is_plain(charge) && !charge.cost.is_refund()
    }

    /// Charges a request of one limit that this cell decides by the whole of it, under its own name.
    #[inline(always)]
    fn try_charge_one(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        let is_recorded = is_exchanged(charge) && !self.outboxes.is_empty();
        let place = is_recorded.then(|| self.ledger.find(charge, name));
        let charged = self.own.try_charge_named(charge, name)?;
        // A request of one charge that is allowed is admitted.
        if let Some(place) = place
            && charged.outcome.verdict.is_allowed()
        {
            self.ledger.record_at(place, charge);
        }
        Some(charged)
    }

    /// Charges any request without waiting, if one place decides it by the whole limits.
    #[inline(never)]
    fn try_charge_list(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        if self.share.load(Ordering::Relaxed) < WHOLE || self.is_overdrawn(charges) || self.is_late(charges) {
            return false;
        }
        if charges.iter().any(|charge| self.is_reported_refund(charge)) {
            return false;
        }
        if !charges.iter().all(is_plain) {
            return self.try_renamed(charges, outcomes);
        }
        let is_charged = self.own.try_charge(charges, outcomes);
        if is_charged {
            self.record(charges, outcomes);
        }
        is_charged
    }

    /// Returns debits as other cells are to apply them: no more than this cell's own states can be debited. A settlement may be
    /// far beyond a limit, and would deny callers for longer elsewhere than here.
    async fn as_far_as_held<'c>(&self, charges: &[Charge<'c>]) -> Charges<'c> {
        let mut charges: Charges<'c> = charges.iter().copied().collect();
        for charge in &mut charges {
            if charge.cost.units() > charge.limit.capacity()
                && !charge.cost.is_refund()
                && is_exchanged(charge)
                && let Ok(room) = self.room(charge).await
            {
                charge.cost = Cost::new(charge.cost.units().min(room));
            }
        }
        charges
    }

    /// Returns whether a refund is reported to other cells. What the counter can give back is read first, which may take a while.
    #[inline]
    fn is_reported_refund(&self, charge: &Charge<'_>) -> bool {
        charge.cost.is_refund() && is_exchanged(charge) && !self.outboxes.is_empty()
    }

    /// Cuts those refunds that `is_cut` to what this cell's counters can give back: other cells would give back units that
    /// were consumed there. If the store does not answer, they count as they are.
    pub(super) async fn cut_refunds(&self, charges: &mut [Charge<'_>], is_cut: impl Fn(&Charge<'_>) -> bool) {
        for charge in charges.iter_mut() {
            // An overdrawn bucket has used more than its state says.
            let is_overdrawn = || self.overdrafts.get(charge.key.id()).is_some();
            if !self.is_reported_refund(charge) || !is_cut(charge) || is_overdrawn() {
                continue;
            }
            if let Ok(known) = used_units::read(&self.own, charge).await {
                charge.cost = given_back(charge, known.used);
            }
        }
    }

    /// Returns the pseudonyms of each charge's secrets.
    fn names_of(&self, charges: &[Charge<'_>]) -> SmallVec<[Option<Names>; 4]> {
        let names =
            |charge: &Charge<'_>| if needs_names(charge) { self.names.names(&charge.key) } else { None };
        charges.iter().map(names).collect()
    }

    /// Replaces a home that is no region by none: a caller that invents homes would have a counter for each.
    fn with_known_home<'a>(
        &self,
        scope: &Scope,
        mut parts: SmallVec<[KeyPart<'a>; 4]>,
    ) -> SmallVec<[KeyPart<'a>; 4]> {
        if scope.region_mode().has_owner()
            && scope.owner() == CounterOwner::Home
            && let Some(home) = parts.last_mut()
            && !matches!(&*home, KeyPart::Text(region) if self.members.is_region(region))
        {
            *home = KeyPart::Text("");
        }
        parts
    }

    /// Returns whether one of the buckets may be overdrawn. Counters with secrets have other names, so any overdraft
    /// will do.
    #[inline]
    fn is_overdrawn(&self, charges: &[Charge<'_>]) -> bool {
        let is_one =
            |charge: &Charge<'_>| needs_names(charge) || self.overdrafts.get(charge.key.id()).is_some();
        !self.overdrafts.is_empty() && charges.iter().any(is_one)
    }

    /// Returns whether a late peer may have used one of the counters.
    #[inline]
    fn is_late(&self, charges: &[Charge<'_>]) -> bool {
        let is_one = |charge: &Charge<'_>| needs_names(charge) || self.late.has(charge.key.id());
        self.late.count() > 0 && charges.iter().any(is_one)
    }

    /// Charges a request with secrets or with owners without waiting, if one place decides it.
    fn try_renamed(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        renamed_charges!(self, charges => renamed);
        if renamed.iter().any(|charge| may_be_lost(charge) || is_guarded(charge)) {
            return false;
        }
        let own = renamed.iter().filter(|charge| self.is_own(&charge.key)).count();
        if own == renamed.len() {
            let is_charged = self.own.try_charge(&renamed, outcomes);
            if is_charged {
                self.record(&renamed, outcomes);
            }
            return is_charged;
        }
        let is_leased = |charge: &Charge<'_>| charge.key.scope.region_mode() == RegionMode::Leased;
        if own > 0 || !renamed.iter().all(is_leased) {
            return false;
        }
        let leased: Charges<'_> =
            renamed.iter().map(|charge| Charge { mode: Mode::Leased, ..*charge }).collect();
        self.leases.try_charge(&leased, outcomes)
    }
}

/// Returns whether this cell decides a charge, under its own name.
#[inline(always)]
fn is_plain(charge: &Charge<'_>) -> bool {
    !charge.key.scope.region_mode().has_owner() && !needs_names(charge)
}

/// Makes the answers to late charges name counters as the caller does, who else charges them once more.
fn with_ids_of(charges: &[Charge<'_>], renamed: &[Charge<'_>], error: StoreError) -> StoreError {
    let beside = error.late_beside().iter().flat_map(|(_, late)| late);
    let late: Vec<LateCharge> = error.late().into_iter().chain(beside).cloned().collect();
    if late.is_empty() {
        return error;
    }
    let ids = renamed.iter().zip(charges).map(|(renamed, charge)| (renamed.key.id(), charge.key.id()));
    let ids: Arc<[(CounterId, CounterId)]> = ids.filter(|(renamed, id)| renamed != id).collect();
    for late in late.iter().filter(|_| !ids.is_empty()) {
        let ids = Arc::clone(&ids);
        late.map_answer(move |answer| match answer {
            LateAnswer::Charged(mut names) => {
                for name in &mut names {
                    *name = ids.iter().find(|(renamed, _)| renamed == name).map_or(*name, |(_, id)| *id);
                }
                LateAnswer::Charged(names)
            }
            other => other,
        });
    }
    error
}
