//! Comparison of a step's actual result with the expected one.

use super::file::{Expect, ExpectStatus, Overall};
use std::collections::BTreeMap;
use std::fmt::Display;

/// Actual result of a step.
#[derive(Debug, Default)]
pub(crate) struct Actual {
    pub(crate) overall: &'static str,
    pub(crate) error: Option<String>,
    pub(crate) statuses: Vec<ActualStatus>,
    pub(crate) denied_by: Option<String>,
    pub(crate) degraded_by: Option<String>,
    pub(crate) warned_by: Option<String>,
    pub(crate) delay_ms: u64,
    pub(crate) retry_after_ms: Option<u64>,
    /// Percent of each tier's limits that apply, where limits follow signals.
    pub(crate) limits_percent: BTreeMap<String, f64>,
    /// Priority and guarantee by the domain's `overload` section, if it has one.
    pub(crate) overload: Option<(String, String)>,
    /// What each counter held, one line each, for a step that fails.
    pub(crate) counters: Vec<String>,
}

#[derive(Debug, Default)]
pub(crate) struct ActualStatus {
    pub(crate) code: &'static str,
    pub(crate) remaining: u64,
    pub(crate) limit: Option<u64>,
    pub(crate) unit: Option<&'static str>,
    pub(crate) reset: Option<u64>,
    pub(crate) name: String,
}

/// Returns the differences, one line each.
pub(crate) fn differences(expected: &Expect, actual: &Actual) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(overall) = expected.overall.filter(|overall| overall.name() != actual.overall) {
        let by = actual.denied_by.as_ref().map(|rule| format!(" by `{rule}`")).unwrap_or_default();
        found.push(format!("overall: expected {}, got {}{by}", overall.name(), actual.overall));
    }
    if let Some(text) = &expected.error {
        let error = actual.error.as_deref().unwrap_or("");
        if !error.contains(text.as_str()) {
            found.push(format!("error: expected one that contains `{text}`, got `{error}`"));
        }
    } else if let Some(error) = &actual.error
        && expected.overall != Some(Overall::Error)
    {
        found.push(format!("error: expected none, got `{error}`"));
    }
    let named = [
        ("denied_by", &expected.denied_by, &actual.denied_by),
        ("degraded_by", &expected.degraded_by, &actual.degraded_by),
        ("warned_by", &expected.warned_by, &actual.warned_by),
    ];
    for (name, expected, actual) in named {
        if let Some(expected) = expected {
            field(&mut found, name, expected, actual.as_deref().unwrap_or("nothing"));
        }
    }
    if let Some(delay) = expected.delay_ms {
        field(&mut found, "delay_ms", delay, actual.delay_ms);
    }
    if let Some(retry) = expected.retry_after_ms {
        let got = actual.retry_after_ms.map_or_else(|| "never".to_owned(), |ms| ms.to_string());
        field(&mut found, "retry_after_ms", retry, got);
    }
    let got = actual.overload.as_ref();
    let none = || "no `overload` section".to_owned();
    if let Some(priority) = &expected.priority {
        field(&mut found, "priority", priority, got.map_or_else(none, |(priority, _)| priority.clone()));
    }
    if let Some(guarantee) = &expected.guarantee {
        field(&mut found, "guarantee", guarantee, got.map_or_else(none, |(_, guarantee)| guarantee.clone()));
    }
    for (tier, percent) in expected.limits_percent.iter().flatten() {
        let got = actual.limits_percent.get(tier).map_or_else(|| "none".to_owned(), ToString::to_string);
        field(&mut found, &format!("limits_percent.{tier}"), percent, got);
    }
    if let Some(statuses) = &expected.statuses {
        field(&mut found, "number of statuses", statuses.len(), actual.statuses.len());
        for (at, (expected, actual)) in statuses.iter().zip(&actual.statuses).enumerate() {
            status(&mut found, at, expected, actual);
        }
    }
    found
}

fn status(found: &mut Vec<String>, at: usize, expected: &ExpectStatus, actual: &ActualStatus) {
    let place = |name: &str| format!("statuses[{at}].{name}");
    let number = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), |number| number.to_string());
    if let Some(code) = expected.code {
        field(found, &place("code"), code.name(), actual.code);
    }
    if let Some(remaining) = expected.remaining {
        field(found, &place("remaining"), remaining, actual.remaining);
    }
    if let Some(limit) = expected.limit {
        field(found, &place("limit"), limit, number(actual.limit));
    }
    if let Some(unit) = &expected.unit {
        field(found, &place("unit"), unit.to_ascii_uppercase(), actual.unit.unwrap_or("none"));
    }
    if let Some(reset) = expected.reset {
        field(found, &place("reset"), reset, number(actual.reset));
    }
    if let Some(name) = &expected.name {
        field(found, &place("name"), name, &actual.name);
    }
    if let Some(has_limit) = expected.has_limit {
        field(found, &place("has_limit"), has_limit, actual.limit.is_some());
    }
}

fn field(found: &mut Vec<String>, name: &str, expected: impl Display, actual: impl Display) {
    let (expected, actual) = (expected.to_string(), actual.to_string());
    if expected != actual {
        found.push(format!("{name}: expected {expected}, got {actual}"));
    }
}
