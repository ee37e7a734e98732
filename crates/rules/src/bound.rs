//! The most that all cells together admit of a limit, by its mode and its algorithm.
//!
//! A bucket remembers more than its burst, so what was admitted twice before cells knew is missing later: with `shared`
//! the excess is bounded once for any time. A window forgets at its end, and each cell admits up to the limit before it
//! knows of the others: with `shared` the excess comes again in each window. Carrying a debt into the next window was
//! rejected: a window whose callers are denied from its first request is not what its rule says.

use crate::rule::{FailPolicy, OnError, Rule};
use tollgate_core::{Algorithm, Limit, LossPolicy, Mode, RegionMode, TimeDelta};

/// A bound on admissions over any span of time t: `burst` + `beyond` + `rates` × rate × t.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Units that one place admits at once: the burst of a bucket; the limit of a window; of a fixed window twice,
    /// across a boundary.
    pub burst: u64,
    /// Units beyond that, in the worst case: each other cell has its whole burst and goes on until it knows.
    pub beyond: u64,
    /// How often the rate is admitted in the worst case: once, or by each cell where windows are shared. 0 for permits,
    /// which are held and not admitted by time.
    pub rates: u64,
    /// Units beyond the limit where only the lag counts. Of a bucket: once, where it is in steady use. Of a window: in
    /// each window, where no cell gets more than the rate, evenly.
    pub typical: u64,
    /// Whether the limit has windows: what all cells admit is then bounded in each of them by `rates` × limit.
    pub has_windows: bool,
}

impl Bound {
    /// Returns the bound of a limit over this many cells, which know each other's consumption after `lag`.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, RegionMode, TimeDelta, nonzero};
    /// use tollgate_rules::Bound;
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(1_000))).build()?;
    /// let lag = TimeDelta::from_millis(200);
    /// let shared = Bound::new(&limit, RegionMode::Shared, 3, lag);
    /// assert_eq!((shared.burst, shared.beyond, shared.rates, shared.typical), (1_000, 2_400, 1, 400));
    /// assert_eq!(Bound::new(&limit, RegionMode::Leased, 3, lag).beyond, 0);
    /// let windows = LimitSpec::new(Algorithm::FixedWindow, Rate::per_second(nonzero!(1_000))).build()?;
    /// let shared = Bound::new(&windows, RegionMode::Shared, 3, lag);
    /// assert_eq!((shared.burst, shared.beyond, shared.rates, shared.typical), (2_000, 4_000, 3, 400));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn new(limit: &Limit, mode: RegionMode, cells: u32, lag: TimeDelta) -> Self {
        let capacity = limit.capacity();
        let has_windows = limit.algorithm().has_windows() || limit.algorithm() == Algorithm::SlidingLog;
        let burst = match limit.algorithm() {
            Algorithm::FixedWindow => capacity.saturating_mul(2),
            // Units of an interval come together.
            _ => {
                capacity.saturating_add(limit.refill_interval().map_or(0, |interval| during(limit, interval)))
            }
        };
        let rates = u64::from(limit.algorithm() != Algorithm::Concurrency);
        // Permits of shared rules are divided among the cells.
        if mode != RegionMode::Shared || rates == 0 {
            return Self { burst, beyond: 0, rates, typical: 0, has_windows };
        }
        let cells = u64::from(cells.max(1));
        let others = cells - 1;
        let lagging = during(limit, lag).saturating_mul(others);
        if has_windows {
            let typical = lagging.min(capacity.saturating_mul(others));
            return Self { burst, beyond: burst.saturating_mul(others), rates: cells, typical, has_windows };
        }
        let beyond = burst.saturating_mul(others).saturating_add(lagging);
        Self { burst, beyond, rates, typical: lagging, has_windows }
    }

    /// Returns the bound of a limit that each of so many nodes counts for itself.
    #[must_use]
    pub fn of_nodes(limit: &Limit, nodes: u32) -> Self {
        let alone = Self::new(limit, RegionMode::Split, 1, TimeDelta::ZERO);
        let nodes = u64::from(nodes.max(1));
        let beyond = alone.burst.saturating_mul(nodes - 1);
        Self { beyond, rates: alone.rates * nodes, typical: beyond, ..alone }
    }
}

impl Rule {
    /// Returns the bound of one of the rule's limits over this many cells, which know each other's consumption after `lag`. With
    /// `mode: local`, each cell counts as one node.
    #[must_use]
    pub fn bound(&self, limit: &Limit, cells: u32, lag: TimeDelta) -> Bound {
        match self.mode {
            Mode::Local => Bound::of_nodes(limit, cells),
            _ => Bound::new(limit, self.region_mode(), cells, lag),
        }
    }

