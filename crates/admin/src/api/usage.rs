//! Usage endpoints: read a caller's usage without charging, reset it, and grant extra units.

use super::explained::measure_effect;
use super::region::RegionOfLimit;
use super::schemas::{
    ApiKeyParameter, CallerIdParameter, GrantIdParameter, GrantParameter, SeenCallerIdParameter,
};
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::caller_path::{CallerPath, SentCaller};
use crate::error::{ApiError, ApiResult, unprocessable};
use crate::last_tier::{LastTier, last_tier};
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
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use tollgate_control::{Actor, GrantRecord, GrantSpec, rfc3339};
use tollgate_core::{Algorithm, CounterStore, Timestamp};
use tollgate_engine::{
    GrantBalance, LimitUsage, Limiter, Network, UnlimitedRule, UnmatchedRule, Usage, UsageError,
    UsageOf as EngineUsageOf, Window,
};
use tollgate_http::problem::Problem;
use tollgate_rules::{CALLER_KEY, Domain, PerCallerRule, Role as LimitRole, Ruleset};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The attribute that contains the client's address.
const ADDRESS: &str = "remote_address";

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
    /// The attribute that identifies the caller.
    pub key: String,
    /// This attribute and the others that the caller's requests carry.
    pub attributes: Vec<(String, String)>,
    /// Full address of the client, if that is what identifies the caller.
    pub address: Option<IpAddr>,
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
            let attributes = of.pairs();
            Self::usage(self, &of.with(&attributes)).await
        })
    }

    fn reset<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a> {
        Box::pin(async move {
            let attributes = of.pairs();
            Self::reset(self, &of.with(&attributes)).await
        })
    }
}

impl UsageQuery {
    /// Selects the limits of a caller in a domain. A client's address is counted as the HTTP servers identify it, an IPv6
    /// address by its network; with the suffix `/128` as it is, which is how Envoy's descriptors contain it.
    pub(crate) fn of(admin: &AdminState, domain: Option<String>, key: &str, value: &str) -> Self {
        let address: Option<IpAddr> = value.parse().ok().filter(|_| key == ADDRESS);
        let counted = match address {
            Some(address) => (admin.address_attribute)(address),
            None => single_address(value).map_or_else(|| value.to_owned(), |address| address.to_string()),
        };
        Self { domain, key: key.to_owned(), attributes: vec![(key.to_owned(), counted)], address, rule: None }
    }

    /// Adds the tier of the caller's latest request, if no tier is stated; returns where the tier is from.
    async fn add_last_tier(&mut self, admin: &AdminState) -> Option<TierSource> {
        let rules = (admin.rules)();
        let domain =
            found_domain(&rules, self.domain.as_deref()).filter(|domain| domain.depends_on_tier())?;
        let stated = |key: &str| self.attributes.iter().find(|(name, _)| name == key);
        if stated(domain.tier_key()).is_some() {
            return Some(TierSource::Stated);
        }
        let (_, value) = stated(&self.key)?;
        match last_tier(admin, domain, &self.key, value).await {
            LastTier::Unknown => return None,
            LastTier::Absent => {}
            LastTier::Named(tier) => self.attributes.push((domain.tier_key().to_owned(), tier)),
        }
        Some(TierSource::LastRequest)
    }

    fn pairs(&self) -> Vec<(&str, &str)> {
        self.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    fn with<'a>(&'a self, attributes: &'a [(&'a str, &'a str)]) -> EngineUsageOf<'a> {
        let (domain, rule) = (self.domain.as_deref(), self.rule.as_deref());
        EngineUsageOf { domain, key: &self.key, attributes, address: self.address, rule }
    }
}

/// The caller from the path, with the usage query, and where its tier is from if it has no quota; `None` if it is not known.
struct UsageOf(CallerPath, UsageQuery, Option<TierSource>);

/// Where a caller's tier is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum TierSource {
    /// The caller's quota.
    Quota,
    /// The attributes that the reader states.
    Stated,
    /// The caller's latest request to this node.
    LastRequest,
}

