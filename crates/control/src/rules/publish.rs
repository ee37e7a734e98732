//! Publishing rules: read, linted, compared with what acts, and only then written down. The same work without the writing
//! is a check.

use crate::db::transaction::Actor;
use crate::error::ControlError;
use crate::preview::collect::Hearing;
use crate::preview::report::Report;
use crate::rules::manager::{Acting, Desk, RulesFrom};
use crate::rules::revision::{RuleDraft, RuleFile};
use serde::Deserialize;
use std::sync::Arc;
use tollgate_rules::{Ruleset, Source};
use utoipa::ToSchema;

/// The most files of a revision.
const MOST_FILES: usize = 1_000;
/// The longest name of a file.
const LONGEST_NAME: usize = 512;
/// The longest reason.
const LONGEST_REASON: usize = 1_024;

/// Rules as they are sent.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Proposal {
    /// All of them: what is not here acts no more.
    pub files: Vec<RuleFile>,
    /// Why.
    #[serde(default)]
    pub reason: String,
    /// What the sender believes acts; not asked where it is left out.
    pub base_rev: Option<i64>,
    /// The sender knows what share of requests they newly deny.
    #[serde(default)]
    pub confirm: bool,
}

/// What came of publishing.
#[derive(Clone, Debug)]
pub enum Publication {
    /// They act.
    Acts(i64, Report),
    /// They wait for another person.
    Waits(i64, Report),
    /// They are what acts already.
    Same(i64, Report),
}

/// Why nothing was published.
#[derive(Debug)]
pub enum Refusal {
    /// A field is wrong: its place, and what to write.
    Malformed(&'static str, String),
    /// The rules say something wrong.
    Wrong(Box<Report>),
    /// They newly deny more than goes without saying.
    NeedsConfirm(Box<Report>),
    /// This node takes its rules from files.
    FromFiles,
    /// Something else acts than the sender believed.
    Changed(Option<i64>),
    /// The database did not do it.
    Control(ControlError),
}

impl From<ControlError> for Refusal {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

impl Desk {
    /// What these rules would do.
    ///
    /// # Errors
    /// If they cannot be looked at.
    pub async fn check(self: &Arc<Self>, files: Vec<RuleFile>) -> Result<Report, Refusal> {
        Ok(self.look(files, self.acting(), Hearing::Lately).await?.0)
    }

    /// Publishes rules, unless something speaks against it.
    ///
    /// # Errors
    /// What speaks against it.
    pub async fn publish(self: &Arc<Self>, sent: Proposal, actor: &Actor) -> Result<Publication, Refusal> {
        if self.from == RulesFrom::Files {
            return Err(Refusal::FromFiles);
        }
        check_reason(&sent.reason)?;
        self.know_the_latest().await?;
        let acting = self.acting();
        if sent.base_rev.is_some() && sent.base_rev != acting.rev() {
            return Err(Refusal::Changed(acting.rev()));
        }
        let (report, candidate) = self.look(sent.files.clone(), Arc::clone(&acting), Hearing::Now).await?;
        let Some(candidate) = candidate else { return Err(Refusal::Wrong(Box::new(report))) };
        if let Some(rev) = acting.rev().filter(|_| candidate.revision() == acting.rules.revision()) {
            return Ok(Publication::Same(rev, report));
        }
        let denied = report.rehearsal.as_ref().map_or(0.0, |rehearsal| rehearsal.newly_denied_share);
        let needs_approval = denied > self.guardrails.approval_over;
        if !needs_approval && !sent.confirm && denied > self.guardrails.confirm_over {
            return Err(Refusal::NeedsConfirm(Box::new(report)));
        }
        let first = (acting.files.clone(), acting.rules.revision().to_owned());
        let draft = RuleDraft {
            files: sent.files,
            hash: candidate.revision().to_owned(),
            reason: sent.reason,
            base_rev: acting.rev(),
            first: Some(first),
            needs_approval,
        };
        let rev = match self.control.publish_rules(draft, actor).await {
            Err(ControlError::Changed) => {
                self.know_the_latest().await?;
                return Err(Refusal::Changed(self.acting().rev()));
            }
            other => other?,
        };
        if needs_approval {
            return Ok(Publication::Waits(rev, report));
        }
        self.let_act().await;
        Ok(Publication::Acts(rev, report))
    }

    /// Lets a revision act that waits for another person.
    ///
    /// # Errors
    /// [`ControlError`] if that person may not, or what waited has been overtaken.
    pub async fn approve(self: &Arc<Self>, rev: i64, actor: &Actor) -> Result<(), ControlError> {
        self.control.approve_rules(rev, actor).await?;
        self.let_act().await;
        Ok(())
    }

    /// Makes a new revision with the text of an old one. It is not rehearsed: who goes back is in a hurry.
    ///
    /// # Errors
    /// What speaks against it.
    pub async fn roll_back(self: &Arc<Self>, to: i64, reason: &str, actor: &Actor) -> Result<i64, Refusal> {
        if self.from == RulesFrom::Files {
            return Err(Refusal::FromFiles);
        }
        check_reason(reason)?;
        let rev = self.control.roll_back_rules(to, None, reason, actor).await?;
        self.let_act().await;
        Ok(rev)
    }

    async fn look(
        &self,
        files: Vec<RuleFile>,
        acting: Arc<Acting>,
        hearing: Hearing,
    ) -> Result<(Report, Option<Arc<Ruleset>>), Refusal> {
        check_files(&files)?;
        let sources: Vec<Source> = files.iter().map(Source::from).collect();
        Ok(self.preview.look(sources, Arc::clone(&acting.rules), hearing).await?)
    }

    async fn know_the_latest(self: &Arc<Self>) -> Result<(), ControlError> {
        self.control.catch_up().await?;
        self.let_act().await;
        Ok(())
    }

    /// Lets what is published act here before it is answered.
    pub(crate) async fn let_act(self: &Arc<Self>) {
        let own = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || own.take_published()).await;
    }
}

fn check_files(files: &[RuleFile]) -> Result<(), Refusal> {
    let wrong = |why: String| Err(Refusal::Malformed("files", why));
    if files.is_empty() {
        return wrong("there is none: a revision is all rules that are to act".to_owned());
    }
    if files.len() > MOST_FILES {
        return wrong(format!("there are at most {MOST_FILES}"));
    }
    for (at, file) in files.iter().enumerate() {
        let plain = !file.name.is_empty() && !file.name.chars().any(char::is_control);
        if !plain || file.name.len() > LONGEST_NAME {
            return wrong(format!(
                "files[{at}].name: write 1 to {LONGEST_NAME} bytes without control characters"
            ));
        }
        // A database keeps no text with it.
        if file.text.contains('\0') {
            return wrong(format!("files[{at}].text: it holds a zero byte"));
        }
    }
    Ok(())
}

fn check_reason(reason: &str) -> Result<(), Refusal> {
    if reason.trim().is_empty() || reason.len() > LONGEST_REASON || reason.chars().any(char::is_control) {
        let why = format!("say why, in 1 to {LONGEST_REASON} bytes without control characters");
        return Err(Refusal::Malformed("reason", why));
    }
    Ok(())
}
