//! The metrics of envoyproxy/ratelimit, counted from decisions: hits by descriptor, calls and their time, errors.
//!
//! How the hits of a request count is in `weights`.

use super::series::{Counted, Series, SeriesTable, by_labels, labels, sanitized};
use super::weights::{LastUse, Weights};
use crate::server::status::ServerStatus;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use tollgate_core::{TimeDelta, Timestamp, Verdict};
use tollgate_engine::{Check, CheckInput, Decision, LimitStatus, Observer, Origin};
use tollgate_observe::MetricsWriter;
use tollgate_rules::{EnvoyLevel, Role, Ruleset};

/// Upper bounds of the histogram of response times, in seconds.
const BOUNDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const METHOD: &str = "ShouldRateLimit";
/// Seconds between two warnings about the same.
const WARNING_INTERVAL: u64 = 60;
/// Name of the protocol whose calls are counted.
const RLS: &str = "rls";

/// The metrics of the service.
pub(crate) struct ServiceMetrics {
    near_limit_ratio: f64,
    /// Whether denials of that service's local cache are counted.
    has_local_cache: bool,
    /// Tags on every metric, sorted, and the same as labels.
    tags: Vec<(String, String)>,
    labels: Vec<(String, String)>,
    series: SeriesTable,
    /// Domains without rules that were asked for.
    unknown_domains: SeriesTable,
    /// The series of each rule of the rule set that was last seen.
    by_rule: RwLock<RuleSeries>,
    /// What was last used of counters that are charged several hits at a time.
    last_use: LastUse,
    calls: AtomicU64,
    service_errors: AtomicU64,
    redis_errors: AtomicU64,
    shadowed: AtomicU64,
    times: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
    /// Second at which the last look at an exact limit was reported.
    last_look: AtomicU64,
}

/// The rules that series belong to.
#[derive(Default)]
struct RuleSeries {
    rules: Option<Arc<Ruleset>>,
    /// Levels and series by rule number.
    series: Vec<Option<(Vec<EnvoyLevel>, Arc<Series>)>>,
}

/// One value for statsd and for `/stats`.
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) value: u64,
    pub(super) is_gauge: bool,
}

impl ServiceMetrics {
    pub(crate) fn new(near_limit_ratio: f64, has_local_cache: bool, mut tags: Vec<(String, String)>) -> Self {
        tags.sort();
        Self {
            near_limit_ratio,
            has_local_cache,
            labels: labels(&tags),
            tags,
            series: SeriesTable::default(),
            unknown_domains: SeriesTable::default(),
            by_rule: RwLock::default(),
            last_use: LastUse::default(),
            calls: AtomicU64::new(0),
            service_errors: AtomicU64::new(0),
            redis_errors: AtomicU64::new(0),
            shadowed: AtomicU64::new(0),
            times: Default::default(),
            micros: AtomicU64::new(0),
            last_look: AtomicU64::new(0),
        }
    }

