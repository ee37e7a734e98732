//! Placement of counters: the mode of each limit (central, leased, local), its node share and its shards.
//!
//! | | |
//! |---|---|
//! | `mode: local` | on this node alone |
//! | `mode: leased` | on this node, out of what the store has deducted |
//! | `mode: central`, or nothing, `class: security` or `strict` | asked about every time |
//! | nothing, and all callers share the counter, and the store is far | leased |
//! | else | asked about, and leased while its key is hot |
//!
//! `fallback` sets a part of a limit aside for nodes that are cut off: the shared counters have that much less to give,
//! and each node has its share of the part. `split` cuts a limit into shards, each with a counter of its own.

use crate::rule::{Class, FailPolicy, OnError, Role, Rule, RuleLimit};
use crate::ruleset::Options;
use tollgate_core::Mode;

pub(crate) fn resolve_modes(rules: &mut [Rule], options: &Options) {
    for rule in rules {
        let exact = matches!(rule.class, Class::Security | Class::Strict);
        rule.mode = match rule.mode {
            Mode::Adaptive if exact => Mode::Central,
            Mode::Adaptive if rule.shared_by_callers && options.lease_shared => Mode::Leased,
            stated => stated,
        };
        let keeping = Placement::from_rule(rule);
        let sets = std::iter::once(&mut rule.limits).chain(rule.tiers.iter_mut().map(|(_, set)| set));
        for limit in sets.flat_map(|set| &mut set.limits) {
            let has_share = keeping.resolve(limit, options.nodes);
            if keeping.fallback.is_some() && !has_share {
                // Nobody knows among how many nodes to share it, or a share is less than a unit.
                rule.on_error = OnError::Always(FailPolicy::Closed);
            }
        }
    }
}

/// What a rule says of where its limits are kept.
struct Placement {
    fallback: Option<u64>,
    mode: Mode,
    split: Option<u16>,
}

impl Placement {
    const fn from_rule(rule: &Rule) -> Self {
        Self { fallback: rule.fallback, mode: rule.mode, split: rule.split }
    }

    /// Whether a share of the limit was set aside.
    fn resolve(&self, limit: &mut RuleLimit, nodes: Option<u32>) -> bool {
        limit.mode = limit_mode(limit, self.mode);
        let has_share = assign_node_share(limit, self.fallback, nodes, self.split);
        limit.shards = self.split.map(|split| limit.limit.shards(u32::from(split)));
        has_share
    }
}

/// Keeps a limit as the others of its rule are kept, whose mode is settled.
pub(crate) fn resolve_limit(limit: &mut RuleLimit, rule: &Rule, nodes: Option<u32>) {
    let _ = Placement::from_rule(rule).resolve(limit, nodes);
}

fn limit_mode(limit: &RuleLimit, mode: Mode) -> Mode {
    match mode {
        Mode::Leased | Mode::Adaptive if !limit.limit.is_leasable() => Mode::Central,
        // What only counts must not take ahead: its numbers are read as they stand.
        Mode::Leased | Mode::Adaptive if !matches!(limit.role, Role::Live) => Mode::Central,
        mode => mode,
    }
}

/// Works out a node's share of a limit; whether one was set aside. Where the counter is split, each shard falls back on its
/// own, with its part of the share.
fn assign_node_share(
    limit: &mut RuleLimit,
    fallback: Option<u64>,
    nodes: Option<u32>,
    split: Option<u16>,
) -> bool {
    let whole = &limit.limit;
    let split = u32::from(split.unwrap_or(1));
    let set_aside = fallback.zip(nodes).and_then(|(thousandths, nodes)| {
        let authority = whole.fraction(1_000 - thousandths, 1_000)?;
        Some((authority, whole.fraction(thousandths, 1_000 * u64::from(nodes.max(1)) * u64::from(split))?))
    });
    if let Some((authority, share)) = set_aside {
        (limit.limit, limit.node_share, limit.prepaid) = (authority, Some(Box::new(share)), true);
    } else if let Some(nodes) = nodes.filter(|nodes| *nodes > 1) {
        limit.node_share = Some(Box::new(whole.per_node_share(nodes.saturating_mul(split))));
    }
    limit.prepaid
}
