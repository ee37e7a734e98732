//! Placement of counters: the mode of each limit (central, leased, local), its node share and its shards.
//!
//! | | |
//! |---|---|
//! | `mode: local` | on this node alone |
//! | `mode: leased` | on this node, out of what the store has deducted |
//! | `mode: central`, or no mode with `class: security` or `strict` | charged in the store every time |
//! | no mode, all callers share the counter, and the store is remote | leased |
//! | otherwise | charged in the store, and leased while its key is hot |
//!
//! `fallback` reserves a fraction of a limit for nodes that cannot reach the store: the shared counters have that much
//! less to give, and each node gets its share of the fraction. Where cells divide a limit (`region`), all of this is about
//! the cell's part. `durable` marks the scopes of limits whose consumption is also written to the database. `split` divides a limit into shards, each with its own
//! counter.

use crate::region::{CellPlace, RegionSetting, SharedRegion};
use crate::rule::{Class, FailPolicy, OnError, Role, Rule, RuleLimit};
use crate::ruleset::Options;
use tollgate_core::{Algorithm, CalendarUnit, Mode, Period};

pub(crate) fn resolve_modes(rules: &mut [Rule], options: &Options) {
    for rule in rules {
        let exact = matches!(rule.class, Class::Security | Class::Strict);
        rule.mode = match rule.mode {
            Mode::Adaptive if exact => Mode::Central,
            Mode::Adaptive if rule.shared_by_callers && options.lease_shared => Mode::Leased,
            stated => stated,
        };
        let cells = options.cells.as_ref().filter(|cells| cells.learned.is_none());
        if let Some(cells) = cells.filter(|_| rule.home().is_some()) {
            rule.homes = Some(cells.regions.iter().map(|(region, _)| region.clone()).collect());
        }
        let keeping = Placement::from_rule(rule);
        let sets = std::iter::once(&mut rule.limits).chain(rule.tiers.iter_mut().map(|(_, set)| set));
        for limit in sets.flat_map(|set| &mut set.limits) {
            let whole = limit.limit.capacity();
            let has_share = keeping.resolve(limit, NodeNumber::from_options(options), options.cells.as_ref());
            rule.has_empty_part |= whole > 0 && limit.limit.capacity() == 0;
            if keeping.fallback.is_some() && !has_share {
                // The number of nodes will never be known, or a share is less than one unit.
                rule.on_error = OnError::Always(FailPolicy::Closed);
            }
        }
    }
}

/// Number of nodes that share the store.
#[derive(Clone, Copy)]
enum NodeNumber {
    /// Given with the rules.
    Fixed(u32),
    /// Counted while the server runs.
    Counted,
    Unknown,
}

impl NodeNumber {
    fn from_options(options: &Options) -> Self {
        match options.nodes {
            Some(nodes) => Self::Fixed(nodes),
            None if options.lease_shared => Self::Counted,
            None => Self::Unknown,
        }
    }
}

/// The placement options of a rule.
struct Placement {
    fallback: Option<u64>,
    mode: Mode,
    split: Option<u16>,
    is_gradual: bool,
    region: Option<SharedRegion>,
    durable: Option<bool>,
    class: Class,
}

impl Placement {
    fn from_rule(rule: &Rule) -> Self {
        Self {
            fallback: rule.fallback,
            mode: rule.mode,
            split: rule.split,
            is_gradual: rule.enforce.is_some(),
            region: rule.region.clone(),
            durable: rule.durable,
            class: rule.class,
        }
    }

    /// Resolves the placement of a limit. Returns whether a share was reserved for this node.
    fn resolve(&self, limit: &mut RuleLimit, nodes: NodeNumber, cells: Option<&CellPlace>) -> bool {
        self.divide_among_cells(limit, cells);
        limit.mode = limit_mode(limit, self.mode);
        // For some callers the limit only counts, and such limits take no units ahead.
        if self.is_gradual && matches!(limit.mode, Mode::Leased | Mode::Adaptive) {
            limit.mode = Mode::Central;
        }
        let has_share = assign_node_share(limit, self.fallback, nodes, self.split);
        limit.shards = self.split.map(|split| limit.limit.shards(u32::from(split)));
        let is_durable = self.is_durable(limit);
        if limit.scope.is_durable() != is_durable {
            limit.scope = limit.scope.clone().with_durable(is_durable);
        }
        has_share
    }

