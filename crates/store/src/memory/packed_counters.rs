//! Packed counters: the table of keys, and the small table of shared counters for newcomers that it turns away.
//!
//! A charge is: find the slot, step its word, put it back by one compare-exchange; from the start again if somebody
//! was faster. A denial or a look writes nothing.
//!
//! When a newcomer's window is full of keys that are protected, it is charged on a counter that it shares with a 256th
//! of the strangers of its scope. So a flood cannot reset keys near their limit, memory does not grow, and strangers
//! get together what one key may have: the error is on the safe side. Turning them all away was rejected (a flood
//! would then lock out every new user), as was letting them pass (a flood would then have no limit).

use super::cache_lines::Lines;
use super::slot::Snapshot;
use super::stats::{Counts, Event};
use super::table::{Insertion, Table};
use tollgate_core::{Cost, Limit, Outcome, Tag, Timestamp};

/// A key that has used this many 256ths of its limit, or more, by its slot's own reckoning, is never evicted. That
/// reckoning is at least half of the truth: whoever has used half of a limit is safe.
pub(super) const MARK: u16 = 64;

/// Shared counters have no mark: the least used gives way.
pub(super) const NO_MARK: u16 = 256;

pub(super) struct Counters<L> {
    pub(super) keys: Table<L>,
    pub(super) shared: Table<L>,
    pub(super) counts: Counts,
    pub(super) shared_counts: Counts,
}

/// One charge of a packed limit.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
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
pub(super) enum Place {
    Own(usize),
    Shared(usize),
}

/// What a charge found and left; enough to undo it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receipt {
    /// `None` if nothing was there and nothing was written.
    pub(super) place: Option<Place>,
    pub(super) before: Snapshot,
    pub(super) after: Snapshot,
}

impl Receipt {
    pub(super) const NOTHING: Self = Self { place: None, before: Snapshot::EMPTY, after: Snapshot::EMPTY };
}

/// How a charge is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// If it fits.
    Charge,
    /// In any case: it has already happened.
    Debit,
    /// Not at all; but a limit that counts what it denies counts this if it denies it.
    Attempt,
}

impl<'a> Ask<'a> {
    #[inline(always)]
    pub(super) fn step(&self, seen: Option<Snapshot>, manner: Manner) -> (Snapshot, Outcome) {
        let word = seen.and_then(|seen| seen.word_for(self.tag));
        if manner == Manner::Debit && !self.cost.is_refund() {
            let word = self.limit.debit_word(word, self.moment, self.cost.units());
            let (_, outcome) = self.limit.step_word(Some(word), self.moment, Cost::PEEK);
            return (Snapshot::after(self.name, self.limit, self.tag, &outcome, word), outcome);
        }
        let (word, outcome) = self.limit.step_word(word, self.moment, self.cost);
        (Snapshot::after(self.name, self.limit, self.tag, &outcome, word), outcome)
    }

    /// Whether a charge of an unused counter leaves anything to remember.
    fn leaves_a_trace(&self, after: Snapshot, outcome: &Outcome, manner: Manner) -> bool {
        if self.cost.is_peek() || self.cost.is_refund() {
            return false;
        }
        if outcome.verdict.is_allowed() {
            return manner != Manner::Attempt;
        }
        // A window that counts attempts remembers a denial too.
        self.limit.step_word(None, self.moment, Cost::PEEK).0 != after.word && after.word != 0
    }

    /// The same charge on the shared counter.
    pub(super) fn shared(&self) -> Ask<'a> {
        Ask { name: self.shared, ..*self }
    }
}

impl<L: Lines> Counters<L> {
    /// The usual charge, and nothing else: a key that has a slot, and nobody in the way. `None`: ask [`Self::charge`].
    ///
    /// It is `charge` without a receipt, and written out because the few bytes of a receipt, passed through memory,
    /// cost as much as finding the slot.
    #[inline(always)]
    pub(super) fn charge_known(&self, ask: &Ask<'_>) -> Option<Outcome> {
        let (at, seen) = self.keys.find(ask.name)?;
        let (word, outcome) = ask.limit.step_word(seen.word_for(ask.tag), ask.moment, ask.cost);
        let done = if word == seen.word || ask.cost.is_peek() {
            self.keys.still(at, seen)
        } else {
            self.keys.update(at, seen, Snapshot::after(ask.name, ask.limit, ask.tag, &outcome, word))
        };
        done.then_some(outcome)
    }

    pub(super) fn charge(&self, ask: &Ask<'_>, manner: Manner) -> (Outcome, Receipt) {
        loop {
            let Some((at, seen)) = self.keys.find(ask.name) else {
                match self.newcomer(ask, manner) {
                    Some(done) => return done,
                    None => continue,
                }
            };
            if let Some((outcome, receipt)) = charge_slot(&self.keys, at, seen, ask, manner) {
                return (outcome, Receipt { place: Some(Place::Own(at)), ..receipt });
            }
        }
    }

