//! Confirmation of changes that take something away from a caller: a quota of nothing, a quota below what the caller uses,
//! the grant that it lives on. Without confirmation such a change is rejected with 409, and nothing changes.
//!
//! What the caller uses is read from its counters and from its recent requests to this node. Counters that cannot be
//! read are a reason to ask as well: the guard must not open while the store is unavailable.

use crate::AdminState;
use crate::api::usage::UsageQuery;
use crate::error::ApiError;
use crate::last_tier::{LastTier, last_tier};
use http::StatusCode;
use std::sync::Arc;
use tokio::sync::OnceCell;
use tollgate_control::{
    CallerRef, ControlPlane, ImportLine, KeyHash, Precondition, QuotaChange, QuotaSpec, RecentRequests,
};
use tollgate_engine::{Usage, UsageError};
use tollgate_http::problem::Problem;
use tollgate_rules::Ruleset;

/// Number of lines named in the problem of an import.
const MAX_LINES: usize = 10;

/// Returns a problem if setting (or deleting, without `draft`) a caller's quota needs confirmation.
pub(crate) async fn check(
    admin: &AdminState,
    caller: CallerRef<'_>,
    draft: Option<&QuotaSpec>,
    expected: Precondition,
) -> Result<(), ApiError> {
    let found = admin.control()?.quota(caller).await?.map(|quota| quota.revision);
    // A write based on an outdated quota fails for that reason first; so does the deletion of a missing quota.
    if !expected.is_met(found) || draft.is_none() && found.is_none() {
        return Ok(());
    }
    let guard = QuotaGuard::new(admin)?;
    let mut change = guard.control.quota_change(caller, draft, &guard.rules)?;
    guard.set_request_tier(&mut change).await;
    let reasons = guard.reasons(&change).await;
    if reasons.is_empty() { Ok(()) } else { Err(problem(&reasons).into()) }
}

/// Returns a problem if the caller lives on this grant: a limit that it covers is used up.
pub(crate) async fn check_revocation(
    admin: &AdminState,
    caller: CallerRef<'_>,
    grant: &str,
) -> Result<(), ApiError> {
    let Some((key, value)) = caller.attribute() else { return Ok(()) };
    let mut reasons = Vec::new();
    for usage in usage_of(admin, &(admin.rules)(), (key, value), None).await {
        let Ok(usage) = usage else {
            reasons.push(UNREADABLE.to_owned());
            continue;
        };
        let lives_on = usage.grants.iter().filter(|one| one.id == grant && one.remaining != Some(0));
        for one in lives_on {
            let used_up = usage
                .limits
                .iter()
                .find(|limit| one.rules.contains(&limit.rule) && limit.remaining == Some(0));
            reasons.extend(used_up.map(|limit| {
                format!(
                    "the caller has used up rule `{}` of domain `{}` and passes by this grant alone",
                    limit.rule, usage.domain
                )
            }));
        }
    }
    reasons.dedup();
    if reasons.is_empty() { Ok(()) } else { Err(problem(&reasons).into()) }
}

const UNREADABLE: &str = "what the caller uses is unknown, because the counter store is unavailable";

/// What quota changes are judged by: the active rules, the counters, and recent requests.
pub(crate) struct QuotaGuard<'a> {
    admin: &'a AdminState,
    control: &'a Arc<ControlPlane>,
    rules: Arc<Ruleset>,
    /// Collected when the first change needs them.
    recent: OnceCell<Arc<RecentRequests>>,
}

impl<'a> QuotaGuard<'a> {
    pub(crate) fn new(admin: &'a AdminState) -> Result<Self, ApiError> {
        Ok(Self { admin, control: admin.control()?, rules: (admin.rules)(), recent: OnceCell::new() })
    }

    async fn recent(&self) -> Option<Arc<RecentRequests>> {
        let collect = || async {
            let manager = self.admin.rule_manager().map_err(ApiError::from)?;
            Ok::<_, ApiError>(Arc::new(manager.recent_requests().await?))
        };
        self.recent.get_or_try_init(collect).await.ok().map(Arc::clone)
    }

