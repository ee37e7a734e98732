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

use crate::control_plane::ControlPlane;
use crate::error::ControlError;
use crate::preview::collect::{Freshness, MAX_SLICE_REQUESTS, PeerSampleCollector, PeerSamples, wildcards};
use crate::preview::merge::{SliceBudget, merge};
use crate::preview::pseudonym::KnownValues;
use crate::preview::replay::{ImpactReport, replay};
use crate::preview::report::{ChangeKind, PreviewReport, RuleDiagnostic, RuleDiff};
use crate::preview::sample::TrafficSample;
use std::sync::Arc;
use tokio::sync::Mutex;
use tollgate_engine::CounterSharing;
use tollgate_rules::{Options, Ruleset, Source};

/// Reads candidate rules, compares them with the active ones, and replays the last traffic through both.
pub(crate) struct Preview {
    control: Arc<ControlPlane>,
    options: Options,
    /// What this node remembers of its traffic.
    sample: Arc<TrafficSample>,
    /// What the others remember.
    peers: Arc<PeerSampleCollector>,
    /// Which counters nodes have of their own.
    counters: CounterSharing,
    /// One replay at a time: each takes memory.
    replaying: Mutex<()>,
}

impl Preview {
    pub(crate) fn new(control: Arc<ControlPlane>, options: Options, counters: CounterSharing) -> Arc<Self> {
        let sample = Arc::new(TrafficSample::new(Arc::clone(&control.clock), control.hasher.seed()));
        let peers = Arc::new(PeerSampleCollector::new(Arc::clone(&control)));
        Arc::new(Self { control, options, sample, peers, counters, replaying: Mutex::default() })
    }

    pub(crate) fn sample(&self) -> Arc<TrafficSample> {
        Arc::clone(&self.sample)
    }

    /// Reads rules, compares them with what acts, and rehearses them.
    pub(crate) async fn preview(
        self: &Arc<Self>,
        sources: Vec<Source>,
        acting: Arc<Ruleset>,
        hearing: Freshness,
    ) -> Result<(PreviewReport, Option<Arc<Ruleset>>), ControlError> {
        let (own, before) = (Arc::clone(self), Arc::clone(&acting));
        let (mut report, candidate) = run_blocking(move || own.read(&sources, &before)).await?;
        let Some(candidate) = candidate else { return Ok((report, None)) };
        let others = self.peers.collect(hearing, wildcards([&acting, &candidate])).await;
        let _one = self.replaying.lock().await;
        let (own, new) = (Arc::clone(self), Arc::clone(&candidate));
        report.rehearsal = Some(run_blocking(move || own.replay(&acting, &new, &others)).await?);
        Ok((report, Some(candidate)))
    }

    fn read(&self, sources: &[Source], acting: &Ruleset) -> (PreviewReport, Option<Arc<Ruleset>>) {
        let candidate = match Ruleset::load(sources, &self.options) {
            Ok(candidate) => Arc::new(candidate),
            Err(errors) => {
                let errors = errors.all().iter().map(RuleDiagnostic::from).collect();
                return (PreviewReport { errors, ..PreviewReport::default() }, None);
            }
        };
        let change = |change: tollgate_rules::RuleChange| RuleDiff {
            rule: change.rule,
            change: match (&change.before, &change.after) {
                (None, _) => ChangeKind::Added,
                (_, None) => ChangeKind::Removed,
                _ => ChangeKind::Changed,
            },
            before: change.before,
            after: change.after,
        };
        let report = PreviewReport {
            errors: Vec::new(),
            warnings: candidate.warnings().iter().map(RuleDiagnostic::from).collect(),
            diff: acting.diff(&candidate).into_iter().map(change).collect(),
            rehearsal: None,
        };
        (report, Some(candidate))
    }

    /// Rehearses on what this node and the others remember.
    fn replay(&self, live: &Arc<Ruleset>, candidate: &Arc<Ruleset>, others: &PeerSamples) -> ImpactReport {
        let own = self.sample.slices();
        let (mut nodes, mut nodes_silent) = (vec![others.own_name.clone()], others.missing.clone());
        let mut told = Vec::new();
        if !others.samples.is_empty() {
            let (hasher, now) = (&self.control.hasher, self.control.clock.now());
            let requests = own.iter().flat_map(|slice| &slice.requests);
            let known = KnownValues::new(hasher, requests, &[live, candidate]);
            for (name, text) in &others.samples {
                match encoding::decode(text, now, &known, others.bytes) {
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
        let mut sample = merge(
            std::iter::once(own).chain(told),
            SliceBudget { requests: MAX_SLICE_REQUESTS, bytes: usize::MAX },
        );
        sample.retain(|one| !one.is_peek());
        let rehearsal = replay(&sample, live, candidate, Some(&self.control.quota_table()), self.counters);
        ImpactReport { nodes, nodes_silent, nodes_unknown: others.unknown, ..rehearsal }
    }
}

/// Does what takes a while where nobody waits for the thread.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ControlError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ControlError::Corrupt(error.to_string()))
}
