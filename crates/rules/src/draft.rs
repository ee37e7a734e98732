//! Rule draft: a rule file as written, typed and with positions, before compilation.
//!
//! The step between text and rules: what a limit is depends on the domain's algorithm, the rule's action and the
//! profile, so the decoder only says what stands there and `compile` says what it means.

use crate::reader::Spanned;
use crate::rule::{Action, Class, FailPolicy, OnError, Profile, SoftAction};
use crate::yaml::Position;
use std::collections::BTreeMap;
use tollgate_core::{Algorithm, Mode, Period, TimeDelta};

/// One file.
#[derive(Debug, Default)]
pub(crate) struct FileDraft {
    pub(crate) domain: Option<Spanned<String>>,
    pub(crate) profile: Option<Spanned<Profile>>,
    pub(crate) shape: ShapeDraft,
    pub(crate) class: Option<Class>,
    pub(crate) tier_key: Option<String>,
    pub(crate) rules: Vec<RuleDraft>,
}

/// What a limit's arithmetic may be told, at any of the three places: file, rule, limit.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShapeDraft {
    pub(crate) algorithm: Option<Spanned<Algorithm>>,
    pub(crate) burst: Option<Spanned<u64>>,
    pub(crate) slots: Option<Spanned<u64>>,
    pub(crate) jitter: Option<Spanned<bool>>,
}

/// One limit.
#[derive(Clone, Debug)]
pub(crate) struct LimitDraft {
    pub(crate) at: Position,
    pub(crate) count: u64,
    pub(crate) period: Period,
    pub(crate) shape: ShapeDraft,
}

/// `soft`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftDraft {
    pub(crate) threshold: SoftThreshold,
    pub(crate) action: SoftAction,
}

/// Where a soft mark stands.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SoftThreshold {
    Units(u64),
    Percent(u64),
}

/// `concurrency`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConcurrencyDraft {
    pub(crate) limit: u64,
    pub(crate) ttl: TimeDelta,
}

/// `cost`.
#[derive(Clone, Debug)]
pub(crate) enum CostDraft {
    Fixed(u64),
    Attribute(String),
}

/// `on_error`, before the class fills what it leaves open.
#[derive(Clone, Debug)]
pub(crate) enum OnErrorDraft {
    Always(FailPolicy),
    ByTier { tiers: BTreeMap<String, FailPolicy>, otherwise: Option<FailPolicy> },
}

impl OnErrorDraft {
    /// With the rest filled in by the class.
    pub(crate) fn complete(self, class: Class) -> OnError {
        match self {
            Self::Always(policy) => OnError::Always(policy),
            Self::ByTier { tiers, otherwise } => {
                let by_class = match class {
                    Class::Comfort => FailPolicy::Local,
                    Class::Cost => FailPolicy::Open,
                    Class::Security | Class::Strict => FailPolicy::Closed,
                };
                OnError::ByTier { tiers, otherwise: otherwise.unwrap_or(by_class) }
            }
        }
    }
}

/// One descriptor.
#[derive(Debug, Default)]
pub(crate) struct RuleDraft {
    pub(crate) at: Position,
    pub(crate) key: Option<Spanned<String>>,
    pub(crate) value: Option<Spanned<String>>,
    pub(crate) name: Option<Spanned<String>>,
    /// The limits of `rate_limit` (one, or none if unlimited) or of `limit`.
    pub(crate) limits: Option<Vec<LimitDraft>>,
    pub(crate) unlimited: bool,
    pub(crate) replaces: Vec<Spanned<String>>,
    pub(crate) shape: ShapeDraft,
    pub(crate) tiers: Vec<(String, Vec<LimitDraft>)>,
    pub(crate) concurrency: Option<Spanned<ConcurrencyDraft>>,
    pub(crate) class: Option<Class>,
    pub(crate) on_error: Option<OnErrorDraft>,
    pub(crate) mode: Option<Spanned<Mode>>,
    /// Thousandths.
    pub(crate) fallback: Option<Spanned<u64>>,
    pub(crate) split: Option<Spanned<u64>>,
    pub(crate) action: Option<Spanned<Action>>,
    pub(crate) soft: Option<Spanned<SoftDraft>>,
    pub(crate) candidate: Vec<LimitDraft>,
    pub(crate) priority: i32,
    pub(crate) cost: Option<CostDraft>,
    pub(crate) shadow: bool,
    pub(crate) quota: bool,
    pub(crate) detailed_metric: bool,
    pub(crate) value_to_metric: bool,
    pub(crate) share_threshold: Option<Spanned<bool>>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) rules: Vec<RuleDraft>,
}
