// Responses of the admin API, as far as the dashboard reads them.
export interface Session {
  name: string | null;
  role: 'replica' | 'viewer' | 'operator' | 'admin' | null;
  needs_login: boolean;
  /** The kind of control-plane database; null without one. */
  database: string | null;
}

export interface Override {
  descriptor: string;
  requests_per_unit: number;
  unit: string;
  burst?: number;
  /** In place of a rate. */
  limit?: 'unlimited';
  /** Whether it replaces the rule's limits of other periods too. */
  replace?: 'all';
}

/** A caller's limits of one rule. */
export interface LimitsInForce {
  unlimited: boolean;
  limits: { limit: number; count: number; window: string; algorithm: string; cost?: string; source: string; enforced?: boolean }[];
}

/** What a change of a quota would do. */
export interface QuotaPreview {
  rules: { domain: string; rule: string; descriptor: string; reference: string; before: LimitsInForce; after: LimitsInForce }[];
  /** Why it needs a confirmation. */
  confirm: string[];
  warnings: string[];
}

export interface Quota {
  /** The attribute that identifies the caller. */
  key: string;
  api_key?: string;
  id: string;
  key_prefix: string;
  tier: string | null;
  overrides: Override[];
  effective_at: string | null;
  expires_at: string | null;
  until_effective?: { tier: string | null; overrides: Override[]; expires_at: string | null };
  reason: string;
  author: string;
  updated_at: string;
  revision: number;
}

export interface AuditEntry {
  seq: number;
  at: string;
  actor: string;
  origin: string;
  action: string;
  target: string;
  before: string;
  after: string;
  hash: string;
}

export interface Tick {
  t: number;
  allow: number;
  deny: number;
  shadow_deny: number;
  fail_open: number;
  delayed: number;
  unmatched: number;
  p50_us: number | null;
  p99_us: number | null;
  p999_us: number | null;
}

export type Series = { [K in keyof Tick]: Tick[K][] };

export interface RuleCount {
  rule: string;
  domain: string;
  allow: number;
  deny: number;
  shadow_deny: number;
  /** Requests over a soft limit of the rule. */
  warn: number;
  degrade: number;
  /** Over the last ten seconds. */
  per_second_allow: number;
  per_second_deny: number;
}

export interface NodeState {
  name: string;
  version: string;
  region?: string | null;
  started_at: string;
  rules_revision: string;
  rules_age_ms: number | null;
  /** Why the rule files, or the rules published last, are not active. */
  rules_error: string | null;
  /** Whether the rule files were broken at the start, and their last good copy is active. */
  rules_last_good: boolean;
  control_age_ms: number | null;
  propagation_lag_ms: number | null;
  store: string;
  breakers: { shard: string; state: string }[];
  leases: Record<string, unknown> | null;
  concurrency: { rule: string; in_flight: number }[];
  /** This node's cell and the others; null if there is one cell. */
  cells?: Cells | null;
}

export interface DomainRequests {
  domain: string;
  requests: number;
}

export interface Stats {
  now: string;
  step_ms: number;
  series: Series;
  rules: RuleCount[];
  /** Requests that no limit applied to, by domain, since startup. */
  unmatched: DomainRequests[];
  /** Requests of domains without rules, since startup; the names are sampled. */
  unknown_domains: { requests: number; denied: number; domains: DomainRequests[] };
  tiers: { tier: string; histogram: number[] }[];
  node: NodeState;
}

/** A cell and what it knows of the others. */
export interface Cells {
  cell: string;
  region: string;
  peers: { region: string; address: string; cell: string | null; silent: boolean; lag_ms: number; waiting: number }[];
  share: number;
  regional_only: boolean;
  /** Whether another process has this cell's name. */
  displaced: boolean;
  overshoot_units: number;
}

export interface Top {
  window_s: number;
  by_rate: { key_masked: string; key_id: string; actionable: boolean; rate: number; share: number }[];
  /** Callers with an API key are actionable, by the id. */
  by_denials: { key_masked: string; key_id: string; actionable: boolean; domain: string; rule: string; denied: number }[];
  near_limit: {
    key_masked: string;
    key_id: string;
    actionable: boolean;
    domain: string;
    rule: string;
    utilisation: number;
    minutes: number;
    tier: string | null;
    tier_above: string | null;
  }[];
  shared_address: { prefix: string; keys: number; near_limit: number }[];
  /** Leased keys with the most traffic at this node; values are masked. */
  hot: { counter: string; values: string[]; per_second: number; state: 'leased' | 'promoted'; available: number }[];
}

