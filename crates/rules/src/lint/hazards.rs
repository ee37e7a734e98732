//! Lints for rules that limit less, or cost more, than they seem to: keys that never repeat, bursts at the boundary of a
//! window, permits that are never released, counters that need several slots of a cluster.

use crate::compile::NodeLocation;
use crate::diagnostic::Severity;
use crate::reader::Reader;
use crate::rule::{Class, LimitSet, Role, Rule, RuleLimit};
use crate::ruleset::{Domain, Options, PermitRelease};
use crate::sensitivity::identifies_caller;
use crate::tree::{TreeNode, ValueTest};
use std::collections::BTreeMap;
use tollgate_core::{Algorithm, Mode};

/// Endings of names, in lower case and without separators, whose values differ in every request.
const UNIQUE_ENDINGS: [&str; 10] = [
    "requestid",
    "reqid",
    "traceid",
    "spanid",
    "correlationid",
    "invocationid",
    "idempotencykey",
    "traceparent",
    "timestamp",
    "nonce",
];
/// Names that are too short to be endings.
const UNIQUE_NAMES: [&str; 9] =
    ["uuid", "guid", "ulid", "ts", "epoch", "now", "random", "unixtime", "requesttime"];

/// Returns whether values of this key differ in every request, by its name.
fn is_unique_per_request(key: &str) -> bool {
    let name: String =
        key.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    let bare = name.strip_prefix('x').unwrap_or(&name);
    UNIQUE_ENDINGS.iter().any(|ending| name.ends_with(ending))
        || UNIQUE_NAMES.iter().any(|known| name == *known || bare == *known)
}

/// Warns about a counter per value of a key whose values never repeat: no limit on it is ever reached.
pub(super) fn unique_key(node: &TreeNode, place: &NodeLocation, reader: &mut Reader<'_>) {
    let counts_each = matches!(node.element.test, ValueTest::Any | ValueTest::Like(_));
    if counts_each && is_unique_per_request(&node.element.key) {
        let message = format!(
            "`{}` differs in every request: a counter for each value never reaches a limit",
            node.element.key
        );
        reader.warning(
            place.at,
            message,
            "count by the caller, such as `api_key`, `user` or `remote_address`",
        );
    }
}

/// Warns about a rule on `HEAD`: Tollgate counts it as `GET`, since servers run the same handler for both.
pub(super) fn head_method(node: &TreeNode, place: &NodeLocation, reader: &mut Reader<'_>) {
    let value = match &node.element.test {
        ValueTest::Exact(value) => &**value,
        ValueTest::Like(pattern) | ValueTest::Shared(pattern) => pattern.text(),
        ValueTest::Any | ValueTest::Network(_) => return,
    };
    let path = match &*node.element.key {
        "method" if value.eq_ignore_ascii_case("HEAD") => "",
        "endpoint" => match value.split_once(' ') {
            Some((method, _)) if method.eq_ignore_ascii_case("HEAD") => &value[method.len()..],
            _ => return,
        },
        _ => return,
    };
    let message = format!(
        "`{}` matches no request that the gateway, `/check` or the Rust layer reads: they count HEAD as GET",
        node.element
    );
    reader.warning(place.at, message, format!("write `GET{path}`, which counts both"));
}

/// Warns about a security rule whose fixed window admits twice its limit around the boundary.
pub(super) fn burst_at_boundary(rule: &Rule, place: &NodeLocation, reader: &mut Reader<'_>) {
    if rule.class != Class::Security {
        return;
    }
    let sets = std::iter::once(&rule.limits).chain(rule.tiers.iter().map(|(_, set)| set));
    for (n, set) in sets.enumerate() {
        let Some((at, limit)) = set.limits.iter().enumerate().find(|(_, limit)| is_unprotected(limit, set))
        else {
            continue;
        };
        let position = if n == 0 { place.limits.get(at) } else { None };
        let message = format!(
            "a fixed window of `{}` admits twice as much around its boundary, on a rule of `class: security`",
            limit.limit.rate()
        );
        reader.warning(
            *position.unwrap_or(&place.at),
            message,
            "write `algorithm: strict_window`, or a shorter limit beside it, as in `[5/minute, 2/second]`",
        );
        return;
    }
}

