//! The domain by which `/check` decides: the configured one, or the only one of the rules.
//!
//! When rules get a second domain, the choice stays what it was: a file for another service must not turn every check into
//! an error. A start with several domains has no former choice, so the log and `/readyz` ask for a setting until then.
//! Rejected: the first domain of the files, because their order means nothing.

use super::problem::Problem;
use arc_swap::ArcSwapOption;
use http::StatusCode;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tollgate_rules::{Domain, RequiredDomains, Ruleset};

/// The domain of forward auth.
#[derive(Debug)]
pub struct ForwardDomain {
    configured: Option<String>,
    /// The domain that was the only one, until there were others.
    held: ArcSwapOption<String>,
    /// Whether any check has been decided: others than proxies may be all who ask this process.
    is_used: AtomicBool,
    /// Rules without the domain are refused.
    required: OnceLock<RequiredDomains>,
    /// What the log has already.
    logged: Mutex<Option<String>>,
}

impl ForwardDomain {
    pub(crate) fn new(configured: Option<String>) -> Self {
        Self {
            configured,
            held: ArcSwapOption::empty(),
            is_used: AtomicBool::new(false),
            required: OnceLock::new(),
            logged: Mutex::new(None),
        }
    }

    /// Lets rules be refused that would leave `/check` without its domain.
    pub fn require_in(&self, required: &RequiredDomains) {
        required.set("`forward_auth`", self.configured.clone());
        let _ = self.required.set(required.clone());
    }

    pub(crate) fn configured(&self) -> Option<&str> {
        self.configured.as_deref()
    }

    /// Returns the domain of these rules.
    fn choose<'r>(&self, rules: &'r Ruleset) -> Option<&'r Domain> {
        if let Some(name) = &self.configured {
            return rules.domain(name);
        }
        if let Some(held) = self.held.load().as_ref().and_then(|held| rules.domain(held)) {
            return Some(held);
        }
        let mut all = rules.domains();
        let only = all.next().filter(|_| all.next().is_none())?;
        self.held.store(Some(only.name().to_owned().into()));
        Some(only)
    }

    /// Returns the domain whose rules apply.
    ///
    /// # Errors
    /// None is selected, or the active rules do not have the configured one: its requests would have no limits.
    pub(crate) fn domain<'r>(&self, rules: &'r Ruleset) -> Result<&'r Domain, Problem> {
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
            self.require(rules);
        }
        self.choose(rules).ok_or_else(|| {
            let (title, detail) = self.error(rules);
            self.log(rules, Some(&detail), true);
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, title, detail)
        })
    }

    fn error(&self, rules: &Ruleset) -> (&'static str, String) {
        match &self.configured {
            Some(domain) => (
                "Unknown domain",
                format!(
                    "the active rules have no domain `{domain}`; set `forward_auth: {{domain: NAME}}` to one that they \
                     have, or load rules for it"
                ),
            ),
            None => (
                "No domain",
                format!(
                    "no domain is selected; set `forward_auth: {{domain: NAME}}` to one of the loaded domains ({})",
                    names(rules)
                ),
            ),
        }
    }

    /// Returns what an operator should do while all is well: the choice does not outlive the process.
    fn warning(&self, rules: &Ruleset) -> Option<String> {
        let domain = self.choose(rules).filter(|_| self.configured.is_none())?.name();
        rules.domains().nth(1)?;
        Some(format!(
            "the rules have several domains ({}); /check goes on with `{domain}`, which was the only one. Set \
             `forward_auth: {{domain: {domain}}}` before the next start",
            names(rules)
        ))
    }

    /// Requires the domain if no other could take its place: the only domain of rules may get another name.
    fn require(&self, rules: &Ruleset) {
        if let (None, Some(required), true) =
            (&self.configured, self.required.get(), self.is_used.load(Ordering::Relaxed))
        {
            let is_only = rules.domains().nth(1).is_none();
            required.set("`/check`", self.choose(rules).filter(|_| !is_only).map(Domain::name));
        }
    }

    /// Follows a change of rules.
    pub fn follow(&self, rules: &Ruleset) {
        self.require(rules);
        self.log(rules, self.warning(rules).as_deref(), false);
    }

    /// Logs a text once.
    fn log(&self, rules: &Ruleset, text: Option<&str>, is_error: bool) {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.as_deref() == text {
            return;
        }
        match text {
            Some(text) if is_error => tracing::error!(rules = rules.revision(), "/check: {text}"),
            Some(text) => tracing::warn!(rules = rules.revision(), "{text}"),
            None => {}
        }
        *logged = text.map(str::to_owned);
    }

    /// Returns the state, for `/readyz`.
    #[must_use]
    pub fn details(&self, rules: &Ruleset) -> Value {
        let chosen = self.choose(rules);
        let error = chosen.is_none().then(|| self.error(rules).1);
        json!({"domain": chosen.map(Domain::name), "warning": self.warning(rules), "error": error})
    }
}

fn names(rules: &Ruleset) -> String {
    rules.domains().map(Domain::name).collect::<Vec<_>>().join(", ")
}
