//! Charges, the interface between engine and store: a request is a list of charges, and each has an outcome.

use crate::algorithm::concurrency::PermitId;
use crate::cost::Cost;
use crate::counter_key::CounterKey;
use crate::limit::Limit;
use crate::outcome::Outcome;
use crate::time::Timestamp;
use smallvec::SmallVec;

/// How the denial of one charge affects the other charges of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// Member of a set that is applied all or none.
    #[default]
    Required,
    /// Member of a set of which at least one must fit; those that fit are applied if the request is admitted.
    Alternative,
    /// Applied independently of the other charges: shadow rules, candidates, the Envoy profile.
    Independent,
}

/// Assumption about a counter without state in a store that may have lost writes, for example after a failover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossPolicy {
    /// Assume unused: callers continue, with units that they may already have spent.
    #[default]
    AssumeUnused,
    /// Assume exhausted at the moment of the loss; the counter recovers from there at the limit's rate. No crash grants
    /// new units.
    AssumeExhausted,
}

/// Where a charge may be decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// In the store, every time.
    #[default]
    Central,
    /// In the store until the key is hot, then as leased.
    Adaptive,
    /// On this node, from units that the store has already deducted; in the store when none are available.
    Leased,
    /// On this node, by its own counters, which are not shared.
    Local,
}

/// One limit to charge for one request.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// Key of the counter.
    pub key: CounterKey<'a>,
    /// Limit that the counter enforces.
    pub limit: &'a Limit,
    /// Cost in units.
    pub cost: Cost,
    /// Effect of a denial on the other charges.
    pub enforcement: Enforcement,
    /// Holder of the permit, for concurrency limits.
    pub permit: PermitId,
    /// Assumption when the counter's state may have been lost.
    pub loss_policy: LossPolicy,
    /// Where the charge may be decided.
    pub mode: Mode,
}

impl<'a> Charge<'a> {
    /// Creates a required charge of `cost`.
    #[must_use]
    pub const fn new(key: CounterKey<'a>, limit: &'a Limit, cost: Cost) -> Self {
        Self {
            key,
            limit,
            cost,
            enforcement: Enforcement::Required,
            permit: PermitId::ANONYMOUS,
            loss_policy: LossPolicy::AssumeUnused,
            mode: Mode::Central,
        }
    }
}

/// A permit to release.
#[derive(Clone, Copy, Debug)]
pub struct Permit<'a> {
    /// Key of the counter.
    pub key: CounterKey<'a>,
    /// Limit that the counter enforces.
    pub limit: &'a Limit,
    /// Holder of the permit.
    pub id: PermitId,
}

/// Units that were charged and never used, to be returned.
#[derive(Clone, Copy, Debug)]
pub struct UnitReturn<'a> {
    /// Key of the counter.
    pub key: CounterKey<'a>,
    /// Limit that the counter enforces.
    pub limit: &'a Limit,
    /// Number of units.
    pub units: u64,
    /// Time of the charge, by the store's clock. Units that have been replenished since are not returned again.
    pub taken_at: Timestamp,
    /// Time at which the bucket was due to be full after the charge, by the store's clock. If it has changed, later
    /// charges were applied: their slots lie above these units' slots, which can then no longer be returned separately.
    pub full_at: Timestamp,
    /// Idempotency key: a store that receives the same return twice applies it once.
    pub id: PermitId,
}

/// Whether a request's charges were applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// All required charges were applied, and one of the alternatives if there are any.
    Admitted,
    /// No required or alternative charge was applied.
    Denied,
}

/// The results of a request's charges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcomes {
    /// Whether the charges were applied.
    pub admission: Admission,
    /// Time of the charge, by the store's clock; zero if no store was called.
    pub at: Timestamp,
    /// One outcome per charge, in the same order, each for that limit alone. In a denied request, the outcomes of
    /// required charges that would have fitted show what remains without this request.
    pub per_charge: SmallVec<[Outcome; 4]>,
}

/// The result of a request of one charge. By value: a list that is written and read again at once waits for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charged {
    /// Time of the charge, by the store's clock.
    pub at: Timestamp,
    /// Outcome of the charge.
    pub outcome: Outcome,
}

impl Charged {
    /// Returns the result of a request of one charge that `try_charge` charges as a list; `None` if it declines.
    #[inline]
    pub fn of_list<'c>(
        charge: &Charge<'c>,
        try_charge: impl FnOnce(&[Charge<'c>], &mut Outcomes) -> bool,
    ) -> Option<Self> {
        let mut outcomes = Outcomes::default();
        if !try_charge(std::slice::from_ref(charge), &mut outcomes) {
            return None;
        }
        outcomes.per_charge.pop().map(|outcome| Self { at: outcomes.at, outcome })
    }

    /// Returns whether the charge was applied.
    #[must_use]
    #[inline]
    pub fn admission(&self, charge: &Charge<'_>) -> Admission {
        Outcomes::admission(std::iter::once((charge.enforcement, &self.outcome)))
    }

    /// Writes it as the result of a request into `outcomes`, which must be empty.
    #[inline(always)]
    pub fn write_to(self, charge: &Charge<'_>, outcomes: &mut Outcomes) {
        (outcomes.admission, outcomes.at) = (self.admission(charge), self.at);
        outcomes.per_charge.push(self.outcome);
    }
}

impl Default for Outcomes {
    /// Creates an empty list for a store to fill. Always inlined, so that unfilled slots need not be copied.
    #[inline(always)]
    fn default() -> Self {
        Self { admission: Admission::Admitted, at: Timestamp::ZERO, per_charge: SmallVec::new() }
    }
}

impl Outcomes {
    /// Computes the admission from the outcomes; every store uses this function. Unknown outcomes deny nothing: the
    /// engine's fail policy decides those.
    ///
    /// ```
    /// use tollgate_core::{Admission, Enforcement, Outcome, Outcomes, TimeDelta, Verdict};
    /// let denied = Outcome { verdict: Verdict::Denied { retry_after: None }, ..Outcome::UNKNOWN };
    /// assert_eq!(Outcomes::admission([(Enforcement::Required, &denied)].into_iter()), Admission::Denied);
    /// assert_eq!(Outcomes::admission([(Enforcement::Independent, &denied)].into_iter()), Admission::Admitted);
    /// ```
    #[must_use]
    pub fn admission<'a>(outcomes: impl Iterator<Item = (Enforcement, &'a Outcome)>) -> Admission {
        let (mut alternatives, mut fitting) = (0_u32, 0_u32);
        for (enforcement, outcome) in outcomes {
            match enforcement {
                Enforcement::Required if outcome.verdict.is_denied() => return Admission::Denied,
                Enforcement::Alternative => {
                    alternatives += 1;
                    fitting += u32::from(!outcome.verdict.is_denied());
                }
                _ => {}
            }
        }
        if alternatives > 0 && fitting == 0 { Admission::Denied } else { Admission::Admitted }
    }
}
