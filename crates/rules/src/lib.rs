//! Rule language: compiles YAML files and turns requests into plans of charges. Independent of stores and protocols.
//!
//! A file goes through four stages, each of which depends only on the one before:
//!
//! | module | contents |
//! |---|---|
//! | `yaml`, [`diagnostic`](Diagnostics) | the parser, whose nodes carry positions; errors and warnings |
//! | `reader`, `decode`, `draft`, `period`, `suggest` | the keys of a rule file and the type of each |
//! | `compile`, `scope`, `placement`, [`rule`](Rule), [`unit`](Unit) | compiled rules, counter scopes, modes |
//! | `tree`, `pattern`, `network`, `matcher`, [`plan`](Plan) | matching a request to limits |
//! | `counter_shards` | shards of a split counter |
//! | `lint`, [`explain`](Explanation) | rules that can never apply; why a rule did or did not match |
//! | `settings` | the effective settings of a rule |
//! | [`diff`](RuleChange) | changes between two rule sets |
//! | [`loosening`](Loosening), [`tightening`](Tightening) | what a new rule set no longer protects, or admits far less of |
//! | [`metadata`](Metadata) | values that a rule returns to the proxy |
//! | [`denial_response`](DenialResponse) | the status and the body of a denial, where a rule sets them |
//! | [`outline`](OutlineNode) | the descriptors of a domain, nested as in the file |
//! | [`fleet_match`](FleetMatch) | where a request stands in the fleet's capacity when tenants share it |
//! | [`overload`](Overload), [`signal`](Signal) | what is shed when not all can be served; signals that limits follow |
//! | [`sensitivity`](identifies_caller) | attributes that identify a caller or may be secret |
//! | [`overrides`](CallerOverrides), [`per_caller`](PerCallerRule) | a caller's limits in place of the rules'; rules with a counter per caller |
//! | [`ruleset`](Ruleset) | all domains, loaded together |

mod bound;
mod compile;
mod counter_shards;
mod decode;
mod denial_response;
mod diagnostic;
mod diff;
mod draft;
mod envoy_keys;
mod explain;
mod fleet_match;
mod lint;
mod loosening;
mod matcher;
mod metadata;
mod network;
mod outline;
mod overload;
mod overload_explanation;
mod overrides;
mod pattern;
mod per_caller;
mod period;
mod placement;
mod plan;
mod quota_key;
mod reader;
mod region;
mod required_domains;
mod rule;
mod ruleset;
mod scope;
mod sensitivity;
mod settings;
mod signal;
mod suggest;
mod tightening;
mod tree;
mod unit;
mod yaml;

pub use bound::{Bound, limit_in_words};
pub use compile::{StoreNames, is_store_name};
pub use denial_response::{BodyField, BodyTemplate, DenialResponse, FieldValue};
pub use diagnostic::{Diagnostic, Diagnostics, Severity};
pub use diff::RuleChange;
pub use envoy_keys::EnvoyLevel;
pub use explain::{Clause, ExplainedRequest, Explanation, RuleExplanation, RuleResult};
pub use fleet_match::{FleetCapacity, FleetMatch, FleetStanding};
pub use lint::value_mistake;
pub use loosening::{Loosening, LooseningKind};
pub use metadata::{Metadata, MetadataValue};
pub use outline::OutlineNode;
pub use overload::{
    ADAPT_RULE, Adapt, AttributeValue, Condition, FLEET_RULE, Fairness, Fleet, FleetShares, Overload,
    PriorityRule, TierFairness, WORKERS_RULE, Workers,
};
pub use overload_explanation::OverloadExplanation;
pub use overrides::{CALLER_KEY, CallerOverrides, Override, OverrideError, OverrideRate, Replaces};
pub use pattern::Wildcards;
pub use per_caller::PerCallerRule;
pub use period::{parse_count, parse_inline_period};
pub use plan::{Attributes, Charges, Descriptor, LimitOrigin, MatchKind, MatchedLimit, Plan};
pub use region::{CellPlace, LearnedCells, OwnerSetting, RegionSetting, is_region_name};
pub use required_domains::RequiredDomains;
pub use rule::{
    Action, Billing, Class, CostFrom, DescriptorMatch, Enforce, FailPolicy, LimitSet, OnError, Profile, Role,
    Rule, RuleLimit, SoftAction, SoftLimit,
};
pub use ruleset::{Domain, Options, PermitRelease, Ruleset, Source};
pub use sensitivity::{identifies_caller, may_be_secret};
pub use signal::{Signal, SignalSource, UpstreamMeasure};
pub use suggest::closest;
pub use tightening::{Tightening, TighteningKind};
pub use tree::GLOBAL;
pub use unit::Unit;

/// The JSON schema of rule files, for editors.
#[must_use]
pub const fn schema() -> &'static str {
    include_str!("schema.json")
}
