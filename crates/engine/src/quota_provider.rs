//! What is agreed with single callers, asked on the way of a request: an answer from memory, never from a database.
//!
//! The limiter knows only this trait; who keeps the agreements, and how they change, is another room's affair. A limiter
//! without any pays for one look at an empty place.

use crate::check::{Check, Request};
use crate::grant::Grants;
use crate::limiter::Limiter;
use std::sync::Arc;
use tollgate_core::Clock;
use tollgate_rules::{Ruleset, TENANT_KEY, Tenant};

/// All agreements with single callers.
pub trait Tenants: Send + Sync {
    /// What is agreed with this caller and acts now, compiled against these rules.
    fn find(&self, caller: &str, rules: &Ruleset, clock: &dyn Clock) -> Agreed;
}

/// What is agreed with one caller.
#[derive(Clone, Debug, Default)]
pub struct Agreed {
    /// A tier, and limits of its own.
    pub tenant: Option<Arc<Tenant>>,
    /// Extra quota, once.
    pub grants: Option<Arc<Grants>>,
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
    pub(crate) fn agreed_with(&self, check: &Check<'_>, rules: &Ruleset) -> Agreed {
        let Some(tenants) = &self.tenants else { return Agreed::default() };
        caller(check).map_or_else(Agreed::default, |caller| tenants.find(caller, rules, &*self.clock))
    }
}

/// Who asks, where the request says it.
#[inline]
fn caller<'a>(check: &Check<'a>) -> Option<&'a str> {
    let place = |entries: &[(&'_ str, &'_ str)]| entries.iter().position(|(key, _)| *key == TENANT_KEY);
    match check.request {
        Request::Attributes(attributes) => Some(attributes[place(attributes)?].1),
        Request::Descriptors(descriptors) => {
            descriptors.iter().find_map(|one| Some(one.entries[place(one.entries)?].1))
        }
    }
}
