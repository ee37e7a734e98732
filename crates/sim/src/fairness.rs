//! Fairness: nodes with the same demand are served alike.
//!
//! A bucket has units at every moment, so over a run each node gets at least a quarter of what the best-served one gets.
//! A window has none once they are taken, which at ten times the limit is soon: a node that is quiet in those moments, or
//! whose messages are late, has no claim to what the others took meanwhile, and with two or three windows in a run it may
//! miss most of them. What holds for windows: a node gets at least a quarter of what it asked for while its window still
//! had units, as far as the best-served node got that much in the same window.

use tollgate_core::{Algorithm, Limit};

/// What each node asked for and got.
#[derive(Default)]
pub(crate) struct Fairness {
    /// Entries of (instant, units), by node.
    asked: Vec<Vec<(u64, u64)>>,
    served: Vec<Vec<(u64, u64)>>,
}

impl Fairness {
    pub(crate) fn new(nodes: usize) -> Self {
        Self { asked: vec![Vec::new(); nodes], served: vec![Vec::new(); nodes] }
    }

    pub(crate) fn ask(&mut self, node: usize, now: u64, units: u64) {
        self.asked[node].push((now, units));
    }

    pub(crate) fn serve(&mut self, node: usize, now: u64, units: u64) {
        self.served[node].push((now, units));
    }

    /// Returns a violation if, without faults and with equal demand, a node got much less than its due. `least` is the
    /// number of units from which nodes can be compared.
    pub(crate) fn violation(&self, limit: &Limit, phase: u64, least: u64) -> Option<String> {
        let got: Vec<u64> = self.served.iter().map(|served| sum(served, |_| true)).collect();
        let due = match limit.algorithm() {
            Algorithm::FixedWindow => self.due_in_windows(limit.rate().period.length().as_micros(), phase),
            _ => vec![*got.iter().max()?; got.len()],
        };
        let unfair = |(got, due): (&u64, &u64)| *due >= least && got * 4 < *due;
        let any = got.iter().zip(&due).any(unfair);
        any.then(|| format!("units served to each node: {got:?}, of at least a quarter of {due:?}"))
    }

    /// Returns what each node asked for while its windows had units, in no window more than the best-served node got.
    fn due_in_windows(&self, period: u64, phase: u64) -> Vec<u64> {
        let window = |at: u64| (at + phase) / period;
        let mut due = vec![0; self.asked.len()];
        let mut windows: Vec<u64> = self.served.iter().flatten().map(|(at, _)| window(*at)).collect();
        windows.sort_unstable();
        windows.dedup();
        for number in windows {
            let is_in = |at: u64| window(at) == number;
            let last =
                self.served.iter().flatten().map(|(at, _)| *at).filter(|at| is_in(*at)).max().unwrap_or(0);
            let best = self.served.iter().map(|served| sum(served, is_in)).max().unwrap_or(0);
            for (due, asked) in due.iter_mut().zip(&self.asked) {
                *due += sum(asked, |at| is_in(at) && at <= last).min(best);
            }
        }
        due
    }
}

fn sum(entries: &[(u64, u64)], counts: impl Fn(u64) -> bool) -> u64 {
    entries.iter().filter(|(at, _)| counts(*at)).map(|(_, units)| units).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{LimitSpec, Rate, TimeDelta};

    fn run(algorithm: Algorithm, asks: &[(usize, u64, u64, u64)]) -> Option<String> {
        let limit =
            LimitSpec::new(algorithm, Rate::per(1_000, TimeDelta::from_secs(1))).build().expect("in range");
        let mut fairness = Fairness::new(2);
        for (node, at, asked, served) in asks {
            fairness.ask(*node, *at, *asked);
            fairness.serve(*node, *at, *served);
        }
        fairness.violation(&limit, 0, 100)
    }

    /// Without it a check that excuses windows excuses everything.
    #[test]
    fn a_node_that_asks_in_time_must_be_served() {
        for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow] {
            let starved = [(0, 10, 900, 900), (1, 5, 900, 100)];
            assert!(run(algorithm, &starved).is_some(), "{algorithm}");
            assert!(run(algorithm, &[(0, 10, 900, 700), (1, 5, 900, 300)]).is_none(), "{algorithm}");
        }
        let late = [(0, 10, 900, 900), (1, 500_000, 900, 0)];
        assert!(run(Algorithm::Gcra, &late).is_some());
        // It asked when the window had nothing left; a serve of nothing at that time is none.
        let mut fairness = Fairness::new(2);
        fairness.ask(0, 10, 900);
        fairness.serve(0, 10, 900);
        fairness.ask(1, 500_000, 900);
        let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per(1_000, TimeDelta::from_secs(1)));
        assert!(fairness.violation(&limit.build().expect("in range"), 0, 100).is_none());
    }
}
