//! What is agreed with single callers, asked on the way of a request: an answer from memory, never from a database.
//!
//! The limiter knows only this trait; who keeps the agreements, and how they change, is another room's affair. A limiter
//! without any pays for one look at an empty place.

use crate::check::{Check, Request};
use crate::limiter::Limiter;
use std::sync::Arc;
use tollgate_core::Clock;
use tollgate_rules::{Ruleset, TENANT_KEY, Tenant};

/// All agreements with single callers.
pub trait Tenants: Send + Sync {
    /// What is agreed with this caller and acts now, compiled against these rules.
    fn find(&self, caller: &str, rules: &Ruleset, clock: &dyn Clock) -> Option<Arc<Tenant>>;
}

impl<S> Limiter<S> {
    /// Decides by agreements with single callers, too.
    #[must_use]
    pub fn with_tenants(mut self, tenants: Arc<dyn Tenants>) -> Self {
        self.tenants = Some(tenants);
        self
    }

    /// What is agreed with the caller of a request.
    #[inline]
    pub(crate) fn tenant_of(&self, check: &Check<'_>, rules: &Ruleset) -> Option<Arc<Tenant>> {
        let tenants = self.tenants.as_ref()?;
        let caller = |entries: &[(&'_ str, &'_ str)]| entries.iter().position(|(key, _)| *key == TENANT_KEY);
        let caller = match check.request {
            Request::Attributes(attributes) => attributes[caller(attributes)?].1,
            Request::Descriptors(descriptors) => {
                descriptors.iter().find_map(|one| Some(one.entries[caller(one.entries)?].1))?
            }
        };
        tenants.find(caller, rules, &*self.clock)
    }
}
