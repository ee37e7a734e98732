//! One measurement: rounds in which the contestants take turns on the same number of blocks. The median block of a round
//! counts, so that a block in which the thread was preempted does not; and the best round, because noise on a shared
//! machine only adds time.

use crate::contestants::Contestant;
use crate::traffic::{BLOCK, Law, Traffic};
use std::sync::Barrier;
use std::time::Instant;

/// Returns nanoseconds per decision and thread for each contestant.
pub(crate) fn measure(
    contestants: &[&dyn Contestant],
    keys: u64,
    law: Law,
    threads: usize,
    rounds: usize,
    blocks: usize,
) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; contestants.len()];
    for round in 0..rounds {
        for (contestant, best) in contestants.iter().zip(&mut best) {
            *best = best.min(once(*contestant, keys, law, threads, blocks, round as u64));
        }
    }
    best
}

fn once(contestant: &dyn Contestant, keys: u64, law: Law, threads: usize, blocks: usize, round: u64) -> f64 {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let barrier = Barrier::new(threads);
    let mut nanos: Vec<f64> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, core) = (&barrier, cores.get(thread).copied());
                scope.spawn(move || {
                    core.map(core_affinity::set_for_current);
                    let mut traffic = Traffic::new(keys, law, round * 1_000 + thread as u64);
                    barrier.wait();
                    (0..blocks).map(|_| timed(contestant, &mut traffic)).collect::<Vec<f64>>()
                })
            })
            .collect();
        running.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    nanos.sort_unstable_by(f64::total_cmp);
    nanos[nanos.len() / 2] / BLOCK as f64
}

#[allow(clippy::disallowed_methods, reason = "a stopwatch")]
fn timed(contestant: &dyn Contestant, traffic: &mut Traffic) -> f64 {
    traffic.next_block();
    let start = Instant::now();
    contestant.answer(traffic);
    start.elapsed().as_nanos() as f64
}

/// Runs a contestant once on every key.
pub(crate) fn fill(contestant: &dyn Contestant, keys: u64) {
    let mut traffic = Traffic::new(keys, Law::Uniform, 0);
    for first in (0..keys).step_by(BLOCK) {
        traffic.block_from(first);
        contestant.answer(&traffic);
    }
}
