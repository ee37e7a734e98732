//! Envoy's configuration for rules: a filter for each domain, the cluster, and actions that send each rule's descriptor.
//!
//! Rules name keys, and Envoy's configuration must say where their values come from. Keys that Envoy has an action for get it; others
//! with a fixed value become `generic_key`, and the rest headers, which a comment asks to check.

use super::actions::MAX_STAGE;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tollgate_rules::{DescriptorMatch, Domain, GLOBAL, Profile, Ruleset};

/// Returns the configuration as YAML.
///
/// Stages distinguish what is for which filter. Envoy has eleven of them, so more domains have their actions in their filters,
/// which every route then uses.
pub(super) fn envoy(rules: &Ruleset) -> String {
    let mut text = String::from(
        "# Part 1: in http_filters of the HTTP connection manager, before envoy.filters.http.router.\nhttp_filters:\n",
    );
    let has_stages = rules.domains().nth(MAX_STAGE as usize + 1).is_none();
    for (stage, domain) in rules.domains().enumerate() {
        text.push_str(&filter(domain, stage, has_stages));
    }
    if has_stages {
        text.push_str("# Part 2: in a route, or in a virtual host for all its routes.\nrate_limits:\n");
        for (stage, domain) in rules.domains().enumerate() {
            text.push_str(&format!("  # Domain {}.\n", one_line(domain.name())));
            text.push_str(&actions(domain, "  ", stage));
        }
    } else {
        text.push_str(
            "# Part 2: nothing in routes. Envoy has stages for eleven filters; these have `rate_limits` of their own.\n",
        );
    }
    text.push_str(CLUSTER);
    text
}

const CLUSTER: &str = include_str!("cluster.yaml");

fn filter(domain: &Domain, stage: usize, has_stages: bool) -> String {
    let name = flow(&json!(domain.name()));
    let own = match (has_stages, stage) {
        (true, 0) => String::new(),
        (true, stage) => format!("      stage: {stage}\n"),
        (false, _) => format!("      rate_limits:\n{}", actions(domain, "        ", 0)),
    };
    format!(
        "  - name: envoy.filters.http.ratelimit\n    typed_config:\n      \
         \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit\n      domain: {name}\n{own}      \
         timeout: 0.02s\n      failure_mode_deny: false\n      enable_x_ratelimit_headers: DRAFT_VERSION_03\n      \
         rate_limit_service:\n        transport_api_version: V3\n        grpc_service: {{envoy_grpc: {{cluster_name: tollgate}}}}\n"
    )
}

/// Returns the entries of `rate_limits` for a domain.
fn actions(domain: &Domain, indent: &str, stage: usize) -> String {
    let mut text = String::new();
    for (notes, actions) in rate_limits(domain) {
        for line in notes {
            text.push_str(&format!("{indent}# {line}\n"));
        }
        text.push_str(&format!("{indent}- actions:\n"));
        for action in actions {
            text.push_str(&format!("{indent}    - {}\n", flow(&action)));
        }
        if stage > 0 {
            text.push_str(&format!("{indent}  stage: {stage}\n"));
        }
    }
    text
}

/// Returns the actions for the rules of a domain, with notes.
fn rate_limits(domain: &Domain) -> Vec<(Vec<String>, Vec<Value>)> {
    let mut path: Vec<(String, Option<String>)> = Vec::new();
    let mut sent = BTreeSet::new();
    let mut all = Vec::new();
    for node in domain.outline() {
        path.truncate(node.depth as usize);
        let (key, value) = match node.element.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (node.element.clone(), None),
        };
        // A key such as `remote_address/24` counts the networks of another one.
        let key = match domain.profile() {
            Profile::Native => network_of(&key).to_owned(),
            _ => key,
        };
        path.push((key, value));
        let Some(rule) = node.rule else { continue };
        let (mut actions, mut notes) = (Vec::new(), vec![format!("Rule {}.", one_line(&rule.name))]);
        for (key, value) in &path {
            let (action, guessed) = action(key, value.as_deref());
            if guessed {
                notes.push(format!("Check the header of `{}`.", one_line(key)));
            }
            actions.push(action);
        }
        // Under `match: all` one descriptor for each key is enough, whatever combinations rules have.
        let lists: Vec<Vec<Value>> = match domain.matching() {
            DescriptorMatch::All => actions.into_iter().map(|action| vec![action]).collect(),
            DescriptorMatch::One => vec![actions],
        };
        for actions in lists {
            if sent.insert(flow(&json!(actions))) {
                all.push((std::mem::take(&mut notes), actions));
            }
        }
    }
    all
}

/// Returns the key whose values a network key counts.
fn network_of(key: &str) -> &str {
    let name = key.trim_end_matches(|c: char| c.is_ascii_digit());
    match name.strip_suffix('/').filter(|_| name.len() < key.len()) {
        Some(name) => network_of(name),
        None => key,
    }
}

/// Returns the action that sends a key, and whether its header is a guess.
fn action(key: &str, value: Option<&str>) -> (Value, bool) {
    let header = |name: &str| json!({"request_headers": {"header_name": name, "descriptor_key": key}});
    match (key, value) {
        ("remote_address" | "source_cluster" | "destination_cluster", _) => (json!({key: {}}), false),
        ("masked_remote_address", network) => (json!({key: masks(network)}), false),
        // Every request has it, so an action must send it always.
        (key, _) if key == GLOBAL.0 => {
            (json!({"generic_key": {"descriptor_key": key, "descriptor_value": GLOBAL.1}}), false)
        }
        ("generic_key", Some(value)) => (json!({"generic_key": {"descriptor_value": value}}), false),
        ("path" | ":path", _) => (header(":path"), false),
        ("method" | ":method", _) => (header(":method"), false),
        ("host" | "authority" | ":authority", _) => (header(":authority"), false),
        (_, Some(value)) if !value.contains('*') => {
            (json!({"generic_key": {"descriptor_key": key, "descriptor_value": value}}), false)
        }
        _ => {
            let name: String = key
                .to_ascii_lowercase()
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' })
                .collect();
            let name =
                if name.starts_with("x-") || name == "user-agent" { name } else { format!("x-{name}") };
            (header(&name), true)
        }
    }
}

/// Returns the masks that send a network, such as `10.0.0.0/8`; without one, addresses are sent whole.
fn masks(network: Option<&str>) -> Value {
    let parts = network.and_then(|network| network.split_once('/'));
    match parts.and_then(|(address, bits)| Some((address, bits.parse::<u8>().ok()?))) {
        Some((address, bits)) if address.contains(':') => json!({"v6_prefix_mask_len": bits}),
        Some((_, bits)) => json!({"v4_prefix_mask_len": bits}),
        None => json!({}),
    }
}

/// Returns a value as YAML in flow style.
fn flow(value: &Value) -> String {
    value.to_string()
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