    /// `None`: look again.
    #[cold]
    fn newcomer(&self, ask: &Ask<'_>, manner: Manner) -> Option<(Outcome, Receipt)> {
        let (after, outcome) = ask.step(None, manner);
        if !ask.leaves_a_trace(after, &outcome, manner) {
            if self.keys.has_room(ask.name, ask.now) {
                return Some((outcome, Receipt::NOTHING));
            }
            return self.strangers(ask, manner);
        }
        match self.keys.insert(ask.name, ask.now, after, &self.counts) {
            Insertion::Filled(at) => {
                Some((outcome, Receipt { place: Some(Place::Own(at)), before: Snapshot::EMPTY, after }))
            }
            Insertion::Raced => None,
            Insertion::Full => self.strangers(ask, manner),
        }
    }

    /// Charges the shared counter.
    fn strangers(&self, ask: &Ask<'_>, manner: Manner) -> Option<(Outcome, Receipt)> {
        let ask = &ask.shared();
        let done = if let Some((at, seen)) = self.shared.find(ask.name) {
            let (outcome, receipt) = charge_slot(&self.shared, at, seen, ask, manner)?;
            (outcome, Receipt { place: Some(Place::Shared(at)), ..receipt })
        } else {
            let (after, outcome) = ask.step(None, manner);
            if !ask.leaves_a_trace(after, &outcome, manner) {
                return Some((outcome, Receipt::NOTHING));
            }
            match self.shared.insert(ask.name, ask.now, after, &self.shared_counts) {
                Insertion::Filled(at) => {
                    (outcome, Receipt { place: Some(Place::Shared(at)), before: Snapshot::EMPTY, after })
                }
                Insertion::Raced | Insertion::Full => return None,
            }
        };
        self.counts.note(ask.name, Event::Overflowed);
        Some(done)
    }

    /// Where a charge stands and what it would do, without doing it.
    #[inline]
    pub(super) fn draft(&self, ask: &Ask<'_>) -> (Outcome, Receipt) {
        if let Some((at, seen)) = self.keys.find(ask.name)
            && self.keys.still(at, seen)
        {
            let (after, outcome) = ask.step(Some(seen), Manner::Charge);
            return (outcome, Receipt { place: Some(Place::Own(at)), before: seen, after });
        }
        self.draft_newcomer(ask)
    }

    #[cold]
    fn draft_newcomer(&self, ask: &Ask<'_>) -> (Outcome, Receipt) {
        let (place, seen) = self.locate(ask);
        let (after, outcome) = match place {
            Some(Place::Shared(_)) => ask.shared().step(seen, Manner::Charge),
            _ => ask.step(seen, Manner::Charge),
        };
        (outcome, Receipt { place, before: seen.unwrap_or(Snapshot::EMPTY), after })
    }

    fn locate(&self, ask: &Ask<'_>) -> (Option<Place>, Option<Snapshot>) {
        loop {
            if let Some((at, seen)) = self.keys.find(ask.name) {
                if self.keys.still(at, seen) {
                    return (Some(Place::Own(at)), Some(seen));
                }
                continue;
            }
            if self.keys.has_room(ask.name, ask.now) {
                return (None, None);
            }
            match self.shared.find(ask.shared) {
                Some((at, seen)) if self.shared.still(at, seen) => {
                    return (Some(Place::Shared(at)), Some(seen));
                }
                Some(_) => {}
                None => return (None, None),
            }
        }
    }

    /// Puts a draft into effect if nothing has moved since.
    #[inline]
    pub(super) fn settle(&self, draft: &Receipt) -> bool {
        match draft.place {
            Some(Place::Own(at)) => self.keys.update(at, draft.before, draft.after),
            Some(Place::Shared(at)) => {
                let done = self.shared.update(at, draft.before, draft.after);
                if done {
                    self.counts.note(draft.after.meta >> 16, Event::Overflowed);
                }
                done
            }
            None => false,
        }
    }

    /// Takes a charge back: exactly, if nobody has touched the counter since; else as a refund.
    #[cold]
    pub(super) fn undo(&self, ask: &Ask<'_>, receipt: &Receipt) {
        let (table, at, ask) = match receipt.place {
            Some(Place::Own(at)) => (&self.keys, at, *ask),
            Some(Place::Shared(at)) => (&self.shared, at, ask.shared()),
            None => return,
        };
        if receipt.before.word == receipt.after.word || table.replace(at, receipt.after, receipt.before) {
            return;
        }
        let back = Ask { cost: ask.cost.negated(), ..ask };
        // Gone from its slot means evicted, and what was taken is forgotten with the rest.
        while let Some((at, seen)) = table.find(ask.name) {
            if charge_slot(table, at, seen, &back, Manner::Debit).is_some() {
                return;
            }
        }
    }
}

/// Steps one slot; `None` if it changed meanwhile. The receipt's place is for the caller to say.
#[inline]
fn charge_slot<L: Lines>(
    table: &Table<L>,
    at: usize,
    seen: Snapshot,
    ask: &Ask<'_>,
    manner: Manner,
) -> Option<(Outcome, Receipt)> {
    let (after, outcome) = ask.step(Some(seen), manner);
    // A denial that changes the word all the same is an attempt counted, or a clock set back and mended.
    let idle = manner == Manner::Attempt && outcome.verdict.is_allowed();
    if after.word == seen.word || ask.cost.is_peek() || idle {
        let receipt = Receipt { place: None, before: seen, after: seen };
        return table.still(at, seen).then_some((outcome, receipt));
    }
    table.update(at, seen, after).then_some((outcome, Receipt { place: None, before: seen, after }))
}
