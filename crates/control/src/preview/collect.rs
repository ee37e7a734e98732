//! Collects traffic samples from other nodes, through the database, for an impact preview. The requesting node
//! inserts a row, each live node adds its sample, and the requesting node reads and deletes them. Nodes that do not
//! respond in time are named, and the preview continues without them.
//!
//! PostgreSQL announces requests by NOTIFY; a SQLite file is polled twice a second. Rejected: pushing samples
//! continuously, because rules are published a few times a day and traffic never stops.

use crate::auth::secret::generate_id;
use crate::control_plane::ControlPlane;
use crate::db::deadline::with_timeout;
use crate::db::{Db, at_now, on};
use crate::error::ControlError;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tollgate_rules::{Domain, Ruleset};

/// NOTIFY channel for sample requests.
pub(crate) const CHANNEL: &str = "tollgate_traffic";

/// Time limit for other nodes to respond.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the requesting node polls for responses.
const POLL_INTERVAL: Duration = Duration::from_millis(40);
/// Time limit for reading the list of nodes; the next one is for the whole exchange.
const NODES_TIMEOUT: Duration = Duration::from_secs(1);
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which collected samples are reused: while an operator edits rules, they are previewed every few seconds.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Age at which rows left behind are deleted, in milliseconds.
const ROW_TTL_MS: i64 = 60_000;
/// Maximum size of one node's sample, in bytes; the next one is for all samples.
pub(crate) const MAX_BYTES_PER_NODE: usize = 4 << 20;
const MAX_BYTES: usize = 32 << 20;
/// Maximum number of requests per time slice that are replayed.
pub(crate) const MAX_SLICE_REQUESTS: usize = 4_096;
/// Maximum number of wildcards in a sample request, and their maximum length in bytes.
const MAX_WILDCARDS: usize = 256;
const MAX_WILDCARD_BYTES: usize = 256;
/// Minimum number of requests to ask each node for, regardless of the number of nodes.
const MIN_REQUESTS_PER_NODE: usize = 32;

const INSERT_REQUEST: [&str; 2] = at_now!(
    "INSERT INTO traffic_asked (id, instance, bytes, requests, wildcards, asked_at) VALUES ($1, $2, $3, $4, $5, ",
    ")"
);
const SELECT_RESPONDERS: &str = "SELECT instance FROM traffic_told WHERE id = $1";
const SELECT_RESPONSE: &str =
    "SELECT body FROM traffic_told WHERE id = $1 AND instance = $2 AND LENGTH(body) <= $3";
const DELETE_EXCHANGE: [&str; 2] =
    ["DELETE FROM traffic_asked WHERE id = $1", "DELETE FROM traffic_told WHERE id = $1"];
const DELETE_OLD: [[&str; 2]; 2] = [
    at_now!("DELETE FROM traffic_asked WHERE asked_at < ", " - $1"),
    at_now!("DELETE FROM traffic_told WHERE told_at < ", " - $1"),
];

/// Traffic samples of other nodes.
#[derive(Debug)]
pub(crate) struct PeerSamples {
    /// Name of this node.
    pub(crate) own_name: String,
    /// Encoded samples, by node name.
    pub(crate) samples: Vec<(String, String)>,
    /// Live nodes that did not respond.
    pub(crate) missing: Vec<String>,
    /// Whether the list of nodes could not be read.
    pub(crate) unknown: bool,
    /// Maximum size of each sample, in bytes.
    pub(crate) bytes: usize,
    /// Wildcards that the sample request contained.
    wildcards: BTreeSet<String>,
}

/// Name of a node that has not sent a heartbeat yet.
const THIS_NODE: &str = "this node";

impl PeerSamples {
    /// Returns an empty collection: no other node is known.
    fn none(own: &str) -> Self {
        Self {
            own_name: own.to_owned(),
            samples: Vec::new(),
            missing: Vec::new(),
            unknown: false,
            bytes: 0,
            wildcards: BTreeSet::new(),
        }
    }

    /// Returns an empty collection: the list of nodes is unknown.
    fn unknown() -> Self {
        Self { unknown: true, ..Self::none(THIS_NODE) }
    }
}

/// Size limits of each sample, and the wildcards that pseudonyms must preserve.
pub(crate) struct SampleRequest {
    pub(crate) bytes: usize,
    pub(crate) requests: usize,
    pub(crate) wildcards: BTreeSet<String>,
}

/// Returns the wildcards that other nodes need, so that their pseudonymized values match these rules as the originals
/// would.
pub(crate) fn wildcards(rules: [&Ruleset; 2]) -> BTreeSet<String> {
    let all = rules.into_iter().flat_map(Ruleset::domains).flat_map(Domain::wildcards);
    bounded(all.filter(|text| text.len() <= MAX_WILDCARD_BYTES).map(str::to_owned))
}

/// Returns at most [`MAX_WILDCARDS`] of them, to bound the work of each node.
pub(crate) fn bounded(wildcards: impl Iterator<Item = String>) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for one in wildcards {
        if all.len() == MAX_WILDCARDS {
            break;
        }
        all.insert(one);
    }
    all
}

