//! The rate limit header fields. Everything that a later version of the draft may change is in `draft_11`.

use super::field_value::FieldValue;
use super::{DecisionSummary, Dialect, Disposition, LegacyHeaders, Policy, ResponseConfig};
use crate::headers::HeaderSink;
use http::header::{HeaderName, RETRY_AFTER};
use tollgate_core::Timestamp;
use tollgate_engine::Window;

static LIMIT: HeaderName = HeaderName::from_static("ratelimit");
static POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
static X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
static X_POLICY: HeaderName = HeaderName::from_static("x-ratelimit-policy");
static X_CONCURRENCY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-concurrency-limit");
static X_CONCURRENCY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-concurrency-remaining");
static X_BUCKET: HeaderName = HeaderName::from_static("x-ratelimit-bucket");
static X_DENIED_BY: HeaderName = HeaderName::from_static("x-ratelimit-denied-by");
static X_REASON: HeaderName = HeaderName::from_static("x-ratelimit-reason");
static X_DECISION: HeaderName = HeaderName::from_static("x-ratelimit-decision-id");
static X_DEGRADED: HeaderName = HeaderName::from_static("x-ratelimit-degraded");
static X_WARNING: HeaderName = HeaderName::from_static("x-ratelimit-warning");

pub(super) fn write(
    settings: &ResponseConfig,
    facts: &DecisionSummary<'_>,
    now: Timestamp,
    headers: &mut impl HeaderSink,
) {
    match settings.ratelimit {
        Dialect::Draft11 => draft_11(facts, headers),
        Dialect::None => {}
    }
    if settings.legacy != LegacyHeaders::None {
        legacy(settings.legacy, facts, facts.at.unwrap_or(now), headers);
    }
    if let Some(bucket) = facts.scope.and_then(|scope| scope.bucket.as_deref()) {
        headers.put(&X_BUCKET, bucket.as_bytes());
    }
    if facts.disposition != Disposition::Allowed {
        if let Some(wait) = facts.retry_after {
            number(headers, &RETRY_AFTER, wait);
        }
        if let Some(rule) = facts.denied_by.filter(|_| settings.denied_by) {
            insert_name(headers, &X_DENIED_BY, rule);
        }
        if let Some(reason) = facts.reason.filter(|_| settings.denied_by) {
            insert_name(headers, &X_REASON, reason);
        }
        // For a support request: operators can look the decision up by its ID.
        if let Some(decision) = facts.decision {
            headers.put(&X_DECISION, &decision.digits());
        }
    }
    write_markers(facts, headers);
}

/// Writes the markers of an allowed request: a denial is not served, in a reduced form or otherwise.
pub(super) fn write_markers(facts: &DecisionSummary<'_>, headers: &mut impl HeaderSink) {
    if facts.disposition != Disposition::Allowed {
        return;
    }
    for (field, rule) in [(&X_DEGRADED, facts.degraded_by), (&X_WARNING, facts.warned_by)] {
        if let Some(rule) = rule {
            insert_name(headers, field, rule);
        }
    }
}

fn insert_name(headers: &mut impl HeaderSink, field: &HeaderName, rule: &str) {
    insert(headers, field, FieldValue::default().name(rule));
}

fn insert(headers: &mut impl HeaderSink, field: &HeaderName, line: &FieldValue) {
    if !line.is_empty() {
        headers.put(field, line.bytes());
    }
}

fn number(headers: &mut impl HeaderSink, field: &HeaderName, number: u64) {
    headers.put(field, itoa::Buffer::new().format(number).as_bytes());
}

/// `RateLimit-Policy: "a";q=100;w=60, "b";q=9;qu="concurrent-requests"` and `RateLimit: "a";r=50;t=30, "b";r=8`. A limit of
/// requests at once has an item of its own, without a time: a permit is free when another request ends.
fn draft_11(facts: &DecisionSummary<'_>, headers: &mut impl HeaderSink) {
    let mut line = FieldValue::default();
    for policy in &facts.policies {
        if !line.is_empty() {
            line.text(", ");
        }
        quoted_name(&mut line, policy).text(";q=").number(policy.quota);
        if let Some(seconds) = policy.seconds() {
            line.text(";w=").number(seconds);
        }
        if policy.window == Window::Concurrent {
            line.text(";qu=\"concurrent-requests\"");
        }
    }
    insert(headers, &POLICY, &line);
    let mut line = FieldValue::default();
    if let Some(rate) = facts.nearest_rate() {
        quoted_name(&mut line, rate).text(";r=").number(rate.remaining);
        if rate.has_reset() {
            line.text(";t=").number(rate.reset);
        }
    }
    if let Some(permits) = facts.nearest_concurrency() {
        if !line.is_empty() {
            line.text(", ");
        }
        quoted_name(&mut line, permits).text(";r=").number(permits.remaining);
    }
    insert(headers, &LIMIT, &line);
}

fn quoted_name<'l>(line: &'l mut FieldValue, policy: &Policy<'_>) -> &'l mut FieldValue {
    line.text("\"").quoted(policy.rule);
    if policy.is_one_of_several {
        // Rare enough to allocate.
        line.text("/").text(&policy.window.to_string());
    }
    line.text("\"")
}

fn legacy(form: LegacyHeaders, facts: &DecisionSummary<'_>, at: Timestamp, headers: &mut impl HeaderSink) {
    if let Some(rate) = facts.nearest_rate() {
        number(headers, &X_LIMIT, rate.quota);
        number(headers, &X_REMAINING, rate.remaining);
        if rate.has_reset() {
            let reset = match form {
                LegacyHeaders::Epoch => rate.reset_epoch(at),
                LegacyHeaders::Delta | LegacyHeaders::None => rate.reset,
            };
            number(headers, &X_RESET, reset);
        }
    }
    if let Some(permits) = facts.nearest_concurrency() {
        number(headers, &X_CONCURRENCY_LIMIT, permits.quota);
        number(headers, &X_CONCURRENCY_REMAINING, permits.remaining);
    }
    let mut line = FieldValue::default();
    for policy in facts.policies.iter().filter(|policy| policy.window != Window::Concurrent) {
        if !line.is_empty() {
            line.text(", ");
        }
        line.number(policy.quota);
        if let Some(seconds) = policy.seconds() {
            line.text(";w=").number(seconds);
        }
    }
    insert(headers, &X_POLICY, &line);
}