/// Warns about `durable: true` on limits that have recovered before a store that lost them is noticed.
pub(super) fn durable_for_nothing(rule: &Rule, place: &NodeLocation, reader: &mut Reader<'_>) {
    const RECOVERED: u64 = 2 * 10_000_000;
    let mut kept = rule.all_limits().filter(|limit| limit.scope.is_durable()).peekable();
    let is_short = |limit: &RuleLimit| limit.limit.retention().as_micros() < RECOVERED;
    if rule.durable == Some(true) && kept.peek().is_some() && kept.all(is_short) {
        reader.warning(
            place.at,
            "`durable: true` has no effect: these limits recover within ten seconds",
            "leave it out, or write a longer period",
        );
    }
}

/// Warns about a limit of which this cell's part is less than a unit, although its region has a weight.
pub(super) fn empty_part(rule: &Rule, place: &NodeLocation, options: &Options, reader: &mut Reader<'_>) {
    let Some(cells) = options.cells.as_ref().filter(|_| rule.has_empty_part) else { return };
    let weights = rule.region.as_ref().map_or(&[][..], |region| &region.weights);
    if weights.iter().any(|(region, weight)| Some(region) == cells.region.as_ref() && *weight == 0) {
        return;
    }
    let message = format!(
        "{} cells divide a limit of this rule, and the part of this one is 0: it admits nothing here",
        cells.cells()
    );
    reader.warning(place.at, message, "write a higher limit, or `region: owner`: one cell decides the whole");
}

/// Returns whether a limit is an enforced fixed window, and no other limit of the set is shorter or of another kind.
fn is_unprotected(limit: &RuleLimit, set: &LimitSet) -> bool {
    let is_window = |limit: &RuleLimit| limit.limit.algorithm() == Algorithm::FixedWindow;
    let length = |limit: &RuleLimit| limit.limit.rate().period.length();
    let protects = |other: &RuleLimit| {
        let is_rate = other.limit.algorithm() != Algorithm::Concurrency;
        other.role.is_live()
            && is_rate
            && other.cost == limit.cost
            && (!is_window(other) || length(other) < length(limit))
    };
    // A limit of one or none cannot burst.
    limit.role.is_live()
        && is_window(limit)
        && limit.limit.rate().count > 1
        && !set.limits.iter().any(protects)
}

/// Warns about permits that stay until their `ttl`, because the protocol does not report the end of a request.
pub(super) fn unreleased_permits(place: &NodeLocation, options: &Options, reader: &mut Reader<'_>) {
    let Some((at, has_ttl)) = place.concurrency else { return };
    let is_hazard = match options.permits {
        PermitRelease::Released => false,
        // An explicit `ttl` is deliberate.
        PermitRelease::Unknown => !has_ttl,
        PermitRelease::Expire => true,
    };
    if is_hazard {
        reader.warning(
            at,
            "`concurrency` holds a permit until its `ttl` for requests over RLS, /check, /v1/check and TG.CHECK: they do \
             not report the end of a request",
            "use the gateway, the Rust layer or /v1/reserve with it, negative hits of Envoy at the end of a stream, or a \
             `ttl` near a request's duration, as in `{limit: 20, ttl: 2s}`",
        );
    }
}

/// Warns about a `shard_by` that does not keep a caller's counters together.
pub(super) fn shard_by(domain: &Domain, place: &NodeLocation, reader: &mut Reader<'_>) {
    let Some(attribute) = domain.shard_by() else { return };
    let (why, help) = if is_unique_per_request(attribute) {
        (
            "differs in every request: every counter is new",
            "name the attribute of the caller, as in `shard_by: customer`",
        )
    } else if !identifies_caller(attribute) {
        (
            "does not identify a caller: a caller has a counter for each of its values",
            "name the attribute of the caller, as in `shard_by: customer`",
        )
    } else {
        return;
    };
    reader.warning(place.at, format!("`shard_by: {attribute}` {why}"), help);
}