    /// Returns whether consumption of a limit is also written to the database, if there is one: as the rule says, else for
    /// calendar months and for what costs money.
    fn is_durable(&self, limit: &RuleLimit) -> bool {
        let is_month = matches!(
            &limit.limit.rate().period,
            Period::Calendar(calendar) if calendar.unit() == CalendarUnit::Month
        );
        limit.limit.algorithm() != Algorithm::Concurrency
            && self.mode != Mode::Local
            && self.durable.unwrap_or(is_month || self.class == Class::Cost)
    }

    /// Replaces the limit by this cell's part of it, if cells divide it. A soft limit stays at the same fraction.
    fn divide_among_cells(&self, limit: &mut RuleLimit, cells: Option<&CellPlace>) {
        let setting = self.region.as_deref();
        let share = cells.and_then(|cells| match setting {
            Some(setting) => setting.share(&limit.limit, cells),
            None => RegionSetting::default().share(&limit.limit, cells),
        });
        let Some(share) = share.filter(|_| self.mode != Mode::Local) else { return };
        limit.soft = limit.soft.map(|soft| soft.scaled(&limit.limit, &share));
        limit.limit = share;
    }
}

/// Places a limit like the others of its rule, whose mode is already resolved.
pub(crate) fn resolve_limit(
    limit: &mut RuleLimit,
    rule: &Rule,
    nodes: Option<u32>,
    cells: Option<&CellPlace>,
) {
    let is_counted = rule.limits.limits.iter().any(|other| other.reserve.is_some());
    let unknown = if is_counted { NodeNumber::Counted } else { NodeNumber::Unknown };
    let _ = Placement::from_rule(rule).resolve(limit, nodes.map_or(unknown, NodeNumber::Fixed), cells);
}

fn limit_mode(limit: &RuleLimit, mode: Mode) -> Mode {
    match mode {
        Mode::Leased | Mode::Adaptive if !limit.limit.is_leasable() => Mode::Central,
        // A limit that only counts must not take units ahead: its numbers are read directly.
        Mode::Leased | Mode::Adaptive if !matches!(limit.role, Role::Live) => Mode::Central,
        mode => mode,
    }
}

/// Computes a node's share of a limit. Returns whether the share was reserved. If the counter is split, each shard
/// falls back separately, with its part of the share.
fn assign_node_share(
    limit: &mut RuleLimit,
    fallback: Option<u64>,
    nodes: NodeNumber,
    split: Option<u16>,
) -> bool {
    let whole = &limit.limit;
    let split = u32::from(split.unwrap_or(1));
    let reserve = |thousandths: u64, nodes: u32| {
        let authority = whole.fraction(1_000 - thousandths, 1_000)?;
        let share = whole.fraction(thousandths, 1_000 * u64::from(nodes.max(1)) * u64::from(split))?;
        // A node's clock differs from the store's: two of its windows would lie in one of the store's.
        Some((authority, share.for_any_span()))
    };
    match (nodes, fallback) {
        (NodeNumber::Fixed(nodes), fallback) => {
            if let Some((authority, share)) = fallback.and_then(|thousandths| reserve(thousandths, nodes)) {
                (limit.limit, limit.node_share, limit.prepaid) = (authority, Some(Box::new(share)), true);
            } else if nodes > 1 {
                limit.node_share = Some(Box::new(whole.per_node_share(nodes.saturating_mul(split))));
            }
        }
        (NodeNumber::Counted, Some(thousandths)) => {
            if let Some((authority, share)) = reserve(thousandths, 1) {
                (limit.limit, limit.reserve, limit.prepaid) = (authority, Some(Box::new(share)), true);
            }
        }
        (NodeNumber::Counted | NodeNumber::Unknown, _) => {}
    }
    limit.prepaid
}
