//! Where a request stands in the fleet's capacity when tenants share it, and the limits that are charged then.
//!
//! All requests charge the same counters, by different numbers. One beyond its tenant's fair share finds the capacity in use
//! a little before one within it, so that those find room; one within a guarantee finds room although the capacity is in use,
//! and charges its guarantee besides. What is reserved for a priority is a guarantee of its requests: what others take back by
//! theirs must not be at its expense, so it finds room in the capacity even where they have taken back all that they may. Its tenants
//! share it: a request beyond its tenant's share of the reserve finds it used up a little before others do. What it takes is counted, so the others have that much less afterwards: a guarantee
//! that is not used is lent without anything being set aside, and is taken back by its owner's next request. Rejected: a
//! counter for each share, whose sizes would have to follow the demand on all nodes, and a charge that ignores its limit, which
//! bounds nothing.

use crate::matcher::value_part;
use crate::overload::{Fleet, FleetShares, Overload};
use crate::plan::{LimitOrigin, MatchedLimit, Plan};
use crate::rule::{Role, Rule, RuleLimit};
use crate::sensitivity::{identifies_caller, may_be_secret};
use smallvec::SmallVec;
use tollgate_core::{
    Admission, Algorithm, Enforcement, KeyPart, Limit, Outcome, Outcomes, Priority, Scope, TimeDelta, Verdict,
};

/// Standing of a request in the fleet's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FleetStanding {
    /// Within its tenant's fair share, or nothing is contended: the capacity as the rules have it.
    #[default]
    Fair,
    /// Beyond its tenant's fair share.
    Excess,
    /// Within its tenant's guarantee, or its tier's.
    Guaranteed,
    /// Within what is reserved for its priority.
    Reserved,
}

impl FleetStanding {
    /// Returns whether a counter besides the capacity's admits the request.
    #[must_use]
    pub const fn is_claim(self) -> bool {
        matches!(self, Self::Guaranteed | Self::Reserved)
    }
}

/// What a fleet's capacity counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FleetCapacity {
    /// Requests per second.
    PerSecond(f64),
    /// Requests in flight.
    InFlight {
        /// Number of places.
        places: f64,
        /// How long a request whose end is not reported counts as in flight.
        ttl: TimeDelta,
    },
}

impl FleetCapacity {
    fn of(limit: &Limit) -> Self {
        let (count, period) = (limit.rate().count as f64, limit.rate().period.length());
        match limit.algorithm() {
            Algorithm::Concurrency => Self::InFlight { places: count, ttl: period },
            _ => Self::PerSecond(count * 1e6 / period.as_micros().max(1) as f64),
        }
    }
}

/// A request that charges a fleet's capacity which tenants share, or which only counts (shadow mode).
#[derive(Clone, Copy, Debug)]
pub struct FleetMatch<'p> {
    /// Name of the domain.
    pub domain: &'p str,
    /// The section.
    pub overload: &'p Overload,
    /// Rule of the limits by which tenants share the capacity.
    rule: &'p Rule,
    /// The tenant, if the request names one.
    pub tenant: Option<&'p str>,
    /// Index of its tier among those with shares.
    pub tier: Option<usize>,
    /// Its priority.
    pub priority: Priority,
    /// How the plan charges it now.
    pub standing: FleetStanding,
    /// Whether the capacity has been in use of late.
    pub is_contended: bool,
    /// Whether the request is beyond its tenant's fair share, within a guarantee or not.
    pub is_excess: bool,
    /// Whether it is beyond its tenant's fair share of what is reserved for its priority, once that has been asked.
    is_reserve_excess: Option<bool>,
    /// The standings by which it was charged before, or cannot be.
    tried: [bool; 4],
    /// The guarantee or the reserve that it was admitted by.
    held: Option<HeldGuarantee<'p>>,
}

/// A guarantee or a reserve that a request was charged to. It is not among the limits of its decision: a caller has no limit there, and what
/// is used of it says nothing about whether the next request passes.
#[derive(Clone, Copy, Debug)]
struct HeldGuarantee<'p> {
    limit: &'p RuleLimit,
    parts: (u16, u16),
    delay: TimeDelta,
}

