//! Usage endpoints: read a caller's usage without charging, reset it, and grant extra units.

use super::schemas::{
    ApiKeyParameter, CallerIdParameter, GrantIdParameter, GrantParameter, SeenCallerIdParameter,
};
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::caller_path::CallerPath;
use crate::error::{ApiError, ApiResult, unprocessable};
use crate::path::LastSegment;
use crate::query::{ConfirmParameter, KeyParameter, NoParameters, StrictQuery};
use crate::quota_guard;
use crate::response::{json_response, no_content};
use crate::{AdminState, query};
use axum::extract::{FromRequestParts, State};
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tollgate_control::{Actor, GrantRecord, GrantSpec, rfc3339};
use tollgate_core::CounterStore;
use tollgate_engine::{GrantBalance, LimitUsage, Limiter, UnmatchedRule, Usage, UsageError, Window};
use tollgate_http::problem::Problem;
use tollgate_rules::{CALLER_KEY, Role as LimitRole};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new()
        .routes(routes!(get))
        .routes(routes!(reset))
        .routes(routes!(grant))
        .routes(routes!(revoke))
        .routes(routes!(get_by_id))
        .routes(routes!(reset_by_id))
        .routes(routes!(grant_by_id))
        .routes(routes!(revoke_by_id))
}

/// Selects a caller's limits.
pub struct UsageQuery {
    /// The domain; required if there are several.
    pub domain: Option<String>,
    /// The caller's API key and the other attributes that requests carry.
    pub attributes: Vec<(String, String)>,
    /// Restricts the query to one rule.
    pub rule: Option<String>,
}

/// The usage, or the reason why it cannot be read.
pub type UsageFuture<'a> = Pin<Box<dyn Future<Output = Result<Usage, UsageError>> + Send + 'a>>;

/// Access to usage counters, implemented by a limiter over any store.
pub trait UsageReader: Send + Sync {
    /// Returns the usage.
    fn usage<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a>;
    /// Resets the usage and returns the new state.
    fn reset<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a>;
}

impl<S: CounterStore> UsageReader for Limiter<S> {
    fn usage<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a> {
        Box::pin(async move {
            let attributes: Vec<(&str, &str)> = of.pairs();
            Self::usage(self, of.domain.as_deref(), &attributes, of.rule.as_deref()).await
        })
    }

    fn reset<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a> {
        Box::pin(async move {
            let attributes: Vec<(&str, &str)> = of.pairs();
            Self::reset(self, of.domain.as_deref(), &attributes, of.rule.as_deref()).await
        })
    }
}

impl UsageQuery {
    fn pairs(&self) -> Vec<(&str, &str)> {
        self.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }
}

/// The caller from the path, with the usage query.
struct UsageOf(CallerPath, UsageQuery);

impl FromRequestParts<Arc<AdminState>> for UsageOf {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        let caller = CallerPath::from_request_parts(parts, admin).await?;
        let (mut values, mut attributes) =
            query::with_attributes(parts.uri.query().unwrap_or_default(), &["domain"])?;
        if attributes.iter().any(|(name, _)| name == CALLER_KEY) {
            return Err(Problem::bad("must be absent; the path already contains the API key")
                .in_field("attr.api_key")
                .into());
        }
        attributes.insert(0, (CALLER_KEY.to_owned(), caller.key()?.to_owned()));
        let domain = values.pop().flatten();
        Ok(Self(caller, UsageQuery { domain, attributes, rule: None }))
    }
}

/// Query parameters of a usage request. In addition, each `attr.NAME=VALUE` is an attribute of the caller's requests.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes what `UsageOf` parses")]
struct UsageParameters {
    /// The domain; required if there are several.
    domain: Option<String>,
}

/// Returns a caller's usage of each of its limits, without charging.
#[utoipa::path(get, path = "/admin/v1/usage/{api_key}", operation_id = "GET_usage_api_key",
    params(ApiKeyParameter, KeyParameter, UsageParameters),
    responses((status = 200, description = "The usage.", body = UsageBody)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer, of: UsageOf) -> ApiResult {
    read(&admin, of).await
}

/// Returns a caller's usage, by the id from a list.
#[utoipa::path(get, path = "/admin/v1/usage/by-id/{id}", operation_id = "GET_usage_api_key_by_id",
    params(SeenCallerIdParameter, UsageParameters),
    responses((status = 200, description = "The usage.", body = UsageBody)),
    extensions(("x-role" = json!("viewer"))))]
async fn get_by_id(State(admin): State<Arc<AdminState>>, _: Viewer, of: UsageOf) -> ApiResult {
    read(&admin, of).await
}

