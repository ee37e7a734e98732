//! Requests of several tenants in virtual time, evenly spaced or at random.

use crate::rig::Rig;
use tollgate_core::TimeDelta;
use tollgate_core::conformance::SplitMix64;

/// Sends requests of each load at its rate per second, for so many seconds in steps of a millisecond; `load` returns a load's rate and its
/// requests' attributes. Returns how many of each were sent and served from the step `counted` on. With a seed, they come at random.
pub(crate) fn send<const N: usize, L>(
    rig: &Rig,
    loads: &[L],
    load: impl Fn(&L) -> (f64, [(&'static str, &'static str); N]),
    steps: u64,
    counted: u64,
    seed: Option<u64>,
) -> Vec<(u64, u64)> {
    let mut random = seed.map(SplitMix64::new);
    let mut counts = vec![(0, 0); loads.len()];
    let mut due: Vec<f64> = (0..loads.len()).map(|at| at as f64 / loads.len() as f64).collect();
    for step in 0..steps {
        for (at, (rate, attributes)) in loads.iter().map(&load).enumerate() {
            due[at] += match &mut random {
                None => rate / 1_000.0,
                Some(random) => f64::from(u8::from(random.fraction() < rate / 1_000.0)),
            };
            while due[at] >= 1.0 {
                due[at] -= 1.0;
                let is_served = rig.take(&attributes).is_allowed();
                if step >= counted {
                    counts[at].0 += 1;
                    counts[at].1 += u64::from(is_served);
                }
            }
        }
        rig.clock.advance(TimeDelta::from_millis(1));
    }
    counts
}
