//! Rate limit filters of Envoy, for HTTP and for connections: their settings, each on its own.

use super::actions::{Entry, EntryValue, MAX_STAGE, Owner, Template, has_operator};
use super::cluster::Clusters;
use super::finding::Report;
use super::proto::{field, flag, list, number, seconds, text, unknown_fields};
use super::routes::Limits;
use serde_json::Value;

pub(super) const HTTP_FILTER: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimit";
pub(super) const NETWORK_FILTER: &str = "envoy.extensions.filters.network.ratelimit.v3.RateLimit";
/// The name that most configurations give the filter.
const USUAL_NAME: &str = "envoy.filters.http.ratelimit";

const HTTP_FIELDS: [&str; 18] = [
    "domain",
    "stage",
    "request_type",
    "timeout",
    "failure_mode_deny",
    "failure_mode_deny_percent",
    "rate_limited_as_resource_exhausted",
    "rate_limit_service",
    "enable_x_ratelimit_headers",
    "enable_retry_after_header",
    "disable_x_envoy_ratelimited_header",
    "rate_limited_status",
    "response_headers_to_add",
    "status_on_error",
    "stat_prefix",
    "filter_enabled",
    "filter_enforced",
    "rate_limits",
];

/// A rate limit filter for HTTP.
#[derive(Debug)]
pub(super) struct HttpFilter {
    pub(super) place: String,
    /// Name in the list of filters, by which routes have settings for it.
    pub(super) name: String,
    pub(super) domain: String,
    pub(super) stage: u64,
    /// Whether it is disabled, except on routes that enable it.
    pub(super) is_disabled: bool,
    /// Its own `rate_limits`.
    pub(super) limits: Limits,
    config: Value,
}

/// A rate limit filter for connections.
#[derive(Debug)]
pub(super) struct NetworkFilter {
    pub(super) place: String,
    pub(super) domain: String,
    pub(super) templates: Vec<Template>,
    config: Value,
}

/// A share of requests, which the runtime may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    All,
    Some,
    /// None, unless the runtime has another share.
    NoneByDefault,
    None,
}

/// Reads a RuntimeFractionalPercent; without one, all.
pub(super) fn share(config: &Value, name: &str) -> Share {
    let Some(setting) = field(config, name) else { return Share::All };
    let default = field(setting, "default_value");
    let numerator = default.and_then(|default| number(default, "numerator")).unwrap_or(0);
    let whole = match default.and_then(|default| text(default, "denominator")) {
        Some("TEN_THOUSAND") => 10_000,
        Some("MILLION") => 1_000_000,
        _ => 100,
    };
    match (numerator, text(setting, "runtime_key")) {
        (0, None) => Share::None,
        (0, Some(_)) => Share::NoneByDefault,
        (numerator, _) if numerator < whole => Share::Some,
        _ => Share::All,
    }
}

impl HttpFilter {
    /// Reads a filter: its settings, and the entry of the list that has them, if it is known.
    pub(super) fn read(config: &Value, entry: Option<&Value>, place: &str, report: &mut Report) -> Self {
        Self {
            place: place.to_owned(),
            name: entry.and_then(|entry| text(entry, "name")).unwrap_or(USUAL_NAME).to_owned(),
            domain: text(config, "domain").unwrap_or_default().to_owned(),
            stage: number(config, "stage").unwrap_or(0),
            is_disabled: entry.is_some_and(|entry| flag(entry, "disabled")),
            limits: Limits::read_of(config, place, Owner::Filter, report),
            config: config.clone(),
        }
    }

    /// Returns why the filter never asks, whatever the route.
    pub(super) fn why_off(&self) -> Option<&'static str> {
        (share(&self.config, "filter_enabled") == Share::None).then_some("its `filter_enabled` is 0 %")
    }

    pub(super) fn check(&self, clusters: &Clusters, report: &mut Report) {
        let Self { place, config, domain, stage, .. } = self;
        for unknown in unknown_fields(config, &HTTP_FIELDS) {
            match unknown.meant {
                Some(meant) => report.problem(
                    place,
                    format!("Envoy refuses `{}`: the filter has no such field", unknown.name),
                    format!("did you mean `{meant}`?"),
                ),
                None => report.note(
                    place,
                    format!("`{}` is not known here; Envoy refuses what it does not know", unknown.name),
                ),
            }
        }
        if *stage > MAX_STAGE {
            report.problem(
                place,
                format!("Envoy refuses `stage: {stage}`, which is above {MAX_STAGE}"),
                "more filters than that need `rate_limits` of their own",
            );
        }
        check_service(config, domain, place, clusters, report);
        match text(config, "request_type") {
            Some("internal") => report.warning(
                place,
                "`request_type: internal`: only internal requests (x-envoy-internal) are limited, not those from outside",
                "remove it to limit all requests",
            ),
            Some("external") => report.note(
                place,
                "`request_type: external`: internal requests (x-envoy-internal) are not limited",
            ),
            None | Some("both") => {}
            Some(other) => report.problem(
                place,
                format!("Envoy refuses `request_type: {other}`"),
                "write internal, external or both",
            ),
        }
        match share(config, "filter_enabled") {
            Share::NoneByDefault => report.warning(
                place,
                "`filter_enabled` is 0 %: Envoy asks only if its runtime has another share",
                "set the share that is meant",
            ),
            Share::Some => {
                report.note(place, "`filter_enabled`: Envoy asks about a share of the requests only");
            }
            // Reported as a filter that sends nothing.
            Share::All | Share::None => {}
        }
        match share(config, "filter_enforced") {
            Share::None | Share::NoneByDefault => report.warning(
                place,
                "`filter_enforced` is 0 %: Envoy asks, and lets denied requests pass",
                "set the share that is meant",
            ),
            Share::Some => report.note(place, "`filter_enforced`: only a share of the denials is enforced"),
            Share::All => {}
        }
        if text(config, "enable_x_ratelimit_headers").unwrap_or("OFF") == "OFF" {
            report.note(
                place,
                "clients get RateLimit, Retry-After and a body, but no x-ratelimit headers; `enable_x_ratelimit_headers: DRAFT_VERSION_03` adds them",
            );
        }
    }
}

