//! Quota lookup interface: a caller's quota, from memory, never from a database.
//!
//! The limiter knows only this trait; who keeps the agreements, and how they change, is another room's affair. A limiter
//! without any pays for one look at an empty place.

use crate::check::{Check, CheckInput};
use crate::grant::Grants;
use crate::limiter::Limiter;
use std::sync::Arc;
use tollgate_core::Clock;
use tollgate_rules::{CALLER_KEY, CallerOverrides, Ruleset};

/// All agreements with single callers.
pub trait QuotaProvider: Send + Sync {
    /// What is agreed with this caller and acts now, compiled against these rules.
    fn lookup(&self, caller: &str, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota;
}

/// What is agreed with one caller.
#[derive(Clone, Debug, Default)]
pub struct CallerQuota {
    /// A tier, and limits of its own.
    pub overrides: Option<Arc<CallerOverrides>>,
    /// Extra quota, once.
    pub grants: Option<Arc<Grants>>,
}

impl<S> Limiter<S> {
    /// Decides by agreements with single callers, too.
    #[must_use]
    pub fn with_quotas(mut self, tenants: Arc<dyn QuotaProvider>) -> Self {
        self.quotas = Some(tenants);
        self
    }

    /// What is agreed with the caller of a request.
    #[inline]
    pub(crate) fn quota_for(&self, check: &Check<'_>, rules: &Ruleset) -> CallerQuota {
        let Some(tenants) = &self.quotas else { return CallerQuota::default() };
        caller(check).map_or_else(CallerQuota::default, |caller| tenants.lookup(caller, rules, &*self.clock))
    }
}

/// Who asks, where the request says it.
#[inline]
fn caller<'a>(check: &Check<'a>) -> Option<&'a str> {
    let place = |entries: &[(&'_ str, &'_ str)]| entries.iter().position(|(key, _)| *key == CALLER_KEY);
    match check.input {
        CheckInput::Attributes(attributes) => Some(attributes[place(attributes)?].1),
        CheckInput::Descriptors(descriptors) => {
            descriptors.iter().find_map(|one| Some(one.entries[place(one.entries)?].1))
        }
    }
}
