//! Test runner: runs descriptor steps like gRPC requests, and attribute steps and reservations like HTTP requests.
//!
//! A step that fails shows what each of its counters held: a reader of the report has no server to query.

use super::expect::{Actual, ActualStatus, differences};
use super::file::{Case, Step, StepDescriptor};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tollgate_core::{Cost, Limit, ManualClock, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{Check, ClosedReservation, Decision, LimitStatus, Limiter, ReservationId, SettleError};
use tollgate_rules::{Descriptor, Role, Ruleset, Source};
use tollgate_server::rls;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus,
};
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_store::{MemoryConfig, MemoryStore};

type TestLimiter = Limiter<MemoryStore<Arc<ManualClock>>>;

/// Time to settle or cancel a reservation, unless the step has another: as over HTTP.
const DEADLINE_MS: u64 = 60_000;

/// Reason why a case fails.
pub(crate) enum Failure {
    /// The rules do not load: why, which is the same for every case with these rules.
    Rules(String),
    /// The case itself, with all differences.
    Case(String),
}

/// Runs a case of the test file at `path`.
pub(crate) fn run(case: &Case, path: &Path) -> Result<(), Failure> {
    let loaded = sources(case, path).and_then(|sources| {
        Ruleset::load(&sources, &crate::config::options(case.profile)).map_err(|errors| errors.to_string())
    });
    let rules = match (loaded, &case.error) {
        (Ok(_), Some(text)) => {
            return Err(Failure::Case(format!("expected loading to fail with `{text}`, but it loaded")));
        }
        (Err(error), Some(text)) if error.contains(text.as_str()) => return Ok(()),
        (Err(error), Some(text)) => {
            let why = format!("expected loading to fail with `{text}`, but it failed with\n{error}");
            return Err(Failure::Case(why));
        }
        (Err(error), None) => return Err(Failure::Rules(error)),
        (Ok(rules), None) => rules,
    };
    run_steps(case, path, rules).map_err(Failure::Case)
}

fn run_steps(case: &Case, path: &Path, rules: Ruleset) -> Result<(), String> {
    if case.steps.is_empty() {
        return Err("the case tests nothing; add `steps`, or `error` if the rules must not load".to_owned());
    }
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(case.start)));
    let memory = MemoryConfig::with_bytes(8 << 20);
    let store = MemoryStore::new(&memory, Arc::clone(&clock)).map_err(|error| error.to_string())?;
    let time: Arc<dyn tollgate_core::Clock> = Arc::clone(&clock) as _;
    let limiter = Limiter::new(Arc::new(rules), store, time).with_global_shadow(case.global_shadow);
    let mut run = CaseRun { limiter, reservations: BTreeMap::new() };
    let mut report = Vec::new();
    for (number, step) in case.steps.iter().enumerate() {
        let (line, step) = (step.referenced.line(), &step.value);
        let repeat = step.repeat.unwrap_or(1).max(1);
        let place = match repeat {
            1 => format!("{}:{line}: step {}", path.display(), number + 1),
            _ => {
                format!("{}:{line}: step {}, repetition {repeat} of {repeat}", path.display(), number + 1)
            }
        };
        let mut actual = Actual::default();
        for _ in 0..repeat {
            if let Some(advance) = step.advance {
                clock.advance(advance.0);
            }
            actual = run.step(step).map_err(|error| format!("{place}: {error}"))?;
            actual.overload = run.overload(step);
            actual.limits_percent = run.limits_percent(step);
        }
        let found = differences(&step.expect, &actual);
        if !found.is_empty() {
            report.extend(found.into_iter().chain(actual.counters).map(|line| format!("{place}: {line}")));
        }
    }
    if report.is_empty() { Ok(()) } else { Err(report.join("\n")) }
}

fn sources(case: &Case, test: &Path) -> Result<Vec<Source>, String> {
    let base = test.parent().unwrap_or(Path::new(""));
    let inline = |key: &str| format!("{}: {key}", test.display());
    let mut sources = Vec::new();
    match (&case.rules, &case.rules_file) {
        (Some(text), None) => sources.push(Source { name: inline("rules"), text: text.clone() }),
        (None, Some(file)) => {
            let path = base.join(file);
            let text =
                std::fs::read_to_string(&path).map_err(|error| unreadable(&path, file, base, &error))?;
            sources.push(Source { name: path.display().to_string(), text });
        }
        _ => return Err(format!("{}: write either `rules` or `rules_file`", test.display())),
    }
    for (number, text) in case.extra_rules.iter().enumerate() {
        sources.push(Source { name: inline(&format!("extra_rules[{number}]")), text: text.clone() });
    }
    Ok(sources)
}

