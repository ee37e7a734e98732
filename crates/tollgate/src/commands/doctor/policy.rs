//! Envoy Gateway: what a BackendTrafficPolicy makes of requests, and what it needs.

use super::finding::Report;
use serde_json::Value;
use std::net::IpAddr;

/// How headers and query parameters are compared.
const HOW: [&str; 3] = ["Exact", "RegularExpression", "Distinct"];
const UNITS: [&str; 7] = ["Second", "Minute", "Hour", "Day", "Week", "Month", "Year"];

/// Checks a BackendTrafficPolicy.
pub(super) fn check(policy: &Value, place: &str, report: &mut Report) {
    let spec = &policy["spec"];
    let name = policy["metadata"]["name"].as_str().unwrap_or("NAME");
    let namespace = policy["metadata"]["namespace"].as_str().unwrap_or("default");
    let has_target = ["targetRef", "targetRefs", "targetSelectors"]
        .iter()
        .any(|key| spec[key].is_object() || spec[key].as_array().is_some_and(|list| !list.is_empty()));
    if !has_target {
        report.problem(
            place,
            "the policy has no target: it applies to nothing",
            "add `targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: …}]`",
        );
    }
    let limit = &spec["rateLimit"];
    if limit.is_null() {
        report.note(place, "the policy has no `rateLimit`");
        return;
    }
    if limit["local"].is_object() || limit["type"] == "Local" {
        report.note(
            place,
            "`local` limits are counted by each Envoy on its own; Tollgate is not asked about them",
        );
    }
    if let Some(kind) = limit["type"].as_str().filter(|kind| !["Global", "Local"].contains(kind)) {
        unknown_word("type", kind, &["Global", "Local"], place, report);
    }
    let rules = limit["global"]["rules"].as_array();
    match rules {
        None if limit["type"] == "Global" => report.problem(
            place,
            "`type: Global` without `global.rules`: nothing is limited",
            "add `global: {rules: [{limit: {requests: 100, unit: Minute}}]}`",
        ),
        None => {}
        Some(rules) if rules.is_empty() => {
            report.problem(place, "`global.rules` is empty: nothing is limited", "add a rule with a `limit`");
        }
        Some(rules) => {
            let own = rules.iter().filter(|rule| rule["shared"] != true).count();
            if own > 0 {
                report.note(
                    place,
                    "the domain of its rules is NAMESPACE/GATEWAY/LISTENER, one for each listener",
                );
            }
            if own < rules.len() {
                report.note(
                    place,
                    format!("rules with `shared: true` are in domain `{namespace}/{name}`, with a second call for each request"),
                );
            }
            for (number, rule) in rules.iter().enumerate() {
                let at = format!("{place}.spec.rateLimit.global.rules[{number}]");
                check_rule(rule, number, &at, report);
            }
        }
    }
}

fn check_rule(rule: &Value, number: usize, place: &str, report: &mut Report) {
    let limit = &rule["limit"];
    let requests = limit["requests"].as_u64();
    let unit = limit["unit"].as_str();
    match unit {
        None => {
            report.problem(place, "the limit has no `unit`", format!("write one of {}", UNITS.join(", ")));
        }
        Some(unit) if !UNITS.contains(&unit) => unknown_word("unit", unit, &UNITS, place, report),
        Some(_) => {}
    }
    match requests {
        None => report.problem(place, "the limit has no whole number of `requests`", "write `requests: 100`"),
        Some(0) => report.warning(
            place,
            "`requests: 0` denies every request that the rule selects",
            "remove the rule if that is not meant",
        ),
        Some(_) => {}
    }
    let selectors = rule["clientSelectors"].as_array().map(Vec::as_slice).unwrap_or_default();
    // Envoy Gateway joins all selectors of a rule to one: each condition of each must hold.
    let mut whom: Vec<String> = Vec::new();
    for (index, selector) in selectors.iter().enumerate() {
        let at = format!("{place}.clientSelectors[{index}]");
        let parts = selected(selector, &at, report);
        let is_set = |key: &&str| match &selector[*key] {
            Value::Array(conditions) => !conditions.is_empty(),
            condition => condition.is_object(),
        };
        if !["headers", "sourceCIDR", "methods", "path", "queryParams"].iter().any(is_set) {
            report.problem(
                &at,
                "the selector is empty",
                "add `headers`, `sourceCIDR`, `methods`, `path` or `queryParams`",
            );
        }
        whom.extend(parts);
    }
    let whom =
        if whom.is_empty() { "all requests of a route together".to_owned() } else { whom.join(" and ") };
    let (requests, unit) = (requests.unwrap_or_default(), unit.unwrap_or("?").to_ascii_lowercase());
    let mut text = format!("rule {number}: {requests} per {unit} for {whom}");
    if rule["shadowMode"] == true {
        text.push_str("; counted, never denied (shadowMode)");
    }
    if limit["fromMetadata"].is_object() {
        text.push_str("; the limit may come from metadata, on the same counter");
    }
    let cost = &rule["cost"]["request"];
    match (cost["from"].as_str(), cost["number"].as_u64()) {
        (Some("Number"), Some(0)) => text.push_str("; requests cost nothing when they begin"),
        (Some("Number"), Some(1)) | (None, _) => {}
        (Some("Number"), Some(number)) => text.push_str(&format!("; each request costs {number}")),
        (Some("Metadata"), _) => text.push_str("; the cost of a request comes from metadata"),
        (Some(_), _) => report.problem(
            place,
            "`cost.request` has no cost",
            "write `from: Number` with `number`, or `from: Metadata` with `metadata`",
        ),
    }
    if rule["cost"]["response"].is_object() {
        text.push_str("; charged when the response ends, so it may be exceeded by what is in flight");
    }
    report.note(place, text);
}

