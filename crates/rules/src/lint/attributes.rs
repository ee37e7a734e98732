//! Lints for names and values of attributes that no request has: a name one letter off a known one, an endpoint without its
//! method, a network where an address belongs, a cost that is counted under another name.
//!
//! Programs may send any attributes of their own, so a name or a value is reported only if it is plainly meant as one
//! that Tollgate derives from requests. Files for envoyproxy/ratelimit name what Envoy sends, and are not judged.

use crate::compile::NodeLocation;
use crate::reader::Reader;
use crate::ruleset::Domain;
use crate::suggest::is_slip_of;
use crate::tree::GLOBAL;
use crate::yaml::{Position, shorten};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// The attributes that Tollgate reads from requests, and those that its documentation and Envoy's name.
const ATTRIBUTES: [&str; 14] = [
    "api_key",
    "endpoint",
    "host",
    "method",
    "model",
    "path",
    "remote_address",
    "tenant",
    "tier",
    "user",
    "destination_cluster",
    "generic_key",
    "source_cluster",
    GLOBAL.0,
];
/// The attributes that usually have a cost.
const COSTS: [&str; 3] = ["tokens", "input_tokens", "output_tokens"];

/// Methods of HTTP, to recognize one in another spelling. Without HEAD, which has a warning of its own.
const METHODS: [&str; 8] = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];

pub(super) fn domain(domain: &Domain, places: &[NodeLocation], reader: &mut Reader<'_>) {
    if reader.is_ratelimit_file {
        return;
    }
    let mut names = Names { domain, reported: BTreeSet::new() };
    for (node, place) in domain.tree.iter().zip(places).skip(1) {
        names.check(&node.element.key, place.at, reader);
        let value = super::hazards::value_of(&node.element).unwrap_or_default();
        check_value(&node.element.key, value, place.at, reader);
    }
    costs(domain, places, reader);
    let top = places.first();
    if let (Some(attribute), Some(top)) = (domain.shard_by(), top) {
        names.check(attribute, top.at, reader);
    }
    let (Some(overload), Some(at)) = (domain.overload(), top.and_then(|top| top.overload)) else { return };
    for condition in overload.priorities.iter().flat_map(|rule| &rule.when) {
        names.check(&condition.name, at, reader);
        for value in &condition.values {
            check_value(&condition.name, value.text(), at, reader);
        }
    }
    if let Some(fairness) = &overload.fairness {
        names.check(&fairness.by, at, reader);
    }
}

/// The names of a domain, each reported once.
struct Names<'d> {
    domain: &'d Domain,
    reported: BTreeSet<&'d str>,
}

impl<'d> Names<'d> {
    fn check(&mut self, name: &'d str, at: Position, reader: &mut Reader<'_>) {
        // What the file itself declares is meant.
        if name == self.domain.tier_key() || !self.reported.insert(name) {
            return;
        }
        if let Some(known) = slip(name, &ATTRIBUTES) {
            let message =
                format!("`{}` is nearly `{known}`, and no request that Tollgate reads has it", shorten(name));
            reader.warning(at, message, format!("did you mean `{known}`?"));
        }
    }
}

