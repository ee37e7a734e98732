//! Test runner: runs descriptor steps like gRPC requests and attribute steps like HTTP requests.

use super::expect::{Actual, ActualStatus, differences};
use super::file::{Case, Step, StepDescriptor};
use std::path::Path;
use std::sync::Arc;
use tollgate_core::{Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, Limiter};
use tollgate_rules::{Ruleset, Source};
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

/// Runs a case. The error lists the differences.
pub(crate) fn run(case: &Case, base: &Path) -> Result<(), String> {
    let loaded = sources(case, base).and_then(|sources| {
        Ruleset::load(&sources, &crate::config::options(case.profile)).map_err(|errors| errors.to_string())
    });
    let rules = match (loaded, &case.error) {
        (Ok(_), Some(text)) => return Err(format!("expected loading to fail with `{text}`, but it loaded")),
        (Err(error), Some(text)) if error.contains(text.as_str()) => return Ok(()),
        (Err(error), Some(text)) => {
            return Err(format!("expected loading to fail with `{text}`, but it failed with\n{error}"));
        }
        (Err(error), None) => return Err(format!("the rules cannot be used\n{error}")),
        (Ok(rules), None) => rules,
    };
    if case.steps.is_empty() {
        return Err("the case tests nothing; add `steps`, or `error` if the rules must not load".to_owned());
    }
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(case.start)));
    let memory = MemoryConfig::with_bytes(8 << 20);
    let store = MemoryStore::new(&memory, Arc::clone(&clock)).map_err(|error| error.to_string())?;
    let time: Arc<dyn tollgate_core::Clock> = Arc::clone(&clock) as _;
    let limiter = Limiter::new(Arc::new(rules), store, time).with_global_shadow(case.global_shadow);
    let mut report = Vec::new();
    for (number, step) in case.steps.iter().enumerate() {
        if let Some(advance) = step.advance {
            clock.advance(advance.0);
        }
        let repeat = step.repeat.unwrap_or(1).max(1);
        let place = match repeat {
            1 => format!("step {}", number + 1),
            _ => format!("step {}, repetition {repeat} of {repeat}", number + 1),
        };
        let mut actual = run_step(&limiter, step).map_err(|error| format!("{place}: {error}"))?;
        for _ in 1..repeat {
            actual = run_step(&limiter, step).map_err(|error| format!("{place}: {error}"))?;
        }
        let found = differences(&step.expect, &actual);
        report.extend(found.into_iter().map(|line| format!("{place}: {line}")));
    }
    if report.is_empty() { Ok(()) } else { Err(report.join("\n")) }
}

fn sources(case: &Case, base: &Path) -> Result<Vec<Source>, String> {
    let mut sources = Vec::new();
    match (&case.rules, &case.rules_file) {
        (Some(text), None) => sources.push(Source { name: "rules".to_owned(), text: text.clone() }),
        (None, Some(file)) => {
            let path = base.join(file);
            let text =
                std::fs::read_to_string(&path).map_err(|error| unreadable(&path, file, base, &error))?;
            sources.push(Source { name: path.display().to_string(), text });
        }
        _ => return Err("write either `rules` or `rules_file`".to_owned()),
    }
    for (number, text) in case.extra_rules.iter().enumerate() {
        sources.push(Source { name: format!("extra_rules[{number}]"), text: text.clone() });
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

fn run_step(limiter: &TestLimiter, step: &Step) -> Result<Actual, String> {
    let rules = limiter.rules();
    let domain = match &step.domain {
        Some(domain) => domain.clone(),
        None => rules.domains().next().map_or_else(String::new, |domain| domain.name().to_owned()),
    };
    match (&step.descriptors, &step.attributes) {
        (Some(descriptors), None) => Ok(by_descriptors(limiter, domain, descriptors, step)),
        (None, Some(attributes)) => {
            let pairs: Vec<(&str, &str)> =
                attributes.iter().map(|(key, value)| (key.as_str(), value.0.as_str())).collect();
            let check = Check::attributes(&domain, &pairs).with_cost(step.cost.map_or(Cost::ONE, Cost::new));
            let decision = pollster::block_on(limiter.check(&check));
            let statuses = decision.limits.iter().map(|limit| attribute_status(&decision, limit)).collect();
            Ok(Actual { statuses, ..from_decision(&decision) })
        }
        _ => Err("no request; write `attributes` or `descriptors`, one of them".to_owned()),
    }
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
        Err(bad) => Actual { overall: "ERROR", error: Some(bad.to_string()), ..Actual::default() },
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
        ..Actual::default()
    }
}

fn attribute_status(decision: &Decision, limit: &tollgate_engine::LimitStatus) -> ActualStatus {
    let over = limit.outcome.verdict.is_denied() && limit.role.is_live();
    let facts = decision.limit(limit);
    let unit = facts.and_then(|facts| facts.unit);
    ActualStatus {
        code: if over { "OVER_LIMIT" } else { "OK" },
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
