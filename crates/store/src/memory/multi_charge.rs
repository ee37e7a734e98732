//! Multi-charge requests: all charges or none, over counters that have no common lock.
//!
//! First every charge is prepared: read and stepped, nothing written. If the prepared charges deny the request, nothing
//! has happened. Otherwise they are committed one by one, each by its own compare-exchange. A counter that another
//! thread has changed meanwhile is charged again; if that denies, what was taken is undone, last first, and the request
//! is denied.
//!
//! Each counter admits at most its limit at every instant, because each is only ever changed by its own step. The one
//! effect of a race: while a request that will be undone holds a charge, another one that would have fitted can be
//! denied. Nothing is ever admitted above a limit, and no charge of a denied request remains.
//!
//! Independent charges go first, each on its own. A required charge of the same counter then sees them. Locking all
//! counters in order was rejected: a global counter is in every request, and would serialize them all.

use super::cache_lines::LineStorage;
use super::packed_counters::{ChargeKind, ChargeReceipt, PackedCharge, PackedCounters, SlotLocation};
use super::slot::SlotValue;
use smallvec::SmallVec;
use tollgate_core::{Admission, Cost, Enforcement, Outcome, Outcomes};

/// One charge of a request in progress.
pub(super) struct PreparedCharge<'a> {
    /// `None` for a wide counter: its outcome is given, and the caller undoes it.
    pub(super) charge: Option<PackedCharge<'a>>,
    pub(super) enforcement: Enforcement,
    pub(super) outcome: Outcome,
    receipt: ChargeReceipt,
}

impl<'a> PreparedCharge<'a> {
    pub(super) fn new(ask: Option<PackedCharge<'a>>, enforcement: Enforcement, outcome: Outcome) -> Self {
        Self { charge: ask, enforcement, outcome, receipt: ChargeReceipt::NOTHING }
    }

    pub(super) fn is_independent(&self) -> bool {
        self.enforcement == Enforcement::Independent
    }

    /// Returns whether the counter was created by this charge.
    pub(super) fn is_new_key(&self) -> bool {
        self.receipt.before == SlotValue::EMPTY && self.receipt.location.is_some()
    }

    /// Returns the charge if it belongs to the set that is taken together or not at all.
    fn in_set(&self) -> Option<&PackedCharge<'a>> {
        self.charge.as_ref().filter(|_| !self.is_independent())
    }

    fn has_changed(&self) -> bool {
        !self.receipt.before.is_same_state(self.receipt.after)
    }
}

/// Maximum number of charges on the fast path.
const MAX_FAST: usize = 8;

/// Charges a request on the fast path: every counter known and named once, every charge fits, no concurrent change.
/// Returns `None` if it does not apply: nothing has happened, and [`charge_all`] must be called. A request whose
/// charges all fit is admitted under every enforcement. `gone` is called for a charge to be undone whose slot is gone.
#[inline(always)]
pub(super) fn charge_known<'a, L: LineStorage>(
    counters: &PackedCounters<L>,
    names: &[u64],
    ask: impl Fn(usize) -> Option<PackedCharge<'a>>,
    gone: impl Fn(usize),
) -> Option<SmallVec<[Outcome; 4]>> {
    let mut drafts = [(0, SlotValue::EMPTY, SlotValue::EMPTY); MAX_FAST];
    if names.len() > MAX_FAST {
        return None;
    }
    let mut each = SmallVec::new();
    for (i, name) in names.iter().enumerate() {
        let ask = ask(i)?;
        if names[..i].contains(name) {
            return None;
        }
        let (at, seen) = counters.keys.find(*name)?;
        let (after, outcome) = ask.step(Some(seen), ChargeKind::Charge);
        if outcome.verdict.is_denied() {
            return None;
        }
        drafts[i] = (at, seen, if ask.cost.is_peek() { seen } else { after });
        each.push(outcome);
    }
    for i in 0..names.len() {
        let (at, before, after) = drafts[i];
        let done = if before.is_same_state(after) {
            counters.keys.is_unchanged(at, before)
        } else {
            counters.keys.update(at, before, after)
        };
        if !done {
            for (j, (at, before, after)) in drafts[..i].iter().enumerate().rev() {
                let receipt =
                    ChargeReceipt { location: Some(SlotLocation::Own(*at)), before: *before, after: *after };
                if !counters.undo(&ask(j)?, &receipt) {
                    gone(j);
                }
            }
            return None;
        }
    }
    Some(each)
}