fn slip(name: &str, known: &[&'static str]) -> Option<&'static str> {
    if known.contains(&name) {
        return None;
    }
    known.iter().copied().find(|known| is_slip_of(name, known))
}

fn check_value(key: &str, value: &str, at: Position, reader: &mut Reader<'_>) {
    if let Some((message, help)) = value_mistake(key, value) {
        reader.warning(at, message, help);
    }
}

/// Returns why no request has this value of an attribute that Tollgate derives from requests, and what to write instead. The
/// value may have wildcards.
///
/// ```
/// let (why, help) = tollgate_rules::value_mistake("endpoint", "post /login").expect("a mistake");
/// assert_eq!(help, "write `POST /login`");
/// assert!(why.starts_with("`endpoint=post /login` matches no request"));
/// assert_eq!(tollgate_rules::value_mistake("endpoint", "POST /login"), None);
/// ```
#[must_use]
pub fn value_mistake(key: &str, value: &str) -> Option<(String, String)> {
    let (why, help) = match key {
        "endpoint" => endpoint(value)?,
        "path" if is_relative_path(value) => {
            ("paths begin with `/`".to_owned(), format!("write `/{}`", shorten(value)))
        }
        "method" if METHODS.contains(&&*value.to_ascii_uppercase()) && !METHODS.contains(&value) => {
            ("methods are in capitals".to_owned(), format!("write `{}`", value.to_ascii_uppercase()))
        }
        "remote_address" => address(value)?,
        _ => return None,
    };
    Some((format!("`{key}={}` matches no request that Tollgate reads: {why}", shorten(value)), help))
}

/// An endpoint is the method in capitals, a space, and the path.
fn endpoint(value: &str) -> Option<(String, String)> {
    let separator = |c: char| c == ' ' || c == ':' || c == '\t';
    let is_method = |word: &str| METHODS.contains(&&*word.to_ascii_uppercase());
    let begins_path = |path: &str| path.starts_with('/') || path.starts_with('*');
    if value.starts_with('/') {
        let message = "an endpoint begins with its method, as in `POST /login`".to_owned();
        let help = format!("write `POST {0}`, or `* {0}` for all methods", shorten(value));
        return Some((message, help));
    }
    let end = value.find(|c: char| separator(c) || c == '/').filter(|end| is_method(&value[..*end]))?;
    let (method, path) = (&value[..end], value[end..].trim_start_matches(separator));
    let is_written = value[end..].strip_prefix(' ').is_some_and(|path| path.is_empty() || begins_path(path));
    if is_written && METHODS.contains(&method) {
        return None;
    }
    let path = if begins_path(path) { path.to_owned() } else { format!("/{path}") };
    let help = format!("write `{} {}`", method.to_ascii_uppercase(), shorten(&path));
    Some(("an endpoint is the method in capitals, a space, and the path".to_owned(), help))
}

/// Returns whether this looks like a path without its first slash: names of routes have none at all.
fn is_relative_path(value: &str) -> bool {
    !value.starts_with(['/', '*']) && value.contains('/') && !value.contains("://")
}

fn address(value: &str) -> Option<(String, String)> {
    if let Some((address, bits)) = value.split_once('/') {
        let is_network = address.parse::<IpAddr>().is_ok() && bits.parse::<u8>().is_ok();
        return is_network.then(|| {
            let octets: Vec<&str> = match bits {
                "8" | "16" | "24" => address.split('.').take(bits.parse().unwrap_or(0_usize) / 8).collect(),
                _ => Vec::new(),
            };
            let alone = match address.contains(':') || octets.is_empty() {
                true => String::new(),
                false => {
                    let pattern = octets.join(".");
                    format!("; for this one alone: `value: \"{pattern}.*\"` with `share_threshold: true`")
                }
            };
            let help = format!(
                "write `key: remote_address/{bits}` without a value, which has a counter for each network{alone}"
            );
            ("it is one address, and this is a network".to_owned(), help)
        });
    }
    let address: IpAddr = value.parse().ok()?;
    let canonical = address.to_canonical().to_string();
    (canonical != value).then(|| {
        ("addresses are compared as text, in their shortest form".to_owned(), format!("write `{canonical}`"))
    })
}

/// Warns about costs whose names are nearly usual ones, or are words for the number of requests.
fn costs(domain: &Domain, places: &[NodeLocation], reader: &mut Reader<'_>) {
    for (rule, name) in domain.cost_attributes() {
        let help = if matches!(name, "request" | "requests" | "hits" | "calls") {
            "write `cost: 1` to count requests".to_owned()
        } else if let Some(known) = slip(name, &COSTS) {
            format!("did you mean `cost: {known}`?")
        } else {
            continue;
        };
        let message = format!(
            "`cost: {name}` reads the attribute `{name}`; a request without it has its own cost, usually 1"
        );
        let node = domain.tree.iter().position(|node| node.rule == Some(rule.id));
        let at = node.map(|node| places[node].at).unwrap_or_default();
        reader.warning(at, message, help);
    }
}
