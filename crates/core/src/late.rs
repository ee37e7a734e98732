//! Late charge: a charge that its caller stopped waiting for, and whose answer may still come.
//!
//! A request past its deadline is decided by its rules' fail policy, but the store may charge it afterwards. Exactly one
//! of two things must then happen: a request that was denied, or whose caller left, gets the charge back; one that was
//! admitted keeps it, and is not charged a second time. Only the caller knows which, and only the store knows whether it
//! charged. So a store returns [`StoreError::Late`](crate::StoreError::Late) with a [`LateCharge`]: a caller that takes
//! it over with [`LateCharge::keep`] gets the answer; one that drops it leaves the charge to the store, which undoes
//! it.
//!
//! Rejected: a store that always undoes late charges, with the caller charging again what it admitted. That costs two
//! more calls to a store that is slow already, and a bucket that refills quickly cannot be refunded exactly.

use crate::counter_key::CounterKey;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Identifies a counter: its scope and a hash of its values.
pub type CounterId = (u64, u64);

impl CounterKey<'_> {
    /// Returns what identifies the counter within a process.
    #[must_use]
    pub fn id(&self) -> CounterId {
        (self.scope.id(), self.stable_hash())
    }
}

/// What became of a late charge.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LateAnswer {
    /// The store admitted the request and charged these counters.
    Charged(Vec<CounterId>),
    /// The store charged nothing.
    NotCharged,
    /// It will never be known: the connection was lost.
    Unknown,
}

type Keep = Box<dyn FnOnce(LateAnswer) + Send>;
type Undo = Box<dyn FnOnce() + Send>;
type Map = Box<dyn FnOnce(LateAnswer) -> LateAnswer + Send>;

enum LateState {
    /// Neither side has acted.
    Waiting,
    /// The caller keeps the charge; the function receives the answer.
    Kept(Keep),
    /// The caller dropped it: a charge is undone.
    Abandoned,
    /// The answer has come; the function undoes the charge.
    Answered(LateAnswer, Undo),
    Done,
}

/// The caller's side. Clones are one handle; the charge is abandoned when the last of them is dropped.
#[derive(Clone)]
pub struct LateCharge(Arc<LateHandle>);

struct LateHandle {
    state: Arc<Mutex<LateState>>,
    /// What the answer to a kept charge passes first.
    maps: Mutex<Vec<Map>>,
}

/// The store's side.
pub struct LateResponder(Arc<Mutex<LateState>>);

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LateCharge {
    /// Creates both sides of a late charge.
    ///
    /// ```
    /// use std::sync::mpsc::channel;
    /// use tollgate_core::{LateAnswer, LateCharge};
    /// let (sender, answers) = channel();
    /// let (late, store) = LateCharge::new();
    /// late.keep(move |answer| sender.send(answer).unwrap());
    /// store.answer(LateAnswer::NotCharged, || unreachable!("the caller keeps it"));
    /// assert_eq!(answers.recv(), Ok(LateAnswer::NotCharged));
    ///
    /// let (undone, undoes) = channel();
    /// let (late, store) = LateCharge::new();
    /// drop(late);
    /// store.answer(LateAnswer::Charged(vec![(1, 2)]), move || undone.send(()).unwrap());
    /// assert!(undoes.recv().is_ok());
    /// ```
    #[must_use]
    pub fn new() -> (Self, LateResponder) {
        let state = Arc::new(Mutex::new(LateState::Waiting));
        let handle = LateHandle { state: Arc::clone(&state), maps: Mutex::default() };
        (Self(Arc::new(handle)), LateResponder(state))
    }

    /// Passes the answer through `map` if the charge is kept: for a store in front of another that records what is charged,
    /// or has other names for counters. It must not block.
    ///
    /// ```
    /// use std::sync::mpsc::channel;
    /// use tollgate_core::{LateAnswer, LateCharge};
    /// let (sender, answers) = channel();
    /// let (late, store) = LateCharge::new();
    /// late.map_answer(|_| LateAnswer::Charged(vec![(3, 4)]));
    /// late.keep(move |answer| sender.send(answer).unwrap());
    /// store.answer(LateAnswer::Charged(vec![(1, 2)]), || unreachable!("the caller keeps it"));
    /// assert_eq!(answers.recv(), Ok(LateAnswer::Charged(vec![(3, 4)])));
    /// ```
    pub fn map_answer(&self, map: impl FnOnce(LateAnswer) -> LateAnswer + Send + 'static) {
        lock(&self.0.maps).push(Box::new(map));
    }

    /// Keeps the charge: `then` receives the answer, at once if it is known. It must not block.
    pub fn keep(&self, then: impl FnOnce(LateAnswer) + Send + 'static) {
        let maps = std::mem::take(&mut *lock(&self.0.maps));
        let then = move |answer| then(maps.into_iter().fold(answer, |answer, map| map(answer)));
        let mut state = lock(&self.0.state);
        match std::mem::replace(&mut *state, LateState::Done) {
            LateState::Waiting => *state = LateState::Kept(Box::new(then)),
            LateState::Answered(answer, _) => {
                drop(state);
                then(answer);
            }
            // Kept already: the first caller gets the answer.
            other => *state = other,
        }
    }
}