/// Returns why a rule file cannot be read, and where it was searched.
fn unreadable(path: &Path, file: &Path, base: &Path, error: &std::io::Error) -> String {
    let base = if base.as_os_str().is_empty() { Path::new(".") } else { base };
    let base = std::fs::canonicalize(base).unwrap_or_else(|_| base.to_owned());
    format!(
        "cannot read {}: {error}; `rules_file: {}` is relative to the directory of the test file, {}",
        path.display(),
        file.display(),
        base.display()
    )
}

/// The state of a case between its steps.
struct CaseRun {
    limiter: TestLimiter,
    /// Reservations by the names that the steps give them; `None` if nothing was reserved.
    reservations: BTreeMap<String, Option<ReservationId>>,
}

impl CaseRun {
    fn step(&mut self, step: &Step) -> Result<Actual, String> {
        let domain = match &step.domain {
            Some(domain) => domain.clone(),
            None => {
                let rules = self.limiter.rules();
                rules.domains().next().map_or_else(String::new, |domain| domain.name().to_owned())
            }
        };
        let (has_request, cost) = (step.descriptors.is_some() || step.attributes.is_some(), step.cost);
        if !step.signals.is_empty() {
            let signals = step.signals.iter().map(|(name, value)| (name.as_str(), *value));
            self.limiter.rehearse_signals(&domain, signals).map_err(|error| error.to_string())?;
            let is_alone = step.reserve.is_none() && step.settle.is_none() && step.cancel.is_none();
            if is_alone && !has_request {
                return Ok(Actual { overall: "OK", ..Actual::default() });
            }
        }
        if step.deadline_ms.is_some() && step.reserve.is_none() {
            return Err("`deadline_ms` is of a reservation; add `reserve: NAME`".to_owned());
        }
        match (&step.reserve, &step.settle, &step.cancel) {
            (None, None, None) => self.check(domain, step),
            (Some(name), None, None) => self.reserve(&domain, &name.0, step),
            (None, Some(name), None) if !has_request => {
                let cost = cost.ok_or("settling needs the actual `cost`")?;
                let id = self.reserved(&name.0)?;
                Ok(from_closed(pollster::block_on(self.limiter.settle(id, cost))))
            }
            (None, None, Some(name)) if !has_request && cost.is_none() => {
                let id = self.reserved(&name.0)?;
                Ok(from_closed(pollster::block_on(self.limiter.cancel(id))))
            }
            (None, Some(_), None) => {
                Err("`settle` takes only `cost`; put the request in another step".to_owned())
            }
            (None, None, Some(_)) => {
                Err("`cancel` takes no request and no cost; put them in another step".to_owned())
            }
            _ => Err("write one of `reserve`, `settle` and `cancel`".to_owned()),
        }
    }

    /// Returns the percent of each tier's limits of the step's domain that apply.
    fn limits_percent(&self, step: &Step) -> BTreeMap<String, f64> {
        let rules = self.limiter.rules();
        let domain =
            step.domain.as_deref().or_else(|| rules.domains().next().map(tollgate_rules::Domain::name));
        let tiers = self.limiter.adapted_tiers().into_iter();
        let own = tiers.filter(|tier| Some(tier.domain.as_str()) == domain);
        own.map(|tier| (tier.tier, f64::from(tier.thousandths) / 10.0)).collect()
    }

    /// Returns what the domain's `overload` section makes of the step's request.
    fn overload(&self, step: &Step) -> Option<(String, String)> {
        let rules = self.limiter.rules();
        let mut domains = rules.domains();
        let domain =
            domains.find(|domain| step.domain.as_deref().is_none_or(|name| name == domain.name()))?;
        let mut pairs = attributes(step);
        pairs.extend(step.descriptors.iter().flatten().flat_map(entries));
        let tier = pairs.iter().find(|(key, _)| *key == domain.tier_key()).map(|(_, tier)| *tier);
        let explained = domain.explain_overload(&pairs, tier)?;
        Some((explained.priority.to_string(), explained.guarantee.unwrap_or_else(|| "none".to_owned())))
    }

