//! Stats summed over all threads: Prometheus metrics, and JSON for the admin API.

use crate::decision_log::record::rfc3339;
use crate::metrics::exposition::MetricsWriter;
use crate::metrics::labels::{OTHER, RuleLabel};
use crate::metrics::latency::Latency;
use crate::metrics::process;
use crate::metrics::series::{MAX_STEPS, Totals};
use crate::recorder::stripe::{CELLS, PROTOCOLS, Stripe, TENTHS};
use crate::recorder::{
    ORIGINS, RULE_ALLOW, RULE_CANDIDATE, RULE_DEGRADED, RULE_DENY, RULE_OVER_DEGRADE, RULE_OVER_QUOTA,
    RULE_SHADOW, RULE_UNENFORCED, RULE_WARNED, SHADOW_DENY, UNMATCHED, VERDICTS,
};
use crate::telemetry::Telemetry;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::Clock;
use tollgate_engine::Origin;
use tollgate_rules::Ruleset;

impl Telemetry {
    /// Returns all counts of a slot, including those of former owners.
    pub(crate) fn raw_counts(&self, slot: usize) -> [u64; CELLS] {
        let mut sums = [0; CELLS];
        self.stripes.all().iter().for_each(|stripe| stripe.add_cells(slot, &mut sums));
        sums
    }

    /// Returns the counts of all rules, by slot.
    pub(crate) fn all_counts(&self) -> Vec<(RuleLabel, [u64; CELLS])> {
        let names = self.labels.since().into_iter().enumerate();
        let all = names.map(|(slot, (name, before))| {
            let mut sums = self.raw_counts(slot);
            if let Some(before) = before {
                sums.iter_mut().zip(before).for_each(|(sum, before)| *sum = sum.saturating_sub(before));
            }
            (name, sums)
        });
        all.collect()
    }

    /// Returns the counts of all rules that have any.
    fn counts(&self) -> Vec<(RuleLabel, [u64; CELLS])> {
        let mut all = self.all_counts();
        all.retain(|(_, sums)| sums.iter().any(|sum| *sum > 0));
        all
    }

    /// Returns how many checks each rule allowed and denied, by slot.
    pub(crate) fn rule_results(&self) -> Vec<[u64; 2]> {
        self.all_counts().iter().map(|(_, sums)| allowed_and_denied(sums)).collect()
    }

    fn latency(&self) -> [Latency; PROTOCOLS.len()] {
        let mut sums = [Latency::default(); PROTOCOLS.len()];
        for stripe in self.stripes.all().iter() {
            for (protocol, sums) in sums.iter_mut().enumerate() {
                stripe.latencies(protocol).add_to(sums);
            }
        }
        sums
    }

    fn tiers(&self) -> Vec<(Arc<str>, [u64; TENTHS + 1])> {
        let stripes = self.stripes.all().clone();
        let all = self.labels.tiers().into_iter().enumerate().map(|(tier, name)| {
            let mut sums = [0; TENTHS + 1];
            stripes.iter().for_each(|stripe| stripe.add_tier(tier, &mut sums));
            (name, sums)
        });
        all.filter(|(_, sums)| sums[..TENTHS].iter().any(|sum| *sum > 0)).collect()
    }

    /// Returns the number of requests of domains without rules, allowed and denied.
    pub(crate) fn unknown_domain_counts(&self) -> (u64, u64) {
        let sums = self.raw_counts(OTHER as usize);
        (sums[UNMATCHED], sums[ORIGINS.len() + UNMATCHED])
    }

