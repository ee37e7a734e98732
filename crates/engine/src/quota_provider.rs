//! Quota lookup interface: a caller's quota, from memory, never from a database.
//!
//! The limiter depends only on this trait; storing and changing quotas is the control plane's task. A limiter without
//! quotas pays only for checking an empty `Option`.

use crate::check::{Check, CheckInput};
use crate::grant::Grants;
use crate::limiter::Limiter;
use std::sync::Arc;
use tollgate_core::Clock;
use tollgate_rules::{CALLER_KEY, CallerOverrides, Ruleset};

/// Lookup of callers' quotas.
pub trait QuotaProvider: Send + Sync {
    /// Returns the active quota of `caller`, compiled against `rules`.
    fn lookup(&self, caller: &str, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota;
}

/// Quota of one caller.
#[derive(Clone, Debug, Default)]
pub struct CallerQuota {
    /// Tier and limit overrides.
    pub overrides: Option<Arc<CallerOverrides>>,
    /// One-time extra units.
    pub grants: Option<Arc<Grants>>,
}

impl<S> Limiter<S> {
    /// Sets the quota provider of the limiter.
    #[must_use]
    pub fn with_quotas(mut self, tenants: Arc<dyn QuotaProvider>) -> Self {
        self.quotas = Some(tenants);
        self
    }

    /// Returns the quota of the request's caller.
    #[inline]
    pub(crate) fn quota_for(&self, check: &Check<'_>, rules: &Ruleset) -> CallerQuota {
        let Some(tenants) = &self.quotas else { return CallerQuota::default() };
        caller(check).map_or_else(CallerQuota::default, |caller| tenants.lookup(caller, rules, &*self.clock))
    }
}

/// Returns the caller's key, if the request contains it.
#[inline]
pub(crate) fn caller<'a>(check: &Check<'a>) -> Option<&'a str> {
    let place = |entries: &[(&'_ str, &'_ str)]| entries.iter().position(|(key, _)| *key == CALLER_KEY);
    match check.input {
        CheckInput::Attributes(attributes) => Some(attributes[place(attributes)?].1),
        CheckInput::Descriptors(descriptors) => {
            descriptors.iter().find_map(|one| Some(one.entries[place(one.entries)?].1))
        }
    }
}
