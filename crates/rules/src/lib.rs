//! The rule language: from a YAML file to a plan of charges. Knows no store and no protocol.

mod plan;
mod rule;
mod unit;

pub use plan::{Attributes, Descriptor, Hit, HitLimit, Match, Plan};
pub use rule::{
    Action, Class, CostFrom, FailPolicy, LimitSet, OnError, Profile, Role, Rule, RuleLimit, Soft, SoftAction,
};
pub use unit::Unit;
