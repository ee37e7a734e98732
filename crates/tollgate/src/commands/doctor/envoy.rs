//! Envoy's configuration: finds rate limit filters, actions and clusters anywhere in a tree, so that a bootstrap file, a
//! patch of Istio and a fragment are read alike, and checks how they fit together.

use super::actions::{Template, template};
use super::finding::Report;
use serde_json::Value;
use std::borrow::Cow;

const HTTP_FILTER: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimit";
const NETWORK_FILTER: &str = "envoy.extensions.filters.network.ratelimit.v3.RateLimit";
const ROUTER: &str = "envoy.extensions.filters.http.router.v3.Router";
/// Maximum depth of a tree.
const MAX_DEPTH: usize = 128;

/// What rate limiting consists of.
#[derive(Debug, Default)]
pub(super) struct EnvoyParts {
    pub(super) filters: Vec<Filter>,
    pub(super) templates: Vec<Template>,
    clusters: Vec<Cluster>,
    /// Whether routes or clusters may also come from elsewhere.
    is_partial: bool,
}

/// A rate limit filter.
#[derive(Clone, Debug)]
pub(super) struct Filter {
    pub(super) place: String,
    pub(super) domain: String,
    pub(super) stage: u64,
    config: Value,
}

impl Filter {
    /// Returns whether the filter has `rate_limits` of its own: Envoy then ignores those of routes and virtual hosts.
    fn has_own(&self) -> bool {
        field(&self.config, "rate_limits").and_then(Value::as_array).is_some_and(|own| !own.is_empty())
    }

    /// Returns the descriptors that it sends.
    pub(super) fn sent<'t>(&self, templates: &'t [Template]) -> Vec<&'t Template> {
        let is_sent = |template: &&Template| match &template.owner {
            Some(owner) => *owner == self.place,
            None => template.is_per_route() || (!self.has_own() && template.stage == self.stage),
        };
        templates.iter().filter(is_sent).collect()
    }
}

#[derive(Debug)]
struct Cluster {
    place: String,
    name: String,
    has_http2: bool,
}

/// Returns a field, by its name in the protocol or in JSON (`failureModeDeny`).
pub(super) fn field<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    let found = value.get(name).or_else(|| value.get(camel(name).as_ref()));
    found.filter(|found| !found.is_null())
}

fn camel(name: &str) -> Cow<'_, str> {
    if !name.contains('_') {
        return Cow::Borrowed(name);
    }
    let mut parts = name.split('_');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let mut chars = part.chars();
        text.extend(chars.next().map(|first| first.to_ascii_uppercase()));
        text.push_str(chars.as_str());
    }
    Cow::Owned(text)
}

/// Returns the name of a field in the protocol.
pub(super) fn snake(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

/// Returns whether an object is of this type, and its settings: directly, or wrapped in a TypedStruct.
fn typed<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    let is = |key: &str| {
        value.get(key).and_then(Value::as_str).is_some_and(|url| url.rsplit('/').next() == Some(name))
    };
    if is("@type") {
        return Some(value);
    }
    if is("type_url") || is("typeUrl") { value.get("value") } else { None }
}

impl EnvoyParts {
    /// Collects the parts of a document.
    pub(super) fn collect(&mut self, value: &Value, place: &str, report: &mut Report) {
        self.walk(value, place, 0, report);
    }

    /// Marks that routes or clusters may come from elsewhere.
    pub(super) fn mark_partial(&mut self) {
        self.is_partial = true;
    }

    fn walk(&mut self, value: &Value, path: &str, depth: usize, report: &mut Report) {
        if depth > MAX_DEPTH {
            return;
        }
        match value {
            Value::Array(items) => {
                for (number, item) in items.iter().enumerate() {
                    self.walk(item, &format!("{path}[{number}]"), depth + 1, report);
                }
            }
            Value::Object(fields) => {
                self.object(value, path);
                for (key, below) in fields {
                    let below_path = format!("{path}.{key}");
                    match (snake(key).as_str(), below) {
                        ("rate_limits", Value::Array(entries)) => {
                            self.rate_limits(entries, &below_path, report);
                        }
                        ("http_filters", Value::Array(filters)) => order(filters, &below_path, report),
                        ("clusters", Value::Array(clusters)) => {
                            for (number, cluster) in clusters.iter().enumerate() {
                                self.cluster(cluster, &format!("{below_path}[{number}]"));
                            }
                        }
                        ("dynamic_resources" | "rds" | "scoped_routes", _) => self.is_partial = true,
                        _ => {}
                    }
                    self.walk(below, &below_path, depth + 1, report);
                }
            }
            _ => {}
        }
    }