    fn check(&self, domain: String, step: &Step) -> Result<Actual, String> {
        match (&step.descriptors, &step.attributes) {
            (Some(descriptors), None) => Ok(by_descriptors(&self.limiter, domain, descriptors, step)),
            (None, Some(_)) => {
                let pairs = attributes(step);
                let check =
                    Check::attributes(&domain, &pairs).with_cost(step.cost.map_or(Cost::ONE, Cost::new));
                Ok(by_attributes(&pollster::block_on(self.limiter.check(&check))))
            }
            _ => Err("no request; write `attributes` or `descriptors`, one of them".to_owned()),
        }
    }

    fn reserve(&mut self, domain: &str, name: &str, step: &Step) -> Result<Actual, String> {
        let cost = step.cost.map_or(Cost::ONE, Cost::new);
        let pairs = attributes(step);
        let descriptors = step.descriptors.as_deref().unwrap_or_default();
        if descriptors.iter().any(|one| one.limit.is_some()) {
            return Err("an inline `limit` cannot be reserved; write it as a rule".to_owned());
        }
        let entries: Vec<Vec<(&str, &str)>> = descriptors.iter().map(entries).collect();
        let descriptors: Vec<Descriptor<'_>> = descriptors
            .iter()
            .zip(&entries)
            .map(|(one, entries)| Descriptor { entries, hits: one.hits.map(hits), limit: None })
            .collect();
        let check = match (&step.descriptors, &step.attributes) {
            (Some(_), None) => Check::descriptors(domain, &descriptors),
            (None, Some(_)) => Check::attributes(domain, &pairs),
            _ => return Err("no request; write `attributes` or `descriptors`, one of them".to_owned()),
        };
        let within = TimeDelta::from_millis(step.deadline_ms.unwrap_or(DEADLINE_MS));
        let check = check.with_cost(cost);
        match pollster::block_on(self.limiter.reserve(&check, within, None)) {
            Ok(made) => {
                self.reservations.insert(name.to_owned(), made.id);
                Ok(by_attributes(&made.decision))
            }
            Err(error) => Ok(refused(error.to_string())),
        }
    }

    fn reserved(&self, name: &str) -> Result<ReservationId, String> {
        match self.reservations.get(name) {
            Some(Some(id)) => Ok(*id),
            Some(None) => {
                Err(format!("`{name}` holds nothing: its request was denied, or no limit counts it"))
            }
            None => Err(format!("no earlier step reserves `{name}`; add `reserve: {name}` to one")),
        }
    }
}

fn attributes(step: &Step) -> Vec<(&str, &str)> {
    let pairs = step.attributes.iter().flatten();
    pairs.map(|(key, value)| (key.as_str(), value.0.as_str())).collect()
}

fn entries(descriptor: &StepDescriptor) -> Vec<(&str, &str)> {
    descriptor.entries.iter().map(|(key, value)| (key.0.as_str(), value.0.as_str())).collect()
}

fn hits(hits: i64) -> Cost {
    if hits < 0 { Cost::refund(hits.unsigned_abs()) } else { Cost::new(hits.unsigned_abs()) }
}

fn refused(error: String) -> Actual {
    Actual { overall: "ERROR", error: Some(error), ..Actual::default() }
}

fn by_attributes(decision: &Decision) -> Actual {
    let statuses = decision.limits.iter().map(|limit| attribute_status(decision, limit)).collect();
    Actual { statuses, ..from_decision(decision) }
}

fn from_closed(closed: Result<ClosedReservation, SettleError>) -> Actual {
    let closed = match closed {
        Ok(closed) => closed,
        Err(error) => return refused(error.to_string()),
    };
    let statuses = closed.limits.iter().map(|left| ActualStatus {
        code: "OK",
        remaining: left.remaining,
        limit: Some(left.limit.rate().count),
        unit: None,
        reset: Some(left.reset_after.ceil_secs()),
        name: left.rule.clone(),
    });
    let counters =
        closed.limits.iter().map(|left| counter(&left.rule, &left.limit, left.remaining, left.reset_after));
    Actual { overall: "OK", statuses: statuses.collect(), counters: counters.collect(), ..Actual::default() }
}

fn by_descriptors(
    limiter: &TestLimiter,
    domain: String,
    descriptors: &[StepDescriptor],
    step: &Step,
) -> Actual {
    let request = RateLimitRequest {
        domain,
        descriptors: descriptors.iter().map(wire_descriptor).collect(),
        hits_addend: step.hits.unwrap_or(0),
    };
    match pollster::block_on(rls::decide(limiter, "rls", &request, None)) {
        Err(bad) => refused(bad.to_string()),
        Ok(decision) => {
            let RateLimitResponse { statuses, .. } = rls::response(&decision);
            let statuses = statuses.into_iter().map(wire_status).collect();
            Actual { statuses, ..from_decision(&decision) }
        }
    }
}