impl<'p> FleetMatch<'p> {
    pub(crate) const fn new(
        domain: &'p str,
        overload: &'p Overload,
        rule: &'p Rule,
        (tenant, tier): (Option<&'p str>, Option<usize>),
        priority: Priority,
    ) -> Self {
        Self {
            domain,
            overload,
            rule,
            tenant,
            tier,
            priority,
            standing: FleetStanding::Fair,
            is_contended: false,
            is_excess: false,
            is_reserve_excess: None,
            tried: [false; 4],
            held: None,
        }
    }

    fn fleet(&self) -> Option<(&'p Fleet, &'p FleetShares)> {
        let fleet = self.overload.fleet.as_ref()?;
        Some((fleet, fleet.shares.as_ref()?))
    }

    /// Returns the limit that a request of this standing is charged to besides the capacity's.
    #[must_use]
    pub fn claim(&self, standing: FleetStanding) -> Option<&'p RuleLimit> {
        let (_, shares) = self.fleet()?;
        let at = match standing {
            FleetStanding::Guaranteed => shares.guarantees.get(self.tier?).copied().flatten(),
            FleetStanding::Reserved => {
                let (fair, beyond) = shares.reserves[self.priority.index()]?;
                Some(if self.is_beyond_reserve() { beyond } else { fair })
            }
            FleetStanding::Fair | FleetStanding::Excess => None,
        };
        self.rule.limits.limits.get(at?)
    }

    /// Returns the key of the counter that a request of this standing is charged to besides the capacity's: its scope, and the tenant if
    /// each has a counter of its own.
    #[must_use]
    pub fn claim_key(&self, standing: FleetStanding) -> Option<(&'p Scope, Option<KeyPart<'p>>)> {
        let claim = self.claim(standing)?;
        let share = self.overload.fairness.as_ref().zip(self.tier);
        let each = share.filter(|(fairness, tier)| {
            standing == FleetStanding::Guaranteed && fairness.tiers[*tier].is_each
        });
        let value = each.zip(self.tenant);
        let value = value.map(|((fairness, _), tenant)| value_part(may_be_secret(&fairness.by), tenant));
        Some((&claim.scope, value))
    }

    /// Returns whether the counter that a request of this standing is charged to besides the capacity's is one of its caller alone.
    #[must_use]
    pub fn is_claim_per_caller(&self, standing: FleetStanding) -> bool {
        let by = self.overload.fairness.as_ref().map(|fairness| fairness.by.as_str());
        let has_tenant = self.claim_key(standing).is_some_and(|(_, tenant)| tenant.is_some());
        has_tenant && by.is_some_and(identifies_caller)
    }

    /// Returns what is reserved for the request's priority, for all nodes together.
    #[must_use]
    pub fn reserved_capacity(&self) -> Option<FleetCapacity> {
        let (_, shares) = self.fleet()?;
        let (fair, _) = shares.reserves[self.priority.index()]?;
        Some(FleetCapacity::of(&self.rule.limits.limits.get(fair)?.limit))
    }

    /// Returns whether the request is beyond its tenant's fair share of what is reserved for its priority.
    #[must_use]
    pub fn is_beyond_reserve(&self) -> bool {
        self.is_reserve_excess == Some(true)
    }

    /// Returns whether the request has been counted among those that ask for the reserve.
    #[must_use]
    pub const fn is_ranked_in_reserve(&self) -> bool {
        self.is_reserve_excess.is_some()
    }

    /// Records whether the request is beyond its tenant's fair share of the reserve. Must not be called once it is charged to that.
    pub const fn rank_in_reserve(&mut self, is_excess: bool) {
        self.is_reserve_excess = Some(is_excess);
    }

    /// Returns whether what is reserved for its priority has admitted the request.
    #[must_use]
    pub fn holds_reserve(&self) -> bool {
        let reserve = self.claim(FleetStanding::Reserved);
        self.held.zip(reserve).is_some_and(|(held, reserve)| held.limit.id == reserve.id)
    }

    /// Returns the standing of a request that no other counter admits.
    #[must_use]
    pub const fn base(&self) -> FleetStanding {
        if self.is_excess { FleetStanding::Excess } else { FleetStanding::Fair }
    }