    fn object(&mut self, value: &Value, place: &str) {
        let config = typed(value, HTTP_FILTER).or_else(|| typed(value, NETWORK_FILTER));
        if let Some(config) = config {
            self.filters.push(Filter {
                place: place.to_owned(),
                domain: field(config, "domain").and_then(Value::as_str).unwrap_or_default().to_owned(),
                stage: field(config, "stage").and_then(Value::as_u64).unwrap_or(0),
                config: config.clone(),
            });
        }
        // A patch that adds a cluster has no list of them.
        if field(value, "load_assignment").is_some() {
            self.cluster(value, place);
        }
    }

    fn cluster(&mut self, cluster: &Value, place: &str) {
        let Some(name) = cluster["name"].as_str() else { return };
        if !self.clusters.iter().any(|known| known.name == name) {
            let has_http2 = mentions(cluster, "http2_protocol_options", 0);
            self.clusters.push(Cluster { place: place.to_owned(), name: name.to_owned(), has_http2 });
        }
    }

    fn rate_limits(&mut self, entries: &[Value], place: &str, report: &mut Report) {
        for (number, entry) in entries.iter().enumerate() {
            let place = format!("{place}[{number}]");
            let owner = self.filters.iter().find(|filter| place.starts_with(&format!("{}.", filter.place)));
            let owner = owner.map(|filter| filter.place.clone());
            match template(entry, &place) {
                Ok(template) => self.templates.push(Template { owner, ..template }),
                Err(error) => report.problem(
                    &place,
                    format!("Envoy refuses this entry: {error}"),
                    "write it as in `actions: [{remote_address: {}}]`",
                ),
            }
        }
    }

    /// Checks how the parts fit together.
    pub(super) fn check(&self, place: &str, report: &mut Report) {
        if self.filters.is_empty() && self.templates.is_empty() && self.clusters.is_empty() {
            report.problem(
                place,
                "nothing about rate limiting was found: no filter, no actions, no cluster",
                "add the filter envoy.filters.http.ratelimit; `tollgate doctor --rules FILE --print-envoy` prints it",
            );
            return;
        }
        if self.filters.is_empty() && !self.templates.is_empty() {
            report.problem(
                place,
                "there are `rate_limits` actions but no rate limit filter: Envoy never asks Tollgate",
                "add the filter envoy.filters.http.ratelimit before the router",
            );
        }
        for filter in &self.filters {
            self.check_filter(filter, report);
        }
        self.check_ignored(report);
    }

    /// Reports actions of routes and virtual hosts that no filter takes, because those have their own.
    fn check_ignored(&self, report: &mut Report) {
        let Some(filter) = self.filters.iter().find(|filter| filter.has_own()) else { return };
        let is_sent = |template: &Template| {
            self.filters.iter().any(|filter| filter.sent(std::slice::from_ref(template)).len() == 1)
        };
        for template in self.templates.iter().filter(|template| !is_sent(template)) {
            report.problem(
                &template.place,
                format!("Envoy ignores the descriptor {template}: the filter has `rate_limits` of its own ({})", filter.place),
                "move it into the `rate_limits` of the filter, or remove those: then the ones of routes count",
            );
        }
    }

