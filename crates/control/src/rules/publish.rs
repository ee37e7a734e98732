//! Publishing of rules: loads, lints and compares them with the active rules, previews their impact, and only then
//! stores them. A preview does the same without storing.
//!
//! The path of a stored revision to the other nodes: the transaction that stores it notifies them (`NOTIFY` in
//! `db/transaction.rs`), `replication/sync.rs` there calls `catch_up_rules` (`rules/revision_store.rs`), which reads
//! it, and `run_published` in `rules/manager.rs` makes it active.

use crate::db::transaction::Actor;
use crate::error::ControlError;
use crate::preview::collect::Freshness;
use crate::preview::recent_requests::RecentRequests;
use crate::preview::report::PreviewReport;
use crate::rules::manager::{ActiveRules, RuleManager, RulesFrom};
use crate::rules::revision::{NewRevision, RuleFile};
use serde::Deserialize;
use std::sync::Arc;
use tollgate_rules::{Ruleset, Source};
use utoipa::ToSchema;

/// Maximum number of files of a revision.
const MAX_FILES: usize = 1_000;
/// Maximum length of a file name, in bytes.
const MAX_NAME_BYTES: usize = 512;
/// Age of the rules that small steps are judged against.
const BASELINE_AGE_MILLIS: i64 = 24 * 3_600 * 1_000;
/// Maximum length of the reason, in bytes.
const MAX_REASON_BYTES: usize = 1_024;

/// A request to publish rules.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PublishRequest {
    /// All rule files: rules that they do not contain are removed.
    pub files: Vec<RuleFile>,
    /// Reason, recorded in the audit log.
    #[serde(default)]
    #[schema(required = true)]
    pub reason: String,
    /// The active revision on which the rules are based; not checked if absent.
    pub base_rev: Option<i64>,
    /// Publishes even if the guardrails ask for confirmation.
    #[serde(default)]
    pub confirm: bool,
}

/// Result of publishing.
#[derive(Clone, Debug)]
pub enum PublishResult {
    /// The rules are active.
    Active(i64, PreviewReport),
    /// The rules need another operator's approval.
    PendingApproval(i64, PreviewReport),
    /// The rules were already active.
    Unchanged(i64, PreviewReport),
}

/// Why nothing was published.
#[derive(Debug)]
pub enum PublishError {
    /// A field is invalid: its name, and how to fix it.
    Malformed(&'static str, String),
    /// The rules are invalid.
    Invalid(Box<PreviewReport>),
    /// The guardrails ask for confirmation; the report has the reasons.
    NeedsConfirm(Box<PreviewReport>),
    /// This node loads its rules from files.
    FromFiles,
    /// Another revision is active than the request was based on.
    Conflict(Option<i64>),
    /// The control plane failed.
    Control(ControlError),
}

impl From<ControlError> for PublishError {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

impl RuleManager {
    /// Previews rules.
    ///
    /// # Errors
    /// [`PublishError`] if they cannot be previewed.
    pub async fn preview_files(
        self: &Arc<Self>,
        files: Vec<RuleFile>,
    ) -> Result<PreviewReport, PublishError> {
        Ok(self.preview_rules(files, self.active(), Freshness::Cached).await?.0)
    }

    /// Publishes rules, if the guardrails allow it.
    ///
    /// # Errors
    /// [`PublishError`], with the reason.
    pub async fn publish(
        self: &Arc<Self>,
        sent: PublishRequest,
        actor: &Actor,
    ) -> Result<PublishResult, PublishError> {
        if self.from != RulesFrom::Database {
            return Err(PublishError::FromFiles);
        }
        validate_reason(&sent.reason)?;
        self.read_latest().await?;
        let active = self.active();
        if sent.base_rev.is_some() && sent.base_rev != active.rev() {
            return Err(PublishError::Conflict(active.rev()));
        }
        let (report, candidate) =
            self.preview_rules(sent.files.clone(), Arc::clone(&active), Freshness::Current).await?;
        let Some(candidate) = candidate else { return Err(PublishError::Invalid(Box::new(report))) };
        if let Some(rev) = active.rev().filter(|_| candidate.revision() == active.rules.revision()) {
            return Ok(PublishResult::Unchanged(rev, report));
        }
        let denied = report.rehearsal.as_ref().map_or(0.0, |impact| impact.newly_denied_share);
        let needs_approval = denied > self.guardrails.approval_over;
        if !needs_approval && !sent.confirm && !report.confirm.is_empty() {
            return Err(PublishError::NeedsConfirm(Box::new(report)));
        }
        let first = (active.files.clone(), active.rules.revision().to_owned());
        let draft = NewRevision {
            files: sent.files,
            hash: candidate.revision().to_owned(),
            reason: sent.reason,
            base_rev: active.rev(),
            first: Some(first),
            needs_approval,
        };
        let rev = match self.control.publish_rules(draft, actor).await {
            Err(ControlError::Conflict) => {
                self.read_latest().await?;
                return Err(PublishError::Conflict(self.active().rev()));
            }
            other => other?,
        };
        if needs_approval {
            return Ok(PublishResult::PendingApproval(rev, report));
        }
        self.activate_latest().await;
        Ok(PublishResult::Active(rev, report))
    }

