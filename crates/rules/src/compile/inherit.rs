//! Inheritance: the settings of a descriptor that has no limit and only contains others apply to everything below it.
//!
//! A setting that a descriptor writes itself wins, each setting for itself. A descriptor with a limit keeps its
//! settings: they are about that limit, and what stands below it inherits from further up. Settings that belong to one
//! limit or one rule (`burst`, `slots`, `soft`, `replaces`) have no meaning on a group and are rejected there.
//!
//! Rejected: ignoring them, which left a `class: security` without effect; and inheritance from descriptors with a
//! limit, which would change what existing files mean.

use super::Compiler;
use crate::denial_response::DenialResponse;
use crate::draft::RuleDraft;
use crate::metadata::Metadata;
use crate::rule::{Action, Profile};
use tollgate_core::Algorithm;

/// What a level of the tree inherits.
#[derive(Clone, Default)]
pub(super) struct Inherited {
    /// A draft without key, limits and descriptors.
    settings: RuleDraft,
    algorithm: Option<Algorithm>,
    jitter: Option<bool>,
}

impl RuleDraft {
    /// Returns whether it only contains other descriptors.
    pub(super) fn is_group(&self) -> bool {
        !self.rules.is_empty()
            && !self.unlimited
            && self.limits.is_none()
            && self.tiers.is_empty()
            && self.concurrency.is_none()
            && self.candidate.is_empty()
    }
}

impl Inherited {
    /// Creates what the top level inherits.
    pub(super) fn by_file(response: DenialResponse) -> Self {
        Self { settings: RuleDraft { response, ..RuleDraft::default() }, ..Self::default() }
    }

    /// Fills in what the descriptor does not say itself.
    pub(super) fn complete(&self, draft: &mut RuleDraft) {
        let from = &self.settings;
        draft.class = draft.class.or(from.class);
        if draft.on_error.is_none() {
            draft.on_error.clone_from(&from.on_error);
        }
        draft.mode = draft.mode.or(from.mode);
        if draft.store.is_none() {
            draft.store.clone_from(&from.store);
        }
        if draft.region.is_none() {
            draft.region.clone_from(&from.region);
        }
        draft.fallback = draft.fallback.or(from.fallback);
        draft.split = draft.split.or(from.split);
        draft.action = draft.action.or(from.action);
        draft.priority = draft.priority.or(from.priority);
        if draft.cost.is_none() {
            draft.cost.clone_from(&from.cost);
        }
        draft.billing = draft.billing.or(from.billing);
        draft.durable = draft.durable.or(from.durable);
        draft.shadow = draft.shadow.or(from.shadow);
        draft.enforce = draft.enforce.or(from.enforce);
        draft.quota = draft.quota.or(from.quota);
        draft.metadata.inherit(&from.metadata);
        draft.response.inherit(&from.response);
    }

    pub(super) fn algorithm(&self) -> Option<Algorithm> {
        self.algorithm
    }

    pub(super) fn jitter(&self) -> Option<bool> {
        self.jitter
    }
}

impl Compiler<'_, '_> {
    /// Returns what the descriptors of a group inherit; its own settings have been completed.
    pub(super) fn group(&mut self, mut draft: RuleDraft, above: &Inherited) -> Inherited {
        self.native_only(&draft.shape);
        for (name, at) in [
            ("burst", draft.shape.burst.map(|given| given.at)),
            ("slots", draft.shape.slots.map(|given| given.at)),
            ("refill_interval", draft.shape.refill_interval.map(|given| given.at)),
            ("soft", draft.soft.map(|given| given.at)),
            ("replaces", draft.replaces.first().map(|given| given.at)),
        ] {
            if let Some(at) = at {
                self.reader.error_help(
                    at,
                    format!("`{name}` on a descriptor without a limit has no effect"),
                    "write it beside each limit below",
                );
            }
        }
        if let Some(name) = &draft.name {
            self.reader.warning(
                name.at,
                "`name` on a descriptor without a limit names no rule",
                "give it to a rule below, or leave it out",
            );
        }
        if self.profile == Profile::Envoy {
            self.drop_envoy_flags(&mut draft);
        }
        Inherited {
            algorithm: draft.shape.algorithm.map(|given| given.value).or(above.algorithm),
            jitter: draft.shape.jitter.map(|given| given.value).or(above.jitter),
            settings: RuleDraft { key: None, value: None, name: None, rules: Vec::new(), ..draft },
        }
    }

    /// That service reads these keys only beside a limit, and files written for it must decide alike.
    fn drop_envoy_flags(&mut self, draft: &mut RuleDraft) {
        let flags = [("shadow_mode", draft.shadow.take()), ("quota_mode", draft.quota.take())];
        for (name, at) in
            flags.into_iter().filter_map(|(name, flag)| Some((name, flag.filter(|on| on.value)?.at)))
        {
            self.reader.warning(
                at,
                format!("`{name}` on a descriptor without a limit has no effect under `profile: envoy`"),
                "write it beside each `rate_limit` below",
            );
        }
        draft.metadata = Metadata::default();
        if let Some(action) = draft.action.take_if(|action| action.value == Action::Delay) {
            self.reject_under_envoy(action.at, "`action: delay`");
        }
    }
}
