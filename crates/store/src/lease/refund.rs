//! Refunds of buckets that may be leased.
//!
//! A refund moves a bucket's time back, into slots that other nodes may hold as leases: they could be spent twice. So it goes
//! to the store
//!
//! 1. while no lease may be outstanding (a mark beside the counter says so), all of it, or
//! 2. while so much of the bucket is used that the slots of outstanding leases can be exchanged for others that begin after
//!    these leases have expired;
//!
//! otherwise to this node's lease, as spare slots, or if there is none, not at all: units not refunded recover with time.
//! `docs/internals/lease-proof.md` has the proof. Rejected: keeping with each charge whether a lease has paid it. Slots can be
//! exchanged, so that does not matter, and what the store has charged would be lost.

use super::stats::add;
use super::{LeasedStore, is_guarded};
use smallvec::SmallVec;
use tokio::sync::Mutex;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, Mode, Outcome, Outcomes,
    RegionMode, StoreError, Timestamp, Verdict,
};

const LOCKS: usize = 64;
/// Maximum number of parts that a refund is divided into.
const MAX_PARTS: usize = 32;

/// Locks of refunds by key: of the second kind, one is under way on a node for each counter. None waits for another: the
/// node's lease takes what comes meanwhile.
pub(super) struct RefundLocks([Mutex<()>; LOCKS]);

impl Default for RefundLocks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

/// What a refund comes to.
struct Refund<'a> {
    charge: Charge<'a>,
    /// Units that are not refunded yet, of the charge's limit.
    left: u64,
    /// When their slots had not begun, by this node's clock.
    freed_at: Timestamp,
}

/// Returns a refund that the store decides.
const fn central<'a>(charge: &Charge<'a>) -> Charge<'a> {
    Charge { mode: Mode::Central, enforcement: Enforcement::Required, ..*charge }
}

impl<S: CounterStore, A: CounterStore, C: Clock + Clone> LeasedStore<S, A, C> {
    /// Refunds units of a bucket whose slots have not begun at `freed_at`, by this node's clock.
    ///
    /// # Errors
    /// [`StoreError`] if nothing was refunded.
    pub(super) async fn refund(&self, charge: &Charge<'_>, freed_at: Timestamp) -> Result<(), StoreError> {
        let name = self.hasher.name(&charge.key);
        let turn = self.refunding.0[name as usize % LOCKS].try_lock();
        if let Some(known) = self.refund_unleased(charge).await? {
            let mut refund = Refund { charge: central(charge), left: charge.cost.units(), freed_at };
            if turn.is_ok() {
                self.refund_beside_leases(&mut refund, &known).await?;
            }
            self.refund_to_lease(name, &refund);
        }
        Ok(())
    }

    /// Refunds a bucket, unless leases of it may be outstanding: then it returns the bucket's outcome without the refund.
    async fn refund_unleased(&self, charge: &Charge<'_>) -> Result<Option<Outcome>, StoreError> {
        let Some((scope, limit)) = self.config.refund_guard(charge.key.scope) else { return Ok(None) };
        let key = CounterKey { scope: &scope, ..charge.key };
        let request = [central(charge), Charge::new(key, &limit, Cost::ONE)];
        let outcomes = self.inner.charge(&request).await?;
        self.table.refunded(self.hasher.name(&charge.key));
        Ok(outcomes.per_charge.first().copied().filter(|_| outcomes.admission == Admission::Denied))
    }

    /// Refunds to the store what outstanding leases leave room for, in parts that several nodes may refund at once.
    ///
    /// # Errors
    /// [`StoreError`] if nothing was refunded.
    async fn refund_beside_leases(&self, refund: &mut Refund<'_>, known: &Outcome) -> Result<(), StoreError> {
        let charge = refund.charge;
        // An owner in another cell decides by itself.
        if matches!(charge.key.scope.region_mode(), RegionMode::Owner | RegionMode::Leased) {
            return Ok(());
        }
        let Some(depth) = self.config.refund_depth(charge.limit) else { return Ok(()) };
        // A repeated denial says nothing of the bucket.
        let known = Some(known.reset_after).filter(|_| known.verdict != Verdict::Unknown);
        let (mut used, whole) = (known, refund.left);
        for _ in 0..MAX_PARTS {
            let part = refund.left.min(depth.part);
            if part == 0 {
                break;
            }
            let reset_after = match used.take() {
                Some(known) => known,
                None => {
                    let look = [Charge { cost: Cost::PEEK, ..charge }];
                    let Ok(outcomes) = self.inner.charge(&look).await else { break };
                    outcomes.per_charge[0].reset_after
                }
            };
            if !depth.allows(reset_after, part) {
                break;
            }
            let debited = self.inner.debit(&[Charge { cost: Cost::refund(part), ..charge }]).await;
            match debited {
                Ok(()) => refund.left -= part,
                // The store may have it, so this node's lease must not.
                Err(error) if error.is_in_doubt() => {
                    error.late().into_iter().for_each(|late| late.keep(|_| {}));
                    refund.left -= part;
                    break;
                }
                Err(error) if refund.left == whole => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Gives this node's lease what the store was not refunded.
    fn refund_to_lease(&self, name: u64, refund: &Refund<'_>) {
        let Refund { charge, left, freed_at } = refund;
        if *left > 0 && !self.table.refund(name, (charge.limit, *left), *freed_at, self.clock.now()) {
            let lost = (*left).min(charge.limit.capacity()) / charge.limit.parts_of_unit().max(1);
            add(&self.counts.unrefunded, lost);
        }
    }

    /// Charges a request that also refunds: the refunds follow once the rest is admitted, and the outcomes include
    /// them.
    #[cold]
    pub(super) async fn charge_and_refund(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let mut looks: SmallVec<[Charge<'_>; 4]> = charges.iter().copied().collect();
        looks.iter_mut().filter(|charge| is_guarded(charge)).for_each(|charge| charge.cost = Cost::PEEK);
        let now = self.clock.now();
        let Some(near) = self.decide_locally(&looks, false, now) else {
            return self.inner.charge(&looks).await;
        };
        let mut outcomes = self.charge_rest(&looks, near, now).await?;
        if outcomes.admission == Admission::Admitted {
            for (at, charge) in charges.iter().enumerate().filter(|(_, charge)| is_guarded(charge)) {
                // Nothing says when the units were taken, so their slots may have begun.
                if self.refund_unleased(charge).await?.is_some() {
                    add(&self.counts.unrefunded, charge.cost.units());
                }
                outcomes.per_charge[at] = self.inner.charge(&[looks[at]]).await?.per_charge[0];
            }
        }
        Ok(outcomes)
    }
}
