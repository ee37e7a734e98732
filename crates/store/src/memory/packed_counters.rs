//! Packed counters: the table of keys, and the small table of shared counters for new keys that find no slot.
//!
//! A charge finds the slot, steps its word and stores it by one compare-exchange; it starts again if another thread was
//! faster. A denial or a peek writes nothing, whatever limit it was made with; two kinds of denial do: one that a limit
//! counts as an attempt, and one that finds a state which a clock that moved backward has left in the future.
//!
//! When the window of a new key is full of protected keys, it is charged on a counter that it shares with a 256th of
//! the other new keys of its scope. So a flood cannot reset keys near their limit, memory does not grow, and the keys
//! that share a counter get together what one key may have: the error is on the safe side. Denying them all was
//! rejected (a flood would then lock out every new user), as was allowing them all (a flood would then have no limit).

use super::cache_lines::LineStorage;
use super::slot::SlotValue;
use super::stats::{Counts, Event};
use super::table::{Insertion, Table};
use tollgate_core::{Cost, Limit, Outcome, Tag, Timestamp};

/// A key that has used this many 256ths of its limit, or more, by its slot's estimate, is never evicted. That estimate
/// is at least half of the true value: a key that has used half of its limit is safe.
pub(super) const PROTECTED_PRESSURE: u16 = 64;

/// Shared counters are not protected: the least used is evicted.
pub(super) const NO_PROTECTION: u16 = 256;

pub(super) struct PackedCounters<L> {
    pub(super) keys: Table<L>,
    pub(super) shared: Table<L>,
    pub(super) counts: Counts,
    pub(super) shared_counts: Counts,
}

/// One charge of a packed limit.
#[derive(Clone, Copy)]
pub(super) struct PackedCharge<'a> {
    pub(super) name: u64,
    /// Name of the shared counter, for use if the key finds no slot.
    pub(super) shared: u64,
    pub(super) limit: &'a Limit,
    pub(super) tag: Tag,
    pub(super) cost: Cost,
    pub(super) now: Timestamp,
    /// `now` shifted into the windows of this key.
    pub(super) moment: Timestamp,
}

/// A slot in one of the two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotLocation {
    Own(usize),
    Shared(usize),
}

/// State before and after a charge; enough to undo it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeReceipt {
    /// `None` if there was no state and nothing was written.
    pub(super) location: Option<SlotLocation>,
    pub(super) before: SlotValue,
    pub(super) after: SlotValue,
}

impl ChargeReceipt {
    pub(super) const NOTHING: Self =
        Self { location: None, before: SlotValue::EMPTY, after: SlotValue::EMPTY };
}

/// Kind of charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChargeKind {
    /// Applied if it fits.
    Charge,
    /// Applied unconditionally: it has already happened.
    Debit,
    /// Not applied, but a limit that counts denied requests counts this one if it denies it.
    Attempt,
}

impl<'a> PackedCharge<'a> {
    #[inline(always)]
    pub(super) fn step(&self, seen: Option<SlotValue>, manner: ChargeKind) -> (SlotValue, Outcome) {
        let before = seen.and_then(|seen| seen.word_for(self.tag));
        let layout = seen.filter(|_| before.is_some()).map_or(0, SlotValue::layout);
        if manner == ChargeKind::Debit && !self.cost.is_refund() {
            let word = self.limit.debit_word(before, layout, self.moment, self.cost.units());
            // A debit beyond the debt that is owed already leaves the word to its writer.
            let layout = if before == Some(word) { layout } else { 0 };
            let (_, outcome) = self.limit.step_word(Some(word), layout, self.moment, Cost::PEEK);
            let layout = if layout == 0 { self.after(&outcome, word, 0).layout() } else { layout };
            return (SlotValue::new(self.name, layout, word), outcome);
        }
        let (word, outcome) = self.limit.step_word(before, layout, self.moment, self.cost);
        (self.after(&outcome, word, layout), outcome)
    }

    #[inline(always)]
    fn after(&self, outcome: &Outcome, word: u64, layout: u16) -> SlotValue {
        let layout = self.limit.layout(layout, word, self.moment, self.cost, outcome);
        SlotValue::new(self.name, layout, word)
    }

    /// Returns whether a denial that left `word` is stored all the same: see above. A state in the future is the only
    /// one whose word falls, because its time is in the highest bits. All other changes were made by reading it: a
    /// window that has turned, or a state that another limit wrote.
    #[cold]
    pub(super) fn stores_denial(&self, seen: SlotValue, word: u64) -> bool {
        self.limit.counts_denied() || seen.word_for(self.tag).is_some_and(|before| word < before)
    }

