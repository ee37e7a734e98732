//! Guardrails of publishing: thresholds for confirmation, approval and automatic rollback.

use crate::preview::replay::ImpactReport;
use crate::preview::report::{ConfirmKind, ConfirmReason};
use std::time::Duration;
use tollgate_rules::{LooseningKind, Ruleset, TighteningKind};

/// Number of parts of the time that a denial spike must last.
pub(crate) const PARTS: u32 = 12;

/// Thresholds for rejecting a publication and for rolling it back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guardrails {
    /// Share of newly denied or newly allowed requests, or of callers that have any, above which a publication must be
    /// confirmed.
    pub confirm_over: f64,
    /// Share of newly denied requests above which another operator must approve it.
    pub approval_over: f64,
    /// Multiple of a caller's baseline above which its denials are a spike; 0 disables the rollback guard.
    pub rise: f64,
    /// Duration that a spike must last.
    pub lasting: Duration,
    /// Duration for which new rules are watched.
    pub within: Duration,
}

impl Default for Guardrails {
    fn default() -> Self {
        Self {
            confirm_over: 0.05,
            approval_over: 0.5,
            rise: 10.0,
            lasting: Duration::from_secs(60),
            within: Duration::from_secs(300),
        }
    }
}

impl Guardrails {
    /// Returns why replacing `active` by `candidate`, with this impact on recent traffic, needs confirmation.
    /// `baseline` are the rules of a day ago: a limit is not raised in small steps.
    ///
    /// The guard looks in both directions: who is newly denied complains, who is newly allowed does not. Requests and
    /// callers are judged separately, because one busy caller outweighs many others in requests. Traffic is judged where
    /// there is some, and the rules alone always: what is loosened, and what admits nothing or a tenth.
    #[must_use]
    pub fn confirm_reasons(
        &self,
        active: &Ruleset,
        baseline: &Ruleset,
        candidate: &Ruleset,
        impact: &ImpactReport,
    ) -> Vec<ConfirmReason> {
        let loosened =
            active.loosened_since(baseline, candidate).into_iter().map(|loosening| ConfirmReason {
                reason: match loosening.kind {
                    LooseningKind::DomainRemoved => ConfirmKind::DomainRemoved,
                    LooseningKind::SecurityRuleRemoved => ConfirmKind::SecurityRuleRemoved,
                    LooseningKind::SecurityRuleWeakened => ConfirmKind::SecurityRuleWeakened,
                },
                detail: loosening.detail,
            });
        let tightened =
            active.tightened_since(baseline, candidate).into_iter().map(|tightening| ConfirmReason {
                reason: match tightening.kind {
                    TighteningKind::AdmitsNothing => ConfirmKind::AdmitsNothing,
                    TighteningKind::LimitCut => ConfirmKind::LimitCut,
                },
                detail: tightening.detail,
            });
        let shares = [
            (ConfirmKind::NewlyDenied, impact.newly_denied_share, "of recent requests would be newly denied"),
            (
                ConfirmKind::NewlyAllowed,
                impact.newly_allowed_share,
                "of recent requests would be newly allowed",
            ),
            (
                ConfirmKind::CallersNewlyDenied,
                impact.tenants_affected_share,
                "of recent callers would be newly denied requests",
            ),
            (
                ConfirmKind::CallersNewlyAllowed,
                impact.callers_newly_allowed_share,
                "of recent callers would be newly allowed requests",
            ),
        ];
        let shares = shares.into_iter().filter(|(_, share, _)| *share > self.confirm_over).map(
            |(reason, share, what)| ConfirmReason { reason, detail: format!("{:.1}% {what}", share * 100.0) },
        );
        shares.chain(loosened).chain(tightened).collect()
    }

    /// Returns the duration of one part.
    pub(crate) fn part(&self) -> Duration {
        (self.lasting / PARTS).max(Duration::from_millis(50))
    }
}
