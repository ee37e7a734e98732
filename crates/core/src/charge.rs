//! Charges, the interface between engine and store: a request is a list of charges, and each has an outcome.

use crate::algorithm::concurrency::PermitId;
use crate::cost::Cost;
use crate::counter_key::CounterKey;
use crate::limit::Limit;
use crate::outcome::Outcome;
use crate::time::Timestamp;
use smallvec::SmallVec;

/// What a denial of one charge means for the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// One of a set of which all are taken or none.
    #[default]
    Required,
    /// One of a set of which at least one must fit; those that fit are taken if the request passes.
    Alternative,
    /// Taken or not on its own, whatever the others say: shadow rules, candidates, the Envoy profile.
    Independent,
}

/// What a counter without a state is taken for where its store may have lost writes: another process answers in the
/// place of the one that knew them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossPolicy {
    /// As unused: callers go on, with quota that they may have spent before.
    #[default]
    AssumeUnused,
    /// As used up at the moment of the loss; it recovers from there as its limit does. No crash hands out fresh quota.
    AssumeExhausted,
}

/// Where a charge may be decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By the store, every time.
    #[default]
    Central,
    /// By the store, until its key is hot: then as leased.
    Adaptive,
    /// By this node, out of units that the store has already deducted; by the store where there are none in hand.
    Leased,
    /// By this node's own counters, which nobody shares.
    Local,
}

/// One limit to be charged for one request.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// Which counter.
    pub key: CounterKey<'a>,
    /// By which limit.
    pub limit: &'a Limit,
    /// How much.
    pub cost: Cost,
    /// How it bears on the others.
    pub enforcement: Enforcement,
    /// Who holds the permit, where the limit is of concurrency.
    pub permit: PermitId,
    /// What is assumed where its state may have been lost.
    pub loss_policy: LossPolicy,
    /// Where it may be decided.
    pub mode: Mode,
}

impl<'a> Charge<'a> {
    /// A required charge of `cost`.
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

/// A permit to be given back.
#[derive(Clone, Copy, Debug)]
pub struct Permit<'a> {
    /// Which counter.
    pub key: CounterKey<'a>,
    /// By which limit.
    pub limit: &'a Limit,
    /// Whose.
    pub id: PermitId,
}

/// Units that were taken and never used, to be given back.
#[derive(Clone, Copy, Debug)]
pub struct UnitReturn<'a> {
    /// Which counter.
    pub key: CounterKey<'a>,
    /// By which limit.
    pub limit: &'a Limit,
    /// How many.
    pub units: u64,
    /// When they were taken, by the store's time. What time has given back since is not given back again.
    pub taken_at: Timestamp,
    /// When the bucket was to be full again after they were taken, by the store's time. If that has changed, somebody has
    /// taken after them: their slots lie below others', and cannot be given back without giving back those.
    pub full_at: Timestamp,
    /// Names this giving-back: a store that hears of it twice does it once.
    pub id: PermitId,
}

/// Whether a request's charges were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// All required charges, and one of the alternatives if there are any.
    Admitted,
    /// None of them.
    Denied,
}

/// What came of a request's charges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcomes {
    /// Whether they were taken.
    pub admission: Admission,
    /// When, by the store's time; zero where no store was asked.
    pub at: Timestamp,
    /// One for each charge, in the same order: what that limit alone says. In a refused request the required charges
    /// that would have fitted tell what remains without this one.
    pub per_charge: SmallVec<[Outcome; 4]>,
}

impl Default for Outcomes {
    /// No outcomes: room for a store to write them. Inlined always: what is not yet in the list need then not be copied.
    #[inline(always)]
    fn default() -> Self {
        Self { admission: Admission::Admitted, at: Timestamp::ZERO, per_charge: SmallVec::new() }
    }
}

impl Outcomes {
    /// The rule by which outcomes make an admission; every store uses it. What was not answered refuses nothing: that is
    /// for the engine to judge.
    ///
    /// ```
    /// use tollgate_core::{Admission, Enforcement, Outcome, Outcomes, TimeDelta, Verdict};
    /// let denied = Outcome { verdict: Verdict::Denied { retry_after: None }, remaining: 0, reset_after: TimeDelta::ZERO };
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