    /// Returns whether a charge of an unused counter leaves any state to store.
    fn changes_state(&self, after: SlotValue, outcome: &Outcome, manner: ChargeKind) -> bool {
        if self.cost.is_peek() || self.cost.is_refund() {
            return false;
        }
        if outcome.verdict.is_allowed() {
            return manner != ChargeKind::Attempt;
        }
        // A window that counts attempts stores a denial too.
        self.limit.step_word(None, 0, self.moment, Cost::PEEK).0 != after.word && after.word != 0
    }

    /// Returns the same charge on the shared counter.
    pub(super) fn shared(&self) -> PackedCharge<'a> {
        PackedCharge { name: self.shared, ..*self }
    }
}

impl<L: LineStorage> PackedCounters<L> {
    /// Charges on the fast path only: the key has a slot and no other thread interferes. Returns `None` if
    /// [`Self::charge`] must be called.
    ///
    /// It is `charge` without a receipt, and duplicated because the few bytes of a receipt, passed through memory, cost
    /// as much as finding the slot.
    #[inline(always)]
    pub(super) fn charge_known(&self, ask: &PackedCharge<'_>) -> Option<Outcome> {
        let (at, seen) = self.keys.find(ask.name)?;
        let before = seen.word_for(ask.tag);
        let layout = if before.is_some() { seen.layout() } else { 0 };
        let (word, outcome) = ask.limit.step_word(before, layout, ask.moment, ask.cost);
        let denied = outcome.verdict.is_denied();
        if ask.cost.is_peek() || denied && !ask.stores_denial(seen, word) {
            return self.keys.is_unchanged(at, seen).then_some(outcome);
        }
        let after = ask.after(&outcome, word, layout);
        let done = if seen.is_same_state(after) {
            self.keys.is_unchanged(at, seen)
        } else {
            self.keys.update(at, seen, after)
        };
        done.then_some(outcome)
    }

    pub(super) fn charge(&self, ask: &PackedCharge<'_>, manner: ChargeKind) -> (Outcome, ChargeReceipt) {
        loop {
            let Some((at, seen)) = self.keys.find(ask.name) else {
                match self.charge_new_key(ask, manner) {
                    Some(done) => return done,
                    None => continue,
                }
            };
            if let Some((outcome, receipt)) = charge_slot(&self.keys, at, seen, ask, manner) {
                return (outcome, ChargeReceipt { location: Some(SlotLocation::Own(at)), ..receipt });
            }
        }
    }

    /// Charges a key without a slot. Returns `None` if the lookup must be repeated.
    #[cold]
    fn charge_new_key(&self, ask: &PackedCharge<'_>, manner: ChargeKind) -> Option<(Outcome, ChargeReceipt)> {
        let (after, outcome) = ask.step(None, manner);
        if !ask.changes_state(after, &outcome, manner) {
            if self.keys.has_room(ask.name, ask.now) {
                return Some((outcome, ChargeReceipt::NOTHING));
            }
            return self.charge_shared(ask, manner);
        }
        match self.keys.insert(ask.name, ask.now, after, &self.counts) {
            Insertion::Filled(at) => Some((
                outcome,
                ChargeReceipt { location: Some(SlotLocation::Own(at)), before: SlotValue::EMPTY, after },
            )),
            Insertion::Raced => None,
            Insertion::Full => self.charge_shared(ask, manner),
        }
    }

    /// Charges the shared counter. Returns `None` if the lookup must be repeated.
    fn charge_shared(&self, ask: &PackedCharge<'_>, manner: ChargeKind) -> Option<(Outcome, ChargeReceipt)> {
        let ask = &ask.shared();
        let done = if let Some((at, seen)) = self.shared.find(ask.name) {
            let (outcome, receipt) = charge_slot(&self.shared, at, seen, ask, manner)?;
            (outcome, ChargeReceipt { location: Some(SlotLocation::Shared(at)), ..receipt })
        } else {
            let (after, outcome) = ask.step(None, manner);
            if !ask.changes_state(after, &outcome, manner) {
                return Some((outcome, ChargeReceipt::NOTHING));
            }
            match self.shared.insert(ask.name, ask.now, after, &self.shared_counts) {
                Insertion::Filled(at) => (
                    outcome,
                    ChargeReceipt {
                        location: Some(SlotLocation::Shared(at)),
                        before: SlotValue::EMPTY,
                        after,
                    },
                ),
                Insertion::Raced | Insertion::Full => return None,
            }
        };
        self.counts.record(ask.name, Event::Overflowed);
        Some(done)
    }