impl NetworkFilter {
    pub(super) fn read(config: &Value, place: &str) -> Self {
        let descriptors = list(config, "descriptors").iter().enumerate();
        let template = |(at, descriptor): (usize, &Value)| Template {
            place: format!("{place}.descriptors[{at}]"),
            stage: 0,
            entries: list(descriptor, "entries").iter().filter_map(entry).collect(),
            unknown: None,
            has_limit: field(descriptor, "limit").is_some(),
        };
        Self {
            place: place.to_owned(),
            domain: text(config, "domain").unwrap_or_default().to_owned(),
            templates: descriptors.map(template).collect(),
            config: config.clone(),
        }
    }

    pub(super) fn check(&self, clusters: &Clusters, report: &mut Report) {
        let Self { place, config, domain, templates } = self;
        check_service(config, domain, place, clusters, report);
        report.note(place, "the filter limits connections, not requests");
        if templates.is_empty() {
            report.problem(
                place,
                "the filter has no `descriptors`; Envoy refuses it",
                "add `descriptors: [{entries: [{key: …, value: …}]}]`",
            );
        }
    }
}

fn entry(entry: &Value) -> Option<Entry> {
    let value = text(entry, "value")?;
    // This filter replaces operators by their values.
    let value = if has_operator(value) { EntryValue::Any } else { EntryValue::Fixed(value.to_owned()) };
    Some(Entry::new(text(entry, "key")?, value))
}

/// Checks whom the filter asks, how long it waits, and what it does without an answer.
fn check_service(config: &Value, domain: &str, place: &str, clusters: &Clusters, report: &mut Report) {
    if domain.is_empty() {
        report.problem(
            place,
            "the filter has no `domain`; Envoy refuses it",
            "set it to the domain of the rules",
        );
    }
    let asked = match field(config, "rate_limit_service") {
        None => {
            report.problem(
                place,
                "the filter has no `rate_limit_service`",
                "add `rate_limit_service: {transport_api_version: V3, grpc_service: {envoy_grpc: {cluster_name: tollgate}}}`",
            );
            "an unknown service".to_owned()
        }
        Some(service) => {
            // Without a version Envoy uses V3, too.
            if let Some(version @ "V2") = text(service, "transport_api_version") {
                report.problem(
                    place,
                    format!("`transport_api_version: {version}` is not V3, the only version that Tollgate and Envoy support"),
                    "write `transport_api_version: V3`",
                );
            }
            clusters.check(field(service, "grpc_service"), place, report)
        }
    };
    let timeout = field(config, "timeout");
    let waits = match timeout.map(|timeout| timeout.as_str().and_then(seconds)) {
        None => {
            report.warning(
                place,
                "no `timeout`: Envoy waits 20 ms for a decision",
                "write `timeout: 0.02s`, or more if Tollgate or its store is far away",
            );
            "20 ms".to_owned()
        }
        Some(None) => {
            let written = timeout.map(ToString::to_string).unwrap_or_default();
            report.problem(
                place,
                format!("`timeout: {}` is no duration", written.trim_matches('"')),
                "write seconds, as in `timeout: 0.02s`",
            );
            return;
        }
        Some(Some(0.0)) => {
            report.warning(
                place,
                "a timeout of 0 is none: Envoy waits for a slow server without end, and requests with it",
                "write `timeout: 0.02s`, or more if Tollgate or its store is far away",
            );
            "without end".to_owned()
        }
        Some(Some(time)) => {
            if time < 0.005 {
                let fix = "give it at least 0.005s: a decision over Redis takes milliseconds";
                report.warning(place, "the timeout is so short that decisions are missed", fix);
            } else if time > 1.0 {
                let fix = "0.02s to 0.2s is usual: every request waits that long while nothing answers";
                report.warning(place, "the timeout is long", fix);
            }
            timeout.and_then(Value::as_str).unwrap_or_default().to_owned()
        }
    };
    let without = if flag(config, "failure_mode_deny") {
        "responds 500 (failure_mode_deny)"
    } else {
        "lets the request pass (failure_mode_deny is off)"
    };
    report.note(
        place,
        format!(
            "Envoy asks {asked} about domain `{domain}` and waits {waits}; without an answer it {without}"
        ),
    );
}
