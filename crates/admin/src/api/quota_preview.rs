//! The limits in force for a caller before and after a change of its quota, and what stands in the way of the change.
//! Both sides are compiled as the limiter compiles them, so what is shown is what will be charged. The dashboard's form
//! and the command line show it before they send the change.

use super::quotas::read_draft;
use super::schemas::{ApiKeyParameter, CallerIdParameter};
use crate::AdminState;
use crate::auth::Viewer;
use crate::body::Json;
use crate::caller_path::CallerPath;
use crate::error::ApiResult;
use crate::query::{KeyParameter, StrictQuery};
use crate::quota_guard::QuotaGuard;
use crate::response::json_response;
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{LimitsInForce, QuotaChange, QuotaSpec, RuleInForce};
use tollgate_core::Period;
use tollgate_engine::Window;
use tollgate_rules::{Role, RuleLimit, Ruleset, Unit};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(preview)).routes(routes!(preview_by_id))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct PreviewParameters {
    /// The tier of the caller's requests, which applies where a quota gives none; by default that of its latest request to this
    /// node.
    tier: Option<String>,
}

/// The limits in force for a caller before and after a change of its quota.
#[derive(Serialize, ToSchema)]
struct QuotaPreview {
    /// The rules with counters of the caller's own.
    rules: Vec<RulePreview>,
    /// Why the change needs confirmation; empty if it needs none.
    confirm: Vec<String>,
    /// What the sender may not have expected.
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
struct RulePreview {
    domain: String,
    rule: String,
    /// Path of the rule.
    descriptor: String,
    /// The `descriptor` of an override of this rule.
    reference: String,
    before: LimitsPreview,
    after: LimitsPreview,
}

/// Limits of one rule; none, and not `unlimited`, if the rule has none for the caller.
#[derive(PartialEq, Eq, Serialize, ToSchema)]
struct LimitsPreview {
    unlimited: bool,
    limits: Vec<LimitPreview>,
}

#[derive(PartialEq, Eq, Serialize, ToSchema)]
struct LimitPreview {
    /// The units that an unused limit allows at one instant.
    limit: u64,
    /// Units per `window`.
    count: u64,
    window: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    burst: Option<u64>,
    algorithm: &'static str,
    /// What it counts: `requests`, `cost` (what the request states), or an attribute.
    cost: String,
    /// `rule`, `tier` or `override`.
    source: &'static str,
    /// Whether it can deny requests; a candidate and a limit in shadow cannot.
    enforced: bool,
}

/// Returns the limits in force before and after a change of a caller's quota, and why it would need confirmation. Without
/// tier and overrides: before and after the quota's deletion. Changes nothing.
#[utoipa::path(post, path = "/admin/v1/quotas/{api_key}/preview", operation_id = "POST_quotas_api_key_preview",
    params(ApiKeyParameter, KeyParameter, PreviewParameters), request_body = QuotaSpec,
    responses((status = 200, description = "The limits.", body = QuotaPreview)),
    extensions(("x-role" = json!("viewer"))))]
async fn preview(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    caller: CallerPath,
    StrictQuery(asked): StrictQuery<PreviewParameters>,
    Json(draft): Json<QuotaSpec>,
) -> ApiResult {
    show(&admin, &caller, asked, &draft).await
}

/// Returns the same by the caller's id from a list.
#[utoipa::path(post, path = "/admin/v1/quotas/by-id/{id}/preview", operation_id = "POST_quotas_by-id_id_preview",
    params(CallerIdParameter, PreviewParameters), request_body = QuotaSpec,
    responses((status = 200, description = "The limits.", body = QuotaPreview)),
    extensions(("x-role" = json!("viewer"))))]
async fn preview_by_id(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    caller: CallerPath,
    StrictQuery(asked): StrictQuery<PreviewParameters>,
    Json(draft): Json<QuotaSpec>,
) -> ApiResult {
    show(&admin, &caller, asked, &draft).await
}

