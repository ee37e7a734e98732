//! Live nodes: how many processes share the counter store, learned through the store itself.
//!
//! Each node holds a permit of one concurrency limit in the store and renews it: its heartbeat. A node that stops gives it
//! back, one that dies loses it when it expires. The limit's remaining units give the number of nodes, so a node that
//! must decide without the store knows its share. `--nodes` overrides the number.
//!
//! The number falls when two heartbeats in a row have shown fewer, so a node that dies is counted for at most ten seconds.
//! After heartbeats that failed it takes longer: permits may have expired in the outage, and the first node to return must
//! not take itself for the only one.
//!
//! A node that starts while the store is unavailable has not counted anybody. It begins with the number that a process on
//! this host last counted for the same store (a file in the state directory), or with the nodes that the control-plane
//! database lists. If neither is known it has the whole limit, and says so. Denying was rejected: a single node is the
//! usual case without a file, and its rules ask for local decisions.

use crate::config::last_good::{replace, state_directory};
use crate::config::{Config, StoreChoice};
use crate::server::store::Store;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tollgate_control::ControlPlane;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, Limit, LimitSpec, Permit, PermitId, Rate,
    Scope, StableHasher, TimeDelta, Timestamp,
};
use tollgate_engine::{DecisionId, Limiter};

/// Interval between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time after which a permit without a heartbeat expires.
const LIFETIME: TimeDelta = TimeDelta::from_secs(5);
/// How long fewer nodes must have been seen, so that one late heartbeat does not count.
const CONFIRMED: TimeDelta = TimeDelta::from_secs(2);
/// How long after failed heartbeats the number does not fall: the time in which every node finds the store again. After a
/// long outage nodes probe it less often.
const AFTER_OUTAGE: TimeDelta = TimeDelta::from_secs(10);
const AFTER_LONG_OUTAGE: TimeDelta = TimeDelta::from_secs(40);
const LONG_OUTAGE: TimeDelta = TimeDelta::from_secs(600);
/// Heartbeats that fail at the start before that is reported, and the pause between them: the first one has to open its
/// connection, and may miss the deadline of checks.
const FIRST_TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// More nodes than ever share a store.
const MAX_NODES: u64 = 100_000;

/// The heartbeat before it beats; none if the store is not shared.
pub(crate) struct Heartbeats(Option<Heartbeat>);

/// The task that counts the nodes.
pub(crate) struct RunningHeartbeats(Option<(Arc<Heartbeat>, JoinHandle<()>)>);

impl Heartbeats {
    /// Prepares the heartbeat of this process. With `--nodes` the number of nodes is fixed; the others still count this
    /// one.
    pub(crate) fn new(
        limiter: &Arc<Limiter<Store>>,
        config: &Config,
        control: Option<Arc<ControlPlane>>,
    ) -> Self {
        Self(Heartbeat::new(limiter, config, control))
    }

    pub(crate) fn start(self) -> RunningHeartbeats {
        RunningHeartbeats(self.0.map(|heartbeat| {
            let heartbeat = Arc::new(heartbeat);
            let task = Arc::clone(&heartbeat);
            (heartbeat, tokio::spawn(async move { task.run().await }))
        }))
    }
}

impl RunningHeartbeats {
    /// Notifies the other nodes that this one shuts down.
    pub(crate) async fn end(self) {
        if let Some((heartbeat, task)) = self.0 {
            task.abort();
            heartbeat.release().await;
        }
    }
}

/// The permit that stands for this node.
struct Heartbeat {
    limiter: Arc<Limiter<Store>>,
    scope: Scope,
    limit: Limit,
    id: PermitId,
    is_counted: bool,
    last_count: LastCount,
    control: Option<Arc<ControlPlane>>,
}

impl Heartbeat {
    /// Creates the heartbeat of this process; `None` if its store is not shared.
    fn new(
        limiter: &Arc<Limiter<Store>>,
        config: &Config,
        control: Option<Arc<ControlPlane>>,
    ) -> Option<Self> {
        limiter.store().leases()?;
        let StoreChoice::Redis(redis) = &config.store else { return None };
        let limit = LimitSpec::new(Algorithm::Concurrency, Rate::per(MAX_NODES, LIFETIME)).build().ok()?;
        Some(Self {
            limiter: Arc::clone(limiter),
            scope: Scope::new("tollgate|nodes"),
            limit,
            id: PermitId(DecisionId::generate().0),
            is_counted: config.nodes.is_none(),
            last_count: LastCount::of(&redis.address_for_display()),
            control,
        })
    }