    /// Approves a pending revision and makes it active.
    ///
    /// # Errors
    /// [`ControlError`] if the operator may not approve it, or the active rules have changed since.
    pub async fn approve(self: &Arc<Self>, rev: i64, actor: &Actor) -> Result<(), ControlError> {
        self.control.approve_rules(rev, actor).await?;
        self.activate_latest().await;
        Ok(())
    }

    /// Publishes an earlier revision again as a new one, without a preview: a rollback is urgent.
    ///
    /// # Errors
    /// [`PublishError`], with the reason.
    pub async fn roll_back(
        self: &Arc<Self>,
        to: i64,
        reason: &str,
        actor: &Actor,
    ) -> Result<i64, PublishError> {
        if self.from != RulesFrom::Database {
            return Err(PublishError::FromFiles);
        }
        validate_reason(reason)?;
        // Otherwise this node, and those like it, would keep the present rules, and others take the former ones.
        if let Some(former) = self.control.rule_revision(to).await? {
            let (sources, options) = (former.sources(), self.options.clone());
            let loaded =
                tokio::task::spawn_blocking(move || Ruleset::load(&sources, &options).map(drop)).await;
            if let Ok(Err(errors)) = loaded {
                return Err(PublishError::Malformed(
                    "to",
                    format!("cannot be loaded by this node: {errors}"),
                ));
            }
        }
        let rev = self.control.roll_back_rules(to, None, reason, actor).await?;
        self.activate_latest().await;
        Ok(rev)
    }

    /// Returns the recent requests of callers to this node.
    ///
    /// # Errors
    /// [`ControlError`] if they cannot be collected.
    pub async fn recent_requests(&self) -> Result<RecentRequests, ControlError> {
        let preview = Arc::clone(&self.preview);
        let collected = tokio::task::spawn_blocking(move || preview.recent_requests()).await;
        collected.map_err(|error| ControlError::Corrupt(error.to_string()))
    }

    async fn preview_rules(
        &self,
        files: Vec<RuleFile>,
        active: Arc<ActiveRules>,
        freshness: Freshness,
    ) -> Result<(PreviewReport, Option<Arc<Ruleset>>), PublishError> {
        validate_files(&files)?;
        let sources: Vec<Source> = files.iter().map(Source::from).collect();
        let (mut report, candidate) =
            self.preview.preview(sources, Arc::clone(&active.rules), freshness).await?;
        if let (Some(candidate), Some(impact)) = (&candidate, &report.rehearsal) {
            let baseline = self.baseline(&active).await?;
            report.confirm = self.guardrails.confirm_reasons(&active.rules, &baseline, candidate, impact);
        }
        Ok((report, candidate))
    }

    /// Returns the rules of a day ago; the active ones if they are older, or this version cannot load those.
    async fn baseline(&self, active: &ActiveRules) -> Result<Arc<Ruleset>, ControlError> {
        let day_ago = self.control.now_millis() - BASELINE_AGE_MILLIS;
        let found = match active.published {
            Some(_) => self.control.rules_active_at(day_ago).await?,
            None => None,
        };
        let sources =
            found.filter(|found| Some(found.revision.rev) != active.rev()).map(|found| found.sources());
        let options = self.options.clone();
        let loading = sources
            .map(|sources| tokio::task::spawn_blocking(move || Ruleset::load(&sources, &options).ok()));
        let loaded = match loading {
            Some(loading) => loading.await.ok().flatten(),
            None => None,
        };
        Ok(loaded.map_or_else(|| Arc::clone(&active.rules), Arc::new))
    }

    async fn read_latest(self: &Arc<Self>) -> Result<(), ControlError> {
        self.control.catch_up().await?;
        self.activate_latest().await;
        Ok(())
    }

    /// Makes the latest published rules active on this node before the response is sent.
    pub(crate) async fn activate_latest(self: &Arc<Self>) {
        let own = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || own.apply_published()).await;
    }
}

fn validate_files(files: &[RuleFile]) -> Result<(), PublishError> {
    let invalid = |detail: String| Err(PublishError::Malformed("files", detail));
    if files.is_empty() {
        return invalid("must not be empty; a revision contains all rules".to_owned());
    }
    if files.len() > MAX_FILES {
        return invalid(format!("must have at most {MAX_FILES} entries"));
    }
    for (at, file) in files.iter().enumerate() {
        let plain = !file.name.is_empty() && !file.name.chars().any(char::is_control);
        if !plain || file.name.len() > MAX_NAME_BYTES {
            return invalid(format!(
                "files[{at}].name: must have 1 to {MAX_NAME_BYTES} bytes and no control characters"
            ));
        }
        // PostgreSQL cannot store it in a text.
        if file.text.contains('\0') {
            return invalid(format!("files[{at}].text: must not contain a NUL byte"));
        }
    }
    Ok(())
}

fn validate_reason(reason: &str) -> Result<(), PublishError> {
    if reason.trim().is_empty() || reason.len() > MAX_REASON_BYTES || reason.chars().any(char::is_control) {
        let detail = format!("must have 1 to {MAX_REASON_BYTES} bytes and no control characters");
        return Err(PublishError::Malformed("reason", detail));
    }
    Ok(())
}