/// Warns about rules whose counters lie in several slots of a cluster for one request: each slot is another call, and a
/// denial in one must be undone in the others.
pub(super) fn several_slots(
    domain: &Domain,
    places: &[NodeLocation],
    options: &Options,
    reader: &mut Reader<'_>,
) {
    let severity = match options.cluster {
        Some(false) => return,
        Some(true) => Severity::Warning,
        None => Severity::Note,
    };
    // The first descriptor for each attribute that places counters; `None` for counters without values.
    let mut first: BTreeMap<Option<String>, usize> = BTreeMap::new();
    for (at, node) in domain.tree.iter().enumerate() {
        let Some(rule) = node.rule.map(|id| &domain.rules[id as usize]) else { continue };
        let central = |limit: &RuleLimit| {
            matches!(limit.mode, Mode::Central | Mode::Adaptive) && limit.role != Role::Candidate
        };
        // What all callers share is leased on a remote store, and needs no call.
        let is_leased = rule.shared_by_callers && rule.mode != Mode::Central && !options.lease_shared;
        if rule.all_limits().any(central) && !is_leased {
            first.entry(placed_by(domain, at, rule)).or_insert(at);
        }
    }
    if first.len() < 2 {
        return;
    }
    let names: Vec<String> = first
        .keys()
        .map(|name| name.as_ref().map_or_else(|| "a shared counter".to_owned(), |name| format!("`{name}`")))
        .collect();
    let last = first.values().max().copied().unwrap_or_default();
    let message = format!(
        "on Redis Cluster a request's counters need {} slots, by {}: as many calls, and more to undo a denial",
        first.len(),
        names.join(", ")
    );
    reader.warn(
        severity,
        places[last].at,
        message,
        "write `shard_by: customer` (the attribute that all callers have) at the top of the file, or nest these rules in \
         one key",
    );
}

/// Returns the key whose value is the hash tag of a rule's counters.
fn placed_by(domain: &Domain, node: usize, rule: &Rule) -> Option<String> {
    if let Some(attribute) = &rule.shard_by {
        return Some(attribute.clone());
    }
    let mut path = u32::try_from(node).map(|node| domain.path(node)).unwrap_or_default().into_iter();
    let element = path.find_map(|node| {
        let element = &domain.tree[node as usize].element;
        (!matches!(element.test, ValueTest::Exact(_) | ValueTest::Shared(_))).then_some(element)
    })?;
    Some(match element.test {
        ValueTest::Network(_) => element.to_string(),
        _ => element.key.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A false alarm on a key that names users would teach people to ignore warnings.
    #[test]
    fn names_of_unique_values_are_recognized_and_names_of_callers_are_not() {
        for unique in [
            "request_id",
            "X-Request-ID",
            "requestId",
            "req_id",
            "trace_id",
            "x-b3-traceid",
            "X-Amzn-Trace-Id",
            "traceparent",
            "span_id",
            "correlation-id",
            "nonce",
            "client_nonce",
            "timestamp",
            "request_timestamp",
            "ts",
            "uuid",
            "x-uuid",
            "idempotency_key",
        ] {
            assert!(is_unique_per_request(unique), "{unique}");
        }
        for caller in [
            "user",
            "user_id",
            "api_key",
            "customer",
            "user_uuid",
            "account_guid",
            "tenant_id",
            "session_id",
            "remote_address",
            "endpoint",
            "event_id",
            "accounts",
            "posts",
            "time_zone",
            "request_method",
            "client_id",
        ] {
            assert!(!is_unique_per_request(caller), "{caller}");
        }
    }
}