/// Charges a request on the general path.
pub(super) fn charge_all<L: LineStorage>(
    counters: &PackedCounters<L>,
    items: &mut [PreparedCharge<'_>],
) -> Admission {
    for item in items.iter_mut().filter(|item| item.is_independent()) {
        if let Some(ask) = &item.charge {
            (item.outcome, item.receipt) = counters.charge(ask, ChargeKind::Charge);
        }
    }
    for i in 0..items.len() {
        if let Some(ask) = items[i].in_set() {
            (items[i].outcome, items[i].receipt) = prepare(counters, ask, &items[..i]);
        }
    }
    if admission(items) == Admission::Denied {
        roll_back(counters, items, 0);
        return Admission::Denied;
    }
    for i in 0..items.len() {
        let Some(ask) = items[i].in_set() else { continue };
        if items[i].outcome.verdict.is_denied() {
            counters.charge(ask, ChargeKind::Attempt);
            items[i].receipt = ChargeReceipt::NOTHING;
            continue;
        }
        if ask.cost.is_peek() || !items[i].has_changed() {
            items[i].receipt = ChargeReceipt::NOTHING;
            continue;
        }
        if counters.commit(&items[i].receipt) {
            continue;
        }
        let fresh = counters.charge(ask, ChargeKind::Charge);
        (items[i].outcome, items[i].receipt) = fresh;
        if admission(items) == Admission::Denied {
            roll_back(counters, items, i);
            return Admission::Denied;
        }
    }
    Admission::Admitted
}

fn admission(items: &[PreparedCharge<'_>]) -> Admission {
    Outcomes::admission(items.iter().map(|item| (item.enforcement, &item.outcome)))
}

/// Prepares a charge on top of the earlier ones of this request: the same counter twice counts twice.
fn prepare<L: LineStorage>(
    counters: &PackedCounters<L>,
    ask: &PackedCharge<'_>,
    earlier: &[PreparedCharge<'_>],
) -> (Outcome, ChargeReceipt) {
    let same = |item: &&PreparedCharge<'_>| item.in_set().is_some_and(|other| other.name == ask.name);
    let (outcome, mut receipt) = match earlier.iter().rev().find(same) {
        None => counters.prepare(ask),
        Some(prior) => {
            let ChargeReceipt { location: place, after: before, .. } = prior.receipt;
            let (after, outcome) = match place {
                Some(SlotLocation::Shared(_)) => ask.shared().step(Some(before), ChargeKind::Charge),
                _ => ask.step(Some(before), ChargeKind::Charge),
            };
            (outcome, ChargeReceipt { location: place, before, after })
        }
    };
    // What is not written is not seen by the next charge of the same counter either.
    let denied = outcome.verdict.is_denied() && !ask.stores_denial(receipt.before, receipt.after.word);
    if ask.cost.is_peek() || denied {
        receipt.after = receipt.before;
    }
    (outcome, receipt)
}

/// Restores the state before the request; the first `taken` items may have been committed.
#[cold]
fn roll_back<L: LineStorage>(counters: &PackedCounters<L>, items: &mut [PreparedCharge<'_>], taken: usize) {
    for item in items[..taken].iter().rev() {
        if let Some(ask) = item.in_set().filter(|_| item.outcome.verdict.is_allowed()) {
            counters.undo(ask, &item.receipt);
        }
    }
    for item in items.iter_mut().filter(|item| item.outcome.verdict.is_allowed()) {
        let Some(ask) = item.in_set() else { continue };
        // The outcome without this charge.
        let (seen, _) = counters.prepare(&PackedCharge { cost: Cost::PEEK, ..*ask });
        item.outcome = Outcome { verdict: item.outcome.verdict, ..seen };
    }
    for item in items[taken..].iter().filter(|item| item.outcome.verdict.is_denied()) {
        if let Some(ask) = item.in_set() {
            counters.charge(ask, ChargeKind::Attempt);
        }
    }
}