    /// Beats as long as the process runs.
    async fn run(&self) {
        let mut count = NodeCount::default();
        let mut assumption = Assumption::default();
        loop {
            let seen = self.beat().await;
            let before = count.nodes;
            count.record(seen, self.limiter.clock().now());
            if count.nodes != before {
                tracing::info!(nodes = count.nodes, "nodes sharing the store");
                if self.is_counted {
                    self.limiter.set_live_nodes(count.nodes);
                }
                self.last_count.save(count.nodes);
            }
            let mut pause = INTERVAL;
            if count.nodes == 0 {
                pause = assumption.pause();
                self.assume(&mut assumption).await;
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Sets the number of nodes while the store has not reported it.
    async fn assume(&self, assumption: &mut Assumption) {
        if assumption.nodes.is_none() && self.is_counted {
            assumption.nodes = match self.last_count.load() {
                Some(nodes) => Some((nodes, "last counted before a restart")),
                None => self.listed().await.map(|nodes| (nodes, "listed in the control-plane database")),
            };
            if let Some((nodes, _)) = assumption.nodes {
                self.limiter.set_live_nodes(nodes);
            }
        }
        if !assumption.is_news() || !self.is_counted {
            return;
        }
        if let Some((nodes, source)) = assumption.nodes {
            tracing::warn!(nodes, "the store does not answer; number of nodes assumed: {source}");
        } else {
            tracing::warn!(
                "the store does not answer, and the number of nodes is unknown: rules with `on_error: local` admit their \
                 whole limit on this node, N nodes N times the limit; set --nodes (TOLLGATE_NODES) to the number of \
                 nodes"
            );
        }
    }

    /// Returns the number of live nodes in the control-plane database.
    async fn listed(&self) -> Option<u32> {
        let nodes = self.control.as_ref()?.nodes().await.ok()?;
        let live = nodes.iter().filter(|node| !node.stale).count();
        u32::try_from(live).ok().filter(|live| *live > 0)
    }

    /// Renews the permit. Returns the number of nodes, or `None` if the store failed.
    async fn beat(&self) -> Option<u32> {
        let charge = Charge::new(self.key(), &self.limit, Cost::ONE);
        let charge = Charge { permit: self.id, enforcement: Enforcement::Independent, ..charge };
        let outcomes = self.limiter.store().charge(&[charge]).await.ok()?;
        let remaining = outcomes.per_charge.first()?.remaining;
        u32::try_from(MAX_NODES.saturating_sub(remaining)).ok()
    }

    /// Gives the permit back, so that the others need not wait for it to expire.
    async fn release(&self) {
        let _ = self
            .limiter
            .store()
            .release(&[Permit { key: self.key(), limit: &self.limit, id: self.id }])
            .await;
    }

    fn key(&self) -> CounterKey<'_> {
        CounterKey { scope: &self.scope, parts: &[] }
    }
}

/// What is assumed while the store has not reported the number of nodes.
#[derive(Debug, Default)]
struct Assumption {
    /// Number of heartbeats that failed.
    misses: u32,
    /// The number, and where it is from.
    nodes: Option<(u32, &'static str)>,
    /// What was last reported.
    reported: Option<Option<(u32, &'static str)>>,
}

impl Assumption {
    /// Counts a failed heartbeat. Returns the pause before the next one.
    fn pause(&mut self) -> Duration {
        self.misses = self.misses.saturating_add(1);
        if self.misses < FIRST_TRIES { FIRST_PAUSE } else { INTERVAL }
    }

    /// Returns whether there is something to report: once, and again when the number becomes known.
    fn is_news(&mut self) -> bool {
        self.misses >= FIRST_TRIES && self.reported.replace(self.nodes) != Some(self.nodes)
    }
}

/// The number of nodes that was last counted, in a file.
struct LastCount(Option<PathBuf>);

impl LastCount {
    /// Returns that of the store at this address.
    fn of(address: &str) -> Self {
        let mut hasher = StableHasher::default();
        hasher.bytes(address.as_bytes());
        Self(state_directory().map(|folder| folder.join(format!("{:016x}.nodes", hasher.finish()))))
    }

    fn load(&self) -> Option<u32> {
        let text = std::fs::read_to_string(self.0.as_ref()?).ok()?;
        text.trim().parse().ok().filter(|nodes| (1..=MAX_NODES).contains(&u64::from(*nodes)))
    }

    /// Keeps the number. A failure only costs what a restart would know.
    fn save(&self, nodes: u32) {
        let Some(path) = &self.0 else { return };
        if let Err(error) = replace(path, format!("{nodes}\n").as_bytes()) {
            tracing::debug!(%error, "number of nodes not kept in {}", path.display());
        }
    }
}

/// The number of nodes to divide by.
#[derive(Debug, Default)]
struct NodeCount {
    nodes: u32,
    /// Since when fewer were seen at every heartbeat, and the most of them.
    fewer: Option<(Timestamp, u32)>,
    /// Since when heartbeats fail.
    failing: Option<Timestamp>,
    /// Until when the number does not fall, because heartbeats have failed.
    held_until: Timestamp,
}

impl NodeCount {
    fn record(&mut self, seen: Option<u32>, now: Timestamp) {
        let Some(seen) = seen.map(|seen| seen.max(1)) else {
            self.fewer = None;
            self.failing.get_or_insert(now);
            return;
        };
        if let Some(since) = self.failing.take() {
            let is_long = now.since(since) >= LONG_OUTAGE;
            self.held_until = now + if is_long { AFTER_LONG_OUTAGE } else { AFTER_OUTAGE };
        }
        if seen >= self.nodes {
            (self.nodes, self.fewer) = (seen, None);
            return;
        }
        let (since, most) = self.fewer.map_or((now, seen), |(since, most)| (since, most.max(seen)));
        self.fewer = Some((since, most));
        if now.since(since) >= CONFIRMED && now >= self.held_until {
            (self.nodes, self.fewer) = (most, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn play(beats: &[(u64, Option<u32>)]) -> Vec<u32> {
        let mut count = NodeCount::default();
        let at = |secs| Timestamp::from_secs(1_000) + TimeDelta::from_secs(secs);
        let counts = beats.iter().map(|(secs, seen)| {
            count.record(*seen, at(*secs));
            count.nodes
        });
        counts.collect()
    }

    /// One missed deadline of a healthy store must not tell an operator that it does not answer.
    #[test]
    fn failed_heartbeats_are_reported_after_a_few() {
        let mut assumption = Assumption::default();
        for _ in 1..FIRST_TRIES {
            assert_eq!((assumption.pause(), assumption.is_news()), (FIRST_PAUSE, false));
        }
        assert_eq!((assumption.pause(), assumption.is_news()), (INTERVAL, true));
        assert_eq!((assumption.pause(), assumption.is_news()), (INTERVAL, false), "once");
        assumption.nodes = Some((3, "listed"));
        assert_eq!((assumption.pause(), assumption.is_news()), (INTERVAL, true));
        assert_eq!((assumption.pause(), assumption.is_news()), (INTERVAL, false));
    }

    /// A node that joins counts at once; one that left, when it is certain.
    #[test]
    fn the_number_rises_at_once_and_falls_slowly() {
        assert_eq!(play(&[(0, Some(1)), (2, Some(3))]), [1, 3]);
        assert_eq!(play(&[(0, Some(3)), (2, Some(1)), (3, Some(2)), (4, Some(1))]), [3, 3, 3, 2]);
        assert_eq!(play(&[(0, Some(3)), (2, Some(2)), (4, Some(3)), (6, Some(2))]), [3; 4], "it was late");
    }

    /// The documentation promises ten seconds: a permit that expires just after a heartbeat, seen by the next, and once more.
    #[test]
    fn a_node_that_dies_is_not_counted_after_ten_seconds() {
        let worst = Duration::from(LIFETIME) + INTERVAL + INTERVAL.max(CONFIRMED.into());
        assert!(worst < Duration::from_secs(10), "{worst:?}");
        for offset in 0..2 {
            let beats = (0..10).map(|beat| 2 * beat + offset);
            let beats: Vec<_> = beats.map(|secs| (secs, Some(if secs < 5 { 3 } else { 2 }))).collect();
            let counts = play(&beats);
            let fell = beats.iter().zip(counts).find(|(_, nodes)| *nodes == 2).expect("it falls").0.0;
            assert!(fell < 10, "after {fell} s");
        }
    }

    /// The first node that returns after an outage must not take the whole limit for itself.
    #[test]
    fn an_outage_does_not_make_a_node_the_only_one() {
        let beats = [(0, Some(3)), (2, None), (60, Some(1)), (62, Some(2)), (64, Some(3)), (80, Some(3))];
        assert_eq!(play(&beats), [3; 6]);
        let long = [(0, Some(3)), (2, None), (900, Some(1)), (930, Some(1)), (932, Some(3))];
        assert_eq!(play(&long), [3; 5]);
        assert_eq!(play(&[(0, Some(3)), (2, Some(1)), (3, None), (13, Some(1)), (20, Some(1))]), [3; 5]);
        assert_eq!(play(&[(0, Some(3)), (2, None), (4, Some(2)), (14, Some(2))]), [3, 3, 3, 2], "in the end");
    }
}