export interface ClusterNode {
  name: string;
  region: string | null;
  version: string;
  started_at: string;
  /** The control revision that is active there. */
  revision: number | null;
  rules_revision: string | null;
  rules_rev: number | null;
  control_age_ms: number | null;
  /** How long the last change took to take effect there. */
  propagation_lag_ms: number | null;
  store: string;
  /** Number of breakers by state. */
  breakers: Record<string, number>;
  draining: boolean;
  seen_at: string;
  age_ms: number;
  stale: boolean;
  is_self: boolean;
}

export interface Cluster {
  database: string | null;
  /** Whether a configured database is unavailable. */
  database_unavailable: boolean;
  /** Whether the other nodes are current. */
  complete: boolean;
  /** When the other nodes were read. */
  read_at: string | null;
  nodes: ClusterNode[];
}

export interface Decision {
  id: string;
  at: string;
  domain: string;
  /** A list where an attribute occurs more than once. */
  attributes: Record<string, string | string[]>;
  protocol: string;
  verdict: string;
  origin: string;
  rule?: string | null;
  limit?: { limit: number; window: string; burst?: number; algorithm: string; unit?: string } | null;
  used_before?: number | null;
  remaining?: number | null;
  retry_after_ms?: number | null;
  /** The rules hash; null for an inline limit. */
  revision: string | null;
  /** The caller's id, if it has an API key. */
  key_id?: string;
  node: string;
  region?: string | null;
  why: string;
  headline?: string;
  notes?: string[];
  cost?: number;
  would_pass_at?: string | null;
}

export interface RuleFile {
  name: string;
  text: string;
}

export interface Finding {
  file: string;
  line: number;
  column: number;
  message: string;
  help?: string | null;
}

export interface RuleChange {
  rule: string;
  change: 'added' | 'removed' | 'changed';
  before?: unknown;
  after?: unknown;
}

export interface Impact {
  requests: number;
  weight: number;
  newly_denied_share: number;
  newly_allowed_share: number;
  callers_affected_share: number;
  callers_newly_allowed_share: number;
  top: { key_masked: string; rule: string; share: number; before_denied: number; after_denied: number }[];
  window_s: number;
  nodes: string[];
  nodes_missing: string[];
  nodes_unknown: boolean;
  tightened?: { newly_denied_share: number; callers_affected_share: number };
}

export interface RuleCheck {
  errors: Finding[];
  warnings: Finding[];
  diff: RuleChange[];
  /** Why publishing needs a confirmation. */
  confirm: { reason: string; detail: string }[];
  impact: Impact | null;
}

export interface RuleRevision {
  rev: number;
  revision: string;
  author: string;
  reason: string;
  created_at: string;
  status: 'active' | 'superseded' | 'pending_approval' | 'rejected' | 'rolled_back';
  approved_by?: string | null;
  rolled_back_because?: string | null;
  files?: RuleFile[];
}

export interface RuleList {
  active: { rev: number | null; revision: string; source: 'files' | 'database'; files: (string | RuleFile)[] };
  revisions: RuleRevision[];
  /** The cursor of the next page, if there is one. */
  next_before?: number | null;
}

/** The rule files of the node. */
export interface RuleFilesState {
  active_revision: string;
  /** Changed files that wait for a confirmation. */
  pending: { revision: string; reasons: string[] } | null;
  /** How the files differ from the published rules, which are active in their place. */
  drift: { rev: number; files_revision: string | null; error: string | null; diff: RuleChange[] } | null;
}

export interface TreeLimit {
  limit: string;
  role: string;
}

export interface TreeRule {
  name: string;
  file: string;
  line: number;
  limits: TreeLimit[];
  tiers: { tier: string; limits: TreeLimit[]; unlimited: boolean }[];
  unlimited: boolean;
  class: string;
  action: string;
}

export interface RuleTree {
  revision: string;
  domains: {
    domain: string;
    tier_key: string;
    descriptors: { element: string; depth: number; rule: TreeRule | null }[];
    omitted: number;
  }[];
}