impl ControlPlane {
    /// Requests samples from all other live nodes. Never fails, and takes a bounded time.
    async fn request_peer_samples(&self, wildcards: BTreeSet<String>) -> PeerSamples {
        let nodes = match with_timeout(NODES_TIMEOUT, self.nodes()).await {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::warn!(%error, "reading nodes failed; previewing with this node's traffic only");
                return PeerSamples::unknown();
            }
        };
        let own = match nodes.iter().find(|node| node.is_self) {
            Some(node) => node.name(),
            None => THIS_NODE,
        };
        let own = own.to_owned();
        let others: Vec<_> = nodes.iter().filter(|node| !node.is_self && !node.stale).collect();
        if others.is_empty() {
            return PeerSamples { wildcards, ..PeerSamples::none(&own) };
        }
        let request = SampleRequest {
            bytes: MAX_BYTES_PER_NODE.min(MAX_BYTES / others.len()),
            requests: (MAX_SLICE_REQUESTS / others.len()).max(MIN_REQUESTS_PER_NODE),
            wildcards,
        };
        let instances: Vec<&str> = others.iter().map(|node| node.instance.as_str()).collect();
        let mut responses = self.exchange(&instances, &request).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "collecting samples failed; previewing without other nodes' traffic");
            vec![None; others.len()]
        });
        let (mut samples, mut missing) = (Vec::new(), Vec::new());
        for (node, response) in others.iter().zip(responses.drain(..)) {
            match response {
                Some(body) => samples.push((node.name().to_owned(), body)),
                None => missing.push(node.name().to_owned()),
            }
        }
        PeerSamples {
            own_name: own,
            samples,
            missing,
            unknown: false,
            bytes: request.bytes,
            wildcards: request.wildcards,
        }
    }

    /// Sends a sample request and returns the response of each instance.
    async fn exchange(
        &self,
        instances: &[&str],
        request: &SampleRequest,
    ) -> Result<Vec<Option<String>>, ControlError> {
        let id = generate_id()?;
        let responses = with_timeout(EXCHANGE_TIMEOUT, async {
            self.delete_old_samples().await?;
            self.insert_sample_request(&id, request).await?;
            // After the timeout, the responses that exist are used.
            let _ = tokio::time::timeout(RESPONSE_TIMEOUT, self.wait_for(&id, instances)).await;
            let mut responses = Vec::with_capacity(instances.len());
            for instance in instances {
                let max = i64::try_from(request.bytes).unwrap_or(i64::MAX);
                let body: Option<(String,)> = on!(&self.db, pool => {
                    sqlx::query_as(SELECT_RESPONSE).bind(&id).bind(*instance).bind(max).fetch_optional(pool).await?
                });
                responses.push(body.map(|(body,)| body));
            }
            Ok(responses)
        })
        .await;
        let deleting = with_timeout(NODES_TIMEOUT, async {
            for sql in DELETE_EXCHANGE {
                on!(&self.db, write pool => { sqlx::query(sql).bind(&id).execute(pool).await?; });
            }
            Ok(())
        });
        if let Err(error) = deleting.await {
            tracing::debug!(%error, "deleting samples failed; a later purge removes them");
        }
        responses
    }

    async fn insert_sample_request(&self, id: &str, request: &SampleRequest) -> Result<(), ControlError> {
        let number = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let (sql, bytes, requests) =
            (self.db.dialect(INSERT_REQUEST), number(request.bytes), number(request.requests));
        let wildcards = serde_json::to_string(&request.wildcards).unwrap_or_default();
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(id).bind(&self.instance).bind(bytes).bind(requests).bind(wildcards).execute(pool).await?;
        });
        if let Db::Postgres(pool) = &self.db {
            sqlx::query("SELECT pg_notify($1, '')").bind(CHANNEL).execute(pool).await?;
        }
        Ok(())
    }

    async fn wait_for(&self, id: &str, instances: &[&str]) -> Result<(), ControlError> {
        loop {
            let responders: Vec<(String,)> =
                on!(&self.db, pool => sqlx::query_as(SELECT_RESPONDERS).bind(id).fetch_all(pool).await?);
            if instances.iter().all(|instance| responders.iter().any(|(responder,)| responder == instance)) {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Deletes requests and samples that were left behind.
    pub(crate) async fn delete_old_samples(&self) -> Result<(), ControlError> {
        for sql in DELETE_OLD {
            let sql = self.db.dialect(sql);
            on!(&self.db, write pool => { sqlx::query(sql).bind(ROW_TTL_MS).execute(pool).await?; });
        }
        Ok(())
    }
}

/// Collector of other nodes' samples, with a short cache.
pub(crate) struct PeerSampleCollector {
    control: Arc<ControlPlane>,
    cached: Mutex<Option<Arc<PeerSamples>>>,
}

impl PeerSampleCollector {
    pub(crate) fn new(control: Arc<ControlPlane>) -> Self {
        Self { control, cached: Mutex::default() }
    }

    /// Returns other nodes' samples, cached or newly requested. If the caller is canceled, the exchange still
    /// completes and deletes its rows.
    pub(crate) async fn collect(
        self: &Arc<Self>,
        freshness: Freshness,
        wildcards: BTreeSet<String>,
    ) -> Arc<PeerSamples> {
        let own = Arc::clone(self);
        let collecting = tokio::spawn(async move {
            let mut cached = own.cached.lock().await;
            let recent = cached.as_ref().filter(|_| freshness == Freshness::Cached);
            if let Some(others) = recent.filter(|others| wildcards.is_subset(&others.wildcards)) {
                return Arc::clone(others);
            }
            let others = Arc::new(own.control.request_peer_samples(wildcards).await);
            if others.unknown {
                return others;
            }
            *cached = Some(Arc::clone(&others));
            drop(cached);
            let (cache, collected) = (Arc::downgrade(&own), Arc::downgrade(&others));
            tokio::spawn(async move {
                tokio::time::sleep(MAX_AGE).await;
                let Some(cache) = cache.upgrade() else { return };
                let mut cached = cache.cached.lock().await;
                if cached.as_ref().is_some_and(|others| collected.ptr_eq(&Arc::downgrade(others))) {
                    *cached = None;
                }
            });
            others
        });
        collecting.await.unwrap_or_else(|_| Arc::new(PeerSamples::unknown()))
    }
}

/// How recent samples must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// At most a few seconds old.
    Cached,
    /// Requested now.
    Current,
}
