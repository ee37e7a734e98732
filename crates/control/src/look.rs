//! What is known of rules before they act: what is wrong with them, what they change, and what they would have done to the last
//! traffic of all nodes.

use crate::db::ControlError;
use crate::desk::{Acting, Desk};
use crate::gather::{Hearing, Others, REQUESTS, wildcards};
use crate::hidden::Known;
use crate::merge::{Room, merge};
use crate::publish::{Change, ChangeKind, Refusal, Remark, Report, check_files};
use crate::rehearsal::{Rehearsal, rehearse};
use crate::revision::RuleFile;
use crate::wire;
use std::sync::Arc;
use tollgate_rules::{Ruleset, Source};

impl Desk {
    /// Reads rules, compares them with what acts, and rehearses them.
    pub(crate) async fn look(
        self: &Arc<Self>,
        files: Vec<RuleFile>,
        acting: Arc<Acting>,
        hearing: Hearing,
    ) -> Result<(Report, Option<Arc<Ruleset>>), Refusal> {
        check_files(&files)?;
        let (own, before) = (Arc::clone(self), Arc::clone(&acting));
        let (mut report, candidate) = aside(move || own.read(&files, &before)).await?;
        let Some(candidate) = candidate else { return Ok((report, None)) };
        let others = self.hear_others(hearing, wildcards([&acting.rules, &candidate])).await;
        let _one = self.rehearsing.lock().await;
        let (own, new) = (Arc::clone(self), Arc::clone(&candidate));
        report.rehearsal = Some(aside(move || own.rehearse(&acting.rules, &new, &others)).await?);
        Ok((report, Some(candidate)))
    }

    fn read(&self, files: &[RuleFile], acting: &Acting) -> (Report, Option<Arc<Ruleset>>) {
        let sources: Vec<Source> = files.iter().map(Source::from).collect();
        let candidate = match Ruleset::load(&sources, &self.options) {
            Ok(candidate) => Arc::new(candidate),
            Err(errors) => {
                let errors = errors.all().iter().map(Remark::from).collect();
                return (Report { errors, ..Report::default() }, None);
            }
        };
        let change = |change: tollgate_rules::RuleChange| Change {
            rule: change.rule,
            change: match (&change.before, &change.after) {
                (None, _) => ChangeKind::Added,
                (_, None) => ChangeKind::Removed,
                _ => ChangeKind::Changed,
            },
            before: change.before,
            after: change.after,
        };
        let report = Report {
            errors: Vec::new(),
            warnings: candidate.warnings().iter().map(Remark::from).collect(),
            diff: acting.rules.diff(&candidate).into_iter().map(change).collect(),
            rehearsal: None,
        };
        (report, Some(candidate))
    }

    /// Rehearses on what this node and the others remember.
    fn rehearse(&self, live: &Arc<Ruleset>, candidate: &Arc<Ruleset>, others: &Others) -> Rehearsal {
        let own = self.sample.remembered();
        let (mut nodes, mut nodes_silent) = (vec![others.own.clone()], others.silent.clone());
        let mut told = Vec::new();
        if !others.told.is_empty() {
            let (hasher, now) = (&self.control.hasher, self.control.clock.now());
            let requests = own.iter().flat_map(|slice| &slice.requests);
            let known = Known::new(hasher, requests, &[live, candidate]);
            for (name, text) in &others.told {
                match wire::read(text, now, &known, others.bytes) {
                    Ok(remembered) => {
                        told.push(remembered);
                        nodes.push(name.clone());
                    }
                    Err(error) => {
                        tracing::warn!(node = name, error, "what a node told of its traffic cannot be read");
                        nodes_silent.push(name.clone());
                    }
                }
            }
        }
        let mut sample =
            merge(std::iter::once(own).chain(told), Room { requests: REQUESTS, bytes: usize::MAX });
        sample.retain(|one| !one.is_look());
        let rehearsal = rehearse(&sample, live, candidate, Some(&self.control.book()), self.counters);
        Rehearsal { nodes, nodes_silent, nodes_unknown: others.unknown, ..rehearsal }
    }
}

/// Does what takes a while where nobody waits for the thread.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::Control(ControlError::Broken(error.to_string())))
}