export interface UsageLimit {
  rule: string;
  descriptor?: string;
  /** What `used` and `remaining` are of. */
  limit: number;
  /** Units per window. */
  count: number;
  /** The same without the emergency measure or signal that changes it. */
  configured_count?: number;
  /** What the limit counts, if not requests. */
  unit?: string;
  window: string;
  algorithm: string;
  used: number;
  remaining: number;
  reset_ms: number;
  burst?: number | null;
  source: string;
  /** Whether other callers share the counter. */
  shared?: boolean;
  role?: string;
  /** The emergency measure that changes the limit or sets it aside, and how. */
  measure?: string;
  measure_effect?: string;
}

export interface Usage {
  api_key: string;
  domain?: string;
  tier: string | null;
  tier_source?: 'quota' | 'stated' | 'last_request' | null;
  /** Limits by tier, if the caller's tier is not known. */
  tiers?: { tier: string; rule: string; descriptor: string; limits: string[] }[];
  limits: UsageLimit[];
  /** Rules that need more attributes. */
  needs?: { rule: string; descriptor: string; attributes: string[] }[];
  unlimited?: { rule: string; descriptor: string }[];
  grants?: { id: string; rules: string[] | null; units: number; remaining: number; expires_at: string }[];
}

/** The limit that a rule applies to a caller now. */
export interface CurrentLimit {
  rule: string;
  limit: number;
  window: string;
  burst?: number | null;
}

export type EmergencyAction = 'block' | 'tighten' | 'exempt' | 'disable_rule' | 'allow_all' | 'shadow_all';

export interface Emergency {
  id: string | number;
  action: EmergencyAction;
  target: { kind: string; key?: string; value: string | null } | null;
  factor?: number | null;
  reason: string;
  author: string;
  created_at: string;
  /** Null if it stays in force until it is ended. */
  expires_at: string | null;
  revision: number;
}

export interface ImportReport {
  imported: number;
  failed: number;
  errors: { line: number; detail: string; field?: string | null }[];
}

export type HistoryFields = 'allow' | 'deny' | 'shadow_deny' | 'fail_open' | 'delayed' | 'unmatched';

export interface HistoryRank {
  key_id?: string;
  key_masked?: string;
  domain?: string;
  rule?: string;
  allow: number;
  deny: number;
}

export interface History {
  from: string;
  to: string;
  /** Length of a step, in seconds. */
  step_s: number;
  /** Days that history is kept; 0 if the server records none. */
  days: number;
  key_masked: string | null;
  /** Counts by step; null where no node recorded anything. */
  series: { t: number[] } & Record<HistoryFields | 'p50_us' | 'p99_us' | 'p999_us', (number | null)[]>;
  top: HistoryRank[];
}

export interface Token {
  id: string;
  name: string;
  role: string;
  created_at: string;
  expires_at: string | null;
  revoked_at: string | null;
}

/** The gate of an upstream. */
export interface OverloadUpstream {
  domain: string;
  upstream: string;
  shadow: boolean;
  limit: number;
  in_flight: number;
  waiting: number;
  threshold: number;
  demand_per_second: number;
  capacity_per_second: number;
  base_latency_ms: number | null;
  priorities: { priority: string; served: number; served_within_share: number | null; served_beyond_share: number | null; admitted: number; shed: number; would_be_shed: number }[];
  tiers: { tier: string; tenants: number; demand_per_second: number; guaranteed_per_second: number; guaranteed_to: 'each' | 'together'; fair_per_second: number | null }[];
}

export interface OverloadFleet {
  domain: string;
  capacity: string;
  shadow: boolean;
  priorities: { priority: string; capacity: number; shed: number; would_be_shed: number }[];
  contended: boolean;
  guaranteed: number;
  tiers: { tier: string; guaranteed_percent: number; guaranteed_to: 'each' | 'together'; tenants: number; demand_per_second: number; fair_per_second: number | null }[];
}

export interface Overload {
  upstreams: OverloadUpstream[];
  fleets: OverloadFleet[];
  adapted: { domain: string; signals: { signal: string; value: number; bound: number; source: 'pushed' | 'measured' | 'query' }[]; tiers: { tier: string; percent: number; shadow_percent: number | null }[]; held: 'shadow' | 'measure' | null }[];
  checks: { pending: number; wait_ms: number; target_ms: number; classes: { class: string; shed_part: number; shed: number }[] } | null;
}