    pub(crate) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for slot in 0..self.labels.rules().len() {
            let sums = self.raw_counts(slot);
            let verdict = |at: usize| verdict_counts(&sums, at).iter().sum::<u64>();
            totals.allow += verdict(0) + verdict(2) + verdict(3);
            totals.deny += verdict(DENY);
            totals.delayed += verdict(2);
            totals.unmatched += sums[UNMATCHED];
            totals.fail_open +=
                (0..VERDICTS.len()).map(|verdict| sums[verdict * ORIGINS.len() + 3]).sum::<u64>();
        }
        // One per request, although several shadow rules may have denied it.
        let shadowed = |stripe: &Arc<Stripe>| stripe.shadowed.load(Ordering::Relaxed);
        totals.shadow_deny = self.stripes.all().iter().map(shadowed).sum();
        self.latency().iter().for_each(|latency| totals.latency.add(latency));
        totals
    }

    /// Writes all metrics of decisions, the decision log, traces, the node and the process.
    pub fn write(&self, page: &mut MetricsWriter) {
        let counts = self.counts();
        let help = "Number of decisions by deciding rule: the one that denied, else the one closest to its limit. Samples with \
                    shadow true count requests that a shadow rule would have denied.";
        let mut family = page.counters("ratelimit_decisions_total", help);
        for (name, sums) in &counts {
            let labels = |verdict, origin, shadow| {
                [
                    ("domain", &*name.domain),
                    ("rule", &*name.rule),
                    ("verdict", verdict),
                    ("origin", origin),
                    ("shadow", shadow),
                ]
            };
            for (at, count) in sums[..SHADOW_DENY].iter().enumerate().filter(|(_, count)| **count > 0) {
                let (verdict, origin) = (VERDICTS[at / ORIGINS.len()], ORIGINS[at % ORIGINS.len()]);
                family.add(&labels(verdict, origin.name(), "false"), count);
            }
            if sums[SHADOW_DENY] > 0 {
                family.add(&labels("deny", Origin::Store.name(), "true"), sums[SHADOW_DENY]);
            }
        }
        let help = "Number of requests whose domain has no rules.";
        let mut family = page.counters("ratelimit_unknown_domain_requests_total", help);
        let (allowed, denied) = self.unknown_domain_counts();
        family.add(&[("verdict", "allow")], allowed);
        family.add(&[("verdict", "deny")], denied);
        let help = "Number of denied requests by the rule that denied, with an empty rule if it was none.";
        let mut family = page.counters("ratelimit_denied_total", help);
        for (name, sums) in &counts {
            let denied = verdict_counts(sums, DENY).iter().sum::<u64>();
            if denied > 0 {
                family.add(&[("domain", &*name.domain), ("rule", &*name.rule)], denied);
            }
        }
        let help = "Number of requests checked against a rule's limits, by the result of that rule alone. What its candidate \
                    would have denied is counted beside it.";
        let mut family = page.counters("ratelimit_rule_checks_total", help);
        for (name, sums) in &counts {
            for (verdict, cell) in RULE_VERDICTS.iter().filter(|(_, cell)| sums[*cell] > 0) {
                let labels = [("domain", &*name.domain), ("rule", &*name.rule), ("verdict", verdict)];
                family.add(&labels, sums[*cell]);
            }
        }
        let help = "Number of requests that passed a soft limit of a rule: warned or degraded.";
        let mut family = page.counters("ratelimit_soft_limit_total", help);
        for (name, sums) in &counts {
            for (action, count) in [("warn", sums[RULE_WARNED]), ("degrade", sums[RULE_DEGRADED])] {
                if count > 0 {
                    let labels = [("domain", &*name.domain), ("rule", &*name.rule), ("action", action)];
                    family.add(&labels, count);
                }
            }
        }
        let help = "Share of its tightest limit that a caller had left after a decision, by tier.";
        let mut family = page.histograms("ratelimit_remaining", help);
        let bounds: Vec<f64> = (1..=TENTHS).map(|tenth| tenth as f64 / TENTHS as f64).collect();
        for (tier, sums) in self.tiers() {
            let counts = [&sums[..TENTHS], &[0]].concat();
            family.histogram(&[("tier", &tier)], &bounds, &counts, sums[TENTHS] as f64 / 1_000.0);
        }
        let help = "Time from the end of reading a request to its decision in seconds, by protocol.";
        let mut family = page.histograms("ratelimit_check_duration_seconds", help);
        for (protocol, latency) in PROTOCOLS.iter().zip(self.latency()) {
            if latency.counts.iter().any(|count| *count > 0) {
                let (bounds, counts, sum) = latency.coarse();
                family.histogram(&[("protocol", protocol)], &bounds, &counts, sum);
            }
        }
        let help = "Number of callers at 80% or more of a per-caller limit for five minutes.";
        page.gauge("ratelimit_near_limit_keys", help, self.top().near_keys());
        let help = "Number of callers at 90% or more of a per-caller limit of a rule, in this minute or the one before.";
        let mut family = page.gauges("ratelimit_callers_at_90_percent", help);
        for ((domain, rule), callers) in self.top().at_90_percent() {
            family.add(&[("domain", &*domain), ("rule", &*rule)], callers);
        }
        page.gauge("ratelimit_decision_log_entries", "Number of decisions in memory.", self.log.len());
        let logged = self.log.logged();
        page.counter("ratelimit_decision_log_decisions_total", "Number of decisions logged.", logged);
        let (written, unwritten) = self.log.sink.as_ref().map_or((0, 0), crate::sink::Sink::counts);
        let help = "Number of decision log lines written to the output.";
        page.counter("ratelimit_decision_log_written_total", help, written);
        let help = "Number of decisions missing from the log: buffer full (memory) or output blocked or failing (output).";
        let mut family = page.counters("ratelimit_decision_log_dropped_total", help);
        family.add(&[("where", "memory")], self.dropped());
        family.add(&[("where", "output")], unwritten);
        if let Some(traces) = &self.spans {
            traces.write(page);
        }
        page.gauges("ratelimit_node_info", "Name, region and version of this node; always 1.").add(
            &[
                ("node", &self.node.node),
                ("region", self.node.region.as_deref().unwrap_or("")),
                ("version", env!("CARGO_PKG_VERSION")),
            ],
            1,
        );
        process::write(page);
    }

    /// Returns the time series of the last `seconds`, and the counts of all rules, as JSON.
    #[must_use]
    pub fn stats(&self, seconds: usize) -> Value {
        let seconds = seconds.clamp(1, MAX_STEPS);
        let rates = self.rates();
        let rules: Vec<Value> = self
            .all_counts()
            .iter()
            .enumerate()
            .filter(|(_, (name, sums))| !name.rule.is_empty() && sums.iter().any(|sum| *sum > 0))
            .map(|(slot, (name, sums))| {
                let [allowed, denied] = rates.rate(slot);
                let [allow, deny] = allowed_and_denied(sums);
                json!({
                    "rule": name.rule, "domain": name.domain, "allow": allow, "deny": deny,
                    "shadow_deny": sums[SHADOW_DENY], "warn": sums[RULE_WARNED], "degrade": sums[RULE_DEGRADED],
                    "per_second_allow": allowed,
                    "per_second_deny": denied,
                })
            })
            .collect();
        drop(rates);
        let counts = self.all_counts();
        let unmatched: Vec<Value> = counts
            .iter()
            .filter(|(name, sums)| name.rule.is_empty() && sums[UNMATCHED] > 0)
            .map(|(name, sums)| json!({"domain": name.domain, "requests": sums[UNMATCHED]}))
            .collect();
        let (allowed, denied) = self.unknown_domain_counts();
        let names: Vec<Value> = self
            .unknown_domains()
            .iter()
            .map(|(domain, requests)| json!({"domain": domain, "requests": requests}))
            .collect();
        let tiers: Vec<Value> = self
            .tiers()
            .iter()
            .map(|(tier, sums)| {
                // Utilization is the complement of what remains.
                let used: Vec<u64> = sums[..TENTHS].iter().rev().copied().collect();
                json!({"tier": tier, "histogram": used})
            })
            .collect();
        json!({
            "now": rfc3339(self.clock.now()),
            "step_ms": 1_000,
            "series": self.series().columns(seconds),
            "rules": rules,
            "unmatched": unmatched,
            "unknown_domains": {"requests": allowed + denied, "denied": denied, "domains": names},
            "tiers": tiers,
            "node": {
                "name": self.node.node,
                "region": self.node.region,
                "version": env!("CARGO_PKG_VERSION"),
                "started_at": rfc3339(self.started),
            },
        })
    }

    /// Returns the top callers, top denied callers, callers near a limit and shared networks; `rules` determine the next tier.
    #[must_use]
    pub fn top_talkers(&self, rules: &Arc<Ruleset>) -> Value {
        let now = self.clock.now();
        let (top, layout, tiers) = (self.top(), self.layout_of(rules), self.labels.tiers());
        let (window, all) = top.window(now);
        let seconds = (window.as_micros() as f64 / 1e6).max(1.0);
        let by_rate: Vec<Value> = top
            .by_rate()
            .iter()
            .map(|by| {
                json!({
                    "key_masked": by.caller.display, "key_id": format!("{:016x}", by.caller.id),
                    "actionable": by.caller.key.is_some(), "rate": by.requests as f64 / seconds, "share": by.requests as f64 / all.max(1) as f64,
                })
            })
            .collect();
        let by_denials: Vec<Value> = top
            .by_denials()
            .iter()
            .map(|by| {
                json!({
                    "key_masked": by.caller.display, "key_id": format!("{:016x}", by.caller.id),
                    "actionable": by.caller.key.is_some(), "domain": by.name.domain, "rule": by.name.rule,
                    "denied": by.denied,
                })
            })
            .collect();
        let near: Vec<Value> = top
            .near()
            .iter()
            .map(|near| {
                let tier = tiers.get(usize::from(near.tier)).filter(|_| near.tier > 1);
                let rule = layout
                    .slots
                    .iter()
                    .position(|slot| *slot == near.slot)
                    .and_then(|at| rules.rules().get(at));
                json!({
                    "key_masked": near.caller.display, "key_id": format!("{:016x}", near.caller.id),
                    "actionable": near.caller.key.is_some(), "domain": near.name.domain, "rule": near.name.rule,
                    "utilisation": near.used, "minutes": near.minutes, "tier": tier,
                    "tier_above": rule.and_then(|rule| tier_above(rule, tier.map(|tier| &**tier))),
                })
            })
            .collect();
        let shared: Vec<Value> = top
            .shared(now)
            .iter()
            .map(|shared| json!({"prefix": shared.network, "keys": shared.keys, "near_limit": shared.near}))
            .collect();
        json!({
            "window_s": seconds.round() as u64, "by_rate": by_rate, "by_denials": by_denials, "near_limit": near,
            "shared_address": shared,
        })
    }
}