impl FromRequestParts<Arc<AdminState>> for UsageOf {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        let caller = CallerPath::from_request_parts(parts, admin).await?;
        let (mut values, attributes) =
            query::with_attributes(parts.uri.query().unwrap_or_default(), &["domain"])?;
        let (key, value) = caller.attribute()?;
        check_counted(&(admin.rules)(), key, value)?;
        if attributes.iter().any(|(name, _)| name == key) {
            return Err(Problem::bad("must be absent; the path already contains it")
                .in_field(format!("attr.{key}"))
                .into());
        }
        let mut of = UsageQuery::of(admin, values.pop().flatten(), key, value);
        of.attributes.extend(attributes);
        let source = of.add_last_tier(admin).await;
        Ok(Self(caller, of, source))
    }
}

/// Returns the domain with this name, or the first one: without a name there is only one.
fn found_domain<'r>(rules: &'r Ruleset, name: Option<&str>) -> Option<&'r Domain> {
    match name {
        Some(name) => rules.domain(name),
        None => rules.domains().next(),
    }
}

/// Checks that rules have a counter for each value like this one.
fn check_counted(rules: &Ruleset, key: &str, value: &str) -> Result<(), Problem> {
    if key == CALLER_KEY {
        return Ok(());
    }
    if !rules.is_quota_key(key) {
        let known = rules.quota_key_names().join(", ");
        let detail = format!("no rule has a counter for each `{key}`; the rules count by {known}");
        return Err(unprocessable("No such key", detail).in_field("key"));
    }
    if value.contains('/') && value.parse::<Network>().is_ok() && single_address(value).is_none() {
        let detail = "usage is counted for addresses, and this is a network; name an address in it";
        return Err(unprocessable("No counter", detail).in_field("value"));
    }
    Ok(())
}

