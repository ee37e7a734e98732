//! The domains that a process decides by because its settings name them: a gateway's routes, `forward_auth`, a program's
//! limits. Rules without one of them are refused wherever they come from, files, a publication or a management server:
//! requests to a domain without rules have no limits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Domains that rules must have, shared between those who compile rules and those who decide by them.
///
/// ```
/// use tollgate_rules::{Options, Ruleset, Source};
/// let options = Options::default();
/// let load = |text: &str| Ruleset::load(&[Source::new("rules.yaml", text)], &options);
/// options.required_domains.set("forward_auth", ["shop"]);
/// assert!(load("domain: shop").is_ok());
/// assert!(load("domain: other").unwrap_err().to_string().contains("`shop`"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct RequiredDomains {
    by_user: Arc<Mutex<BTreeMap<String, BTreeSet<String>>>>,
}

impl RequiredDomains {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, BTreeSet<String>>> {
        self.by_user.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the domains that `user` decides by; errors name it.
    pub fn set<D: Into<String>>(&self, user: &str, domains: impl IntoIterator<Item = D>) {
        self.all().insert(user.to_owned(), domains.into_iter().map(Into::into).collect());
    }

    /// Adds a domain that `user` decides by.
    pub fn add(&self, user: &str, domain: &str) {
        self.all().entry(user.to_owned()).or_default().insert(domain.to_owned());
    }

    /// Returns what is missing, each with who decides by it.
    pub(crate) fn missing(&self, is_known: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        let all = self.all();
        let each = all.iter().flat_map(|(user, domains)| domains.iter().map(move |domain| (user, domain)));
        each.filter(|(_, domain)| !is_known(domain))
            .map(|(user, domain)| (user.clone(), domain.clone()))
            .collect()
    }
}

impl PartialEq for RequiredDomains {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.by_user, &other.by_user) || *self.all() == *other.all()
    }
}

impl Eq for RequiredDomains {}
