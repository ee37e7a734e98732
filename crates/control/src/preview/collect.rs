//! How a node that rehearses rules learns of the traffic that others remember: it asks by a row in the database, each node
//! that is alive writes what it remembers beside, and the asker takes it away. Who does not answer in time is named, and the
//! rehearsal goes on without.
//!
//! PostgreSQL tells that somebody asks by NOTIFY; a file is looked at twice a second. Pushing samples all the time was
//! rejected: rules are published a few times a day, and traffic flows always.

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

/// The name that questions are told under.
pub(crate) const CHANNEL: &str = "tollgate_traffic";

/// How long the others may take to answer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the asker looks.
const POLL_INTERVAL: Duration = Duration::from_millis(40);
/// How long the database may take to say who is there, and how long for all of it.
const NODES_TIMEOUT: Duration = Duration::from_secs(1);
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long what was told may be used for other checks: whoever writes rules has them checked every few seconds.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Rows that nobody has taken away go after this.
const ROW_TTL_MS: i64 = 60_000;
/// The most bytes that one may tell, and all.
pub(crate) const MAX_BYTES_PER_NODE: usize = 4 << 20;
const MAX_BYTES: usize = 32 << 20;
/// The most requests of a slice of time that are rehearsed on.
pub(crate) const MAX_SLICE_REQUESTS: usize = 4_096;
/// The most wildcards that others are told of, and the longest.
const MAX_WILDCARDS: usize = 256;
const MAX_WILDCARD_BYTES: usize = 256;
/// The fewest that each is asked for, however many nodes there are.
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

/// What other nodes remember.
#[derive(Debug)]
pub(crate) struct PeerSamples {
    /// What this node is called.
    pub(crate) own_name: String,
    /// By name, what they told, as they wrote it.
    pub(crate) samples: Vec<(String, String)>,
    /// Who is alive and has told nothing.
    pub(crate) missing: Vec<String>,
    /// The database did not say who is there.
    pub(crate) unknown: bool,
    /// The most that each may have told.
    pub(crate) bytes: usize,
    /// The wildcards that they were told of.
    wildcards: BTreeSet<String>,
}

/// What a node is called that has not yet told of itself.
const THIS_NODE: &str = "this node";

impl PeerSamples {
    /// Nobody is known to be there but this node.
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

    /// Who is there is not known.
    fn unknown() -> Self {
        Self { unknown: true, ..Self::none(THIS_NODE) }
    }
}

/// How much each may tell, and what of values that tell who asks.
pub(crate) struct SampleRequest {
    pub(crate) bytes: usize,
    pub(crate) requests: usize,
    pub(crate) wildcards: BTreeSet<String>,
}

/// The wildcards that others must know of, so that their values match these rules as they would here.
pub(crate) fn wildcards(rules: [&Ruleset; 2]) -> BTreeSet<String> {
    let all = rules.into_iter().flat_map(Ruleset::domains).flat_map(Domain::wildcards);
    bounded(all.filter(|text| text.len() <= MAX_WILDCARD_BYTES).map(str::to_owned))
}

/// No more of them than anybody need look at.
pub(crate) fn bounded(wildcards: impl Iterator<Item = String>) -> BTreeSet<String> {
    let mut kept = BTreeSet::new();
    for one in wildcards {
        if kept.len() == MAX_WILDCARDS {
            break;
        }
        kept.insert(one);
    }
    kept
}