async fn read(admin: &AdminState, UsageOf(caller, of): UsageOf) -> ApiResult {
    let usage = admin.usage.usage(&of).await.map_err(usage_unavailable)?;
    Ok(usage_response(&caller, &usage))
}

/// Which usage to reset, and the reason.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Reset {
    /// The rule to reset; all rules if absent.
    rule: Option<String>,
    reason: String,
}

/// Resets a caller's usage to zero.
#[utoipa::path(post, path = "/admin/v1/usage/{api_key}/reset", operation_id = "POST_usage_api_key_reset",
    params(ApiKeyParameter, KeyParameter, UsageParameters), request_body = Reset,
    responses((status = 200, description = "The usage after the reset.", body = UsageBody)),
    extensions(("x-role" = json!("operator"))))]
async fn reset(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    of: UsageOf,
    Json(sent): Json<Reset>,
) -> ApiResult {
    reset_usage(&admin, of, sent, &actor).await
}

/// Resets a caller's usage, by the id from a list.
#[utoipa::path(post, path = "/admin/v1/usage/by-id/{id}/reset", operation_id = "POST_usage_api_key_reset_by_id",
    params(SeenCallerIdParameter, UsageParameters), request_body = Reset,
    responses((status = 200, description = "The usage after the reset.", body = UsageBody)),
    extensions(("x-role" = json!("operator"))))]
async fn reset_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    of: UsageOf,
    Json(sent): Json<Reset>,
) -> ApiResult {
    reset_usage(&admin, of, sent, &actor).await
}

async fn reset_usage(
    admin: &AdminState,
    UsageOf(caller, mut of): UsageOf,
    sent: Reset,
    actor: &Actor,
) -> ApiResult {
    of.rule = sent.rule;
    let before = admin.usage.usage(&of).await.map_err(usage_unavailable)?;
    let recorded = json!({"limits": before.limits.iter().map(used_limit).collect::<Vec<_>>()}).to_string();
    let key = caller.key()?;
    admin.control()?.audit_reset(key, of.rule.as_deref(), &sent.reason, recorded, actor).await??;
    let usage = admin.usage.reset(&of).await.map_err(usage_unavailable)?;
    Ok(usage_response(&caller, &usage))
}

/// Grants a caller extra units, once.
#[utoipa::path(post, path = "/admin/v1/usage/{api_key}/grant", operation_id = "POST_usage_api_key_grant",
    params(ApiKeyParameter, KeyParameter), request_body = GrantSpec,
    responses((status = 201, description = "The grant.", body = NewGrant)),
    extensions(("x-role" = json!("operator"))))]
async fn grant(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    _: StrictQuery<NoParameters>,
    Json(draft): Json<GrantSpec>,
) -> ApiResult {
    add(&admin, &caller, draft, &actor).await
}

/// Grants extra units, by the caller's id from a list.
#[utoipa::path(post, path = "/admin/v1/usage/by-id/{id}/grant", operation_id = "POST_usage_api_key_grant_by_id",
    params(CallerIdParameter), request_body = GrantSpec,
    responses((status = 201, description = "The grant.", body = NewGrant)),
    extensions(("x-role" = json!("operator"))))]
async fn grant_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    _: StrictQuery<NoParameters>,
    Json(draft): Json<GrantSpec>,
) -> ApiResult {
    add(&admin, &caller, draft, &actor).await
}

async fn add(admin: &AdminState, caller: &CallerPath, draft: GrantSpec, actor: &Actor) -> ApiResult {
    let rules = (admin.rules)();
    let grant = admin.control()?.grant(caller.caller(), draft, &rules, actor).await??;
    let names = rules.find_per_caller_rules(&grant.rule);
    let rules = names.into_iter().filter_map(|id| Some(rules.rule(id)?.name.clone())).collect();
    Ok(json_response(StatusCode::CREATED, &NewGrant { grant, rules }))
}

/// A grant, with the names of the rules that it covers.
#[derive(Serialize, ToSchema)]
struct NewGrant {
    #[serde(flatten)]
    grant: GrantRecord,
    /// Names of the rules, as usage and decisions show them.
    rules: Vec<String>,
}

/// Revokes the rest of a grant.
#[utoipa::path(delete, path = "/admin/v1/usage/{api_key}/grant/{id}", operation_id = "DELETE_usage_api_key_grant_id",
    params(ApiKeyParameter, KeyParameter, GrantIdParameter, ConfirmParameter),
    responses((status = 204, description = "The grant is revoked.")),
    extensions(("x-role" = json!("operator"))))]
async fn revoke(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(confirm): StrictQuery<ConfirmParameter>,
    LastSegment(grant): LastSegment,
) -> ApiResult {
    revoke_grant(&admin, &caller, &grant, confirm, &actor).await
}