    /// Returns how cells share the rule's counters: the region's mode, or `local` where each node counts for itself.
    #[must_use]
    pub fn shared_by(&self) -> &'static str {
        if self.mode == Mode::Local { "local" } else { self.region_mode().name() }
    }

    /// Returns the bound of one of the rule's limits over this many cells in words, with the conditions under which it
    /// holds.
    #[must_use]
    pub fn describe_bound(&self, limit: &Limit, cells: u32, lag: TimeDelta) -> String {
        let mode = self.region_mode();
        let Bound { burst, beyond, rates, typical, has_windows } = self.bound(limit, cells, lag);
        let (capacity, rate, lag_ms) = (limit.capacity(), limit.rate(), lag.as_micros() / 1_000);
        let most = match limit.algorithm() {
            Algorithm::Concurrency => format!("at most {capacity} held at once"),
            Algorithm::FixedWindow => {
                format!("at most {capacity} in each window, and {burst} + {rate} over any time")
            }
            _ => format!("at most {burst} + {rate} over any time"),
        };
        match mode {
            _ if self.mode == Mode::Local => format!(
                "{most} by each node, which counts for itself and loses its counters with its process: with n nodes n times \
                 as much"
            ),
            RegionMode::Shared if rates == 0 => {
                format!("{most}, divided among the cells{}", self.unless_down())
            }
            RegionMode::Shared if has_windows => format!(
                "{most} by each cell, so {} in a window and {} + {rates} × {rate} over any time in the worst case, when all \
                 cells get bursts within the lag; {typical} more than the limit in a window, within a lag of {lag_ms} ms, \
                 while no cell gets more than its rate, evenly{}",
                capacity.saturating_mul(rates),
                burst.saturating_add(beyond),
                self.unless_down(),
            ),
            RegionMode::Shared => {
                let (cells, unless_down) = (u64::from(cells.max(1)), self.unless_down());
                // Debts beyond the burst are in the memory of one node of a cell.
                let several = if typical > burst {
                    format!(
                        "; with Redis and several nodes in a region {} + {cells} × {rate}, because the burst is less than \
                         what others admit within the lag",
                        burst.saturating_mul(cells)
                    )
                } else {
                    String::new()
                };
                format!(
                    "{most}, and {beyond} more in the worst case ({typical} in steady use, within a lag of {lag_ms} \
                     ms){several}{unless_down}"
                )
            }
            RegionMode::Split => {
                format!("{most}, while no cell loses its counters{}", self.unless_down())
            }
            RegionMode::Owner | RegionMode::Leased => {
                // Permits that counted as held would not be released until their time is over, so they count as free.
                let is_used_up = self.class.loss_policy() == LossPolicy::AssumeExhausted
                    && limit.algorithm() != Algorithm::Concurrency;
                let moved = format!("while no owner loses its counters or moves ({capacity} more each time)");
                match (self.without_owner(), is_used_up) {
                    (None, true) => format!("{most}, always"),
                    (None, false) => format!("{most}, {moved}"),
                    (Some(policy), _) => {
                        let lost = if is_used_up { String::new() } else { format!(", and {moved}") };
                        format!(
                            "{most}, while the owner answers (without it `on_error: {policy}` admits more){lost}"
                        )
                    }
                }
            }
        }
    }

    fn policies(&self) -> Vec<FailPolicy> {
        match &self.on_error {
            OnError::Always(policy) => vec![*policy],
            OnError::ByTier { tiers, otherwise } => tiers.values().copied().chain([*otherwise]).collect(),
        }
    }

    /// Returns the condition under which a bound holds of a rule that admits everything without its store.
    fn unless_down(&self) -> &'static str {
        match self.policies().contains(&FailPolicy::Open) {
            true => ", and while the stores answer (without one `on_error: open` admits everything there)",
            false => "",
        }
    }

    /// Returns what the rule does while the owner of its counters does not answer, if that may admit requests.
    #[must_use]
    pub fn without_owner(&self) -> Option<&'static str> {
        let mut policies = self.policies();
        policies.retain(|policy| *policy != FailPolicy::Closed);
        if !self.region_mode().has_owner() || policies.is_empty() {
            return None;
        }
        Some(if policies.contains(&FailPolicy::Open) { "open" } else { "local" })
    }
}

