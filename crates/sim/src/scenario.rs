//! Scenarios: the rule, the nodes, their traffic, the network and the faults that a seed determines.

use crate::world::Network;
use tollgate_core::TimeDelta;
use tollgate_core::conformance::SplitMix64;
use tollgate_store::LeaseConfig;

/// Parameters of a run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// The rule file.
    pub(crate) rules: String,
    /// Whether a share of the limit is set aside for partitioned nodes.
    pub(crate) fallback: bool,
    pub(crate) nodes: usize,
    pub(crate) leases: LeaseConfig,
    pub(crate) network: Network,
    /// Mean microseconds between two checks on each node; and the maximum cost of a check.
    pub(crate) pace: Vec<u64>,
    pub(crate) cost: u64,
    /// Duration of the traffic in microseconds.
    pub(crate) length: u64,
    /// Whether there are no faults.
    pub(crate) calm: bool,
    /// Whether the store's clock jumps.
    pub(crate) jumps: bool,
    /// Whether some requests are reservations that are settled or canceled later.
    pub(crate) reserves: bool,
}

const LIMITS: [(&str, u64); 12] = [
    ("{count: 5, period: second, algorithm: gcra}", 5),
    ("{count: 50, period: second, algorithm: gcra}", 50),
    ("{count: 50, period: second, algorithm: gcra, burst: 400}", 50),
    ("{count: 1000, period: second, algorithm: gcra}", 1_000),
    ("{count: 7000, period: second, algorithm: gcra, burst: 100}", 7_000),
    ("{count: 99991, period: minute, algorithm: gcra, burst: 900}", 1_666),
    ("{count: 300, period: second, algorithm: token_bucket, burst: 60}", 300),
    ("{count: 100, period: second, algorithm: fixed_window}", 100),
    ("{count: 2000, period: 3s, algorithm: fixed_window}", 666),
    ("{count: 900, period: 2s, algorithm: fixed_window, jitter: true}", 450),
    ("{count: 500, period: 2s, algorithm: strict_window}", 250),
    ("{count: 40, period: day, algorithm: gcra}", 1),
];

impl Scenario {
    pub(crate) fn from_seed(rng: &mut SplitMix64) -> Self {
        let nodes = usize::try_from(rng.between(1, 6)).unwrap_or(1);
        let (limit, rate) = *rng.pick(&LIMITS);
        let fallback = rng.chance(200);
        let mode = if rng.chance(700) { "mode: leased, " } else { "" };
        let policy = if fallback { "fallback: 10%" } else { "on_error: closed" };
        let calm = rng.chance(400);
        let network = Network {
            delay: (*rng.pick(&[50, 300, 1_000]), *rng.pick(&[400, 2_000, 6_000])),
            loss: if calm { 0 } else { *rng.pick(&[0, 0, 10, 200]) },
            doubles: if calm { 0 } else { *rng.pick(&[0, 10, 100]) },
            stragglers: 10,
            ..Network::default()
        };
        let length = rng.between(2, 9) * 1_000_000;
        // In total from a tenth of the limit to ten times the limit, in about two thousand checks.
        let demand = (rate * rng.between(1, 100) / 10).max(2);
        let cost = (demand * length / 1_000_000 / 2_000).max(1);
        let checks = (demand / cost).max(1);
        let even = rng.chance(500);
        let pace = (0..nodes as u64)
            .map(|node| {
                let share = if even { nodes as u64 } else { 1 << (node + 1).min(5) };
                (1_000_000 * share / checks).max(200)
            })
            .collect();
        let jumps = !calm && rng.chance(150);
        // A window counts a refund that arrives after its end in the next one; a jump changes what time has restored.
        let is_bucket = limit.contains("gcra") || limit.contains("token_bucket");
        let reserves = is_bucket && !jumps && !fallback && rng.chance(500);
        Self {
            rules: format!("domain: sim\ndescriptors:\n- {{key: user, limit: {limit}, {mode}{policy}}}\n"),
            fallback,
            nodes,
            leases: LeaseConfig {
                share: *rng.pick(&[0.25, 0.25, 0.05, 0.5, 1.0]),
                ttl: TimeDelta::from_millis(*rng.pick(&[10_000, 1_000, 300])),
                horizon: TimeDelta::from_millis(*rng.pick(&[2_000, 200, 50])),
                idle: TimeDelta::from_millis(*rng.pick(&[2_000, 300, 50])),
                hot: Some(*rng.pick(&[10, 100])),
                cool: TimeDelta::from_millis(*rng.pick(&[5_000, 300])),
                nodes: nodes as u32,
                ..LeaseConfig::default()
            },
            network,
            pace,
            cost: if rng.chance(300) { cost * 3 } else { cost },
            length,
            calm,
            jumps,
            reserves,
        }
    }
}
