//! Lints for rules that limit less, or cost more, than they seem to: keys that never repeat, bursts at the boundary of a
//! window, permits that are never released, counters that need several slots of a cluster.

use crate::compile::NodeLocation;
use crate::diagnostic::Severity;
use crate::reader::Reader;
use crate::rule::{Class, CostFrom, LimitSet, Profile, Role, Rule, RuleLimit};
use crate::ruleset::{Domain, Options, PermitRelease};
use crate::sensitivity::identifies_caller;
use crate::tree::{Element, GLOBAL, TreeNode, ValueTest};
use crate::yaml::shorten;
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
    let Some(value) = value_of(&node.element) else { return };
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

/// Warns about a security rule whose limit admits twice as much in some period: a fixed window around its boundary, and a
/// bucket that starts full, if only the file or the group asks for one.
pub(super) fn burst_at_boundary(rule: &Rule, place: &NodeLocation, reader: &mut Reader<'_>) {
    if rule.class != Class::Security {
        return;
    }
    let sets = std::iter::once(&rule.limits).chain(rule.tiers.iter().map(|(_, set)| set));
    for (n, set) in sets.enumerate() {
        let is_loose = |limit: &RuleLimit| {
            is_unprotected(limit, set) || place.inherits_algorithm && is_full_bucket(limit)
        };
        let Some((at, limit)) = set.limits.iter().enumerate().find(|(_, limit)| is_loose(limit)) else {
            continue;
        };
        let position = if n == 0 { place.limits.get(at) } else { None };
        let (how, help) = match is_window(limit) {
            true => (
                "a fixed window of RATE admits twice as much around its boundary",
                "write `algorithm: strict_window`, or a shorter limit beside it, as in `[5/minute, 2/second]`",
            ),
            false => (
                "a bucket of RATE that is full admits nearly twice as much in its first period",
                "write `algorithm: strict_window`, or a `burst`",
            ),
        };
        let how = how.replace("RATE", &format!("`{}`", limit.limit.rate()));
        let message = format!("{how}, on a rule of `class: security`");
        reader.warning(*position.unwrap_or(&place.at), message, help);
        return;
    }
}

/// Segments of paths, without separators, where callers prove who they are.
const LOGINS: [&str; 16] = [
    "2fa",
    "auth",
    "authenticate",
    "forgotpassword",
    "login",
    "logon",
    "mfa",
    "otp",
    "passwd",
    "password",
    "passwordreset",
    "passwords",
    "resetpassword",
    "signin",
    "totp",
    "verifyotp",
];

/// Returns whether callers prove who they are at this endpoint or path, by its name.
fn is_login(value: &str) -> bool {
    let (method, path) = value.split_once(' ').unwrap_or(("", value));
    let segments = path.split(['/', '.', ':']).map(|segment| {
        let letters = segment.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase());
        letters.collect::<String>()
    });
    method != "GET" && segments.into_iter().any(|segment| LOGINS.contains(&&*segment))
}

/// Returns the value that a descriptor names, with its wildcards.
pub(super) fn value_of(element: &Element) -> Option<&str> {
    match &element.test {
        ValueTest::Exact(value) => Some(value),
        ValueTest::Like(pattern) | ValueTest::Shared(pattern) => Some(pattern.text()),
        ValueTest::Any | ValueTest::Network(_) => None,
    }
}

/// Warns about a limit of one caller's size on a login that all callers share: one of them locks out everybody.
pub(super) fn one_for_all(domain: &Domain, id: usize, place: &NodeLocation, reader: &mut Reader<'_>) {
    let node = &domain.tree[id];
    let Some(rule) = node.rule.map(|id| &domain.rules[id as usize]) else { return };
    if !rule.shared_by_callers || reader.is_ratelimit_file {
        return;
    }
    let path = |id: usize| u32::try_from(id).map(|id| domain.path(id)).unwrap_or_default();
    let elements = |id: usize| path(id).into_iter().map(|node| &domain.tree[node as usize].element);
    let has_caller =
        |id: usize| elements(id).any(|element| *element.key != *GLOBAL.0 && identifies_caller(&element.key));
    let is_request = |element: &&Element| matches!(&*element.key, "endpoint" | "path" | "route");
    let Some(value) = elements(id).filter(is_request).find_map(value_of) else { return };
    if has_caller(id) || rule.class != Class::Security && !is_login(value) {
        return;
    }
    // What admits two requests a second is meant for all callers together.
    let is_small = |limit: &&RuleLimit| {
        let rate = limit.limit.rate();
        let micros = u128::from(rate.period.length().as_micros());
        limit.role.is_enforced(rule.action)
            && u128::from(rate.count) * 1_000_000 < 2 * micros
            && rate.count > 0
    };
    let Some(limit) = rule.limits.limits.iter().find(is_small) else { return };
    // Beside a limit of each caller, one of all is a second line.
    let counts_callers = |other: usize| {
        domain.tree[other].rule.is_some()
            && has_caller(other)
            && elements(other).any(|element| value_of(element) == Some(value))
    };
    if (1..domain.tree.len()).any(counts_callers) {
        return;
    }
    let message = format!(
        "all callers share the `{}` of `{}`: one that uses them up locks out everybody",
        limit.limit.rate(),
        shorten(value)
    );
    let help = "count each caller: in place of `limit`, write `descriptors: [{key: remote_address, limit: 5/minute}]`, or put \
                it below `api_key` or `user`";
    reader.warning(place.at, message, help);
}

