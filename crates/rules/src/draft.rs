//! Rule draft: a rule file as written, typed and with positions, before compilation.
//!
//! The step between text and rules: what a limit means depends on the domain's algorithm, the rule's action and the
//! profile, so the decoder only records what is written, and `compile` interprets it.

use crate::decode::overload::OverloadDraft;
use crate::denial_response::DenialResponse;
use crate::metadata::Metadata;
use crate::reader::Spanned;
use crate::region::RegionSetting;
use crate::rule::{Action, Class, CostFrom, DescriptorMatch, FailPolicy, OnError, Profile, SoftAction};
use crate::yaml::Position;
use std::collections::BTreeMap;
use tollgate_core::{Algorithm, Mode, Period, TimeDelta};

/// Draft of one file.
#[derive(Debug, Default)]
pub(crate) struct FileDraft {
    pub(crate) domain: Option<Spanned<String>>,
    pub(crate) profile: Option<Spanned<Profile>>,
    pub(crate) shape: ShapeDraft,
    pub(crate) class: Option<Class>,
    pub(crate) tier_key: Option<String>,
    pub(crate) shard_by: Option<Spanned<String>>,
    pub(crate) store: Option<Spanned<String>>,
    pub(crate) region: Option<Spanned<RegionSetting>>,
    pub(crate) matching: DescriptorMatch,
    /// Whether rules that do not say otherwise are billed.
    pub(crate) billing: bool,
    /// Whether consumption is written to a database, for rules that do not say.
    pub(crate) durable: Option<bool>,
    pub(crate) overload: Option<Spanned<OverloadDraft>>,
    /// What rules answer that do not say otherwise.
    pub(crate) response: DenialResponse,
    pub(crate) rules: Vec<RuleDraft>,
}

/// Options of a limit's arithmetic, allowed at three levels: file, rule, limit.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShapeDraft {
    pub(crate) algorithm: Option<Spanned<Algorithm>>,
    pub(crate) burst: Option<Spanned<u64>>,
    pub(crate) slots: Option<Spanned<u64>>,
    pub(crate) jitter: Option<Spanned<bool>>,
    pub(crate) refill_interval: Option<Spanned<TimeDelta>>,
}

/// Draft of one limit.
#[derive(Clone, Debug)]
pub(crate) struct LimitDraft {
    pub(crate) at: Position,
    pub(crate) count: u64,
    pub(crate) period: Period,
    pub(crate) shape: ShapeDraft,
    /// Cost of this limit alone.
    pub(crate) cost: Option<CostDraft>,
}

/// Draft of `soft`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftDraft {
    pub(crate) threshold: SoftThreshold,
    pub(crate) action: SoftAction,
}

/// Threshold of a soft limit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SoftThreshold {
    Units(u64),
    Percent(u64),
}

/// Draft of `concurrency`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConcurrencyDraft {
    pub(crate) limit: u64,
    pub(crate) ttl: TimeDelta,
    /// Whether the file has the `ttl`.
    pub(crate) has_ttl: bool,
}

/// Draft of `cost`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CostDraft {
    Fixed(u64),
    Attribute(String),
}

impl From<CostDraft> for CostFrom {
    fn from(draft: CostDraft) -> Self {
        match draft {
            CostDraft::Fixed(units) => Self::Fixed(units),
            CostDraft::Attribute(name) => Self::Attribute(name),
        }
    }
}

/// Draft of `on_error`, before the class supplies the defaults.
#[derive(Clone, Debug)]
pub(crate) enum OnErrorDraft {
    Always(FailPolicy),
    ByTier { tiers: BTreeMap<String, FailPolicy>, otherwise: Option<FailPolicy> },
}

impl OnErrorDraft {
    /// Fills in the rest from the class.
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

/// Draft of one descriptor.
#[derive(Clone, Debug, Default)]
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
    /// A tier without limits is unlimited.
    pub(crate) tiers: Vec<(String, Vec<LimitDraft>)>,
    /// Stores of tiers that name one.
    pub(crate) tier_stores: Vec<(String, Spanned<String>)>,
    pub(crate) concurrency: Option<Spanned<ConcurrencyDraft>>,
    pub(crate) class: Option<Class>,
    pub(crate) on_error: Option<OnErrorDraft>,
    pub(crate) mode: Option<Spanned<Mode>>,
    pub(crate) store: Option<Spanned<String>>,
    pub(crate) region: Option<Spanned<RegionSetting>>,
    /// Fraction of the limit in thousandths.
    pub(crate) fallback: Option<Spanned<u64>>,
    pub(crate) split: Option<Spanned<u64>>,
    pub(crate) action: Option<Spanned<Action>>,
    pub(crate) soft: Option<Spanned<SoftDraft>>,
    pub(crate) candidate: Vec<LimitDraft>,
    pub(crate) priority: Option<i32>,
    pub(crate) cost: Option<CostDraft>,
    pub(crate) billing: Option<Spanned<bool>>,
    pub(crate) durable: Option<Spanned<bool>>,
    pub(crate) shadow: Option<Spanned<bool>>,
    /// Share of callers in thousandths.
    pub(crate) enforce: Option<Spanned<u64>>,
    pub(crate) quota: Option<Spanned<bool>>,
    pub(crate) detailed_metric: bool,
    pub(crate) value_to_metric: bool,
    pub(crate) share_threshold: Option<Spanned<bool>>,
    pub(crate) metadata: Metadata,
    pub(crate) response: DenialResponse,
    pub(crate) rules: Vec<RuleDraft>,
}