    /// Counts a check by `protocol` that ended with an error of the service. Calls are those of gRPC.
    pub(crate) fn on_error(&self, protocol: &'static str) {
        self.calls.fetch_add(u64::from(protocol == RLS), Ordering::Relaxed);
        self.service_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the series of a limit in a decision.
    fn series(&self, check: &Check<'_>, decision: &Decision, limit: &LimitStatus) -> Option<Arc<Series>> {
        let entries = match check.input {
            CheckInput::Attributes(entries) => entries,
            CheckInput::Descriptors(all) => all.get(usize::from(limit.descriptor))?.entries,
        };
        let Some(id) = limit.rule else {
            let levels: Vec<String> = entries.iter().map(level).collect();
            return Some(self.series.series(check.domain, &levels));
        };
        let rule = decision.rules().rule(id)?;
        let known = self.by_rule.read().unwrap_or_else(PoisonError::into_inner);
        if known.rules.as_ref().is_some_and(|rules| decision.uses_rules(rules)) {
            let (levels, series) = known.series.get(id as usize)?.as_ref()?;
            if !rule.detailed_metric && !levels.iter().any(|level| level.shows_value) {
                return Some(Arc::clone(series));
            }
            return Some(self.series.series(check.domain, &names(levels, entries, rule.detailed_metric)));
        }
        drop(known);
        self.learn(decision.shared_rules());
        self.series(check, decision, limit)
    }

    /// Remembers the series of all rules of a rule set.
    fn learn(&self, rules: Arc<Ruleset>) {
        let (mut ids, mut names, mut of_rules) = (Vec::new(), Vec::new(), Vec::new());
        for domain in rules.domains() {
            for (rule, levels) in domain.envoy_keys() {
                ids.push(rule.id as usize);
                names.push((
                    domain.name().to_owned(),
                    levels.iter().map(|level| level.name.clone()).collect(),
                ));
                of_rules.push(levels);
            }
        }
        let kept = self.series.keep_rules(&names);
        let mut series: Vec<Option<(Vec<EnvoyLevel>, Arc<Series>)>> = vec![None; rules.rules().len()];
        for ((id, levels), own) in ids.into_iter().zip(of_rules).zip(kept) {
            if let Some(place) = series.get_mut(id) {
                *place = Some((levels, own));
            }
        }
        *self.by_rule.write().unwrap_or_else(PoisonError::into_inner) =
            RuleSeries { rules: Some(rules), series };
    }

    fn count(&self, check: &Check<'_>, decision: &Decision, limit: &LimitStatus) {
        let Some(series) = self.series(check, decision, limit) else { return };
        let Some(facts) = decision.limit(limit) else { return };
        let cost = decision.cost(check, limit);
        if cost.is_refund() {
            return;
        }
        if cost.is_peek() && !facts.limit.counts_denied() {
            self.warn_of_look(decision.at);
        }
        let (hits, max) = (cost.units(), facts.limit.rate().count);
        series.add(Counted::TotalHits, hits);
        // As that service computes it: in single precision.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a ratio of a count")]
        let near = (max as f32 * self.near_limit_ratio as f32).floor() as u64;
        let window = (decision.at + limit.outcome.reset_after).as_secs();
        let counter = counter(check, limit, max);
        let weights = match limit.outcome.verdict {
            Verdict::Unknown => return,
            Verdict::Allowed { .. } => {
                let after = max.saturating_sub(limit.outcome.remaining);
                self.last_use.record(counter, window, after);
                Weights::fitting(hits, after, near)
            }
            Verdict::Denied { .. } => {
                if self.has_local_cache && self.last_use.was_denied(counter, window) {
                    series.add(Counted::OverLimitWithLocalCache, hits);
                }
                let before = self.last_use.before(counter, window, hits, max);
                self.last_use.record_denial(counter, window);
                Weights::denied(hits, before, max, near)
            }
        };
        series.add(Counted::WithinLimit, weights.within);
        series.add(Counted::NearLimit, weights.near);
        series.add(Counted::OverLimit, weights.over);
        if limit.role == Role::Shadow {
            series.add(Counted::ShadowMode, weights.over);
        }
    }

    /// Warns, at most once a minute, that a look at an exact limit decides nothing. Gateways look at a limit when a request begins
    /// and charge what it has cost when it ends; there the limit would never deny.
    fn warn_of_look(&self, now: Timestamp) {
        let second = now.as_secs();
        let is_due = |last: u64| (second >= last.saturating_add(WARNING_INTERVAL)).then_some(second);
        if self.last_look.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_ok() {
            tracing::warn!(
                "a descriptor with hits_addend 0 passes whatever is left, because of TOLLGATE_PROFILE=native: limits on costs that \
                 are charged afterwards (tokens, cost.response) do not deny; leave TOLLGATE_PROFILE out for them"
            );
        }
    }

    /// Writes all metrics for Prometheus.
    pub(super) fn write(&self, status: &ServerStatus, page: &mut MetricsWriter) {
        let tags: Vec<(&str, &str)> =
            self.labels.iter().map(|(tag, value)| (tag.as_str(), value.as_str())).collect();
        let with = |labels: &[(&str, &str)]| -> Vec<(String, String)> {
            labels
                .iter()
                .chain(&tags)
                .map(|(label, value)| ((*label).to_owned(), (*value).to_owned()))
                .collect()
        };
        let all = self.series.all();
        for what in Counted::ALL {
            let name = format!("ratelimit_service_rate_limit_{}", what.name());
            let help = format!("Number of hits by domain and descriptor: {}.", what.name().replace('_', " "));
            let mut family = page.counters(&name, &help);
            for (labels, count) in by_labels(&all, what) {
                add(&mut family, &with(&labels), count);
            }
        }
        let help = "Number of descriptors in domains without rules.";
        let mut family = page.counters("ratelimit_service_rate_limit_domain_not_found", help);
        for series in self.unknown_domains.all() {
            add(&mut family, &with(&[("domain", &series.domain)]), series.count(Counted::TotalHits));
        }
        let mut family =
            page.counters("ratelimit_service_should_rate_limit_error", "Number of failed checks, by kind.");
        for (kind, count) in [("redis_error", &self.redis_errors), ("service_error", &self.service_errors)] {
            add(&mut family, &with(&[("err_type", kind)]), count.load(Ordering::Relaxed));
        }
        let (loaded, failed) = status.rule_loads();
        for (name, help, value) in [
            ("ratelimit_service_config_load_success", "Number of loaded configurations.", loaded),
            ("ratelimit_service_config_load_error", "Number of refused configurations.", failed),
            (
                "ratelimit_service_global_shadow_mode",
                "Number of denials that SHADOW_MODE turned into approvals.",
                self.shadowed.load(Ordering::Relaxed),
            ),
        ] {
            add(&mut page.counters(name, help), &with(&[]), value);
        }
        let mut family =
            page.gauges("ratelimit_redis_pool_cx_active", "Number of open connections to Redis.");
        add(&mut family, &with(&[]), status.store_connections());
        let mut family = page.counters("ratelimit_service_total_requests", "Number of calls, by method.");
        add(&mut family, &with(&[("grpc_method", METHOD)]), self.calls.load(Ordering::Relaxed));
        let counts: Vec<u64> = self.times.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let sum = self.micros.load(Ordering::Relaxed) as f64 / 1e6;
        let labels = with(&[("grpc_method", METHOD)]);
        let labels: Vec<(&str, &str)> =
            labels.iter().map(|(label, value)| (label.as_str(), value.as_str())).collect();
        page.histograms("ratelimit_service_response_time_seconds", "Seconds that a call took, by method.")
            .histogram(&labels, &BOUNDS, &counts, sum);
    }

    /// Returns all values under their statsd names, without tags.
    pub(super) fn samples(&self, status: &ServerStatus) -> Vec<Sample> {
        // Names that are written the same are one counter.
        let mut by_name = BTreeMap::<String, u64>::new();
        for series in self.series.all() {
            let path = series.path();
            for what in Counted::ALL.into_iter().filter(|what| series.count(*what) > 0) {
                let name = format!("ratelimit.service.rate_limit.{path}.{}", what.name());
                *by_name.entry(name).or_default() += series.count(what);
            }
        }
        for series in self.unknown_domains.all() {
            let name = format!("ratelimit.service.rate_limit.{}.domain_not_found", series.domain);
            *by_name.entry(name).or_default() += series.count(Counted::TotalHits);
        }
        let mut samples = Vec::new();
        let mut add = |name: String, value| samples.push(Sample { name, value, is_gauge: false });
        by_name.into_iter().for_each(|(name, value)| add(name, value));
        let (loaded, failed) = status.rule_loads();
        for (name, value) in [
            (
                "ratelimit.service.call.should_rate_limit.redis_error",
                self.redis_errors.load(Ordering::Relaxed),
            ),
            (
                "ratelimit.service.call.should_rate_limit.service_error",
                self.service_errors.load(Ordering::Relaxed),
            ),
            ("ratelimit.service.config_load_success", loaded),
            ("ratelimit.service.config_load_error", failed),
            ("ratelimit.service.global_shadow_mode", self.shadowed.load(Ordering::Relaxed)),
            ("ratelimit_server.ShouldRateLimit.total_requests", self.calls.load(Ordering::Relaxed)),
        ] {
            add(name.to_owned(), value);
        }
        let connections = status.store_connections();
        samples.push(Sample {
            name: "ratelimit.redis_pool.cx_active".to_owned(),
            value: connections,
            is_gauge: true,
        });
        samples
    }

    /// Returns the number of timed calls and their time in microseconds.
    pub(super) fn call_times(&self) -> (u64, u64) {
        (
            self.times.iter().map(|count| count.load(Ordering::Relaxed)).sum(),
            self.micros.load(Ordering::Relaxed),
        )
    }

    /// Returns what follows a statsd name: `.__env=test`.
    pub(super) fn tag_suffix(&self) -> String {
        let tag = |(name, value): &(String, String)| {
            format!(".__{}={}", sanitized(name), sanitized(value).replace('.', "_"))
        };
        self.tags.iter().map(tag).collect()
    }

    /// Returns what follows a value of DogStatsD: `|#env:test`.
    pub(super) fn dog_tags(&self) -> String {
        let tag = |text: &str| sanitized(text).replace(',', "_");
        let tags =
            self.tags.iter().map(|(name, value)| format!("{}:{}", tag(name), tag(value).replace('.', "_")));
        let tags = tags.collect::<Vec<_>>().join(",");
        if tags.is_empty() { tags } else { format!("|#{tags}") }
    }
}

/// Returns the level of an entry: `key`, or `key_value`.
fn level((key, value): &(&str, &str)) -> String {
    if value.is_empty() { (*key).to_owned() } else { format!("{key}_{value}") }
}

/// Returns the level of an entry in a detailed metric, which has the value even if it is empty: `key_`.
fn detailed_level((key, value): &(&str, &str)) -> String {
    format!("{key}_{value}")
}

/// Returns the levels of a rule's metric in a request: with the request's value where the rule asks for it, and with the
/// wildcard where all its values share a counter.
fn names(levels: &[EnvoyLevel], entries: &[(&str, &str)], is_detailed: bool) -> Vec<String> {
    if levels.len() != entries.len() {
        // Attributes, which have no order.
        let own = || levels.iter().map(|level| level.name.clone()).collect();
        return if is_detailed { entries.iter().map(detailed_level).collect() } else { own() };
    }
    let name = |(own, entry): (&EnvoyLevel, &(&str, &str))| match own {
        EnvoyLevel { is_shared: false, .. } if is_detailed => detailed_level(entry),
        EnvoyLevel { is_shared: false, shows_value: true, .. } => level(entry),
        EnvoyLevel { name, .. } => name.clone(),
    };
    levels.iter().zip(entries).map(name).collect()
}

/// Returns a hash of a limit's counter in this request.
fn counter(check: &Check<'_>, limit: &LimitStatus, max: u64) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    (check.domain, limit.rule, max).hash(&mut hasher);
    match check.input {
        CheckInput::Attributes(entries) => entries.hash(&mut hasher),
        CheckInput::Descriptors(all) => {
            all.get(usize::from(limit.descriptor)).map(|one| one.entries).hash(&mut hasher);
        }
    }
    hasher.finish()
}

fn add(family: &mut tollgate_observe::MetricFamily<'_>, labels: &[(String, String)], value: u64) {
    let labels: Vec<(&str, &str)> =
        labels.iter().map(|(label, value)| (label.as_str(), value.as_str())).collect();
    family.add(&labels, value);
}

impl Observer for ServiceMetrics {
    fn on_decision(&self, check: &Check<'_>, decision: &Decision) {
        if decision.rules().domain(check.domain).is_none() {
            // Each descriptor looks its limit up.
            let looked_up = match check.input {
                CheckInput::Attributes(_) => 1,
                CheckInput::Descriptors(all) => all.len() as u64,
            };
            self.unknown_domains.series(check.domain, &[]).add(Counted::TotalHits, looked_up);
            return;
        }
        let mut is_over = false;
        for limit in decision.limits.iter().filter(|limit| limit.role != Role::Candidate) {
            is_over |= limit.role == Role::Live && decision.is_over(limit);
            self.count(check, decision, limit);
        }
        if is_over && decision.is_allowed() && decision.emergency().is_none() {
            self.shadowed.fetch_add(1, Ordering::Relaxed);
        }
        if matches!(decision.origin, Origin::Local | Origin::FailOpen | Origin::FailClosed | Origin::Shed) {
            self.redis_errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn on_rules_changed(&self, rules: &Arc<Ruleset>) {
        self.learn(Arc::clone(rules));
    }

    fn on_latency(&self, protocol: &'static str, requests: u64, each: TimeDelta) {
        if protocol != RLS {
            return;
        }
        self.calls.fetch_add(requests, Ordering::Relaxed);
        let seconds = each.as_micros() as f64 / 1e6;
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.times[bucket].fetch_add(requests, Ordering::Relaxed);
        self.micros.fetch_add(each.as_micros().saturating_mul(requests), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_rules::{Options, Source};

    /// As that service names them.
    #[test]
    fn metrics_have_the_values_that_rules_ask_for() {
        let text = "
domain: d
descriptors:
  - {key: outer, value_to_metric: true, descriptors: [{key: leaf, rate_limit: {unit: hour, requests_per_unit: 5}}]}
  - {key: shared, value: s*, share_threshold: true, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: each, value: e*, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 2}}
";
        let options = Options { ratelimit_files: true, ..Options::default() };
        let rules = Ruleset::load(&[Source::new("d.yaml", text)], &options).expect("rules");
        let all: Vec<_> = rules.domain("d").expect("a domain").envoy_keys().collect();
        let entries: [&[(&str, &str)]; 3] =
            [&[("outer", "v1"), ("leaf", "l")], &[("shared", "s1")], &[("each", "e1")]];
        let expected: [&[&str]; 3] = [&["outer_v1", "leaf"], &["shared_s*"], &["each_e1"]];
        for ((entries, expected), first) in
            entries.iter().zip(expected).zip(["outer", "shared_s*", "each_e*"])
        {
            let (rule, levels) = all.iter().find(|(_, levels)| levels[0].name == first).expect("its rule");
            assert_eq!(names(levels, entries, rule.detailed_metric), expected);
            let empty: Vec<(&str, &str)> = entries.iter().map(|(key, _)| (*key, "")).collect();
            let expected: &[&str] = match first {
                "outer" => &["outer", "leaf"],
                "each_e*" => &["each_"],
                shared => &[shared],
            };
            assert_eq!(names(levels, &empty, rule.detailed_metric), expected);
        }
    }

    #[test]
    fn calls_are_those_of_grpc_and_tags_have_no_dots() {
        let metrics = ServiceMetrics::new(0.8, false, vec![("a.b".to_owned(), "c.d".to_owned())]);
        metrics.on_error("http");
        metrics.on_error("rls");
        assert_eq!(metrics.calls.load(Ordering::Relaxed), 1);
        assert_eq!(metrics.service_errors.load(Ordering::Relaxed), 2);
        let tags = (metrics.tag_suffix(), metrics.dog_tags());
        assert_eq!((tags.0.as_str(), tags.1.as_str()), (".__a.b=c_d", "|#a.b:c_d"));
    }
}
