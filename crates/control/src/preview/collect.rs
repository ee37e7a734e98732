//! How a node that rehearses rules learns of the traffic that others remember: it asks by a row in the database, each node
//! that is alive writes what it remembers beside, and the asker takes it away. Who does not answer in time is named, and the
//! rehearsal goes on without.
//!
//! PostgreSQL tells that somebody asks by NOTIFY; a file is looked at twice a second. Pushing samples all the time was
//! rejected: rules are published a few times a day, and traffic flows always.

use crate::auth::secret::fresh_id;
use crate::control_plane::Control;
use crate::db::deadline::within;
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
const ANSWERING: Duration = Duration::from_secs(2);
/// How often the asker looks.
const LOOK: Duration = Duration::from_millis(40);
/// How long the database may take to say who is there, and how long for all of it.
const WHO: Duration = Duration::from_secs(1);
const ALL_OF_IT: Duration = Duration::from_secs(5);
/// How long what was told may be used for other checks: whoever writes rules has them checked every few seconds.
const FRESH: Duration = Duration::from_secs(5);
/// Rows that nobody has taken away go after this.
const FORGOTTEN: i64 = 60_000;
/// The most bytes that one may tell, and all.
pub(crate) const BYTES: usize = 4 << 20;
const BYTES_OF_ALL: usize = 32 << 20;
/// The most requests of a slice of time that are rehearsed on.
pub(crate) const REQUESTS: usize = 4_096;
/// The most wildcards that others are told of, and the longest.
const MOST_WILDCARDS: usize = 256;
const LONGEST_WILDCARD: usize = 256;
/// The fewest that each is asked for, however many nodes there are.
const FEWEST: usize = 32;

const ASK: [&str; 2] = at_now!(
    "INSERT INTO traffic_asked (id, instance, bytes, requests, wildcards, asked_at) VALUES ($1, $2, $3, $4, $5, ",
    ")"
);
const TOLD: &str = "SELECT instance FROM traffic_told WHERE id = $1";
const READ: &str = "SELECT body FROM traffic_told WHERE id = $1 AND instance = $2 AND LENGTH(body) <= $3";
const TAKE_AWAY: [&str; 2] =
    ["DELETE FROM traffic_asked WHERE id = $1", "DELETE FROM traffic_told WHERE id = $1"];
const FORGET: [[&str; 2]; 2] = [
    at_now!("DELETE FROM traffic_asked WHERE asked_at < ", " - $1"),
    at_now!("DELETE FROM traffic_told WHERE told_at < ", " - $1"),
];

/// What other nodes remember.
#[derive(Debug)]
pub(crate) struct Others {
    /// What this node is called.
    pub(crate) own: String,
    /// By name, what they told, as they wrote it.
    pub(crate) told: Vec<(String, String)>,
    /// Who is alive and has told nothing.
    pub(crate) silent: Vec<String>,
    /// The database did not say who is there.
    pub(crate) unknown: bool,
    /// The most that each may have told.
    pub(crate) bytes: usize,
    /// The wildcards that they were told of.
    wildcards: BTreeSet<String>,
}

/// What a node is called that has not yet told of itself.
const THIS: &str = "this node";

impl Others {
    /// Nobody is known to be there but this node.
    fn nobody(own: &str) -> Self {
        Self {
            own: own.to_owned(),
            told: Vec::new(),
            silent: Vec::new(),
            unknown: false,
            bytes: 0,
            wildcards: BTreeSet::new(),
        }
    }

    /// Who is there is not known.
    fn unknown() -> Self {
        Self { unknown: true, ..Self::nobody(THIS) }
    }
}

/// How much each may tell, and what of values that tell who asks.
pub(crate) struct Question {
    pub(crate) bytes: usize,
    pub(crate) requests: usize,
    pub(crate) wildcards: BTreeSet<String>,
}

/// The wildcards that others must know of, so that their values match these rules as they would here.
pub(crate) fn wildcards(rules: [&Ruleset; 2]) -> BTreeSet<String> {
    let all = rules.into_iter().flat_map(Ruleset::domains).flat_map(Domain::wildcards);
    bounded(all.filter(|text| text.len() <= LONGEST_WILDCARD).map(str::to_owned))
}

/// No more of them than anybody need look at.
pub(crate) fn bounded(wildcards: impl Iterator<Item = String>) -> BTreeSet<String> {
    let mut kept = BTreeSet::new();
    for one in wildcards {
        if kept.len() == MOST_WILDCARDS {
            break;
        }
        kept.insert(one);
    }
    kept
}