/// Returns a limit in words. One of permits has no rate: its period is how long a permit is held at most.
///
/// ```
/// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
/// use tollgate_rules::limit_in_words;
/// let permits = LimitSpec::new(Algorithm::Concurrency, Rate::per_minute(nonzero!(7))).build()?;
/// assert_eq!(limit_in_words(&permits), "concurrency 7, each held for 1m at most");
/// # Ok::<(), tollgate_core::LimitError>(())
/// ```
#[must_use]
pub fn limit_in_words(limit: &Limit) -> String {
    match limit.algorithm() {
        Algorithm::Concurrency => {
            format!(
                "concurrency {}, each held for {} at most",
                limit.capacity(),
                limit.rate().period.length()
            )
        }
        _ => limit.to_string(),
    }
}

/// Returns the units that a limit's rate gives in this time, rounded up.
fn during(limit: &Limit, time: TimeDelta) -> u64 {
    let rate = limit.rate();
    let units = u128::from(rate.count) * u128::from(time.as_micros());
    let units = units.div_ceil(u128::from(rate.period.length().as_micros().max(1)));
    u64::try_from(units).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use crate::{Options, Ruleset, Source};
    use tollgate_core::TimeDelta;

    /// Operators choose a mode by this text: what it promises must be what callers can get at most.
    #[test]
    fn a_bound_is_stated_with_the_algorithm_and_the_conditions() {
        let text = "
domain: d
descriptors:
  - {key: a, name: a, limit: 60/2s, algorithm: fixed_window}
  - {key: b, name: b, limit: 60/2s, algorithm: strict_window}
  - {key: c, name: c, limit: 30/10s, algorithm: fixed_window, region: split}
  - {key: e, name: e, limit: 30/10s, on_error: closed, region: owner}
  - {key: f, name: f, limit: 30/10s, class: security, region: {mode: leased, owner: eu}}
  - {key: g, name: g, limit: 30/10s, region: owner}
  - {key: h, name: h, limit: 1000/second, burst: 10}
  - {key: i, name: i, concurrency: 5, region: owner, on_error: closed}
  - {key: j, name: j, limit: 5/second, mode: local}
  - {key: k, name: k, limit: 5/second, algorithm: fixed_window, mode: local}
  - {key: l, name: l, concurrency: 5, class: security, region: {mode: owner, owner: eu}}
  - {key: m, name: m, limit: 30/10s, on_error: open, region: split}
";
        let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).expect("rules");
        let domain = rules.domains().next().expect("a domain");
        let stated = |name: &str| {
            let rule = domain.domain_rules().find(|rule| rule.name == name).expect("a rule");
            let limit = &rule.all_limits().next().expect("a limit").limit;
            rule.describe_bound(limit, 3, TimeDelta::from_millis(200))
        };
        let cases = [
            ("a", "180 in a window and 360 + 3 × 60/2s over any time in the worst case"),
            ("a", "12 more than the limit in a window"),
            ("b", "180 in a window and 180 + 3 × 60/2s over any time in the worst case"),
            (
                "c",
                "at most 30 in each window, and 60 + 30/10s over any time, while no cell loses its counters",
            ),
            (
                "e",
                "at most 30 + 30/10s over any time, while no owner loses its counters or moves (30 more each time)",
            ),
            ("f", "at most 30 + 30/10s over any time, always"),
            (
                "m",
                "while no cell loses its counters, and while the stores answer (without one `on_error: open` admits",
            ),
            ("g", "(without it `on_error: local` admits more), and while no owner loses"),
            ("h", "10 + 1000/1s over any time, and 420 more in the worst case (400 in steady use"),
            ("h", "with Redis and several nodes in a region 30 + 3 × 1000/1s"),
            ("i", "at most 5 held at once"),
            ("l", "at most 5 held at once, while no owner loses its counters or moves (5 more each time)"),
            ("j", "at most 5 + 5/1s over any time by each node, which counts for itself"),
            ("k", "at most 5 in each window, and 10 + 5/1s over any time by each node"),
        ];
        for (rule, part) in cases {
            assert!(stated(rule).contains(part), "{}", stated(rule));
        }
        // Three nodes, each alone.
        for (name, burst, beyond) in [("j", 5, 10), ("k", 10, 20)] {
            let rule = domain.domain_rules().find(|rule| rule.name == name).expect("a rule");
            let limit = &rule.all_limits().next().expect("a limit").limit;
            let bound = rule.bound(limit, 3, TimeDelta::from_millis(200));
            assert_eq!((bound.burst, bound.beyond, bound.rates), (burst, beyond, 3), "{name}");
            assert_eq!(rule.shared_by(), "local");
        }
        let permits = domain.domain_rules().find(|rule| rule.name == "i").expect("a rule");
        let permits = &permits.all_limits().next().expect("a limit").limit;
        assert_eq!(super::limit_in_words(permits), "concurrency 5, each held for 1m at most");
    }
}