    /// Returns the reasons to confirm a line of an import; `None` if the line is invalid.
    pub(crate) async fn line_reasons(&self, line: &ImportLine) -> Option<Vec<String>> {
        let caller = match (line.caller(), &line.id) {
            ((key, Some(value)), _) => CallerRef::of(key, value),
            ((_, None), Some(id)) => CallerRef::Id(KeyHash::parse(id)?),
            ((_, None), None) => return None,
        };
        let change = self.control.quota_change(caller, Some(&line.spec()), &self.rules).ok()?;
        Some(self.reasons(&change).await)
    }

    /// Returns the active rules.
    pub(crate) fn rules(&self) -> &Arc<Ruleset> {
        &self.rules
    }

    /// Sets the tier of the caller's latest request, which applies where its quota names none.
    pub(crate) async fn set_request_tier(&self, change: &mut QuotaChange) {
        let Some(value) = change.value.clone() else { return };
        for domain in self.rules.domains().filter(|domain| domain.depends_on_tier()) {
            if let LastTier::Named(tier) = last_tier(self.admin, domain, &change.key, &value).await {
                change.tier = Some(tier);
                return;
            }
        }
    }

    /// Returns the reasons to confirm a change.
    pub(crate) async fn reasons(&self, change: &QuotaChange) -> Vec<String> {
        let mut reasons = change.zeroed(&self.rules);
        reasons.extend(change.removed(&self.rules));
        let Some(value) = change.value.as_deref().filter(|_| change.tightens(&self.rules)) else {
            return reasons;
        };
        for usage in usage_of(self.admin, &self.rules, (&change.key, value), change.tier.as_deref()).await {
            match usage {
                Ok(usage) => reasons.extend(change.below_use(&self.rules, &usage)),
                Err(_) => reasons.push(UNREADABLE.to_owned()),
            }
        }
        reasons.dedup();
        if reasons.is_empty()
            && let Some(recent) = self.recent().await
        {
            let (rules, change) = (Arc::clone(&self.rules), change.clone());
            let impact = tokio::task::spawn_blocking(move || recent.impact(&rules, &change)).await;
            let denied = impact.map_or(0.0, |impact| impact.newly_denied_share);
            if denied > 0.0 {
                reasons.push(format!(
                    "{:.1}% of the caller's recent requests would be newly denied",
                    denied * 100.0
                ));
            }
        }
        reasons
    }
}

/// Reads the usage of a caller in each domain.
async fn usage_of(
    admin: &AdminState,
    rules: &Ruleset,
    (key, value): (&str, &str),
    tier: Option<&str>,
) -> Vec<Result<Usage, UsageError>> {
    let mut all = Vec::new();
    for domain in rules.domains() {
        let mut of = UsageQuery::of(admin, Some(domain.name().to_owned()), key, value);
        of.attributes.extend(tier.map(|tier| (domain.tier_key().to_owned(), tier.to_owned())));
        match admin.usage.usage(&of).await {
            // The rules have changed meanwhile; the change is validated against the new ones when it is written.
            Err(UsageError::Domain(_)) => {}
            usage => all.push(usage),
        }
    }
    all
}

fn problem(reasons: &[String]) -> Problem {
    let detail = format!(
        "{}; to do it anyway, send it again with `confirm: true` in the body or `?confirm=true`",
        reasons.join("; ")
    );
    Problem::new(StatusCode::CONFLICT, "Confirmation required", detail).in_field("confirm")
}

/// Lines of an import that need confirmation: the first ones, and how many.
#[derive(Default)]
pub(crate) struct LinesToConfirm {
    first: Vec<String>,
    count: usize,
}

impl LinesToConfirm {
    pub(crate) fn add(&mut self, line: u64, reason: &str) {
        self.count += 1;
        if self.first.len() < MAX_LINES {
            self.first.push(format!("line {line}: {reason}"));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the problem of an import, `imported` lines of which have been written.
    pub(crate) fn problem(mut self, imported: u64) -> Problem {
        if self.count > self.first.len() {
            self.first.push(format!("{} more lines", self.count - self.first.len()));
        }
        let written = match imported {
            0 => "nothing was imported".to_owned(),
            _ => format!("only the first {imported} valid lines took effect"),
        };
        let detail = format!(
            "{}; {written}; to import all of it anyway, send it again with `?confirm=true`",
            self.first.join("; ")
        );
        Problem::new(StatusCode::CONFLICT, "Confirmation required", detail).in_field("confirm")
    }
}
