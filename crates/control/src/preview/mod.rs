//! Impact preview of candidate rules: validation, differences, and their effect on recent traffic of all nodes.
//!
//! The module `rules` uses the preview; the preview does not depend on publishing, and takes two rule sets.

pub(crate) mod caller;
pub(crate) mod collect;
pub(crate) mod encoding;
pub(crate) mod merge;
pub(crate) mod pseudonym;
pub(crate) mod recent_requests;
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
use crate::preview::recent_requests::RecentRequests;
use crate::preview::replay::{ImpactReport, replay_with_ids};
use crate::preview::report::{PreviewReport, RuleDiagnostic, RuleDiff};
use crate::preview::sample::TrafficSample;
use std::sync::Arc;
use tokio::sync::Mutex;
use tollgate_engine::CounterSharing;
use tollgate_rules::{Options, Ruleset, Source};

/// Validates candidate rules, compares them with the active ones, and replays recent traffic through both.
pub(crate) struct Preview {
    control: Arc<ControlPlane>,
    options: Options,
    /// Traffic sample of this node.
    sample: Arc<TrafficSample>,
    /// Traffic samples of other nodes.
    peers: Arc<PeerSampleCollector>,
    /// Which counters are per node.
    counters: CounterSharing,
    /// Allows one replay at a time: each takes memory.
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

    /// Validates rules, compares them with the active ones, and replays recent traffic through both.
    pub(crate) async fn preview(
        self: &Arc<Self>,
        sources: Vec<Source>,
        active: Arc<Ruleset>,
        freshness: Freshness,
    ) -> Result<(PreviewReport, Option<Arc<Ruleset>>), ControlError> {
        let (own, before) = (Arc::clone(self), Arc::clone(&active));
        let (mut report, candidate) = run_blocking(move || own.read(&sources, &before)).await?;
        let Some(candidate) = candidate else { return Ok((report, None)) };
        let others = self.peers.collect(freshness, wildcards([&active, &candidate])).await;
        let _one = self.replaying.lock().await;
        let (own, new) = (Arc::clone(self), Arc::clone(&candidate));
        report.rehearsal = Some(run_blocking(move || own.replay(&active, &new, &others)).await?);
        Ok((report, Some(candidate)))
    }

    /// Returns this node's sampled requests by caller.
    pub(crate) fn recent_requests(&self) -> RecentRequests {
        RecentRequests::new(&self.sample, self.counters)
    }

    fn read(&self, sources: &[Source], active: &Ruleset) -> (PreviewReport, Option<Arc<Ruleset>>) {
        let candidate = match Ruleset::load(sources, &self.options) {
            Ok(candidate) => Arc::new(candidate),
            Err(errors) => {
                let errors = errors.all().iter().map(RuleDiagnostic::from).collect();
                return (PreviewReport { errors, ..PreviewReport::default() }, None);
            }
        };
        let report = PreviewReport {
            errors: Vec::new(),
            warnings: candidate.warnings().iter().map(RuleDiagnostic::from).collect(),
            diff: active.diff(&candidate).into_iter().map(RuleDiff::from).collect(),
            confirm: Vec::new(),
            rehearsal: None,
        };
        (report, Some(candidate))
    }

    /// Replays the samples of this node and of the others.
    fn replay(&self, live: &Arc<Ruleset>, candidate: &Arc<Ruleset>, others: &PeerSamples) -> ImpactReport {
        let own = self.sample.slices();
        let (mut nodes, mut nodes_missing) = (vec![others.own_name.clone()], others.missing.clone());
        let mut samples = Vec::new();
        if !others.samples.is_empty() {
            let (hasher, now) = (&self.control.hasher, self.control.clock.now());
            let requests = own.iter().flat_map(|slice| &slice.requests);
            let known = KnownValues::new(hasher, requests, &[live, candidate]);
            for (name, text) in &others.samples {
                match encoding::decode(text, now, &known, others.bytes) {
                    Ok(slices) => {
                        samples.push(slices);
                        nodes.push(name.clone());
                    }
                    Err(error) => {
                        tracing::warn!(node = name, error, "skipping an unreadable traffic sample");
                        nodes_missing.push(name.clone());
                    }
                }
            }
        }
        let mut sample = merge(
            std::iter::once(own).chain(samples),
            SliceBudget { requests: MAX_SLICE_REQUESTS, bytes: usize::MAX },
        );
        sample.retain(|one| !one.is_peek());
        let (quotas, hasher) = (self.control.quota_table(), &self.control.hasher);
        let impact = replay_with_ids(&sample, live, candidate, &quotas, self.counters, hasher);
        ImpactReport { nodes, nodes_silent: nodes_missing, nodes_unknown: others.unknown, ..impact }
    }
}

/// Runs long work on a blocking thread.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ControlError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ControlError::Corrupt(error.to_string()))
}
