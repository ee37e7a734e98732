//! The rule language: from a YAML file to a plan of charges. Knows no store and no protocol.
//!
//! A file goes through four hands, each of which knows only the one before:
//!
//! | file | answers |
//! |---|---|
//! | `syntax`, [`diagnostic`](Diagnostics) | what stands where; how an error looks |
//! | `read`, `decode`, `draft`, `period`, `suggest` | which keys there are, and what type each is |
//! | `compile`, `scope`, [`rule`](Rule), [`unit`](Unit) | what a descriptor means in its domain; the names of counters |
//! | `tree`, `pattern`, `network`, `walk`, [`plan`](Plan) | which rules a request meets |
//! | `lint`, [`explain`](Explanation) | what will never act; why a rule did or did not match |
//! | [`diff`](RuleChange) | what other rules would change |
//! | [`outline`](Outlined) | how the descriptors of a domain stand under each other |
//! | [`naming`](tells_who) | what the name of an attribute tells about its values |
//! | [`tenant`](Tenant) | what is agreed with one caller in place of the rules' own limits |
//! | [`ruleset`](Ruleset) | all of it, loaded and read |

mod compile;
mod counter_shards;
mod decode;
mod diagnostic;
mod diff;
mod draft;
mod explain;
mod lint;
mod matcher;
mod network;
mod outline;
mod overrides;
mod pattern;
mod per_caller;
mod period;
mod placement;
mod plan;
mod reader;
mod rule;
mod ruleset;
mod scope;
mod sensitivity;
mod suggest;
mod tree;
mod unit;
mod yaml;

pub use diagnostic::{Diagnostic, Diagnostics, Severity};
pub use diff::RuleChange;
pub use explain::{Clause, Explanation, RuleExplanation, RuleResult};
pub use outline::OutlineNode;
pub use overrides::{CALLER_KEY, CallerOverrides, Override, OverrideError};
pub use pattern::Wildcards;
pub use per_caller::PerCallerRule;
pub use plan::{Attributes, Charges, Descriptor, LimitOrigin, MatchKind, MatchedLimit, Plan};
pub use rule::{
    Action, Class, CostFrom, FailPolicy, LimitSet, OnError, Profile, Role, Rule, RuleLimit, SoftAction,
    SoftLimit,
};
pub use ruleset::{Domain, Options, Ruleset, Source};
pub use sensitivity::{identifies_caller, may_be_secret};
pub use unit::Unit;

/// The JSON schema of rule files, for editors.
#[must_use]
pub const fn schema() -> &'static str {
    include_str!("schema.json")
}