/// Revokes the rest of a grant, by the caller's id from a list.
#[utoipa::path(delete, path = "/admin/v1/usage/by-id/{id}/grant/{grant}",
    operation_id = "DELETE_usage_api_key_grant_id_by_id", params(CallerIdParameter, GrantParameter, ConfirmParameter),
    responses((status = 204, description = "The grant is revoked.")),
    extensions(("x-role" = json!("operator"))))]
async fn revoke_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(confirm): StrictQuery<ConfirmParameter>,
    LastSegment(grant): LastSegment,
) -> ApiResult {
    revoke_grant(&admin, &caller, &grant, confirm, &actor).await
}

async fn revoke_grant(
    admin: &AdminState,
    caller: &CallerPath,
    grant: &str,
    confirm: ConfirmParameter,
    actor: &Actor,
) -> ApiResult {
    if !confirm.is_confirmed() {
        quota_guard::check_revocation(admin, caller.caller(), grant).await?;
    }
    admin.control()?.revoke_grant(caller.caller(), grant, actor).await?;
    Ok(no_content())
}

pub(super) fn usage_unavailable(error: UsageError) -> Problem {
    match error {
        UsageError::Domain(why) => Problem::bad(why).in_field("domain"),
        UsageError::Rule(why) => unprocessable("No such rule", why).in_field("rule"),
        error => {
            tracing::warn!(%error, "reading usage failed");
            let detail = "the counter store is unavailable; retry later";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Store unavailable", detail)
        }
    }
}

/// A caller's usage of each of its limits.
#[derive(Serialize, ToSchema)]
#[schema(as = Usage)]
struct UsageBody<'u> {
    /// The API key, only if the request contained it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    api_key: Option<&'u str>,
    domain: String,
    #[schema(required = true)]
    tier: Option<String>,
    limits: Vec<UsedLimit>,
    needs: Vec<NeededAttributes>,
    grants: Vec<LeftOfGrant>,
}

#[derive(Serialize, ToSchema)]
struct UsedLimit {
    rule: String,
    descriptor: String,
    limit: u64,
    window: String,
    algorithm: &'static str,
    #[schema(required = true)]
    used: Option<u64>,
    #[schema(required = true)]
    remaining: Option<u64>,
    reset_ms: u64,
    source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    burst: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = OtherRole)]
    role: Option<OtherRole>,
}

/// Role of a limit that does not decide by itself.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum OtherRole {
    Shadow,
    Candidate,
    Quota,
}

/// A rule whose counters need more request attributes to be read.
#[derive(Serialize, ToSchema)]
#[schema(as = UnmatchedRule)]
struct NeededAttributes {
    rule: String,
    descriptor: String,
    attributes: Vec<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct LeftOfGrant {
    id: String,
    rules: Vec<String>,
    units: u64,
    #[schema(required = true)]
    remaining: Option<u64>,
    expires_at: String,
}

fn usage_response(caller: &CallerPath, usage: &Usage) -> Response {
    let body = UsageBody {
        api_key: caller.sent(),
        domain: usage.domain.clone(),
        tier: usage.tier.clone(),
        limits: usage.limits.iter().map(used_limit).collect(),
        needs: usage.unmatched.iter().map(needs).collect(),
        grants: usage.grants.iter().map(left).collect(),
    };
    json_response(StatusCode::OK, &body)
}

fn used_limit(used: &LimitUsage) -> UsedLimit {
    let (count, capacity) = (used.limit.rate().count, used.limit.capacity());
    UsedLimit {
        rule: used.rule.clone(),
        descriptor: used.descriptor.clone(),
        limit: count,
        window: Window::from_limit(&used.limit).to_string(),
        algorithm: used.limit.algorithm().name(),
        used: used.used(),
        remaining: used.remaining,
        reset_ms: used.reset_after.ceil_millis(),
        source: used.source.name(),
        burst: (capacity != count).then_some(capacity),
        role: match used.role {
            LimitRole::Live => None,
            LimitRole::Shadow | LimitRole::Unenforced => Some(OtherRole::Shadow),
            LimitRole::Candidate => Some(OtherRole::Candidate),
            LimitRole::Quota => Some(OtherRole::Quota),
        },
    }
}

fn needs(needs: &UnmatchedRule) -> NeededAttributes {
    NeededAttributes {
        rule: needs.rule.clone(),
        descriptor: needs.descriptor.clone(),
        attributes: needs.attributes.clone(),
    }
}

pub(super) fn left(left: &GrantBalance) -> LeftOfGrant {
    LeftOfGrant {
        id: left.id.to_string(),
        rules: left.rules.clone(),
        units: left.units,
        remaining: left.remaining,
        expires_at: rfc3339(left.expires_at),
    }
}
