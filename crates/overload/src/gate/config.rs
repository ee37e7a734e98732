//! Configuration of a gate.

use crate::limit::LimitConfig;
use crate::shares::TierShare;

/// How the limit of requests in flight is set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LimitKind {
    /// By measured latency.
    Adaptive(LimitConfig),
    /// A fixed number.
    Fixed(u32),
}

/// Configuration of a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct GateConfig {
    /// The limit of requests in flight.
    pub limit: LimitKind,
    /// Latency of a served request over the base latency that waiting may cause at most while requests are shed.
    pub target: f64,
    /// Shares of tiers; empty if tenants are not distinguished.
    pub tiers: Vec<TierShare>,
    /// Whether tenants share fairly.
    pub is_fair: bool,
    /// Whether nothing is shed and nothing waits; what would be is counted. See also [`Gate::set_shadow`].
    pub shadow: bool,
    /// Secret key of the cohorts and of the tenants' table.
    pub key: u64,
}

impl GateConfig {
    /// Returns the configuration of an adaptive limit with this floor, without fair shares.
    #[must_use]
    pub const fn adaptive(floor: u32) -> Self {
        let limit = LimitKind::Adaptive(LimitConfig { floor, ceiling: 100_000 });
        Self { limit, target: 2.0, tiers: Vec::new(), is_fair: false, shadow: false, key: 0 }
    }

    /// Returns how many cohorts share a place in the order of shedding: with fair shares each priority has its callers
    /// twice, within and beyond their shares.
    pub(crate) const fn cohorts_per_place(&self) -> u16 {
        if self.is_fair { 2 } else { 1 }
    }
}

impl LimitKind {
    /// Returns the bounds of the limit.
    pub(super) fn bounds(self) -> LimitConfig {
        match self {
            Self::Adaptive(limits) => limits,
            Self::Fixed(limit) => LimitConfig { floor: limit.max(1), ceiling: limit.max(1) },
        }
    }
}
