//! Lint for limits that a client passes by inventing a value: an unknown API key, a header that any client may send.
//! Where a rule on such an attribute takes the place of the one for callers without it, every invented value is a caller
//! with a limit of its own.

use crate::compile::NodeLocation;
use crate::diagnostic::Severity;
use crate::overrides::CALLER_KEY;
use crate::reader::Reader;
use crate::rule::{Role, Rule};
use crate::ruleset::{Domain, Options};
use crate::sensitivity::may_be_secret;
use crate::tree::{Element, ValueTest};
use std::collections::HashMap;

pub(super) fn escapes(domain: &Domain, places: &[NodeLocation], options: &Options, reader: &mut Reader<'_>) {
    let unknown = [CALLER_KEY.to_owned()];
    let (severity, invented) = match &options.unverified {
        Some(invented) => (Severity::Warning, &invented[..]),
        None => (Severity::Note, &unknown[..]),
    };
    // A single key is no name that can be invented; a tier or tenant is.
    let is_invented = |element: &&Element| {
        let is_value = matches!(element.test, ValueTest::Exact(_)) && may_be_secret(&element.key);
        !is_value && invented.iter().any(|name| **name == *element.key)
    };
    let rules = domain.tree.iter().enumerate().filter_map(|(at, node)| {
        let path = domain.path(u32::try_from(at).ok()?);
        let element = path.into_iter().map(|node| &domain.tree[node as usize].element).find(is_invented);
        Some((at, &domain.rules[node.rule? as usize], element))
    });
    let (by_invented, others): (Vec<_>, Vec<_>) = rules.partition(|(.., element)| element.is_some());
    let is_quota = |rule: &Rule| rule.all_limits().any(|limit| limit.role == Role::Quota);
    let named: HashMap<&str, &Rule> = others
        .iter()
        .filter(|(_, rule, _)| rule.has_explicit_name && rule.all_limits().any(|limit| limit.role.is_live()))
        .map(|(_, rule, _)| (rule.name.as_str(), *rule))
        .collect();
    let quota = others.iter().map(|(_, rule, _)| *rule).find(|rule| is_quota(rule));
    let escape = by_invented.iter().find_map(|(at, rule, element)| {
        let replaced = rule.replaces.iter().find_map(|name| named.get(name.as_str()).copied());
        // Quota limits deny only together: an invented value has never used up its own.
        Some((*at, replaced.or(quota.filter(|_| is_quota(rule)))?, &(*element)?.key))
    });
    if let Some((at, escaped, key)) = escape {
        let message = format!(
            "a request with an invented `{key}` is not held to the limit `{}`: nothing says which are known",
            escaped.name
        );
        reader.warn(severity, places[at].at, message, help(key));
        return;
    }
    if invented.contains(&domain.tier_key)
        && let Some((at, rule, _)) =
            others.iter().chain(&by_invented).find(|(_, rule, _)| !rule.tiers.is_empty())
    {
        let key = &domain.tier_key;
        let message = format!(
            "any client chooses its tier in `{}`: `{key}` is read from a header that anybody may send",
            rule.name
        );
        reader.warn(severity, places[*at].at, message, help(key));
    }
}

fn help(key: &str) -> String {
    if key == CALLER_KEY {
        "write in the file of --config which keys are known, as in `identity: {api_key: {known: {file: keys.txt}}}` (also \
         `formats`, `quotas: true`, `verified_by_proxy: true`), or, if invented keys may pass, `api_key: {unknown: key}`"
            .to_owned()
    } else {
        format!(
            "move `{key}` from `identity.headers` to `identity.trusted_headers`, which only trusted proxies set"
        )
    }
}
