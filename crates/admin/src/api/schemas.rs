//! Schemas of JSON that other crates produce (`observe` and the process status), of problems, and of parameters
//! shared by many paths. The handlers' own responses are described next to the handlers.

#![expect(dead_code, reason = "these types only describe JSON and are never constructed")]

use serde::Serialize;
use std::collections::BTreeMap;
use tollgate_control::{PreviewReport, RevisionStatus, RuleFile, RuleRevision};
use utoipa::{IntoParams, ToSchema};

/// An error (RFC 9457 problem details).
#[derive(ToSchema)]
pub(crate) struct Problem {
    r#type: String,
    title: String,
    status: u16,
    detail: String,
    /// The invalid field.
    #[schema(required = false)]
    field: String,
}

#[derive(ToSchema)]
pub(crate) struct Anything {}

#[derive(ToSchema)]
pub(crate) struct Readiness {
    ready: bool,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct ApiKeyParameter {
    /// The caller's API key, percent-encoded; with `key`, the value of that attribute.
    #[param(min_length = 1)]
    api_key: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct CallerIdParameter {
    /// The caller: a 16-digit `key_id` from this node's lists or decision log, or a 64-digit `id` from the quota
    /// list, in hexadecimal. Every node resolves the ids of callers with a quota.
    #[param(pattern = "^([0-9a-f]{64}|[0-9a-f]{16})$")]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct SeenCallerIdParameter {
    /// The caller: a 16-digit `key_id` from this node's lists or decision log, or a 64-digit `id` from the quota
    /// list, in hexadecimal. This node must have seen the caller recently, because counters are found by API key.
    #[param(pattern = "^([0-9a-f]{64}|[0-9a-f]{16})$")]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct GrantIdParameter {
    /// The grant's id, from the usage.
    #[param(min_length = 1)]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct GrantParameter {
    /// The grant's id, from the usage.
    #[param(min_length = 1)]
    grant: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct IdParameter {
    /// The id, from a list.
    #[param(min_length = 1)]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct RevParameter {
    /// The revision number.
    #[param(minimum = 1)]
    rev: i64,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
pub(crate) struct Preconditions {
    /// An ETag, to apply the change only if nothing has changed since, or `*`.
    #[param(rename = "If-Match")]
    if_match: Option<String>,
    /// `*`, to apply the change only if nothing exists yet.
    #[param(rename = "If-None-Match")]
    if_none_match: Option<String>,
}

/// A published revision with its preview report.
#[derive(Serialize, ToSchema)]
pub(crate) struct PublishedRevision {
    #[serde(flatten)]
    revision: RuleRevision,
    #[serde(flatten)]
    report: PreviewReport,
}

/// The active rules, with their revision if they were published.
#[derive(Serialize, ToSchema)]
pub(crate) struct ActiveRuleTexts {
    #[schema(required = true)]
    rev: Option<i64>,
    revision: String,
    source: String,
    files: Vec<RuleFile>,
    #[schema(required = false)]
    author: String,
    #[schema(required = false)]
    reason: String,
    #[schema(required = false)]
    created_at: String,
    #[schema(required = false)]
    status: RevisionStatus,
    base_rev: Option<i64>,
    #[schema(required = false)]
    active_since_ms: i64,
    #[schema(required = false)]
    approved_by: String,
    #[schema(required = false)]
    rolled_back_because: String,
}

#[derive(ToSchema)]
pub(crate) struct Nodes {
    /// Kind of the database that the nodes share.
    #[schema(required = true)]
    database: Option<String>,
    /// Whether the database is unavailable. Then this node's state is current, and the other nodes' state is as last
    /// read.
    database_unavailable: bool,
    /// Whether the other nodes' state is current; false without a database and while it is unavailable.
    complete: bool,
    /// Time at which the other nodes' state was read from the database; null if never.
    #[schema(required = true)]
    read_at: Option<String>,
    nodes: Vec<Node>,
}

#[derive(ToSchema)]
struct Node {
    name: String,
    region: Option<String>,
    #[schema(required = false)]
    version: String,
    #[schema(required = false)]
    started_at: String,
    /// The last control revision that is active on the node.
    revision: Option<i64>,
    #[schema(required = false)]
    rules_revision: String,
    /// The number of the published rule revision that is active on the node.
    rules_rev: Option<i64>,
    /// Staleness of the node's control-plane state, in milliseconds.
    control_age_ms: Option<i64>,
    /// Time until the last change took effect on the node, in milliseconds.
    propagation_lag_ms: Option<i64>,
    #[schema(required = false)]
    store: String,
    #[schema(required = false)]
    breakers: BTreeMap<String, i64>,
    #[schema(required = false)]
    draining: bool,
    /// The node's cell, as other cells reach it; null if it is none.
    #[schema(required = false)]
    cell: Option<NodeCell>,
    /// Name of the record that the node's durable counters have in the database.
    #[schema(required = false)]
    durable_record: String,
    seen_at: String,
    age_ms: i64,
    stale: bool,
    /// Whether this is the node that handled the request.
    is_self: bool,
}

#[derive(ToSchema)]
pub(crate) struct DecisionPage {
    decisions: Vec<Decision>,
    #[schema(required = true)]
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct Decision {
    id: String,
    at: String,
    domain: String,
    /// The request's attributes, with secrets masked. A repeated attribute has a list of its values, in order.
    attributes: BTreeMap<String, AttributeValues>,
    protocol: String,
    verdict: DecisionVerdict,
    origin: String,
    cost: u64,
    /// The rules hash; null for an inline limit (`CL.THROTTLE`).
    #[schema(required = true)]
    revision: Option<String>,
    node: String,
    why: String,
    #[schema(required = false)]
    rule: String,
    #[schema(required = false)]
    limit: DecisionLimit,
    #[schema(required = false)]
    used_before: u64,
    #[schema(required = false)]
    remaining: u64,
    #[schema(required = false)]
    retry_after_ms: u64,
    #[schema(required = false)]
    delay_ms: u64,
    /// The emergency measure that affected the decision, as `emergency:` and its id.
    #[schema(required = false)]
    emergency: String,
    #[schema(required = false)]
    region: String,
    /// How cells shared the limit at that moment; absent if there is one cell.
    #[schema(required = false)]
    cells: super::region::RegionOfLimit,
    /// The caller's id for actions, if it has an API key.
    #[schema(required = false, pattern = "^[0-9a-f]{16}$")]
    key_id: String,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum AttributeValues {
    One(String),
    Several(Vec<String>),
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum DecisionVerdict {
    Allow,
    Deny,
    ShadowDeny,
    Delay,
    Degrade,
    Warn,
}

#[derive(Serialize, ToSchema)]
struct DecisionLimit {
    limit: u64,
    window: String,
    algorithm: String,
    #[schema(required = false)]
    burst: u64,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ExplainedDecision {
    #[serde(flatten)]
    decision: Decision,
    explanation: Vec<String>,
    /// The verdict and its cause, without the numbers that other fields have.
    headline: String,
    /// Details that are neither in the headline nor in another field.
    notes: Vec<String>,
    /// For denials: when the request would pass, if known. Unknown while the store is unavailable.
    #[schema(required = false)]
    would_pass_at: String,
}

#[derive(ToSchema)]
pub(crate) struct Stats {
    now: String,
    step_ms: u64,
    series: StatsSeries,
    rules: Vec<RuleStats>,
    /// Requests that no limit applied to, by domain, since startup.
    unmatched: Vec<DomainRequests>,
    unknown_domains: UnknownDomains,
    tiers: Vec<TierStats>,
    node: NodeStats,
}

#[derive(ToSchema)]
struct DomainRequests {
    domain: String,
    requests: u64,
}

/// Requests for domains that no rule file defines, since startup.
#[derive(ToSchema)]
struct UnknownDomains {
    requests: u64,
    /// How many of them were denied (`unknown_domain: deny`).
    denied: u64,
    /// The first 20 of these domains, with request counts estimated from samples.
    domains: Vec<DomainRequests>,
}

#[derive(ToSchema)]
struct StatsSeries {
    t: Vec<Option<f64>>,
    allow: Vec<Option<f64>>,
    deny: Vec<Option<f64>>,
    /// Requests that a shadow rule or limit would have denied, each counted once.
    shadow_deny: Vec<Option<f64>>,
    fail_open: Vec<Option<f64>>,
    delayed: Vec<Option<f64>>,
    /// Requests that no limit applied to.
    unmatched: Vec<Option<f64>>,
    p50_us: Vec<Option<f64>>,
    p99_us: Vec<Option<f64>>,
    p999_us: Vec<Option<f64>>,
}

#[derive(ToSchema)]
struct RuleStats {
    rule: String,
    domain: String,
    /// Requests that the rule allowed, including in shadow mode or degraded.
    allow: u64,
    /// Requests that the rule denied, alone or together with others.
    deny: u64,
    /// Requests that the rule would have denied outside shadow mode; `allow` or `deny` includes them as well.
    shadow_deny: u64,
    /// Requests over a soft limit of the rule that warns.
    warn: u64,
    /// Requests that the rule degraded.
    degrade: u64,
    per_second_allow: f64,
    per_second_deny: f64,
}

#[derive(ToSchema)]
struct TierStats {
    tier: String,
    histogram: Vec<u64>,
}

/// A node's cell.
#[derive(ToSchema)]
struct NodeCell {
    name: String,
    region: String,
    url: String,
}

#[derive(ToSchema)]
struct NodeStats {
    name: String,
    #[schema(required = true)]
    region: Option<String>,
    version: String,
    started_at: String,
    rules_revision: String,
    #[schema(required = true)]
    rules_age_ms: Option<i64>,
    /// Why the rule files, or the rules published last, are not active.
    #[schema(required = true)]
    rules_error: Option<String>,
    /// Whether the rule files were broken at the start, and their last good copy is active.
    rules_last_good: bool,
    #[schema(required = true)]
    control_age_ms: Option<i64>,
    #[schema(required = true)]
    propagation_lag_ms: Option<f64>,
    #[schema(value_type = Vec<Object>)]
    breakers: Vec<()>,
    concurrency: Vec<InFlight>,
    draining: bool,
    /// This node's cell and the others; null if there is one cell.
    #[schema(required = true)]
    cells: Option<CellStats>,
}

/// A cell, and what it knows of the others.
#[derive(ToSchema)]
struct CellStats {
    cell: String,
    region: String,
    peers: Vec<CellPeer>,
    /// Part of shared limits by which this cell decides; 1 unless other cells are silent.
    share: f64,
    /// Whether this cell decides shared limits by its part, because other cells are silent.
    regional_only: bool,
    /// Whether another process has this cell's name: then this one decides nothing that cells share.
    displaced: bool,
    /// Units that other cells admitted beyond what was left here.
    overshoot_units: u64,
}

/// A node of another cell.
#[derive(ToSchema)]
struct CellPeer {
    region: String,
    address: String,
    /// Name of its cell; null if it never answered.
    #[schema(required = true)]
    cell: Option<String>,
    /// Whether it has not answered for the silence time.
    silent: bool,
    /// How long ago everything that it knows of this cell was consumed, in milliseconds.
    lag_ms: u64,
    /// Counters whose consumption it has not acknowledged.
    waiting: u64,
}

#[derive(ToSchema)]
struct InFlight {
    rule: String,
    in_flight: u64,
}

#[derive(ToSchema)]
pub(crate) struct Top {
    window_s: u64,
    by_rate: Vec<RateOfCaller>,
    by_denials: Vec<DenialsOfCaller>,
    near_limit: Vec<NearLimit>,
    shared_address: Vec<SharedAddress>,
    /// The leased keys with the most traffic on this node, hottest first.
    hot: Vec<HotKey>,
    /// Rate at which a key is leased automatically, in units per second; null if never.
    #[schema(required = true)]
    hot_from_per_second: Option<u64>,
}

#[derive(ToSchema)]
struct RateOfCaller {
    key_masked: String,
    key_id: String,
    rate: f64,
    share: f64,
    /// Whether the caller has an API key, so that its `key_id` can be used in actions.
    actionable: bool,
}

#[derive(ToSchema)]
struct DenialsOfCaller {
    key_masked: String,
    key_id: String,
    domain: String,
    rule: String,
    denied: u64,
    /// Whether the caller has an API key, so that its `key_id` can be used in actions.
    actionable: bool,
}

#[derive(ToSchema)]
struct NearLimit {
    key_masked: String,
    key_id: String,
    domain: String,
    rule: String,
    utilisation: f64,
    minutes: u64,
    #[schema(required = true)]
    tier: Option<String>,
    #[schema(required = true)]
    tier_above: Option<String>,
    /// Whether the caller has an API key, so that its `key_id` can be used in actions.
    actionable: bool,
}

#[derive(ToSchema)]
struct HotKey {
    /// Domain, path, algorithm and period of the counter.
    counter: String,
    /// Values of the counter key, masked as in the decision log.
    values: Vec<String>,
    per_second: u64,
    /// Whether the key is leased by its rule, or promoted because it is hot.
    state: LeaseState,
    /// Leased units that this node may still spend.
    available: i64,
}

#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
enum LeaseState {
    Leased,
    Promoted,
}

#[derive(ToSchema)]
struct SharedAddress {
    prefix: String,
    keys: u64,
    near_limit: u64,
}
