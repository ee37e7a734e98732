//! Schemas of JSON that other crates make (`observe` and the process' status), of problems, and of parameters that many
//! paths have. What handlers send themselves is described where they do.

#![expect(dead_code, reason = "these types describe JSON and are never made")]

use serde::Serialize;
use std::collections::BTreeMap;
use tollgate_control::{PreviewReport, RevisionStatus, RuleFile, RuleRevision};
use utoipa::{IntoParams, ToSchema};

/// A problem (RFC 9457).
#[derive(ToSchema)]
pub(crate) struct Problem {
    r#type: String,
    title: String,
    status: u16,
    detail: String,
    /// The field that is wrong.
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
    /// The caller's API key, percent-encoded.
    #[param(min_length = 1)]
    api_key: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct CallerIdParameter {
    /// The `key_id` of a caller whom this node lists or has in its decision log, 16 hexadecimal digits; or the `id` of a list
    /// of quotas, 64. Who has a quota is known at every node.
    #[param(pattern = "^([0-9a-f]{64}|[0-9a-f]{16})$")]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct SeenCallerIdParameter {
    /// The `key_id` of a caller whom this node lists or has in its decision log, 16 hexadecimal digits; or the `id` of a list
    /// of quotas, 64. This node must have seen the caller lately, for counters are found by the key.
    #[param(pattern = "^([0-9a-f]{64}|[0-9a-f]{16})$")]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct GrantIdParameter {
    /// As the usage tells it.
    #[param(min_length = 1)]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct GrantParameter {
    /// As the usage tells it.
    #[param(min_length = 1)]
    grant: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct IdParameter {
    /// As a list tells it.
    #[param(min_length = 1)]
    id: String,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
pub(crate) struct RevParameter {
    /// The number of a revision.
    #[param(minimum = 1)]
    rev: i64,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
pub(crate) struct Preconditions {
    /// An ETag: only if nobody has changed it since, or `*`.
    #[param(rename = "If-Match")]
    if_match: Option<String>,
    /// `*`: only if there is nothing yet.
    #[param(rename = "If-None-Match")]
    if_none_match: Option<String>,
}

/// A revision that was published, and what was known of it before it acts.
#[derive(Serialize, ToSchema)]
pub(crate) struct PublishedRevision {
    #[serde(flatten)]
    revision: RuleRevision,
    #[serde(flatten)]
    report: PreviewReport,
}

/// The rules that act now; what is known of their revision, if they were published.
#[derive(Serialize, ToSchema)]
pub(crate) struct ActingRules {
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
    /// Which kind of database the nodes share.
    #[schema(required = true)]
    database: Option<String>,
    /// Whether there is a database that does not answer: then this node is told as it is, and the others as they were last
    /// read.
    database_unavailable: bool,
    /// Whether the other nodes are told as they are: false without a database, and while it does not answer.
    complete: bool,
    /// When the other nodes were read from the database; null, if never.
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
    /// The last change of operators that acts there.
    revision: Option<i64>,
    #[schema(required = false)]
    rules_revision: String,
    /// The number of the published rules that act there.
    rules_rev: Option<i64>,
    /// For how long it has not been sure to know every change.
    control_age_ms: Option<i64>,
    /// How long the last change took to act there.
    propagation_lag_ms: Option<i64>,
    #[schema(required = false)]
    store: String,
    #[schema(required = false)]
    breakers: BTreeMap<String, i64>,
    #[schema(required = false)]
    draining: bool,
    seen_at: String,
    age_ms: i64,
    stale: bool,
    /// Whether it is the node that was asked.
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
    /// What the request said, secrets hidden. An attribute that came more than once has a list of its values, in order.
    attributes: BTreeMap<String, AttributeValues>,
    protocol: String,
    verdict: DecisionVerdict,
    origin: String,
    cost: u64,
    /// Of the rules; null for a limit that came with its call (`CL.THROTTLE`).
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
    /// The measure of an emergency that made a difference, as `emergency:` and its id.
    #[schema(required = false)]
    emergency: String,
    #[schema(required = false)]
    region: String,
    /// What the caller can be acted on by, if it has an API key.
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
    /// What neither the headline nor another field says.
    notes: Vec<String>,
    /// For denials, where it is known: not while the store is away.
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

/// Requests of domains that no rule file names, since startup.
#[derive(ToSchema)]
struct UnknownDomains {
    requests: u64,
    /// The first 20 of these domains, with their requests as the samples estimate them.
    domains: Vec<DomainRequests>,
}

#[derive(ToSchema)]
struct StatsSeries {
    t: Vec<Option<f64>>,
    allow: Vec<Option<f64>>,
    deny: Vec<Option<f64>>,
    /// Requests that something in shadow would have turned away, each once.
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
    /// Requests that it let pass, in shadow or in a lesser way too.
    allow: u64,
    /// Requests that it turned away, alone or with others.
    deny: u64,
    /// Requests that it would have turned away, were it not in shadow; these are in `allow` or `deny` as well.
    shadow_deny: u64,
    per_second_allow: f64,
    per_second_deny: f64,
}

#[derive(ToSchema)]
struct TierStats {
    tier: String,
    histogram: Vec<u64>,
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
    #[schema(required = true)]
    control_age_ms: Option<i64>,
    #[schema(required = true)]
    propagation_lag_ms: Option<f64>,
    #[schema(value_type = Vec<Object>)]
    breakers: Vec<()>,
    concurrency: Vec<InFlight>,
    draining: bool,
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
    /// The keys with the most traffic at this node that are leased, hottest first.
    hot: Vec<HotKey>,
    /// From how many units a second on a key is leased by itself; null where that is never so.
    #[schema(required = true)]
    hot_from_per_second: Option<u64>,
}

#[derive(ToSchema)]
struct RateOfCaller {
    key_masked: String,
    key_id: String,
    rate: f64,
    share: f64,
    /// Whether it has an API key, and can be acted on by its `key_id`.
    actionable: bool,
}

#[derive(ToSchema)]
struct DenialsOfCaller {
    key_masked: String,
    key_id: String,
    domain: String,
    rule: String,
    denied: u64,
    /// Whether it has an API key, and can be acted on by its `key_id`.
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
    /// Whether it has an API key, and can be acted on by its `key_id`.
    actionable: bool,
}

#[derive(ToSchema)]
struct HotKey {
    /// The domain, path, algorithm and period of its counter.
    counter: String,
    /// Its values, hidden as in the decision log.
    values: Vec<String>,
    per_second: u64,
    /// Leased because its rule says so, or because it is hot.
    state: LeaseState,
    /// Units that this node may still spend by itself.
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