/// Returns the address that a network consists of, if it is only one.
fn single_address(value: &str) -> Option<IpAddr> {
    let (address, bits) = value.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    (bits == if address.is_ipv4() { "32" } else { "128" }).then_some(address)
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

async fn read(admin: &AdminState, UsageOf(caller, of, source): UsageOf) -> ApiResult {
    let usage = admin.usage.usage(&of).await.map_err(usage_unavailable)?;
    Ok(usage_response(admin, &caller, (&of, source), &usage))
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
    UsageOf(caller, mut of, source): UsageOf,
    sent: Reset,
    actor: &Actor,
) -> ApiResult {
    of.rule = sent.rule;
    let before = admin.usage.usage(&of).await.map_err(usage_unavailable)?;
    let recorded = json!({"limits": before.limits.iter().map(used_limit).collect::<Vec<_>>()}).to_string();
    admin
        .control()?
        .audit_reset(caller.caller(), of.rule.as_deref(), &sent.reason, recorded, actor)
        .await??;
    let usage = admin.usage.reset(&of).await.map_err(usage_unavailable)?;
    Ok(usage_response(admin, &caller, (&of, source), &usage))
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
    let names = rules.find_per_caller_rules(&grant.key, &grant.rule);
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
        UsageError::NoReset(why) => unprocessable("Nothing to reset", why),
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
    #[serde(flatten)]
    caller: SentCaller<'u>,
    /// The attribute that identifies the caller.
    key: &'u str,
    domain: String,
    #[schema(required = true)]
    tier: Option<String>,
    /// Where the tier is from, or that there is none; null if it is not known, or no limit depends on it.
    #[schema(required = true)]
    tier_source: Option<TierSource>,
    /// Limits by tier, if the rules have some and the caller's tier is not known: no quota names it, and this node has no
    /// recent request of the caller.
    tiers: Vec<LimitsOfTier>,
    /// The window of the caller's own first limit; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = CurrentWindow)]
    current_window: Option<CurrentWindow>,
    /// The limits of the caller's own that are in force, by what an override calls their rule: `default`,
    /// `endpoint:POST /orders`. Of several limits of a rule, the one with the least left.
    usage: BTreeMap<String, UsedUnits>,
    limits: Vec<UsedLimit>,
    /// Rules that set no rate for the caller; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    unlimited: Vec<LiftedRule>,
    needs: Vec<NeededAttributes>,
    grants: Vec<LeftOfGrant>,
}

/// A rule's limits for callers of one tier.
#[derive(Serialize, ToSchema)]
struct LimitsOfTier {
    tier: String,
    rule: String,
    descriptor: String,
    /// The limits, as in `gcra 100/1m`.
    limits: Vec<String>,
}

/// Used units of a limit. Without a limit, all are `null` and `unlimited` is true.
#[derive(Serialize, ToSchema)]
struct UsedUnits {
    #[schema(required = true)]
    used: Option<u64>,
    #[schema(required = true)]
    limit: Option<u64>,
    #[schema(required = true)]
    remaining: Option<u64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    unlimited: bool,
}

/// A rule that sets no rate for the caller: its quota, its tier or the rule says `unlimited`.
#[derive(Serialize, ToSchema)]
struct LiftedRule {
    rule: String,
    descriptor: String,
}

#[derive(Serialize, ToSchema)]
struct UsedLimit {
    rule: String,
    descriptor: String,
    /// What `used` and `remaining` are of: the units that an unused limit allows at one instant.
    limit: u64,
    /// Units per `window`. Differs from `limit` if the limit has a `burst`.
    count: u64,
    window: String,
    /// The window that the usage is of; absent for permits.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = CurrentWindow)]
    current_window: Option<CurrentWindow>,
    algorithm: &'static str,
    /// What the limit counts, if that is an attribute of requests; absent for requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    unit: Option<String>,
    #[schema(required = true)]
    used: Option<u64>,
    #[schema(required = true)]
    remaining: Option<u64>,
    /// Whether the store may have lost what was used, and all of it is assumed until `reset_ms` from now; absent if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    assumed: bool,
    reset_ms: u64,
    /// After a reset: whether this limit was reset; absent for one that no reset concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = bool)]
    reset: Option<bool>,
    source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    burst: Option<u64>,
    /// Whether other callers share the counter; absent if not. A reset does not change it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    shared: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = OtherRole)]
    role: Option<OtherRole>,
    /// Whether a denial by this limit denies requests; absent if so.
    #[serde(skip_serializing_if = "is_true")]
    #[schema(required = false)]
    enforced: bool,
    /// `count` without the emergency measure or signal that changes it; absent if none does. Overrides replace this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    configured_count: Option<u64>,
    /// The emergency measure that changes the limit or sets it aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    measure: Option<String>,
    /// What that measure does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    measure_effect: Option<String>,
    /// Whether requests are charged to the limit; absent if so. A measure sets the others aside.
    #[serde(skip_serializing_if = "is_true")]
    #[schema(required = false)]
    charged: bool,
    /// How cells share the limit; absent if there is one cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = RegionOfLimit)]
    region: Option<RegionOfLimit>,
}

/// A window: its first instant, and the first after it. For a limit that refills continuously, the period that ends when
/// the limit is unused again.
#[derive(Clone, Serialize, ToSchema)]
struct CurrentWindow {
    #[schema(format = DateTime)]
    start: String,
    #[schema(format = DateTime)]
    end: String,
}

/// Role of a limit that does not decide by itself.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum OtherRole {
    Shadow,
    Unenforced,
    Candidate,
    Quota,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_true(value: &bool) -> bool {
    *value
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

fn usage_response(
    admin: &AdminState,
    caller: &CallerPath,
    (of, source): (&UsageQuery, Option<TierSource>),
    usage: &Usage,
) -> Response {
    let rules = (admin.rules)();
    let quota_tier = || {
        let change = admin.control.as_ref()?.quota_change(caller.caller(), None, &rules).ok()?;
        Some(change.before?.tier()?.to_owned())
    };
    let tier_source = if quota_tier().is_some() { Some(TierSource::Quota) } else { source };
    let tiers = match (tier_source, rules.domain(&usage.domain)) {
        (None, Some(domain)) => limits_by_tier(domain, of),
        _ => Vec::new(),
    };
    let own = usage.limits.iter().filter(|one| !one.is_shared);
    let body = UsageBody {
        caller: caller.sent(),
        key: &of.key,
        tier_source,
        tiers,
        current_window: own.filter_map(|one| one.window).map(current_window).next(),
        domain: usage.domain.clone(),
        tier: usage.tier.clone(),
        usage: used_units(usage),
        limits: usage.limits.iter().map(used_limit).collect(),
        unlimited: usage
            .unlimited
            .iter()
            .map(|one| LiftedRule { rule: one.rule.clone(), descriptor: one.descriptor.clone() })
            .collect(),
        needs: usage.unmatched.iter().map(needs).collect(),
        grants: usage.grants.iter().map(left).collect(),
    };
    json_response(StatusCode::OK, &body)
}

/// Returns the limits by tier of the rules with a counter for each caller.
fn limits_by_tier(domain: &Domain, of: &UsageQuery) -> Vec<LimitsOfTier> {
    let rules = domain.per_caller_rules(&of.key, &of.pairs());
    let of_rule = |one: PerCallerRule<'_>| -> Vec<LimitsOfTier> {
        let tiers = one.rule.tiers.iter().map(|(tier, set)| LimitsOfTier {
            tier: tier.clone(),
            rule: one.rule.name.clone(),
            descriptor: one.path.clone(),
            limits: match set.unlimited {
                true => vec!["unlimited".to_owned()],
                false => set.limits.iter().map(|limit| limit.limit.to_string()).collect(),
            },
        });
        tiers.collect()
    };
    rules.into_iter().flat_map(of_rule).collect()
}

/// Returns what is used of the limits that can deny the caller, by rule.
fn used_units(usage: &Usage) -> BTreeMap<String, UsedUnits> {
    let lifted = |one: &UnlimitedRule| {
        (one.reference.clone(), UsedUnits { used: None, limit: None, remaining: None, unlimited: true })
    };
    let mut all: BTreeMap<String, UsedUnits> = usage.unlimited.iter().map(lifted).collect();
    let decides = |one: &&LimitUsage| {
        let is_live = matches!(one.role, LimitRole::Live | LimitRole::Quota);
        is_live && !one.is_shared && one.limit.algorithm() != Algorithm::Concurrency
    };
    for one in usage.limits.iter().filter(decides) {
        let (limit, remaining) = (Some(one.limit.capacity()), one.remaining);
        let read = UsedUnits { used: one.used(), limit, remaining, unlimited: false };
        match all.entry(one.reference.clone()) {
            Entry::Vacant(entry) => drop(entry.insert(read)),
            Entry::Occupied(mut entry) if remaining < entry.get().remaining => drop(entry.insert(read)),
            Entry::Occupied(_) => {}
        }
    }
    all
}

fn current_window((start, end): (Timestamp, Timestamp)) -> CurrentWindow {
    CurrentWindow { start: rfc3339(start), end: rfc3339(end) }
}

fn used_limit(used: &LimitUsage) -> UsedLimit {
    let (count, capacity) = (used.limit.rate().count, used.limit.capacity());
    UsedLimit {
        rule: used.rule.clone(),
        descriptor: used.descriptor.clone(),
        limit: capacity,
        count,
        current_window: used.window.map(current_window),
        window: Window::from_limit(&used.limit).to_string(),
        algorithm: used.limit.algorithm().name(),
        unit: used.unit.clone(),
        used: used.used(),
        remaining: used.remaining,
        assumed: used.is_assumed,
        reset_ms: used.reset_after.ceil_millis(),
        reset: used.is_reset,
        source: used.source.name(),
        burst: (capacity != count).then_some(capacity),
        shared: used.is_shared,
        role: match used.role {
            LimitRole::Live => None,
            LimitRole::Shadow => Some(OtherRole::Shadow),
            LimitRole::Unenforced => Some(OtherRole::Unenforced),
            LimitRole::Candidate => Some(OtherRole::Candidate),
            LimitRole::Quota => Some(OtherRole::Quota),
        },
        enforced: used.is_enforced,
        configured_count: used.configured.as_ref().map(|limit| limit.rate().count),
        measure: used.measure.as_ref().map(|(name, _)| name.clone()),
        measure_effect: used.measure.as_ref().map(|(_, action)| measure_effect(*action)),
        charged: used.is_charged,
        region: used.region.as_ref().map(Into::into),
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
