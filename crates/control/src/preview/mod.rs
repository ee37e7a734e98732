//! What is known of rules before they act: what is wrong with them, what they change, and what they would have done to the last
//! traffic of all nodes.
//!
//! The rules know of their preview, and the preview knows nothing of who publishes: it takes two rule sets.

pub(crate) mod caller;
pub(crate) mod collect;
pub(crate) mod encoding;
pub(crate) mod merge;
pub(crate) mod pseudonym;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod respond;
pub(crate) mod sample;
pub(crate) mod sample_slice;
pub(crate) mod sampled_request;

use crate::control_plane::Control;
use crate::error::ControlError;
use crate::preview::collect::{Hearing, Others, PeerSamples, REQUESTS, wildcards};
use crate::preview::merge::{Room, merge};
use crate::preview::pseudonym::Known;
use crate::preview::replay::{Rehearsal, rehearse};
use crate::preview::report::{Change, ChangeKind, Remark, Report};
use crate::preview::sample::Sample;
use std::sync::Arc;
use tokio::sync::Mutex;
use tollgate_engine::Counters;
use tollgate_rules::{Options, Ruleset, Source};

/// Reads candidate rules, compares them with the active ones, and replays the last traffic through both.
pub(crate) struct Preview {
    control: Arc<Control>,
    options: Options,
    /// What this node remembers of its traffic.
    sample: Arc<Sample>,
    /// What the others remember.
    peers: Arc<PeerSamples>,
    /// Which counters nodes have of their own.
    counters: Counters,
    /// One replay at a time: each takes memory.
    replaying: Mutex<()>,
}

impl Preview {
    pub(crate) fn new(control: Arc<Control>, options: Options, counters: Counters) -> Arc<Self> {
        let sample = Arc::new(Sample::new(Arc::clone(&control.clock), control.hasher.seed()));
        let peers = Arc::new(PeerSamples::new(Arc::clone(&control)));
        Arc::new(Self { control, options, sample, peers, counters, replaying: Mutex::default() })
    }

    pub(crate) fn sample(&self) -> Arc<Sample> {
        Arc::clone(&self.sample)
    }

    /// Reads rules, compares them with what acts, and rehearses them.
    pub(crate) async fn look(
        self: &Arc<Self>,
        sources: Vec<Source>,
        acting: Arc<Ruleset>,
        hearing: Hearing,
    ) -> Result<(Report, Option<Arc<Ruleset>>), ControlError> {
        let (own, before) = (Arc::clone(self), Arc::clone(&acting));
        let (mut report, candidate) = aside(move || own.read(&sources, &before)).await?;
        let Some(candidate) = candidate else { return Ok((report, None)) };
        let others = self.peers.hear(hearing, wildcards([&acting, &candidate])).await;
        let _one = self.replaying.lock().await;
        let (own, new) = (Arc::clone(self), Arc::clone(&candidate));
        report.rehearsal = Some(aside(move || own.rehearse(&acting, &new, &others)).await?);
        Ok((report, Some(candidate)))
    }

    fn read(&self, sources: &[Source], acting: &Ruleset) -> (Report, Option<Arc<Ruleset>>) {
        let candidate = match Ruleset::load(sources, &self.options) {
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
            diff: acting.diff(&candidate).into_iter().map(change).collect(),
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
                match encoding::read(text, now, &known, others.bytes) {
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
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ControlError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ControlError::Broken(error.to_string()))
}
