//! Loom model of the table: every interleaving of a few steps, up to a bound of preemptions.
//!
//! A slot is modeled as one atomic number that stands for its 128 bits, and a reading as two accesses, so that it can
//! be torn as the real one can. Accesses are read-modify-writes: the model has one order of all of them, which is what
//! the real memory's sequential consistency gives, and what loom cannot model with plain loads.
//!
//! `cargo test -p tollgate-store --lib model`

use super::cache_lines::{LineStorage, SLOTS};
use super::multi_charge::{PreparedCharge, charge_all, charge_known};
use super::packed_counters::{ChargeKind, NO_PROTECTION, PROTECTED_PRESSURE, PackedCharge, PackedCounters};
use super::slot::SlotValue;
use super::stats::Counts;
use super::table::Table;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use tollgate_core::{
    Admission, Algorithm, Cost, Enforcement, Limit, LimitSpec, Outcome, Rate, TimeDelta, Timestamp, Verdict,
};

const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);
const HOUR: TimeDelta = TimeDelta::from_secs(3_600);
/// A little later: what was spent an hour before [`NOW`] is still stored at `NOW`, and has expired here.
const SOON: Timestamp = Timestamp::from_micros(NOW.as_micros() + 2);

/// What one thread does.
type Operation<T> = Box<dyn FnOnce(&PackedCounters<Model>) -> T>;

struct Model {
    slots: [AtomicUsize; SLOTS],
    /// The slot values that the numbers stand for.
    known: Mutex<Vec<SlotValue>>,
}

impl Model {
    fn new(filled: [SlotValue; SLOTS]) -> Self {
        let known = Mutex::new(vec![SlotValue::EMPTY]);
        let number = |snapshot| Self::number(&known, snapshot);
        let slots = filled.map(|snapshot| AtomicUsize::new(number(snapshot)));
        Self { slots, known }
    }

    fn number(known: &Mutex<Vec<SlotValue>>, snapshot: SlotValue) -> usize {
        let mut known = known.lock().expect("one thread at a time");
        known.iter().position(|other| *other == snapshot).unwrap_or_else(|| {
            known.push(snapshot);
            known.len() - 1
        })
    }

    fn load(&self, at: usize) -> SlotValue {
        let number = self.slots[at].fetch_add(0, SeqCst);
        self.known.lock().expect("one thread at a time")[number]
    }
}

impl LineStorage for Model {
    fn metas(&self, line: usize) -> [u64; SLOTS] {
        [0, 1, 2, 3].map(|slot| self.meta(line * SLOTS + slot))
    }

    fn read(&self, at: usize) -> SlotValue {
        let word = self.load(at).word;
        SlotValue { meta: self.load(at).meta, word }
    }

    fn meta(&self, at: usize) -> u64 {
        self.load(at).meta
    }

    fn replace(&self, at: usize, seen: SlotValue, new: SlotValue) -> bool {
        let (seen, new) = (Self::number(&self.known, seen), Self::number(&self.known, new));
        self.slots[at].compare_exchange(seen, new, SeqCst, SeqCst).is_ok()
    }

    fn replace_word(&self, at: usize, seen: SlotValue, word: u64) -> bool {
        loop {
            let now = self.load(at);
            if now.word != seen.word {
                return false;
            }
            if self.replace(at, now, SlotValue { word, ..now }) {
                return true;
            }
        }
    }

    fn prefetch(&self, _: usize) {}

    fn relax(&self) {
        loom::thread::yield_now();
    }
}

fn limit(count: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(3_600))).build().expect("a limit")
}

fn ask(name: u64, limit: &Limit, now: Timestamp) -> PackedCharge<'_> {
    let tag = limit.packed().expect("a bucket").tag;
    PackedCharge { name, shared: name + 100, limit, tag, cost: Cost::ONE, now, moment: now }
}

/// Returns the slot of a key that was charged at `now` as often as its limit of `count` allows.
fn spent(name: u64, count: u64, now: Timestamp) -> SlotValue {
    let limit = limit(count);
    ask(name, &Limit::clone(&limit), now).with(Cost::new(count)).step(None, ChargeKind::Charge).0
}

impl PackedCharge<'_> {
    fn with(self, cost: Cost) -> Self {
        PackedCharge { cost, ..self }
    }
}

fn counters(filled: [SlotValue; SLOTS]) -> PackedCounters<Model> {
    PackedCounters {
        keys: Table::new(Model::new(filled), 1, PROTECTED_PRESSURE),
        shared: Table::new(Model::new([SlotValue::EMPTY; SLOTS]), 1, NO_PROTECTION),
        counts: Counts::default(),
        shared_counts: Counts::default(),
    }
}

fn remaining(counters: &PackedCounters<Model>, ask: PackedCharge<'_>) -> u64 {
    counters.charge(&ask.with(Cost::PEEK), ChargeKind::Charge).0.remaining
}

fn slots_of(counters: &PackedCounters<Model>, name: u64) -> usize {
    (0..SLOTS).filter(|at| counters.keys.lines().load(*at).belongs_to(name)).count()
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Runs all `operations` concurrently on the same counters.
fn race<T: 'static>(
    filled: [SlotValue; SLOTS],
    operations: Vec<Operation<T>>,
) -> (Arc<PackedCounters<Model>>, Vec<T>) {
    let counters = Arc::new(counters(filled));
    let threads: Vec<_> = operations
        .into_iter()
        .map(|act| {
            let counters = counters.clone();
            loom::thread::spawn(move || act(&counters))
        })
        .collect();
    let results = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    (counters, results)
}