/// Reports a word that is none of those that the field may have.
fn unknown_word(field: &str, word: &str, known: &[&str], place: &str, report: &mut Report) {
    let lower: Vec<String> = known.iter().map(|known| known.to_ascii_lowercase()).collect();
    let near = tollgate_rules::closest(word, &lower.iter().map(String::as_str).collect::<Vec<_>>());
    let near = near.and_then(|near| known.iter().find(|known| known.eq_ignore_ascii_case(near)));
    let fix = match near {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("write one of {}", known.join(", ")),
    };
    report.problem(place, format!("`{field}: {word}` is unknown"), fix);
}

fn is_network(text: &str) -> bool {
    let Some((address, bits)) = text.split_once('/') else { return false };
    let max = match address.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    bits.parse::<u8>().is_ok_and(|bits| bits <= max)
}

/// Returns "not " for a condition that is inverted.
fn not(condition: &Value) -> &'static str {
    if condition["invert"] == true { "not " } else { "" }
}

/// Returns whom a selector selects.
fn selected(selector: &Value, place: &str, report: &mut Report) -> Vec<String> {
    let mut parts = Vec::new();
    for (key, noun) in [("headers", "header"), ("queryParams", "query parameter")] {
        for one in selector[key].as_array().into_iter().flatten() {
            let name = one["name"].as_str().unwrap_or_default();
            let not = not(one);
            let how = one["type"].as_str().unwrap_or("Exact");
            if !HOW.contains(&how) {
                unknown_word("type", how, &HOW, place, report);
            }
            match (how, one["value"].as_str()) {
                ("Distinct", value) => {
                    if value.is_some() {
                        report.warning(
                            place,
                            format!(
                                "`value` of {noun} `{name}` is ignored: `Distinct` counts each value apart"
                            ),
                            "remove it, or write `type: Exact`",
                        );
                    }
                    if one["invert"] == true {
                        report.problem(
                            place,
                            format!("`invert` of {noun} `{name}` does not work with `Distinct`"),
                            "remove one of them",
                        );
                    }
                    parts.push(format!("each value of {noun} {name}"));
                }
                (_, None) => report.problem(
                    place,
                    format!("{noun} `{name}` has no `value`"),
                    "add one, or write `type: Distinct` for a limit per value",
                ),
                (how, Some(value)) => parts.push(format!(
                    "{noun} {name} {not}{}{value}",
                    if how == "RegularExpression" { "~ " } else { "= " }
                )),
            }
        }
    }
    let cidr = &selector["sourceCIDR"];
    if cidr.is_object() {
        let of = if cidr["invert"] == true { "outside" } else { "of" };
        match (cidr["value"].as_str(), cidr["type"].as_str()) {
            (None, _) => report.problem(place, "`sourceCIDR` has no `value`", "write `value: 0.0.0.0/0`"),
            (Some(value), _) if !is_network(value) => report.problem(
                place,
                format!("`sourceCIDR.value: {value}` is no network"),
                "write an address and the length of its prefix, as in `10.0.0.0/8`",
            ),
            (Some(value), Some("Distinct")) => parts.push(format!("each address {of} {value}")),
            (Some(value), _) => parts.push(format!("all addresses {of} {value} together")),
        }
    }
    let methods = selector["methods"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|method| format!("{}{}", not(method), method["value"].as_str().unwrap_or("?")));
    let methods: Vec<String> = methods.collect();
    if !methods.is_empty() {
        parts.push(format!("method {}", methods.join(" or ")));
    }
    let path = &selector["path"];
    if path.is_object() {
        let how = match path["type"].as_str() {
            Some("Exact") => "= ",
            Some("RegularExpression") => "~ ",
            _ => "below ",
        };
        parts.push(format!("path {}{how}{}", not(path), path["value"].as_str().unwrap_or("?")));
    }
    parts
}

/// Checks the configuration of Envoy Gateway itself.
pub(super) fn check_gateway(config: &Value, place: &str, report: &mut Report) {
    let limit = &config["rateLimit"];
    if limit.is_null() {
        report.problem(
            place,
            "`rateLimit` is not configured: Envoy Gateway starts no rate limit service, and global limits are refused",
            "add `rateLimit: {backend: {type: Redis, redis: {url: redis.redis-system.svc.cluster.local:6379}}}`",
        );
        return;
    }
    if limit["backend"]["redis"]["url"].as_str().is_none_or(str::is_empty) {
        report.problem(place, "`rateLimit.backend.redis.url` is missing", "set it to `host:port` of Redis");
    }
    let image = config["provider"]["kubernetes"]["rateLimitDeployment"]["container"]["image"].as_str();
    match image {
        Some(image) => report.note(place, format!("the rate limit service is the image `{image}`")),
        None => report.note(place, "the rate limit service is envoyproxy/ratelimit; `provider.kubernetes.rateLimitDeployment.container.image` changes it to Tollgate's"),
    }
    let timeout = limit["timeout"].as_str().unwrap_or("20ms");
    let without = if limit["failClosed"] == true {
        "responds 500 (failClosed)"
    } else {
        "lets the request pass (failClosed is off)"
    };
    report.note(place, format!("Envoy waits {timeout} for a decision; without one it {without}"));
}
