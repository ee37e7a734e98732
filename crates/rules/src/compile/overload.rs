//! Compiles the `overload` section: the fleet's capacity becomes a rule.

use super::Compiler;
use crate::decode::overload::{Capacity, FleetDraft, OverloadDraft};
use crate::metadata::Metadata;
use crate::overload::{Adapt, FLEET_RULE, Fleet, Overload, WORKERS_RULE};
use crate::reader::Spanned;
use crate::rule::{Action, Class, CostFrom, FailPolicy, LimitSet, OnError, Role, Rule, RuleLimit};
use crate::ruleset::PermitRelease;
use crate::scope::{Kind, ScopePath};
use crate::tree::{Element, ValueTest};
use crate::yaml::Position;
use tollgate_core::{Algorithm, LimitSpec, Mode, Priority, Rate};

impl Compiler<'_, '_> {
    pub(super) fn overload(&mut self, draft: Spanned<OverloadDraft>, scope: &ScopePath) -> Overload {
        self.reject_under_envoy(draft.at, "`overload`");
        let OverloadDraft { mut section, fleet } = draft.value;
        if let Some(workers) = &mut section.workers {
            if self.options.permits == PermitRelease::Expire {
                self.reader.warning(
                    draft.at,
                    "`workers` has no effect: no protocol that is served forwards requests",
                    "serve through the gateway or the Rust layer, or use `fleet`",
                );
            }
            workers.rule = self.shedding_rule(WORKERS_RULE, Vec::new(), draft.at);
        }
        if self.options.permits == PermitRelease::Expire
            && section.adapt.as_ref().is_some_and(Adapt::is_measured)
        {
            self.reader.warning(
                draft.at,
                "signals with `measure` have no effect: no protocol that is served forwards requests",
                "serve through the gateway or the Rust layer, push the signals, or ask a Prometheus (`query`)",
            );
        }
        section.fleet = fleet.and_then(|fleet| self.fleet(&fleet, section.shadow, scope));
        section
    }

    fn fleet(&mut self, fleet: &Spanned<FleetDraft>, shadow: bool, scope: &ScopePath) -> Option<Fleet> {
        let FleetDraft { capacity, reserve } = &fleet.value;
        let (algorithm, whole) = match capacity {
            Capacity::InFlight(limit, ttl) => (Algorithm::Concurrency, Rate::per(*limit, *ttl)),
            Capacity::Rate(count, period) => {
                (self.shape.algorithm, Rate { count: *count, period: period.clone() })
            }
        };
        if self.options.permits == PermitRelease::Expire && algorithm == Algorithm::Concurrency {
            self.reader.warning(
                fleet.at,
                "no protocol that is served reports the end of a request, so each counts as in flight until its `ttl` ends",
                "write the capacity as a rate, as in `20000/second`, or serve through the gateway",
            );
        }
        let role = if shadow { Role::Shadow } else { Role::Live };
        let scope = scope.in_store(self.store.as_deref());
        let (mut limits, mut charged, mut left) = (Vec::new(), [1; 4], 1000);
        // The whole capacity first, then what is left of it below each priority that has a part reserved.
        for (above, name) in std::iter::once((None, "fleet"))
            .chain(Priority::ALL.map(|priority| (Some(priority), priority.name())))
        {
            if let Some(above) = above {
                let reserved = reserve[above.index()];
                if reserved == 0 {
                    continue;
                }
                left -= reserved.min(left);
                charged[above.index() + 1..].iter_mut().for_each(|count| *count += 1);
            }
            let count = whole.count * left / 1000;
            if count == 0 {
                self.reader.error_help(
                    fleet.at,
                    format!(
                        "of a capacity of {} the reserves leave less than one request to the others",
                        whole.count
                    ),
                    "reserve less, or write a larger capacity",
                );
                return None;
            }
            let rate = Rate { count, period: whole.period.clone() };
            let limit = match LimitSpec::new(algorithm, rate).build() {
                Ok(limit) => limit,
                Err(error) => {
                    self.reader.error(fleet.at, error.to_string());
                    return None;
                }
            };
            let element = Element { key: FLEET_RULE.into(), test: ValueTest::Exact(name.into()) };
            let scope = scope.child(&element).limit(Kind::Role(role), &limit, None, None);
            limits.push(RuleLimit::new(limit, scope, None, role, None));
        }
        let id = self.shedding_rule(FLEET_RULE, limits, fleet.at);
        Some(Fleet { rule: id, charged })
    }

    /// Adds a rule that sheds.
    fn shedding_rule(&mut self, name: &str, limits: Vec<RuleLimit>, at: Position) -> u32 {
        let id = u32::try_from(self.rules.len()).unwrap_or(u32::MAX);
        let rule = Rule {
            id,
            is_plain: false,
            is_shedding: true,
            has_explicit_name: true,
            keys: Vec::new(),
            name: name.to_owned(),
            limits: LimitSet { limits },
            tiers: Vec::new(),
            unlimited: false,
            class: Class::Comfort,
            on_error: OnError::Always(FailPolicy::Local),
            action: Action::Reject,
            mode: Mode::Adaptive,
            store: self.store.clone(),
            region: None,
            homes: None,
            shared_by_callers: true,
            shard_by: None,
            fallback: None,
            split: None,
            // Named after limits of callers that deny too: the denial of a caller over its own limit names that limit.
            priority: i32::MIN,
            enforce: None,
            cost: CostFrom::Fixed(1),
            billing: None,
            durable: Some(false),
            replaces: Vec::new(),
            detailed_metric: false,
            value_to_metric: false,
            metadata: Metadata::default(),
            location: (self.reader.source.name.clone(), at.line),
        };
        self.rules.push(rule.with_plain_flag());
        id
    }
}
