//! Rule tree endpoint: `GET /admin/v1/rules/tree` returns the active rules as nested descriptors, in file order.

use crate::AdminState;
use crate::auth::Viewer;
use crate::response::typed;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;
use tollgate_rules::{Action, Class, LimitSet, OutlineNode, Rule};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Maximum number of descriptors listed per domain; a longer page would be unreadable.
const MAX_DESCRIPTORS: usize = 5_000;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(tree))
}

#[derive(Serialize, ToSchema)]
struct RuleTree {
    revision: String,
    domains: Vec<TreeDomain>,
}

#[derive(Serialize, ToSchema)]
struct TreeDomain {
    domain: String,
    tier_key: String,
    descriptors: Vec<TreeDescriptor>,
    /// Number of descriptors that are not listed.
    omitted: usize,
}

#[derive(Serialize, ToSchema)]
struct TreeDescriptor {
    element: String,
    depth: u32,
    #[schema(required = true)]
    rule: Option<TreeRule>,
}

#[derive(Serialize, ToSchema)]
struct TreeRule {
    name: String,
    file: String,
    line: u32,
    limits: Vec<TreeLimit>,
    tiers: Vec<TreeTier>,
    unlimited: bool,
    class: TreeClass,
    action: TreeAction,
}

#[derive(Serialize, ToSchema)]
struct TreeLimit {
    limit: String,
    role: String,
}

#[derive(Serialize, ToSchema)]
struct TreeTier {
    tier: String,
    limits: Vec<TreeLimit>,
    unlimited: bool,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum TreeClass {
    Comfort,
    Security,
    Cost,
    Strict,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum TreeAction {
    Reject,
    Delay,
    Degrade,
}

/// Returns the active rules as nested descriptors.
#[utoipa::path(get, path = "/admin/v1/rules/tree", operation_id = "GET_rules_tree",
    responses((status = 200, description = "The rule tree.", body = RuleTree)),
    extensions(("x-role" = json!("viewer"))))]
async fn tree(State(admin): State<Arc<AdminState>>, _: Viewer) -> Response {
    let rules = (admin.rules)();
    let domains = rules.domains().map(|domain| {
        let all = domain.outline();
        let listed = &all[..all.len().min(MAX_DESCRIPTORS)];
        TreeDomain {
            domain: domain.name().to_owned(),
            tier_key: domain.tier_key().to_owned(),
            descriptors: listed.iter().map(descriptor).collect(),
            omitted: all.len() - listed.len(),
        }
    });
    let tree = RuleTree { revision: rules.revision().to_owned(), domains: domains.collect() };
    typed(StatusCode::OK, "application/json", json!(tree).to_string())
}

fn descriptor(node: &OutlineNode<'_>) -> TreeDescriptor {
    TreeDescriptor { element: node.element.to_string(), depth: node.depth, rule: node.rule.map(rule) }
}

fn rule(rule: &Rule) -> TreeRule {
    TreeRule {
        name: rule.name.to_string(),
        file: rule.location.0.to_string(),
        line: rule.location.1,
        limits: limits(&rule.limits, rule),
        tiers: rule
            .tiers
            .iter()
            .map(|(tier, set)| TreeTier {
                tier: tier.to_string(),
                limits: limits(set, rule),
                unlimited: set.unlimited,
            })
            .collect(),
        unlimited: rule.limits.unlimited,
        class: match rule.class {
            Class::Comfort => TreeClass::Comfort,
            Class::Security => TreeClass::Security,
            Class::Cost => TreeClass::Cost,
            Class::Strict => TreeClass::Strict,
        },
        action: match rule.action {
            Action::Reject => TreeAction::Reject,
            Action::Delay => TreeAction::Delay,
            Action::Degrade => TreeAction::Degrade,
        },
    }
}

fn limits(set: &LimitSet, rule: &Rule) -> Vec<TreeLimit> {
    let limit = |one: &tollgate_rules::RuleLimit| TreeLimit {
        limit: one.describe(Some(rule)),
        role: format!("{:?}", one.role).to_lowercase(),
    };
    set.limits.iter().map(limit).collect()
}