    fn check_filter(&self, filter: &Filter, report: &mut Report) {
        let Filter { place, domain, stage, config } = filter;
        if domain.is_empty() {
            report.problem(
                place,
                "the filter has no `domain`; Envoy refuses it",
                "set it to the domain of the rules",
            );
        }
        let asked = self.check_service(filter, report);
        let timeout = field(config, "timeout").and_then(Value::as_str);
        let waits = match timeout.map(seconds) {
            None => {
                report.warning(
                    place,
                    "no `timeout`: Envoy waits 20 ms for a decision",
                    "write `timeout: 0.02s`, or more if Tollgate or its store is far away",
                );
                "20 ms".to_owned()
            }
            Some(None) => {
                let fix = "write seconds, as in `timeout: 0.02s`";
                report.problem(
                    place,
                    format!("`timeout: {}` is no duration", timeout.unwrap_or_default()),
                    fix,
                );
                return;
            }
            Some(Some(time)) => {
                if time < 0.005 {
                    let fix = "give it at least 0.005s: a decision over Redis takes milliseconds";
                    report.warning(place, "the timeout is so short that decisions are missed", fix);
                } else if time > 1.0 {
                    let fix = "0.02s to 0.2s is usual: every request waits that long while nothing answers";
                    report.warning(place, "the timeout is long", fix);
                }
                timeout.unwrap_or_default().to_owned()
            }
        };
        let denies = field(config, "failure_mode_deny").and_then(Value::as_bool).unwrap_or(false);
        let without = if denies {
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
        if field(config, "enable_x_ratelimit_headers").and_then(Value::as_str).unwrap_or("OFF") == "OFF" {
            report.note(place, "clients get no x-ratelimit headers; `enable_x_ratelimit_headers: DRAFT_VERSION_03` adds them");
        }
        // What is wrong with its own is reported at that.
        if filter.has_own()
            || !filter.sent(&self.templates).is_empty()
            || field(config, "descriptors").is_some()
        {
            return;
        }
        if let Some(other) = self.templates.iter().find(|other| other.owner.is_none()) {
            report.problem(
                place,
                format!(
                    "the filter is for stage {stage}, and the actions are for stage {}: it sends nothing",
                    other.stage
                ),
                "give both the same `stage`",
            );
        } else if self.is_partial {
            report.note(place, "no `rate_limits` here; routes that come from elsewhere must have them, or the filter sends nothing");
        } else {
            report.problem(
                place,
                "no route or virtual host has `rate_limits`: the filter sends nothing, and nothing is limited",
                "add `rate_limits: [{actions: [...]}]` to routes; `tollgate doctor --rules FILE --print-envoy` prints them",
            );
        }
    }

    /// Checks where the filter sends requests. Returns that place.
    fn check_service(&self, filter: &Filter, report: &mut Report) -> String {
        let (place, unknown) = (&filter.place, "an unknown service".to_owned());
        let Some(service) = field(&filter.config, "rate_limit_service") else {
            report.problem(
                place,
                "the filter has no `rate_limit_service`",
                "add `rate_limit_service: {transport_api_version: V3, grpc_service: {envoy_grpc: {cluster_name: tollgate}}}`",
            );
            return unknown;
        };
        if field(service, "transport_api_version").and_then(Value::as_str) != Some("V3") {
            report.problem(
                place,
                "`transport_api_version` is not V3, the only version that Tollgate and Envoy support",
                "write `transport_api_version: V3`",
            );
        }
        let grpc = field(service, "grpc_service");
        if let Some(target) = grpc.and_then(|grpc| field(field(grpc, "google_grpc")?, "target_uri")?.as_str())
        {
            return target.to_owned();
        }
        let name = grpc.and_then(|grpc| field(field(grpc, "envoy_grpc")?, "cluster_name")?.as_str());
        let Some(name) = name else {
            report.problem(
                place,
                "`grpc_service` names no cluster",
                "write `grpc_service: {envoy_grpc: {cluster_name: tollgate}}`",
            );
            return unknown;
        };
        match self.clusters.iter().find(|cluster| cluster.name == name) {
            Some(cluster) if !cluster.has_http2 => report.problem(
                &cluster.place,
                format!("cluster `{name}` does not use HTTP/2, which gRPC needs: every call fails"),
                "add typed_extension_protocol_options with `explicit_http_config: {http2_protocol_options: {}}`",
            ),
            Some(_) => {}
            None if name.starts_with("outbound|") => report.note(
                place,
                format!("cluster `{name}` is made by Istio from a Service: its port must be named `grpc…` or have `appProtocol: grpc`"),
            ),
            None if self.is_partial => report.note(place, format!("cluster `{name}` is not defined here; it must come from elsewhere, with HTTP/2")),
            None => report.problem(
                place,
                format!("there is no cluster `{name}`: Envoy refuses the configuration or every call fails"),
                "add it to `clusters`, with HTTP/2 and the address of Tollgate's gRPC listener (8081)",
            ),
        }
        format!("cluster `{name}`")
    }
}

/// Checks that the rate limit filter comes before the router, which ends the chain.
fn order(filters: &[Value], place: &str, report: &mut Report) {
    let is = |filter: &Value, name: &str| {
        field(filter, "typed_config").is_some_and(|config| typed(config, name).is_some())
    };
    let limit = filters.iter().position(|filter| is(filter, HTTP_FILTER));
    let router = filters.iter().position(|filter| is(filter, ROUTER));
    if let (Some(limit), Some(router)) = (limit, router)
        && limit > router
    {
        report.problem(
            &format!("{place}[{limit}]"),
            "the rate limit filter comes after the router, which ends the chain: it never runs",
            "move it before envoy.filters.http.router",
        );
    }
}

/// Returns whether a field with this name is anywhere in the tree.
fn mentions(value: &Value, name: &str, depth: usize) -> bool {
    match value {
        _ if depth > MAX_DEPTH => false,
        Value::Object(fields) => {
            fields.iter().any(|(key, below)| snake(key) == name || mentions(below, name, depth + 1))
        }
        Value::Array(items) => items.iter().any(|item| mentions(item, name, depth + 1)),
        _ => false,
    }
}

/// Reads a duration of protobuf's JSON, such as `0.25s`.
fn seconds(text: &str) -> Option<f64> {
    text.strip_suffix('s')?.parse().ok().filter(|time: &f64| time.is_finite() && *time >= 0.0)
}