    /// Returns whether the request may still be charged by a standing.
    #[must_use]
    pub fn is_untried(&self, standing: FleetStanding) -> bool {
        self.standing != standing && !self.tried[standing as usize]
    }

    /// Records that the request was charged by a standing in vain, or cannot be.
    pub const fn set_tried(&mut self, standing: FleetStanding) {
        self.tried[standing as usize] = true;
    }

    /// Returns whether a limit of the request is one of the fleet's.
    #[must_use]
    pub fn is_fleet(&self, matched: &MatchedLimit<'_>) -> bool {
        let rule = self.overload.fleet.as_ref().map(|fleet| fleet.rule);
        rule.is_some() && matched.rule.map(|rule| rule.id) == rule
    }
}

impl<'p> Plan<'p> {
    /// Returns whether tenants share the fleet's capacity in this request: not if an emergency measure has changed its limits or
    /// set them aside, nor if it is a refund or a peek.
    #[must_use]
    pub fn shares_fleet(&self) -> bool {
        let Some(fleet) = &self.fleet else { return false };
        let mut own = self.limits.iter().filter(|matched| fleet.is_fleet(matched)).peekable();
        let is_plain = |matched: &MatchedLimit<'_>| {
            matches!(matched.limit, LimitOrigin::Rule(_))
                && !matched.cost.is_refund()
                && !matched.cost.is_peek()
        };
        own.peek().is_some() && own.all(is_plain)
    }

    /// Returns the indexes of the limits of the request's guarantee and of its reserve, if it gives both back: it was charged to one of
    /// them.
    #[must_use]
    pub fn refunded_claims(&self) -> Option<(usize, usize)> {
        let own = self.fleet.as_ref()?;
        let find = |standing| {
            let id = own.claim(standing)?.id;
            let is_claim = |one: &MatchedLimit<'_>| {
                one.cost.is_refund() && matches!(one.limit, LimitOrigin::Rule(limit) if limit.id == id)
            };
            self.limits.iter().position(is_claim)
        };
        find(FleetStanding::Guaranteed).zip(find(FleetStanding::Reserved))
    }

    /// Returns whether the fleet's capacity counts requests in flight, and whether it only counts.
    #[must_use]
    pub fn fleet_counts(&self) -> (bool, bool) {
        let own = self.fleet.as_ref().and_then(|fleet| self.limits.iter().find(|one| fleet.is_fleet(one)));
        own.map_or((false, false), |own| {
            (own.limit.limit.algorithm() == Algorithm::Concurrency, own.role == Role::Shadow)
        })
    }

    /// Returns how many units of the fleet's capacity the request asks for: one, whatever it costs its caller.
    #[must_use]
    pub fn fleet_units(&self) -> u64 {
        let own = self.fleet.as_ref().and_then(|fleet| self.limits.iter().find(|one| fleet.is_fleet(one)));
        own.map_or(1, |own| own.cost.units().clamp(1, own.limit.limit.rate().count.max(1)))
    }

    /// Returns whether the capacity only counts.
    #[must_use]
    pub fn is_fleet_shadow(&self) -> bool {
        self.fleet_counts().1
    }

    /// Returns the indexes of the limits that are not the fleet's.
    pub fn outside_fleet(&self) -> impl Iterator<Item = usize> {
        let is_fleet = |at: &usize| self.fleet.as_ref().is_some_and(|own| own.is_fleet(&self.limits[*at]));
        (0..self.limits.len()).filter(move |at| !is_fleet(at))
    }

    /// Makes the outcomes of the fleet's limits that allow the request unknown, because another one of them denies it: they were not
    /// charged.
    pub fn forget_allowed_fleet(&self, outcomes: &mut Outcomes) {
        let Some(own) = &self.fleet else { return };
        for (matched, outcome) in self.limits.iter().zip(&mut outcomes.per_charge) {
            if own.is_fleet(matched) && outcome.verdict.is_allowed() {
                *outcome = Outcome::UNKNOWN;
            }
        }
    }

    /// Sets how a denial by the fleet's limits affects each other.
    pub fn enforce_fleet(&mut self, enforcement: Enforcement) {
        let Some(own) = self.fleet else { return };
        let charged = self.limits.iter_mut().filter(|matched| own.is_fleet(matched));
        charged.for_each(|matched| matched.enforcement = enforcement);
    }

    /// Returns what the fleet's capacity leaves to the lowest priority.
    #[must_use]
    pub fn fleet_capacity(&self) -> Option<FleetCapacity> {
        let (fleet, _) = self.fleet.as_ref().and_then(FleetMatch::fleet)?;
        Some(FleetCapacity::of(&self.fleet_rule_limits(fleet.rule).last()?.limit))
    }

    /// Charges the fleet's capacity by another standing. The limit of a guarantee or a reserve, if it is charged, is the last of the plan.
    pub fn charge_fleet_as(&mut self, standing: FleetStanding) {
        let Some(mut own) = self.fleet else { return };
        let Some((fleet, shares)) = own.fleet().filter(|_| standing != own.standing) else { return };
        if self.is_claim_charged() {
            self.limits.pop();
        }
        let plain = self.fleet_rule_limits(fleet.rule);
        let levels = plain.len();
        let variants = match standing {
            FleetStanding::Fair => plain,
            FleetStanding::Excess => self.variants(shares, 0, levels),
            FleetStanding::Guaranteed => self.variants(shares, levels, levels),
            FleetStanding::Reserved => self.variants(shares, 2 * levels, levels),
        };
        let charged = self.limits.iter_mut().filter(|matched| own.is_fleet(matched));
        for (matched, limit) in charged.zip(variants) {
            matched.limit = LimitOrigin::Rule(limit);
        }
        own.standing = standing;
        self.fleet = Some(own);
        self.push_claim(standing);
    }

    /// Charges the capacity by the standing of a request that no other counter admits, and lets it be tried by all others: it is decided by
    /// other counters than before.
    pub fn share_fleet_anew(&mut self) {
        let Some(own) = &mut self.fleet else { return };
        own.tried = [false; 4];
        let base = own.base();
        self.charge_fleet_as(base);
    }

    fn fleet_rule_limits(&self, rule: u32) -> &'p [RuleLimit] {
        let own = self.limits.iter().filter_map(|matched| matched.rule).find(|own| own.id == rule);
        own.map_or(&[], |rule| &rule.limits.limits)
    }

    fn variants(&self, shares: &FleetShares, first: usize, levels: usize) -> &'p [RuleLimit] {
        let rule = self.fleet.as_ref().map(|own| own.rule).filter(|rule| rule.id == shares.rule);
        rule.and_then(|rule| rule.limits.limits.get(first..first + levels)).unwrap_or_default()
    }

    /// Adds the limit that a request of this standing is charged to besides the capacity's, like that.
    pub(crate) fn push_claim(&mut self, standing: FleetStanding) {
        let Some(own) = self.fleet else { return };
        let Some(claim) = own.claim(standing) else { return };
        let Some(like) = self.limits.iter().find(|matched| own.is_fleet(matched)).cloned() else { return };
        let start = self.parts.len();
        self.parts.extend(own.claim_key(standing).and_then(|(_, value)| value));
        let (Ok(start), Ok(end)) = (u16::try_from(start), u16::try_from(self.parts.len())) else { return };
        self.limits.push(MatchedLimit { limit: LimitOrigin::Rule(claim), parts: (start, end), ..like });
    }

    /// Charges the capacity by a standing without a guarantee, because the store fails. Returns whether a place of a guarantee in flight
    /// had been asked for: nobody would release it if the store gives it later.
    pub fn leave_guarantee(&mut self, standing: FleetStanding) -> bool {
        let asked = self.limits.last().filter(|_| self.is_claim_charged());
        let is_permit = asked.is_some_and(|last| last.limit.limit.algorithm() == Algorithm::Concurrency);
        self.charge_fleet_as(standing);
        is_permit
    }

    /// Returns whether the last limit is that of a guarantee or a reserve.
    #[must_use]
    pub fn is_claim_charged(&self) -> bool {
        let Some(claim) = self.fleet.as_ref().and_then(|own| own.claim(own.standing)) else { return false };
        self.limits.last().is_some_and(|last| last.limit.id == claim.id)
    }

    /// Returns whether a request within a guarantee has found the capacity in use by the numbers of the rules.
    #[must_use]
    pub fn exceeds_fleet(&self, outcomes: &Outcomes) -> bool {
        let Some((own, (fleet, _))) =
            self.fleet.as_ref().and_then(|own| own.fleet().map(|fleet| (own, fleet)))
        else {
            return false;
        };
        let levels = &self.limits[..self.limits.len() - usize::from(self.is_claim_charged())];
        let charged = levels.iter().zip(&outcomes.per_charge).filter(|(matched, _)| own.is_fleet(matched));
        charged.zip(self.fleet_rule_limits(fleet.rule)).any(|((matched, outcome), plain)| {
            let beyond = matched.limit.limit.capacity().saturating_sub(plain.limit.capacity());
            outcome.verdict.is_allowed() && outcome.remaining < beyond
        })
    }

    /// Gives the fleet's limits the numbers of the rules again, and the outcomes what remains of these. The guarantee of a request
    /// that it admitted is kept beside the limits: [`Plan::held_guarantee`].
    pub fn settle_fleet(&mut self, outcomes: &mut Outcomes) {
        let Some(own) = self.fleet.filter(|own| own.standing != FleetStanding::Fair) else { return };
        let held = self.charged_guarantee(outcomes).filter(|_| outcomes.admission == Admission::Admitted);
        self.charge_fleet_with(own, FleetStanding::Fair, outcomes);
        if let Some(fleet) = &mut self.fleet {
            fleet.held = held;
        }
    }

    /// Leaves a guarantee or a reserve that denies the request: it is charged by its standing without one, if others admit it.
    pub fn leave_used_up_claim(&mut self, outcomes: &mut Outcomes) {
        let Some(own) = self.fleet.filter(|_| self.is_claim_charged()) else { return };
        let claim = outcomes.per_charge.get(self.limits.len() - 1);
        if claim.is_some_and(|claim| claim.verdict.is_denied()) {
            self.charge_fleet_with(own, own.base(), outcomes);
        }
    }

    /// Charges the fleet's capacity by another standing, and gives the outcomes what remains by that.
    fn charge_fleet_with(&mut self, own: FleetMatch<'_>, standing: FleetStanding, outcomes: &mut Outcomes) {
        let charged: SmallVec<[u64; 8]> =
            self.limits.iter().map(|matched| matched.limit.limit.capacity()).collect();
        self.charge_fleet_as(standing);
        outcomes.per_charge.truncate(self.limits.len());
        for ((matched, before), outcome) in self.limits.iter().zip(charged).zip(&mut outcomes.per_charge) {
            if own.is_fleet(matched) && outcome.verdict != Verdict::Unknown {
                let capacity = matched.limit.limit.capacity();
                // One that finds no room has none, although others would find what is left for those within their shares.
                let capacity = if outcome.verdict.is_denied() { capacity.min(before) } else { capacity };
                outcome.remaining = (outcome.remaining + capacity).saturating_sub(before);
            }
        }
    }

    /// Returns the guarantee that the plan charges, if its outcome allows the request.
    fn charged_guarantee(&self, outcomes: &Outcomes) -> Option<HeldGuarantee<'p>> {
        let own = self.fleet.as_ref().filter(|_| self.is_claim_charged())?;
        let limit = own.claim(own.standing)?;
        let (last, outcome) = (self.limits.last()?, outcomes.per_charge.get(self.limits.len() - 1)?);
        let Verdict::Allowed { delay } = outcome.verdict else { return None };
        Some(HeldGuarantee { limit, parts: last.parts, delay })
    }

    /// Returns the guarantee that the request was charged to, and its delay. A request in flight releases it; one that is withdrawn
    /// gives it back.
    #[must_use]
    pub fn held_guarantee(&self) -> Option<(MatchedLimit<'p>, TimeDelta)> {
        let own = self.fleet.as_ref()?;
        let HeldGuarantee { limit, parts, delay } = own.held?;
        let like = self.limits.iter().find(|matched| own.is_fleet(matched))?.clone();
        Some((MatchedLimit { limit: LimitOrigin::Rule(limit), parts, ..like }, delay))
    }
}
