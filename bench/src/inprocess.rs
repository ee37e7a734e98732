//! In-process decisions: the store compared with its peers and the floor.

use crate::contest::{fill, measure};
use crate::contestants::{
    Bare, ClockAlone, Contestant, GovernorByNumber, GovernorByString, Ours, Throttlecrab, Way,
};
use crate::limiter::ThroughRules;
use crate::report::{at_least, at_most, heading, note, rows};
use crate::traffic::Law;
use tollgate_core::SystemClock;
use tollgate_store::HugePages;

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Short,
}

pub(crate) fn run(length: Length) {
    let (rounds, blocks, sizes): (usize, usize, &[u64]) = match length {
        Length::Full => (7, 400, &[1_000, 1_000_000, 10_000_000]),
        Length::Short => (5, 100, &[1_000, 1_000_000]),
    };
    for keys in sizes {
        size(*keys, rounds, blocks);
    }
}

/// What a check may cost beside the store alone: with few keys the store is in the processor's cache, and what a
/// check adds weighs more.
const fn limiter_bar(keys: u64) -> f64 {
    if keys > 1_000 { 2.0 } else { 2.5 }
}

/// Measures a check beside the store alone, in a short time.
pub(crate) fn limiter() {
    for keys in [1_000, 1_000_000] {
        let ours = Ours::new(keys, Way::OneLimit, HugePages::WhenDense);
        let limiter = ThroughRules::new(keys);
        let pair: [&dyn Contestant; 2] = [&ours, &limiter];
        pair.iter().for_each(|contestant| fill(*contestant, keys));
        for threads in [1, 2] {
            heading(&format!("{keys} keys, {threads} thread(s)"));
            let nanos = measure(&pair, keys, Law::Uniform, threads, 9, 200);
            rows(&[ours.name(), limiter.name()], &nanos);
            at_most("Limiter::check ÷ store", nanos[1] / nanos[0], limiter_bar(keys));
        }
    }
}

fn size(keys: u64, rounds: usize, blocks: usize) {
    let ours = Ours::new(keys, Way::OneLimit, HugePages::WhenDense);
    let timed = Ours::new(keys, Way::TimeGiven, HugePages::WhenDense);
    let batch = Ours::new(keys, Way::Batch, HugePages::WhenDense);
    let bare = Bare::new(keys, 1);
    let bare_batch = Bare::new(keys, 32);
    let by_string = GovernorByString::new();
    let by_number = GovernorByNumber::new();
    let crab = Throttlecrab::new(keys);
    let clock = ClockAlone(SystemClock::new());
    let limiter = ThroughRules::new(keys);
    let all: [&dyn Contestant; 10] =
        [&ours, &bare, &by_string, &by_number, &crab, &batch, &bare_batch, &clock, &timed, &limiter];
    for contestant in &all {
        fill(*contestant, keys);
    }
    let names: Vec<String> = all.iter().map(|contestant| contestant.name()).collect();
    for law in [Law::Uniform, Law::Zipf] {
        for threads in [1, 2] {
            heading(&format!("{keys} keys, {law:?}, {threads} thread(s)"));
            let nanos = measure(&all, keys, law, threads, rounds, blocks);
            rows(&names, &nanos);
            match keys {
                1_000 => at_least("speedup over governor by String", nanos[2] / nanos[0], 1.5),
                10_000_000 => at_least("speedup over governor by String", nanos[2] / nanos[0], 4.0),
                _ => {}
            }
            at_most("store ÷ bare flat table", nanos[0] / nanos[1], 1.5);
            at_most("Limiter::check ÷ store", nanos[9] / nanos[0], limiter_bar(keys));
            at_most("store batches ÷ bare table batches", nanos[5] / nanos[6], 1.5);
        }
    }
    let figures = ours.store.stats();
    note(&format!(
        "\n{keys} keys in a cap of {} bytes: {:.1} bytes per key, {} slots, {} evicted, {} overflowed",
        figures.bytes_cap,
        figures.bytes_cap as f64 / keys as f64,
        figures.slots,
        figures.evicted,
        figures.overflowed
    ));
    if keys <= 1_000_000 {
        let four = Ours::new(keys, Way::FourLimits, HugePages::WhenDense);
        fill(&four, keys);
        heading(&format!("{keys} keys, four limits in one check"));
        let pair: [&dyn Contestant; 2] = [&ours, &four];
        let nanos = measure(&pair, keys, Law::Uniform, 1, rounds, blocks);
        rows(&[ours.name(), four.name()], &nanos);
        at_most("four limits ÷ one", nanos[1] / nanos[0], 3.5);
    }
}
