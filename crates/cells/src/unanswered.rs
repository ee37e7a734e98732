//! Debits without an answer: what becomes of each once its late answer has come.
//!
//! The store answers for several debits at once, and names those that it has made. So the others are known only when all
//! answers have come; if one of them is lost, or never comes, they stay unknown.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{CounterId, LateAnswer, LateCharge};

/// What became of a debit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Made,
    NotMade,
    /// It will never be known.
    Unknown,
}

/// Debits of which not all answers have come, and what is done with each in the end.
struct Unanswered<D, F: Fn(D, Ending)> {
    debits: Mutex<Vec<(CounterId, D)>>,
    answers_due: AtomicUsize,
    is_lost: AtomicBool,
    then: F,
}

impl<D, F: Fn(D, Ending)> Unanswered<D, F> {
    fn on_answer(&self, answer: &LateAnswer) {
        self.answers_due.fetch_sub(1, Ordering::AcqRel);
        match answer {
            LateAnswer::NotCharged => {}
            LateAnswer::Charged(ids) => {
                let mut debits = self.debits.lock().unwrap_or_else(PoisonError::into_inner);
                let made: Vec<(CounterId, D)> = debits.extract_if(.., |(id, _)| ids.contains(id)).collect();
                drop(debits);
                made.into_iter().for_each(|(_, debit)| (self.then)(debit, Ending::Made));
            }
            _ => self.is_lost.store(true, Ordering::Release),
        }
    }
}

impl<D, F: Fn(D, Ending)> Drop for Unanswered<D, F> {
    fn drop(&mut self) {
        let is_known = *self.answers_due.get_mut() == 0 && !*self.is_lost.get_mut();
        let ending = if is_known { Ending::NotMade } else { Ending::Unknown };
        let rest = std::mem::take(self.debits.get_mut().unwrap_or_else(PoisonError::into_inner));
        rest.into_iter().for_each(|(_, debit)| (self.then)(debit, ending));
    }
}

fn unanswered<D, F: Fn(D, Ending)>(
    late: usize,
    debits: Vec<(CounterId, D)>,
    then: F,
) -> Arc<Unanswered<D, F>> {
    let (answers_due, is_lost) = (AtomicUsize::new(late), AtomicBool::new(false));
    Arc::new(Unanswered { debits: Mutex::new(debits), answers_due, is_lost, then })
}

/// Keeps late debits. `then` is called once for each, with what became of it; it must not block.
pub(crate) fn keep<D: Send + 'static, F: Fn(D, Ending) + Send + Sync + 'static>(
    late: &[LateCharge],
    debits: Vec<(CounterId, D)>,
    then: F,
) {
    let all = unanswered(late.len(), debits, then);
    for late in late {
        let all = Arc::clone(&all);
        late.keep(move |answer| all.on_answer(&answer));
    }
}

/// The same, and leaves the answers to a caller that keeps the debits.
pub(crate) fn watch<D: Send + 'static, F: Fn(D, Ending) + Send + Sync + 'static>(
    late: &[LateCharge],
    debits: Vec<(CounterId, D)>,
    then: F,
) {
    let all = unanswered(late.len(), debits, then);
    for late in late {
        let all = Arc::clone(&all);
        late.map_answer(move |answer| {
            all.on_answer(&answer);
            answer
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LateAnswer::{Charged, NotCharged, Unknown};

    /// A debit that is made again although it was made counts twice; one that is not although it was refused, not at all.
    #[test]
    fn each_debit_ends_once_as_all_answers_say() {
        let cases: [(Vec<LateAnswer>, [Ending; 3]); 6] = [
            (vec![Charged(vec![(0, 0)]), NotCharged], [Ending::Made, Ending::NotMade, Ending::NotMade]),
            (vec![NotCharged, Charged(vec![(1, 1), (2, 2)])], [Ending::NotMade, Ending::Made, Ending::Made]),
            (vec![Charged(vec![(0, 0)]), Unknown], [Ending::Made, Ending::Unknown, Ending::Unknown]),
            (vec![Unknown, NotCharged], [Ending::Unknown; 3]),
            (vec![NotCharged, NotCharged], [Ending::NotMade; 3]),
            // The other answer never comes.
            (vec![NotCharged], [Ending::Unknown; 3]),
        ];
        for (answers, expected) in cases {
            for is_kept in [true, false] {
                let ended = Arc::new(Mutex::new(Vec::new()));
                let (late, stores): (Vec<_>, Vec<_>) = (0..2).map(|_| LateCharge::new()).unzip();
                let (seen, debits) = (Arc::clone(&ended), (0..3).map(|at| ((at, at), at)).collect());
                let then = move |debit, ending| seen.lock().expect("endings").push((debit, ending));
                if is_kept {
                    keep(&late, debits, then);
                } else {
                    watch(&late, debits, then);
                    late.iter().for_each(|late| late.keep(|_| {}));
                }
                drop(late);
                for (store, answer) in stores.into_iter().zip(answers.clone()) {
                    store.answer(answer, || unreachable!("it is kept"));
                }
                let mut ended = std::mem::take(&mut *ended.lock().expect("endings"));
                ended.sort_by_key(|(debit, _)| *debit);
                let expected: Vec<(u64, Ending)> = (0..3).zip(expected).collect();
                assert_eq!(ended, expected, "{answers:?}, {is_kept}");
            }
        }
    }
}
