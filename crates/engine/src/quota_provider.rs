//! Quota lookup interface: a caller's quota, from memory, never from a database.
//!
//! The limiter depends only on this trait; storing and changing quotas is the control plane's task. A limiter without
//! quotas pays only for checking an empty `Option`.

use crate::check::Check;
use crate::grant::Grants;
use crate::limiter::Limiter;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::Clock;
use tollgate_rules::{CallerOverrides, Ruleset};

/// Lookup of callers' quotas.
pub trait QuotaProvider: Send + Sync {
    /// Returns the active quotas of the request's callers, compiled against `rules`: of its API key, its tenant, its
    /// user, or whatever attributes quotas are about.
    fn lookup(&self, check: &Check<'_>, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota;
}

/// The quotas that apply to one request: at most one for each attribute, stored without allocation.
pub type Quotas = SmallVec<[Arc<CallerOverrides>; 2]>;

/// The quotas of the callers of one request.
#[derive(Clone, Debug, Default)]
pub struct CallerQuota {
    /// Tiers and limit overrides.
    pub quotas: Quotas,
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

    /// Returns the quotas of the request's callers.
    #[inline]
    pub(crate) fn quota_for(&self, check: &Check<'_>, rules: &Ruleset) -> CallerQuota {
        let Some(tenants) = &self.quotas else { return CallerQuota::default() };
        tenants.lookup(check, rules, &*self.clock)
    }
}