/// Warns about a long fixed window whose whole count may be used in a moment.
pub(super) fn long_window(domain: &Domain, id: usize, place: &NodeLocation, reader: &mut Reader<'_>) {
    /// An hour.
    const LONG: u64 = 3_600_000_000;
    /// What may come at once without harm.
    const FEW: u64 = 100;
    let Some(rule) = domain.tree[id].rule.map(|id| &domain.rules[id as usize]) else { return };
    if domain.profile() == Profile::Envoy || rule.class == Class::Security {
        return;
    }
    let length = |limit: &RuleLimit| limit.limit.rate().period.length();
    let counts_requests = |limit: &RuleLimit, rule: &Rule| {
        matches!(limit.cost_from(rule), CostFrom::Request | CostFrom::Fixed(1))
    };
    let is_long = |limit: &RuleLimit| {
        limit.role.is_enforced(rule.action)
            && is_window(limit)
            && counts_requests(limit, rule)
            && length(limit).as_micros() >= LONG
            && limit.limit.rate().count >= FEW
    };
    let paces = |other: &RuleLimit, limit: &RuleLimit| {
        other.role.is_live() && (!is_window(other) || length(other) < length(limit))
    };
    let sets = std::iter::once(&rule.limits).chain(rule.tiers.iter().map(|(_, set)| set));
    for (n, set) in sets.enumerate() {
        let found = set
            .limits
            .iter()
            .enumerate()
            .find(|(_, limit)| is_long(limit) && !set.limits.iter().any(|other| paces(other, limit)));
        let Some((at, limit)) = found else { continue };
        let others =
            (1..domain.tree.len()).filter(|other| *other != id && matches_whenever(domain, *other, id));
        let mut others = others.filter_map(|other| Some(&domain.rules[domain.tree[other].rule? as usize]));
        if others.any(|other| other.all_limits().any(|other| paces(other, limit))) {
            continue;
        }
        let position = if n == 0 { place.limits.get(at) } else { None };
        let rate = limit.limit.rate();
        reader.warning(
            *position.unwrap_or(&place.at),
            format!("all of `{rate}` may be used in a moment: a fixed window does not limit how fast"),
            "write a shorter limit beside it, as in `[10/second, 10000/day]`",
        );
        return;
    }
}

/// Returns whether a request that matches one descriptor matches another one, by their keys.
fn matches_whenever(domain: &Domain, other: usize, id: usize) -> bool {
    let path = |id: usize| u32::try_from(id).map(|id| domain.path(id)).unwrap_or_default();
    let own = path(id);
    path(other).into_iter().all(|node| {
        let element = &domain.tree[node as usize].element;
        *element.key == *GLOBAL.0
            || own.contains(&node)
            || own.iter().any(|own| {
                let own = &domain.tree[*own as usize].element;
                own.key == element.key && matches!(element.test, ValueTest::Any | ValueTest::Network(_))
            })
    })
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

fn is_window(limit: &RuleLimit) -> bool {
    limit.limit.algorithm() == Algorithm::FixedWindow
}

/// Returns whether a limit is enforced by a bucket that holds a whole period's units; no shorter limit changes that.
fn is_full_bucket(limit: &RuleLimit) -> bool {
    let (count, capacity) = (limit.limit.rate().count, limit.limit.capacity());
    limit.role.is_live() && limit.limit.algorithm().has_burst() && count > 1 && capacity >= count
}

/// Returns whether a limit is an enforced fixed window, and no other limit of the set is shorter or of another kind.
fn is_unprotected(limit: &RuleLimit, set: &LimitSet) -> bool {
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