fn from_decision(decision: &Decision) -> Actual {
    Actual {
        overall: if decision.is_allowed() { "OK" } else { "OVER_LIMIT" },
        denied_by: decision.denied_by_name().map(str::to_owned),
        degraded_by: decision.degraded_by.map(|by| decision.name(by).to_owned()),
        warned_by: decision.warned_by.map(|by| decision.name(by).to_owned()),
        delay_ms: decision.delay().ceil_millis(),
        retry_after_ms: decision.retry_after().map(TimeDelta::ceil_millis),
        counters: match decision.limits.is_empty() {
            true => vec!["no limit applies".to_owned()],
            false => decision.limits.iter().map(|limit| held(decision, limit)).collect(),
        },
        ..Actual::default()
    }
}

/// Returns what a limit's counter held when the request was decided.
fn held(decision: &Decision, status: &LimitStatus) -> String {
    let name = decision.limit_name(status);
    let Some(limit) = decision.limit(status) else { return format!("`{name}`: unknown") };
    let mut held = counter(name, &limit.limit, status.outcome.remaining, status.outcome.reset_after);
    match status.outcome.verdict {
        Verdict::Denied { retry_after: Some(wait) } => {
            held.push_str(&format!("; it denied, and would allow {} later", shown(wait)));
        }
        Verdict::Denied { retry_after: None } => held.push_str("; it denied, and never allows this cost"),
        Verdict::Allowed { .. } | Verdict::Unknown => {}
    }
    let role = match status.role {
        Role::Live => return held,
        Role::Shadow => "in shadow mode",
        Role::Unenforced => "not enforced for this caller (`enforce`)",
        Role::Candidate => "a candidate",
        Role::Quota => "a quota: one of them must fit",
    };
    held.push_str(&format!(" ({role})"));
    held
}

fn counter(name: &str, limit: &Limit, remaining: u64, reset_after: TimeDelta) -> String {
    let (capacity, reset) = (limit.capacity(), shown(reset_after));
    let used = capacity.saturating_sub(remaining);
    format!("`{name}` held {used} of {capacity} ({limit}), unused again in {reset}")
}

/// Returns a time in whole milliseconds: to the microsecond it is noise.
fn shown(time: TimeDelta) -> TimeDelta {
    TimeDelta::from_millis(time.ceil_millis())
}

fn attribute_status(decision: &Decision, limit: &LimitStatus) -> ActualStatus {
    let facts = decision.limit(limit);
    let unit = facts.and_then(|facts| facts.unit);
    ActualStatus {
        code: if decision.is_over(limit) { "OVER_LIMIT" } else { "OK" },
        remaining: limit.outcome.remaining,
        limit: facts.map(|facts| facts.limit.rate().count),
        unit: Some(unit.map_or("UNKNOWN", tollgate_rules::Unit::name)),
        reset: Some(limit.outcome.reset_after.ceil_secs()),
        name: decision.limit_name(limit).to_owned(),
    }
}

fn wire_descriptor(descriptor: &StepDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor {
        entries: descriptor
            .entries
            .iter()
            .map(|(key, value)| Entry { key: key.0.clone(), value: value.0.clone() })
            .collect(),
        limit: descriptor.limit.as_ref().map(|limit| RateLimitOverride {
            requests_per_unit: limit.requests_per_unit,
            unit: WireUnit::from_str_name(&limit.unit.to_ascii_uppercase()).unwrap_or_default().into(),
        }),
        hits_addend: descriptor.hits.map(i64::unsigned_abs),
        is_negative_hits: descriptor.hits.is_some_and(|hits| hits < 0),
    }
}

fn wire_status(status: DescriptorStatus) -> ActualStatus {
    let limit = status.current_limit;
    ActualStatus {
        code: match Code::try_from(status.code) {
            Ok(Code::Ok) => "OK",
            Ok(Code::OverLimit) => "OVER_LIMIT",
            _ => "UNKNOWN",
        },
        remaining: status.limit_remaining.into(),
        limit: limit.as_ref().map(|limit| limit.requests_per_unit.into()),
        unit: limit.as_ref().map(|limit| WireUnit::try_from(limit.unit).unwrap_or_default().as_str_name()),
        reset: status.duration_until_reset.map(|reset| reset.seconds.unsigned_abs()),
        name: limit.map_or_else(String::new, |limit| limit.name),
    }
}