impl ControlPlane {
    /// Asks all other nodes that are alive. Does not fail, and does not wait for long.
    async fn request_peer_samples(&self, wildcards: BTreeSet<String>) -> PeerSamples {
        let nodes = match with_timeout(NODES_TIMEOUT, self.nodes()).await {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::warn!(%error, "rules are rehearsed on the traffic of this node alone");
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
        let asked = SampleRequest {
            bytes: MAX_BYTES_PER_NODE.min(MAX_BYTES / others.len()),
            requests: (MAX_SLICE_REQUESTS / others.len()).max(MIN_REQUESTS_PER_NODE),
            wildcards,
        };
        let instances: Vec<&str> = others.iter().map(|node| node.instance.as_str()).collect();
        let mut answers = self.exchange(&instances, &asked).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "rules are rehearsed without the traffic of other nodes");
            vec![None; others.len()]
        });
        let (mut told, mut silent) = (Vec::new(), Vec::new());
        for (node, answer) in others.iter().zip(answers.drain(..)) {
            match answer {
                Some(body) => told.push((node.name().to_owned(), body)),
                None => silent.push(node.name().to_owned()),
            }
        }
        PeerSamples {
            own_name: own,
            samples: told,
            missing: silent,
            unknown: false,
            bytes: asked.bytes,
            wildcards: asked.wildcards,
        }
    }

    /// What each of these tells.
    async fn exchange(
        &self,
        instances: &[&str],
        asked: &SampleRequest,
    ) -> Result<Vec<Option<String>>, ControlError> {
        let id = generate_id()?;
        let answers = with_timeout(EXCHANGE_TIMEOUT, async {
            self.delete_old_samples().await?;
            self.insert_sample_request(&id, asked).await?;
            // Whoever has not answered when this is over has not.
            let _ = tokio::time::timeout(RESPONSE_TIMEOUT, self.wait_for(&id, instances)).await;
            let mut answers = Vec::with_capacity(instances.len());
            for instance in instances {
                let most = i64::try_from(asked.bytes).unwrap_or(i64::MAX);
                let body: Option<(String,)> = on!(&self.db, pool => {
                    sqlx::query_as(SELECT_RESPONSE).bind(&id).bind(*instance).bind(most).fetch_optional(pool).await?
                });
                answers.push(body.map(|(body,)| body));
            }
            Ok(answers)
        })
        .await;
        let taken = with_timeout(NODES_TIMEOUT, async {
            for sql in DELETE_EXCHANGE {
                on!(&self.db, write pool => { sqlx::query(sql).bind(&id).execute(pool).await?; });
            }
            Ok(())
        });
        if let Err(error) = taken.await {
            tracing::debug!(%error, "what nodes told stays in the database until somebody purges it");
        }
        answers
    }

    async fn insert_sample_request(&self, id: &str, asked: &SampleRequest) -> Result<(), ControlError> {
        let number = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let (sql, bytes, requests) =
            (self.db.dialect(INSERT_REQUEST), number(asked.bytes), number(asked.requests));
        let wildcards = serde_json::to_string(&asked.wildcards).unwrap_or_default();
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
            let told: Vec<(String,)> =
                on!(&self.db, pool => sqlx::query_as(SELECT_RESPONDERS).bind(id).fetch_all(pool).await?);
            if instances.iter().all(|instance| told.iter().any(|(told,)| told == instance)) {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Removes what nobody has taken away.
    pub(crate) async fn delete_old_samples(&self) -> Result<(), ControlError> {
        for sql in DELETE_OLD {
            let sql = self.db.dialect(sql);
            on!(&self.db, write pool => { sqlx::query(sql).bind(ROW_TTL_MS).execute(pool).await?; });
        }
        Ok(())
    }
}

/// What other nodes remember, and what they told a moment ago.
pub(crate) struct PeerSampleCollector {
    control: Arc<ControlPlane>,
    cached: Mutex<Option<Arc<PeerSamples>>>,
}

impl PeerSampleCollector {
    pub(crate) fn new(control: Arc<ControlPlane>) -> Self {
        Self { control, cached: Mutex::default() }
    }

    /// What others remember: asked now, or a moment ago where that is as good. Whoever waits for it may go away: what was
    /// told is taken away all the same.
    pub(crate) async fn collect(
        self: &Arc<Self>,
        how: Freshness,
        wildcards: BTreeSet<String>,
    ) -> Arc<PeerSamples> {
        let own = Arc::clone(self);
        let hearing = tokio::spawn(async move {
            let mut heard = own.cached.lock().await;
            let lately = heard.as_ref().filter(|_| how == Freshness::Cached);
            if let Some(others) = lately.filter(|others| wildcards.is_subset(&others.wildcards)) {
                return Arc::clone(others);
            }
            let others = Arc::new(own.control.request_peer_samples(wildcards).await);
            if others.unknown {
                return others;
            }
            *heard = Some(Arc::clone(&others));
            drop(heard);
            let (cache, asked) = (Arc::downgrade(&own), Arc::downgrade(&others));
            tokio::spawn(async move {
                tokio::time::sleep(MAX_AGE).await;
                let Some(cache) = cache.upgrade() else { return };
                let mut heard = cache.cached.lock().await;
                if heard.as_ref().is_some_and(|others| asked.ptr_eq(&Arc::downgrade(others))) {
                    *heard = None;
                }
            });
            others
        });
        hearing.await.unwrap_or_else(|_| Arc::new(PeerSamples::unknown()))
    }
}

/// How new it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// A few seconds old at most.
    Cached,
    /// Asked now.
    Current,
}