impl Drop for LateHandle {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, LateState::Done) {
            LateState::Waiting => *state = LateState::Abandoned,
            LateState::Answered(LateAnswer::Charged(_), undo) => {
                drop(state);
                undo();
            }
            other => *state = other,
        }
    }
}

impl LateResponder {
    /// Reports the answer. `undo` runs if the store charged something that the caller does not keep.
    pub fn answer(self, answer: LateAnswer, undo: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.0);
        match std::mem::replace(&mut *state, LateState::Done) {
            LateState::Waiting => *state = LateState::Answered(answer, Box::new(undo)),
            LateState::Kept(then) => {
                drop(state);
                then(answer);
            }
            LateState::Abandoned if matches!(answer, LateAnswer::Charged(_)) => {
                drop(state);
                undo();
            }
            _ => {}
        }
    }
}

impl PartialEq for LateCharge {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for LateCharge {}

impl fmt::Debug for LateCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LateCharge")
    }
}

impl fmt::Debug for LateResponder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LateResponder")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    type Ends = (Receiver<LateAnswer>, Receiver<()>);

    /// Runs the acts of both sides in this order: `k`eep, `d`rop, `a`nswer with a charge, `n`ot charged.
    fn play(steps: &str) -> Ends {
        let ((sender, answers), (undone, undoes)) = (channel(), channel());
        let (late, store) = LateCharge::new();
        let (mut late, mut store) = (Some(late), Some(store));
        for act in steps.chars() {
            let (sender, undone) = (sender.clone(), undone.clone());
            match act {
                'k' => late.as_ref().expect("held").keep(move |answer| sender.send(answer).expect("a test")),
                'd' => drop(late.take()),
                'a' | 'n' => {
                    let answer =
                        if act == 'a' { LateAnswer::Charged(vec![(1, 2)]) } else { LateAnswer::NotCharged };
                    let undo = move || undone.send(()).expect("a test");
                    store.take().expect("not answered").answer(answer, undo);
                }
                _ => unreachable!(),
            }
        }
        (answers, undoes)
    }

    /// A charge must be undone or kept exactly once, whichever side acts first.
    #[test]
    fn a_charge_is_kept_or_undone_once_in_every_order() {
        for steps in ["kda", "kad", "akd", "kkad"] {
            let (answers, undoes) = play(steps);
            assert_eq!((answers.try_iter().count(), undoes.try_iter().count()), (1, 0), "{steps}");
        }
        for steps in ["da", "ad"] {
            let (answers, undoes) = play(steps);
            assert_eq!((answers.try_iter().count(), undoes.try_iter().count()), (0, 1), "{steps}");
        }
        for steps in ["dn", "nd"] {
            let (answers, undoes) = play(steps);
            assert_eq!((answers.try_iter().count(), undoes.try_iter().count()), (0, 0), "{steps}");
        }
    }
}