    /// Returns the location and effect of a charge, without applying it.
    #[inline]
    pub(super) fn prepare(&self, ask: &PackedCharge<'_>) -> (Outcome, ChargeReceipt) {
        if let Some((at, seen)) = self.keys.find(ask.name)
            && self.keys.is_unchanged(at, seen)
        {
            let (after, outcome) = ask.step(Some(seen), ChargeKind::Charge);
            return (outcome, ChargeReceipt { location: Some(SlotLocation::Own(at)), before: seen, after });
        }
        self.prepare_new_key(ask)
    }

    #[cold]
    fn prepare_new_key(&self, ask: &PackedCharge<'_>) -> (Outcome, ChargeReceipt) {
        let (place, seen) = self.locate(ask);
        let (after, outcome) = match place {
            Some(SlotLocation::Shared(_)) => ask.shared().step(seen, ChargeKind::Charge),
            _ => ask.step(seen, ChargeKind::Charge),
        };
        (outcome, ChargeReceipt { location: place, before: seen.unwrap_or(SlotValue::EMPTY), after })
    }

    fn locate(&self, ask: &PackedCharge<'_>) -> (Option<SlotLocation>, Option<SlotValue>) {
        loop {
            if let Some((at, seen)) = self.keys.find(ask.name) {
                if self.keys.is_unchanged(at, seen) {
                    return (Some(SlotLocation::Own(at)), Some(seen));
                }
                continue;
            }
            if self.keys.has_room(ask.name, ask.now) {
                return (None, None);
            }
            match self.shared.find(ask.shared) {
                Some((at, seen)) if self.shared.is_unchanged(at, seen) => {
                    return (Some(SlotLocation::Shared(at)), Some(seen));
                }
                Some(_) => {}
                None => return (None, None),
            }
        }
    }

    /// Commits a prepared charge if its slot has not changed since. Returns whether it was committed.
    #[inline]
    pub(super) fn commit(&self, draft: &ChargeReceipt) -> bool {
        match draft.location {
            Some(SlotLocation::Own(at)) => self.keys.update(at, draft.before, draft.after),
            Some(SlotLocation::Shared(at)) => {
                let done = self.shared.update(at, draft.before, draft.after);
                if done {
                    self.counts.record(draft.after.meta >> 16, Event::Overflowed);
                }
                done
            }
            None => false,
        }
    }

    /// Undoes a charge: exactly, if the counter has not been changed since; otherwise as a refund. Returns whether its
    /// slot was there: a key without one was evicted, and what was taken is lost with the rest of its state, or it has
    /// moved to the wide counters.
    #[cold]
    pub(super) fn undo(&self, ask: &PackedCharge<'_>, receipt: &ChargeReceipt) -> bool {
        let (table, at, ask) = match receipt.location {
            Some(SlotLocation::Own(at)) => (&self.keys, at, *ask),
            Some(SlotLocation::Shared(at)) => (&self.shared, at, ask.shared()),
            None => return true,
        };
        let is_same = receipt.before.is_same_state(receipt.after);
        if is_same || table.replace(at, receipt.after, receipt.before) {
            return true;
        }
        let back = PackedCharge { cost: ask.cost.negated(), ..ask };
        while let Some((at, seen)) = table.find(ask.name) {
            if charge_slot(table, at, seen, &back, ChargeKind::Debit).is_some() {
                return true;
            }
        }
        false
    }
}

/// Steps one slot. Returns `None` if it changed meanwhile. The caller fills in the receipt's location.
#[inline]
fn charge_slot<L: LineStorage>(
    table: &Table<L>,
    at: usize,
    seen: SlotValue,
    ask: &PackedCharge<'_>,
    manner: ChargeKind,
) -> Option<(Outcome, ChargeReceipt)> {
    let (after, outcome) = ask.step(Some(seen), manner);
    let idle = match outcome.verdict.is_denied() {
        true => manner != ChargeKind::Debit && !ask.stores_denial(seen, after.word),
        false => manner == ChargeKind::Attempt,
    };
    if seen.is_same_state(after) || ask.cost.is_peek() || idle {
        let receipt = ChargeReceipt { location: None, before: seen, after: seen };
        return table.is_unchanged(at, seen).then_some((outcome, receipt));
    }
    table.update(at, seen, after).then_some((outcome, ChargeReceipt { location: None, before: seen, after }))
}
