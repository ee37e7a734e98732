//! Packed counters: the table of keys, and the small table of shared counters for new keys that find no slot.
//!
//! A charge is: find the slot, step its word, put it back by one compare-exchange; from the start again if somebody
//! was faster. A denial or a look writes nothing.
//!
//! When a newcomer's window is full of keys that are protected, it is charged on a counter that it shares with a 256th
//! of the strangers of its scope. So a flood cannot reset keys near their limit, memory does not grow, and strangers
//! get together what one key may have: the error is on the safe side. Turning them all away was rejected (a flood
//! would then lock out every new user), as was letting them pass (a flood would then have no limit).

use super::cache_lines::LineStorage;
use super::slot::SlotValue;
use super::stats::{Counts, Event};
use super::table::{Insertion, Table};
use tollgate_core::{Cost, Limit, Outcome, Tag, Timestamp};

/// A key that has used this many 256ths of its limit, or more, by its slot's own reckoning, is never evicted. That
/// reckoning is at least half of the truth: whoever has used half of a limit is safe.
pub(super) const PROTECTED_PRESSURE: u16 = 64;

/// Shared counters have no mark: the least used gives way.
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
    /// The name of the shared counter, should it come to that.
    pub(super) shared: u64,
    pub(super) limit: &'a Limit,
    pub(super) tag: Tag,
    pub(super) cost: Cost,
    pub(super) now: Timestamp,
    /// `now` in the windows of this key.
    pub(super) moment: Timestamp,
}

/// Which slot of which table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotLocation {
    Own(usize),
    Shared(usize),
}

/// What a charge found and left; enough to undo it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeReceipt {
    /// `None` if nothing was there and nothing was written.
    pub(super) location: Option<SlotLocation>,
    pub(super) before: SlotValue,
    pub(super) after: SlotValue,
}

impl ChargeReceipt {
    pub(super) const NOTHING: Self =
        Self { location: None, before: SlotValue::EMPTY, after: SlotValue::EMPTY };
}

/// How a charge is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChargeKind {
    /// If it fits.
    Charge,
    /// In any case: it has already happened.
    Debit,
    /// Not at all; but a limit that counts what it denies counts this if it denies it.
    Attempt,
}

impl<'a> PackedCharge<'a> {
    #[inline(always)]
    pub(super) fn step(&self, seen: Option<SlotValue>, manner: ChargeKind) -> (SlotValue, Outcome) {
        let word = seen.and_then(|seen| seen.word_for(self.tag));
        if manner == ChargeKind::Debit && !self.cost.is_refund() {
            let word = self.limit.debit_word(word, self.moment, self.cost.units());
            let (_, outcome) = self.limit.step_word(Some(word), self.moment, Cost::PEEK);
            return (SlotValue::after(self.name, self.limit, self.tag, &outcome, word), outcome);
        }
        let (word, outcome) = self.limit.step_word(word, self.moment, self.cost);
        (SlotValue::after(self.name, self.limit, self.tag, &outcome, word), outcome)
    }

    /// Whether a charge of an unused counter leaves anything to remember.
    fn changes_state(&self, after: SlotValue, outcome: &Outcome, manner: ChargeKind) -> bool {
        if self.cost.is_peek() || self.cost.is_refund() {
            return false;
        }
        if outcome.verdict.is_allowed() {
            return manner != ChargeKind::Attempt;
        }
        // A window that counts attempts remembers a denial too.
        self.limit.step_word(None, self.moment, Cost::PEEK).0 != after.word && after.word != 0
    }

    /// The same charge on the shared counter.
    pub(super) fn shared(&self) -> PackedCharge<'a> {
        PackedCharge { name: self.shared, ..*self }
    }
}

impl<L: LineStorage> PackedCounters<L> {
    /// The usual charge, and nothing else: a key that has a slot, and nobody in the way. `None`: ask [`Self::charge`].
    ///
    /// It is `charge` without a receipt, and written out because the few bytes of a receipt, passed through memory,
    /// cost as much as finding the slot.
    #[inline(always)]
    pub(super) fn charge_known(&self, ask: &PackedCharge<'_>) -> Option<Outcome> {
        let (at, seen) = self.keys.find(ask.name)?;
        let (word, outcome) = ask.limit.step_word(seen.word_for(ask.tag), ask.moment, ask.cost);
        let done = if word == seen.word || ask.cost.is_peek() {
            self.keys.is_unchanged(at, seen)
        } else {
            self.keys.update(at, seen, SlotValue::after(ask.name, ask.limit, ask.tag, &outcome, word))
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

    /// `None`: look again.
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

    /// Charges the shared counter.
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

    /// Where a charge stands and what it would do, without doing it.
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

    /// Puts a draft into effect if nothing has moved since.
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

    /// Takes a charge back: exactly, if nobody has touched the counter since; else as a refund.
    #[cold]
    pub(super) fn undo(&self, ask: &PackedCharge<'_>, receipt: &ChargeReceipt) {
        let (table, at, ask) = match receipt.location {
            Some(SlotLocation::Own(at)) => (&self.keys, at, *ask),
            Some(SlotLocation::Shared(at)) => (&self.shared, at, ask.shared()),
            None => return,
        };
        if receipt.before.word == receipt.after.word || table.replace(at, receipt.after, receipt.before) {
            return;
        }
        let back = PackedCharge { cost: ask.cost.negated(), ..ask };
        // Gone from its slot means evicted, and what was taken is forgotten with the rest.
        while let Some((at, seen)) = table.find(ask.name) {
            if charge_slot(table, at, seen, &back, ChargeKind::Debit).is_some() {
                return;
            }
        }
    }
}

/// Steps one slot; `None` if it changed meanwhile. The receipt's place is for the caller to say.
#[inline]
fn charge_slot<L: LineStorage>(
    table: &Table<L>,
    at: usize,
    seen: SlotValue,
    ask: &PackedCharge<'_>,
    manner: ChargeKind,
) -> Option<(Outcome, ChargeReceipt)> {
    let (after, outcome) = ask.step(Some(seen), manner);
    // A denial that changes the word all the same is an attempt counted, or a clock set back and mended.
    let idle = manner == ChargeKind::Attempt && outcome.verdict.is_allowed();
    if after.word == seen.word || ask.cost.is_peek() || idle {
        let receipt = ChargeReceipt { location: None, before: seen, after: seen };
        return table.is_unchanged(at, seen).then_some((outcome, receipt));
    }
    table.update(at, seen, after).then_some((outcome, ChargeReceipt { location: None, before: seen, after }))
}
