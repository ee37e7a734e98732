//! Publishing rules: read, linted, compared with what acts, and only then written down. The same work without the writing
//! is a check.

use crate::db::transaction::Actor;
use crate::error::ControlError;
use crate::preview::collect::Freshness;
use crate::preview::report::PreviewReport;
use crate::rules::manager::{ActiveRules, RuleManager, RulesFrom};
use crate::rules::revision::{NewRevision, RuleFile};
use serde::Deserialize;
use std::sync::Arc;
use tollgate_rules::{Ruleset, Source};
use utoipa::ToSchema;

/// The most files of a revision.
const MAX_FILES: usize = 1_000;
/// The longest name of a file.
const MAX_NAME_BYTES: usize = 512;
/// The longest reason.
const MAX_REASON_BYTES: usize = 1_024;

/// Rules as they are sent.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Proposal)]
pub struct PublishRequest {
    /// All of them: what is not here acts no more.
    pub files: Vec<RuleFile>,
    /// Why.
    #[serde(default)]
    #[schema(required = true)]
    pub reason: String,
    /// What the sender believes acts; not asked where it is left out.
    pub base_rev: Option<i64>,
    /// The sender knows what share of requests they newly deny.
    #[serde(default)]
    pub confirm: bool,
}

/// What came of publishing.
#[derive(Clone, Debug)]
pub enum PublishResult {
    /// They act.
    Active(i64, PreviewReport),
    /// They wait for another person.
    PendingApproval(i64, PreviewReport),
    /// They are what acts already.
    Unchanged(i64, PreviewReport),
}

/// Why nothing was published.
#[derive(Debug)]
pub enum PublishError {
    /// A field is wrong: its place, and what to write.
    Malformed(&'static str, String),
    /// The rules say something wrong.
    Invalid(Box<PreviewReport>),
    /// They newly deny more than goes without saying.
    NeedsConfirm(Box<PreviewReport>),
    /// This node takes its rules from files.
    FromFiles,
    /// Something else acts than the sender believed.
    Conflict(Option<i64>),
    /// The database did not do it.
    Control(ControlError),
}

impl From<ControlError> for PublishError {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

impl RuleManager {
    /// What these rules would do.
    ///
    /// # Errors
    /// If they cannot be looked at.
    pub async fn preview_files(
        self: &Arc<Self>,
        files: Vec<RuleFile>,
    ) -> Result<PreviewReport, PublishError> {
        Ok(self.preview_rules(files, self.active(), Freshness::Cached).await?.0)
    }

    /// Publishes rules, unless something speaks against it.
    ///
    /// # Errors
    /// What speaks against it.
    pub async fn publish(
        self: &Arc<Self>,
        sent: PublishRequest,
        actor: &Actor,
    ) -> Result<PublishResult, PublishError> {
        if self.from == RulesFrom::Files {
            return Err(PublishError::FromFiles);
        }
        validate_reason(&sent.reason)?;
        self.read_latest().await?;
        let acting = self.active();
        if sent.base_rev.is_some() && sent.base_rev != acting.rev() {
            return Err(PublishError::Conflict(acting.rev()));
        }
        let (report, candidate) =
            self.preview_rules(sent.files.clone(), Arc::clone(&acting), Freshness::Current).await?;
        let Some(candidate) = candidate else { return Err(PublishError::Invalid(Box::new(report))) };
        if let Some(rev) = acting.rev().filter(|_| candidate.revision() == acting.rules.revision()) {
            return Ok(PublishResult::Unchanged(rev, report));
        }
        let denied = report.rehearsal.as_ref().map_or(0.0, |rehearsal| rehearsal.newly_denied_share);
        let needs_approval = denied > self.guardrails.approval_over;
        if !needs_approval && !sent.confirm && denied > self.guardrails.confirm_over {
            return Err(PublishError::NeedsConfirm(Box::new(report)));
        }
        let first = (acting.files.clone(), acting.rules.revision().to_owned());
        let draft = NewRevision {
            files: sent.files,
            hash: candidate.revision().to_owned(),
            reason: sent.reason,
            base_rev: acting.rev(),
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

    /// Lets a revision act that waits for another person.
    ///
    /// # Errors
    /// [`ControlError`] if that person may not, or what waited has been overtaken.
    pub async fn approve(self: &Arc<Self>, rev: i64, actor: &Actor) -> Result<(), ControlError> {
        self.control.approve_rules(rev, actor).await?;
        self.activate_latest().await;
        Ok(())
    }

    /// Makes a new revision with the text of an old one. It is not rehearsed: who goes back is in a hurry.
    ///
    /// # Errors
    /// What speaks against it.
    pub async fn roll_back(
        self: &Arc<Self>,
        to: i64,
        reason: &str,
        actor: &Actor,
    ) -> Result<i64, PublishError> {
        if self.from == RulesFrom::Files {
            return Err(PublishError::FromFiles);
        }
        validate_reason(reason)?;
        let rev = self.control.roll_back_rules(to, None, reason, actor).await?;
        self.activate_latest().await;
        Ok(rev)
    }

    async fn preview_rules(
        &self,
        files: Vec<RuleFile>,
        acting: Arc<ActiveRules>,
        hearing: Freshness,
    ) -> Result<(PreviewReport, Option<Arc<Ruleset>>), PublishError> {
        validate_files(&files)?;
        let sources: Vec<Source> = files.iter().map(Source::from).collect();
        Ok(self.preview.preview(sources, Arc::clone(&acting.rules), hearing).await?)
    }

    async fn read_latest(self: &Arc<Self>) -> Result<(), ControlError> {
        self.control.catch_up().await?;
        self.activate_latest().await;
        Ok(())
    }

    /// Lets what is published act here before it is answered.
    pub(crate) async fn activate_latest(self: &Arc<Self>) {
        let own = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || own.apply_published()).await;
    }
}

fn validate_files(files: &[RuleFile]) -> Result<(), PublishError> {
    let wrong = |why: String| Err(PublishError::Malformed("files", why));
    if files.is_empty() {
        return wrong("there is none: a revision is all rules that are to act".to_owned());
    }
    if files.len() > MAX_FILES {
        return wrong(format!("there are at most {MAX_FILES}"));
    }
    for (at, file) in files.iter().enumerate() {
        let plain = !file.name.is_empty() && !file.name.chars().any(char::is_control);
        if !plain || file.name.len() > MAX_NAME_BYTES {
            return wrong(format!(
                "files[{at}].name: write 1 to {MAX_NAME_BYTES} bytes without control characters"
            ));
        }
        // A database keeps no text with it.
        if file.text.contains('\0') {
            return wrong(format!("files[{at}].text: it holds a zero byte"));
        }
    }
    Ok(())
}

fn validate_reason(reason: &str) -> Result<(), PublishError> {
    if reason.trim().is_empty() || reason.len() > MAX_REASON_BYTES || reason.chars().any(char::is_control) {
        let why = format!("say why, in 1 to {MAX_REASON_BYTES} bytes without control characters");
        return Err(PublishError::Malformed("reason", why));
    }
    Ok(())
}