/// Position of denials in `VERDICTS`.
const DENY: usize = 1;

/// Results of a rule's checks, with their cells. Those of a candidate come beside the others, of which each check has one.
const RULE_VERDICTS: [(&str, usize); 7] = [
    ("allow", RULE_ALLOW),
    ("deny", RULE_DENY),
    ("shadow_deny", RULE_SHADOW),
    ("unenforced_deny", RULE_UNENFORCED),
    ("degrade", RULE_OVER_DEGRADE),
    ("over_quota", RULE_OVER_QUOTA),
    ("candidate_deny", RULE_CANDIDATE),
];

/// Returns the counts of one verdict, by origin.
fn verdict_counts(sums: &[u64; CELLS], verdict: usize) -> &[u64] {
    &sums[verdict * ORIGINS.len()..][..ORIGINS.len()]
}

/// Returns how many checks a rule allowed and denied.
pub(crate) fn allowed_and_denied(sums: &[u64; CELLS]) -> [u64; 2] {
    let allowed = [RULE_ALLOW, RULE_SHADOW, RULE_UNENFORCED, RULE_OVER_DEGRADE, RULE_OVER_QUOTA];
    [allowed.iter().map(|cell| sums[*cell]).sum(), sums[RULE_DENY]]
}

/// Returns the tier of a rule with the lowest rate above that of `tier`.
fn tier_above<'r>(rule: &'r tollgate_rules::Rule, tier: Option<&str>) -> Option<&'r str> {
    let rate = |limits: &[tollgate_rules::RuleLimit]| {
        let per_second = |limit: &tollgate_rules::RuleLimit| {
            let quota = limit.limit.rate();
            quota.count as f64 / quota.period.length().as_micros().max(1) as f64
        };
        limits.iter().map(per_second).reduce(f64::min)
    };
    let own = rate(rule.limits_for(tier))?;
    let above = rule.tiers.iter().filter_map(|(name, set)| Some((name, rate(&set.limits)?)));
    let above = above.filter(|(_, rate)| *rate > own);
    above.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, _)| name.as_str())
}
