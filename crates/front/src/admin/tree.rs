//! `GET /admin/v1/rules/tree`: the rules that act now, as they stand in their files: descriptor under descriptor.

use super::routes::{Asked, Reply, Route, whole};
use crate::http::json_answer;
use crate::http::problem::Problem;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tollgate_control::Role;
use tollgate_rules::{Action, Class, LimitSet, Outlined, Rule};

pub(super) const ROUTES: &[Route] =
    &[Route::new(Method::GET, "/admin/v1/rules/tree", Role::Viewer, |asked| Box::pin(tree(asked)))];

/// The most descriptors of one domain that are told; a page that shows more helps nobody.
const MOST: usize = 5_000;

async fn tree(asked: Asked) -> Result<Reply, Problem> {
    let rules = (asked.admin.rules)();
    let domains = rules.domains().map(|domain| {
        let all = domain.outline();
        let told = &all[..all.len().min(MOST)];
        json!({
            "domain": domain.name(),
            "tier_key": domain.tier_key(),
            "descriptors": told.iter().map(node).collect::<Vec<_>>(),
            "left_out": all.len() - told.len(),
        })
    });
    let body = json!({"revision": rules.revision(), "domains": domains.collect::<Vec<_>>()});
    Ok(whole(json_answer(StatusCode::OK, body.to_string().into_bytes())))
}

fn node(node: &Outlined<'_>) -> Value {
    json!({"element": node.element, "depth": node.depth, "rule": node.rule.map(rule)})
}

fn rule(rule: &Rule) -> Value {
    let limits = |set: &LimitSet| -> Vec<Value> {
        let limit = |one: &tollgate_rules::RuleLimit| json!({"limit": one.limit.to_string(), "role": format!("{:?}", one.role).to_lowercase()});
        set.limits.iter().map(limit).collect()
    };
    json!({
        "name": rule.name,
        "file": rule.location.0,
        "line": rule.location.1,
        "limits": limits(&rule.limits),
        "tiers": rule.tiers.iter().map(|(tier, set)| json!({"tier": tier, "limits": limits(set)})).collect::<Vec<_>>(),
        "unlimited": rule.unlimited,
        "class": match rule.class {
            Class::Comfort => "comfort",
            Class::Security => "security",
            Class::Cost => "cost",
            Class::Strict => "strict",
        },
        "action": match rule.action {
            Action::Reject => "reject",
            Action::Delay => "delay",
            Action::Degrade => "degrade",
        },
    })
}