impl Control {
    /// Asks all other nodes that are alive. Does not fail, and does not wait for long.
    async fn ask_others(&self, wildcards: BTreeSet<String>) -> Others {
        let nodes = match within(WHO, self.nodes()).await {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::warn!(%error, "rules are rehearsed on the traffic of this node alone");
                return Others::unknown();
            }
        };
        let own = match nodes.iter().find(|node| node.own) {
            Some(node) => node.name(),
            None => THIS,
        };
        let own = own.to_owned();
        let others: Vec<_> = nodes.iter().filter(|node| !node.own && !node.stale).collect();
        if others.is_empty() {
            return Others { wildcards, ..Others::nobody(&own) };
        }
        let asked = Question {
            bytes: BYTES.min(BYTES_OF_ALL / others.len()),
            requests: (REQUESTS / others.len()).max(FEWEST),
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
        Others { own, told, silent, unknown: false, bytes: asked.bytes, wildcards: asked.wildcards }
    }

    /// What each of these tells.
    async fn exchange(
        &self,
        instances: &[&str],
        asked: &Question,
    ) -> Result<Vec<Option<String>>, ControlError> {
        let id = fresh_id()?;
        let answers = within(ALL_OF_IT, async {
            self.forget_traffic().await?;
            self.ask(&id, asked).await?;
            // Whoever has not answered when this is over has not.
            let _ = tokio::time::timeout(ANSWERING, self.wait_for(&id, instances)).await;
            let mut answers = Vec::with_capacity(instances.len());
            for instance in instances {
                let most = i64::try_from(asked.bytes).unwrap_or(i64::MAX);
                let body: Option<(String,)> = on!(&self.db, pool => {
                    sqlx::query_as(READ).bind(&id).bind(*instance).bind(most).fetch_optional(pool).await?
                });
                answers.push(body.map(|(body,)| body));
            }
            Ok(answers)
        })
        .await;
        let taken = within(WHO, async {
            for sql in TAKE_AWAY {
                on!(&self.db, write pool => { sqlx::query(sql).bind(&id).execute(pool).await?; });
            }
            Ok(())
        });
        if let Err(error) = taken.await {
            tracing::debug!(%error, "what nodes told stays in the database until somebody purges it");
        }
        answers
    }

    async fn ask(&self, id: &str, asked: &Question) -> Result<(), ControlError> {
        let number = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let (sql, bytes, requests) = (self.db.dialect(ASK), number(asked.bytes), number(asked.requests));
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
                on!(&self.db, pool => sqlx::query_as(TOLD).bind(id).fetch_all(pool).await?);
            if instances.iter().all(|instance| told.iter().any(|(told,)| told == instance)) {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Removes what nobody has taken away.
    pub(crate) async fn forget_traffic(&self) -> Result<(), ControlError> {
        for sql in FORGET {
            let sql = self.db.dialect(sql);
            on!(&self.db, write pool => { sqlx::query(sql).bind(FORGOTTEN).execute(pool).await?; });
        }
        Ok(())
    }
}

/// What other nodes remember, and what they told a moment ago.
pub(crate) struct PeerSamples {
    control: Arc<Control>,
    heard: Mutex<Option<Arc<Others>>>,
}

impl PeerSamples {
    pub(crate) fn new(control: Arc<Control>) -> Self {
        Self { control, heard: Mutex::default() }
    }

    /// What others remember: asked now, or a moment ago where that is as good. Whoever waits for it may go away: what was
    /// told is taken away all the same.
    pub(crate) async fn hear(self: &Arc<Self>, how: Hearing, wildcards: BTreeSet<String>) -> Arc<Others> {
        let own = Arc::clone(self);
        let hearing = tokio::spawn(async move {
            let mut heard = own.heard.lock().await;
            let lately = heard.as_ref().filter(|_| how == Hearing::Lately);
            if let Some(others) = lately.filter(|others| wildcards.is_subset(&others.wildcards)) {
                return Arc::clone(others);
            }
            let others = Arc::new(own.control.ask_others(wildcards).await);
            if others.unknown {
                return others;
            }
            *heard = Some(Arc::clone(&others));
            drop(heard);
            let (cache, asked) = (Arc::downgrade(&own), Arc::downgrade(&others));
            tokio::spawn(async move {
                tokio::time::sleep(FRESH).await;
                let Some(cache) = cache.upgrade() else { return };
                let mut heard = cache.heard.lock().await;
                if heard.as_ref().is_some_and(|others| asked.ptr_eq(&Arc::downgrade(others))) {
                    *heard = None;
                }
            });
            others
        });
        hearing.await.unwrap_or_else(|_| Arc::new(Others::unknown()))
    }
}

/// How new it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hearing {
    /// A few seconds old at most.
    Lately,
    /// Asked now.
    Now,
}
