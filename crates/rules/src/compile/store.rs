//! Which store keeps a rule's counters: the one that the rule names, else its group's, else the file's, else the default
//! store.

use super::Compiler;
use crate::draft::RuleDraft;
use crate::reader::{Reader, Spanned};
use crate::ruleset::Options;
use std::sync::{Arc, PoisonError, RwLock};
use tollgate_core::{Mode, Period, TimeDelta};

/// The name that rules use for the store without a name.
const DEFAULT: &str = "default";
const MAX_NAME: usize = 64;

/// Returns whether a text can be the name of a store.
///
/// ```
/// assert!(tollgate_rules::is_store_name("eu-west-1"));
/// assert!(!tollgate_rules::is_store_name("eu|west") && !tollgate_rules::is_store_name(""));
/// ```
#[must_use]
pub fn is_store_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain)
}

/// The names of a server's stores, but for the default one. Clones share them: rules may name a store that was added while
/// the server runs.
#[derive(Clone, Debug, Default)]
pub struct StoreNames(Arc<RwLock<Vec<String>>>);

impl StoreNames {
    /// Returns the names, in the order in which they were added.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whether rules and quotas may name this store: one of these, or the default store.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        name == DEFAULT
            || self.0.read().unwrap_or_else(PoisonError::into_inner).iter().any(|known| known == name)
    }

    /// Adds a name.
    pub fn add(&self, name: String) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).push(name);
    }
}

impl FromIterator<String> for StoreNames {
    fn from_iter<I: IntoIterator<Item = String>>(names: I) -> Self {
        Self(Arc::new(RwLock::new(names.into_iter().collect())))
    }
}

impl PartialEq for StoreNames {
    fn eq(&self, other: &Self) -> bool {
        self.list() == other.list()
    }
}

impl Eq for StoreNames {}

/// The name is not that of a configured store, and has been reported.
pub(super) struct UnknownStore;

/// Returns the store that a name stands for; `None` for the default store.
pub(super) fn resolve(
    reader: &mut Reader<'_>,
    given: &Spanned<String>,
    options: &Options,
) -> Result<Option<Arc<str>>, UnknownStore> {
    let name = given.value.as_str();
    if name == DEFAULT {
        return Ok(None);
    }
    let Some(known) = &options.stores else { return Ok(Some(name.into())) };
    if known.contains(name) {
        return Ok(Some(name.into()));
    }
    let known = known.list();
    if known.is_empty() {
        reader.error_help(
            given.at,
            format!("no store is named `{name}`: the server has only its default store"),
            format!("name it with `--store-named {name}=redis://…`, or leave `store` out"),
        );
    } else {
        let known: Vec<&str> = known.iter().map(String::as_str).chain([DEFAULT]).collect();
        reader.unknown_value(given.at, "store", name, &known);
    }
    Err(UnknownStore)
}

/// Returns whether all limits of a rule are per second.
fn is_per_second(draft: &RuleDraft) -> bool {
    let second = Period::Rolling(TimeDelta::from_secs(1));
    let mut limits = draft.limits.iter().flatten().chain(draft.tiers.iter().flat_map(|(_, limits)| limits));
    let has_any = draft.limits.as_ref().is_some_and(|limits| !limits.is_empty());
    has_any && limits.all(|limit| limit.period == second)
}

impl Compiler<'_, '_> {
    /// Returns the stores of the tiers that name one.
    pub(super) fn tier_stores_of(&mut self, draft: &RuleDraft) -> Vec<(String, Option<Arc<str>>)> {
        let is_local = draft.mode.is_some_and(|mode| mode.value == Mode::Local);
        let mut stores = Vec::new();
        for (tier, given) in &draft.tier_stores {
            if is_local && given.value != DEFAULT {
                self.local_store(given);
            } else if let Ok(store) = resolve(self.reader, given, self.options) {
                stores.push((tier.clone(), store));
            }
        }
        stores
    }

    fn local_store(&mut self, given: &Spanned<String>) {
        self.reader.error_help(
            given.at,
            "`store` with `mode: local`: each node counts in its own memory",
            "keep one of them",
        );
    }

    /// Returns the store of a rule's counters; `None` for the default store.
    pub(super) fn store_of(&mut self, draft: &RuleDraft) -> Option<Arc<str>> {
        let is_local = draft.mode.is_some_and(|mode| mode.value == Mode::Local);
        let Some(given) = &draft.store else {
            let per_second = self.options.per_second_store.as_deref().filter(|_| is_per_second(draft));
            return per_second.map(Arc::from).or_else(|| self.store.clone()).filter(|_| !is_local);
        };
        // A group's name is reported once, not for each rule below it.
        if self.reported_stores.contains(&given.at) {
            return None;
        }
        let resolved = if is_local && given.value != DEFAULT {
            self.local_store(given);
            Err(UnknownStore)
        } else {
            resolve(self.reader, given, self.options)
        };
        resolved.unwrap_or_else(|UnknownStore| {
            self.reported_stores.push(given.at);
            None
        })
    }
}