async fn show(
    admin: &AdminState,
    caller: &CallerPath,
    asked: PreviewParameters,
    draft: &QuotaSpec,
) -> ApiResult {
    let guard = QuotaGuard::new(admin)?;
    let rules = guard.rules();
    let mut change = admin.control()?.quota_change(caller.caller(), read_draft(draft), rules)?;
    match asked.tier {
        Some(tier) => change.tier = Some(tier),
        None => guard.set_request_tier(&mut change).await,
    }
    let shown = QuotaPreview {
        rules: change.limits_in_force(rules).iter().map(rule).collect(),
        confirm: guard.reasons(&change).await,
        warnings: change.warnings.clone(),
    };
    Ok(json_response(StatusCode::OK, &shown))
}

fn rule(one: &RuleInForce<'_>) -> RulePreview {
    RulePreview {
        domain: one.domain.to_owned(),
        rule: one.rule.name.clone(),
        descriptor: one.descriptor.clone(),
        reference: one.reference.clone(),
        before: limits(one, &one.before),
        after: limits(one, &one.after),
    }
}

fn limits(of: &RuleInForce<'_>, one: &LimitsInForce<'_>) -> LimitsPreview {
    let limit = |own: &RuleLimit| {
        let (count, capacity) = (own.limit.rate().count, own.limit.capacity());
        LimitPreview {
            limit: capacity,
            count,
            window: Window::from_limit(&own.limit).to_string(),
            burst: (capacity != count).then_some(capacity),
            algorithm: own.limit.algorithm().name(),
            cost: own.cost_from(of.rule).meter().to_owned(),
            source: one.source(own).name(),
            enforced: own.role.is_enforced(of.rule.action),
        }
    };
    LimitsPreview { unlimited: one.set.unlimited, limits: one.set.limits.iter().map(limit).collect() }
}

/// The limits in force for a caller, in the words of overrides: of the rule on the caller alone, and of the others.
#[derive(Serialize, ToSchema)]
pub(super) struct QuotasInForce {
    /// The first limit of the rule on the caller alone; absent if there is no such rule, or it has no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = LimitByUnit)]
    default: Option<LimitByUnit>,
    /// All others.
    overrides: Vec<LimitByUnit>,
}

/// A limit in force: a number per unit, or `unlimited`.
#[derive(Serialize, ToSchema)]
struct LimitByUnit {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    descriptor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    requests_per_unit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    unit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    limit: Option<&'static str>,
}

/// Returns what is in force after a change.
pub(super) fn in_force(change: &QuotaChange, rules: &Ruleset) -> QuotasInForce {
    let mut shown = QuotasInForce { default: None, overrides: Vec::new() };
    for one in change.limits_in_force(rules) {
        let unlimited = one.after.set.unlimited.then_some(LimitByUnit {
            descriptor: None,
            requests_per_unit: None,
            unit: None,
            limit: Some("unlimited"),
        });
        let enforced = one.after.set.limits.iter().filter(|limit| {
            limit.role.is_enforced(one.rule.action) && limit.role != Role::Candidate && is_per_unit(limit)
        });
        let limits = enforced.map(|limit| LimitByUnit {
            descriptor: None,
            requests_per_unit: Some(limit.limit.rate().count),
            unit: Some(unit(limit)),
            limit: None,
        });
        for limit in unlimited.into_iter().chain(limits) {
            match &mut shown.default {
                none @ None if one.reference == "default" => *none = Some(limit),
                _ => {
                    let descriptor = Some(one.reference.clone());
                    shown.overrides.push(LimitByUnit { descriptor, ..limit });
                }
            }
        }
    }
    shown
}

fn is_per_unit(limit: &RuleLimit) -> bool {
    limit.limit.algorithm() != tollgate_core::Algorithm::Concurrency
}

/// Returns the period as an override writes it.
fn unit(limit: &RuleLimit) -> String {
    match &limit.limit.rate().period {
        Period::Rolling(length) => {
            Unit::from_length(*length).map_or_else(|| length.to_string(), |unit| unit.name().to_lowercase())
        }
        calendar => calendar.to_string(),
    }
}