fn charge_at(name: u64, count: u64, now: Timestamp) -> Operation<bool> {
    Box::new(move |counters| {
        let limit = limit(count);
        counters.charge(&ask(name, &limit, now), ChargeKind::Charge).0.verdict.is_allowed()
    })
}

const E: SlotValue = SlotValue::EMPTY;

/// The first slot is free to one thread and not to the other, so they choose different ones for the same name.
#[test]
fn model_two_new_keys_of_one_name_get_one_slot() {
    explore(3, || {
        let (counters, allowed) =
            race([spent(9, 5, NOW - HOUR), E, E, E], vec![charge_at(1, 3, NOW), charge_at(1, 3, SOON)]);
        assert_eq!(allowed, [true, true]);
        assert_eq!(slots_of(&counters, 1), 1);
        assert_eq!(remaining(&counters, ask(1, &limit(3), SOON)), 1);
    });
}

#[test]
fn model_three_new_keys_of_one_name_get_one_slot() {
    explore(2, || {
        let operations = vec![charge_at(1, 4, NOW), charge_at(1, 4, SOON), charge_at(1, 4, NOW)];
        let (counters, allowed) = race([spent(9, 5, NOW - HOUR), E, E, E], operations);
        assert_eq!(allowed, [true, true, true]);
        assert_eq!(slots_of(&counters, 1), 1);
        assert_eq!(remaining(&counters, ask(1, &limit(4), SOON)), 1);
    });
}

/// One slot has expired and two names compete for it: its own, and a new key. Neither charge is lost.
#[test]
fn model_a_new_key_and_the_return_of_an_expired_key() {
    explore(3, || {
        let later = NOW + HOUR + TimeDelta::from_secs(1);
        let full = [spent(7, 5, later), spent(8, 5, later), spent(9, 5, later), spent(1, 5, NOW)];
        // Limits of one: the name that gets the slot is at its limit, and protected; the other one shares.
        let (counters, allowed) = race(full, vec![charge_at(1, 1, later), charge_at(2, 1, later)]);
        assert_eq!(allowed, [true, true]);
        assert_eq!(slots_of(&counters, 1) + slots_of(&counters, 2), 1);
        assert_eq!(remaining(&counters, ask(1, &limit(1), later)), 0);
        assert_eq!(remaining(&counters, ask(2, &limit(1), later)), 0);
    });
}

#[test]
fn model_two_charges_of_one_key_never_pass_its_limit() {
    explore(4, || {
        let half = limit(2);
        let one_left = ask(1, &half, NOW).step(None, ChargeKind::Charge).0;
        let (_, allowed) = race([E, one_left, E, E], vec![charge_at(1, 2, NOW), charge_at(1, 2, NOW)]);
        assert_eq!(allowed.iter().filter(|allowed| **allowed).count(), 1);
    });
}

/// A new key evicts a key that is being charged: the new key's charge counts, and no key is there twice.
#[test]
fn model_an_eviction_and_a_charge() {
    explore(3, || {
        let many = limit(100);
        let little = ask(1, &many, NOW).step(None, ChargeKind::Charge).0;
        let full = [spent(7, 5, NOW), spent(8, 5, NOW), spent(9, 5, NOW), little];
        let (counters, allowed) = race(full, vec![charge_at(1, 100, NOW), charge_at(2, 100, NOW)]);
        assert_eq!(allowed, [true, true]);
        assert!(slots_of(&counters, 1) <= 1 && slots_of(&counters, 2) <= 1);
        let left = remaining(&counters, ask(1, &many, NOW));
        assert!((98..=100).contains(&left), "{left}");
        for (protected, name) in [(0, 7), (1, 8), (2, 9)] {
            assert_eq!(counters.keys.lines().load(protected), spent(name, 5, NOW));
        }
    });
}

fn request(names: [u64; 2], count: u64) -> Operation<bool> {
    Box::new(move |counters| {
        let limit = limit(count);
        let unknown = Outcome { verdict: Verdict::ALLOWED, ..Outcome::UNKNOWN };
        let mut items = names
            .map(|name| PreparedCharge::new(Some(ask(name, &limit, NOW)), Enforcement::Required, unknown));
        let usual = charge_known(counters, &names, |i| Some(ask(names[i], &limit, NOW)), |_| ());
        usual.is_some() || charge_all(counters, &mut items) == Admission::Admitted
    })
}

/// Two requests compete for the last unit of the same two keys, in opposite order: one gets both, or neither gets any.
#[test]
fn model_requests_take_all_or_none() {
    explore(2, || {
        let two = limit(2);
        let used = |name| ask(name, &two, NOW).step(None, ChargeKind::Charge).0;
        let (counters, admitted) =
            race([used(1), used(2), E, E], vec![request([1, 2], 2), request([2, 1], 2)]);
        let passed = admitted.iter().filter(|admitted| **admitted).count() as u64;
        assert!(passed <= 1);
        for name in [1, 2] {
            assert_eq!(remaining(&counters, ask(name, &two, NOW)), 1 - passed, "key {name}");
        }
    });
}

/// The same with keys that are not in the table yet.
#[test]
fn model_requests_of_new_keys_take_all_or_none() {
    explore(2, || {
        let (counters, admitted) = race([E, E, E, E], vec![request([1, 2], 1), request([2, 1], 1)]);
        let passed = admitted.iter().filter(|admitted| **admitted).count() as u64;
        assert!(passed <= 1);
        for name in [1, 2] {
            assert!(slots_of(&counters, name) <= 1);
            assert_eq!(remaining(&counters, ask(name, &limit(1), NOW)), 1 - passed, "key {name}");
        }
    });
}
