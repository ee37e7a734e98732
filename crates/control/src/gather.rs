//! How a node that rehearses rules learns of the traffic that others remember: it asks by a row in the database, each node
//! that is alive writes what it remembers beside, and the asker takes it away. Who does not answer in time is named, and the
//! rehearsal goes on without.
//!
//! PostgreSQL tells that somebody asks by NOTIFY; a file is looked at twice a second. Pushing samples all the time was
//! rejected: rules are published a few times a day, and traffic flows always.

use crate::control::Control;
use crate::db::{ControlError, Db, at_now, on};
use crate::desk::Desk;
use crate::follow::{timely, within};
use crate::nodes::NodeSeen;
use crate::tokens::fresh_id;
use crate::wire;
use std::sync::Arc;
use std::time::Duration;

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
/// How often a file is looked at.
const FILE: Duration = Duration::from_millis(500);
/// A node answers at most so many times at once, and then not before this is over.
const AT_ONCE: i64 = 4;
const PAUSE: Duration = Duration::from_millis(250);
/// A question that is older is nobody's any more; in milliseconds, by the database's clock.
const OLD: i64 = 10_000;
/// Rows that nobody has taken away go after this.
const FORGOTTEN: i64 = 60_000;
/// The most bytes that one may tell, and all.
const BYTES: usize = 4 << 20;
const BYTES_OF_ALL: usize = 32 << 20;
/// The most requests of a slice of time that are rehearsed on.
pub(crate) const REQUESTS: usize = 4_096;
/// The fewest that each is asked for, however many nodes there are.
const FEWEST: usize = 32;

const ASK: [&str; 2] = at_now!(
    "INSERT INTO traffic_asked (id, instance, bytes, requests, asked_at) VALUES ($1, $2, $3, $4, ",
    ")"
);
const QUESTIONS: [&str; 2] = at_now!(
    "SELECT id, bytes, requests FROM traffic_asked asked WHERE instance <> $1 AND NOT EXISTS
         (SELECT 1 FROM traffic_told told WHERE told.id = asked.id AND told.instance = $1)
     AND asked_at > ",
    " - $2 ORDER BY asked_at LIMIT $3"
);
/// Only as long as somebody waits for it.
const TELL: [&str; 2] = at_now!(
    "INSERT INTO traffic_told (id, instance, body, told_at) SELECT id, $2, $3, ",
    " FROM traffic_asked WHERE id = $1 ON CONFLICT (id, instance) DO NOTHING"
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
}

/// What a node is called that has not yet told of itself.
const THIS: &str = "this node";

impl Others {
    /// Nobody is known to be there but this node.
    fn nobody(own: &str) -> Self {
        Self { own: own.to_owned(), told: Vec::new(), silent: Vec::new(), unknown: false, bytes: 0 }
    }

    /// Who is there is not known.
    fn unknown() -> Self {
        Self { unknown: true, ..Self::nobody(THIS) }
    }
}

/// How much each may tell.
#[derive(Clone, Copy)]
struct Share {
    bytes: usize,
    requests: usize,
}

impl Control {
    /// Asks all other nodes that are alive. Does not fail, and does not wait for long.
    async fn ask_others(&self) -> Others {
        let nodes = match within(WHO, self.nodes()).await {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::warn!(%error, "rules are rehearsed on the traffic of this node alone");
                return Others::unknown();
            }
        };
        let own = nodes.iter().find(|node| node.own).map_or(THIS, NodeSeen::name).to_owned();
        let others: Vec<_> = nodes.iter().filter(|node| !node.own && !node.stale).collect();
        if others.is_empty() {
            return Others::nobody(&own);
        }
        let share = Share {
            bytes: BYTES.min(BYTES_OF_ALL / others.len()),
            requests: (REQUESTS / others.len()).max(FEWEST),
        };
        let instances: Vec<&str> = others.iter().map(|node| node.instance.as_str()).collect();
        let mut answers = self.exchange(&instances, share).await.unwrap_or_else(|error| {
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
        Others { own, told, silent, unknown: false, bytes: share.bytes }
    }

    /// What each of these tells.
    async fn exchange(&self, instances: &[&str], share: Share) -> Result<Vec<Option<String>>, ControlError> {
        let id = fresh_id()?;
        let answers = within(ALL_OF_IT, async {
            self.forget_traffic().await?;
            self.ask(&id, share).await?;
            // Whoever has not answered when this is over has not.
            let _ = tokio::time::timeout(ANSWERING, self.wait_for(&id, instances)).await;
            let mut answers = Vec::with_capacity(instances.len());
            for instance in instances {
                let most = i64::try_from(share.bytes).unwrap_or(i64::MAX);
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

    async fn ask(&self, id: &str, share: Share) -> Result<(), ControlError> {
        let number = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let (sql, bytes, requests) = (self.own_words(ASK), number(share.bytes), number(share.requests));
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(id).bind(&self.instance).bind(bytes).bind(requests).execute(pool).await?;
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
            let sql = self.own_words(sql);
            on!(&self.db, write pool => { sqlx::query(sql).bind(FORGOTTEN).execute(pool).await?; });
        }
        Ok(())
    }

    /// Waits until somebody may have asked.
    async fn asked(&self) {
        match &self.db {
            Db::Sqlite { .. } => tokio::time::sleep(FILE).await,
            Db::Postgres(_) => self.traffic_asked.notified().await,
        }
    }

    /// What this node has been asked and has not yet answered.
    async fn questions(&self) -> Result<Vec<(String, Share)>, ControlError> {
        let sql = self.own_words(QUESTIONS);
        let rows: Vec<(String, i64, i64)> = on!(&self.db, pool => {
            sqlx::query_as(sql).bind(&self.instance).bind(OLD).bind(AT_ONCE).fetch_all(pool).await?
        });
        let number = |number: i64| usize::try_from(number).unwrap_or(0);
        let share = |bytes, requests| Share { bytes: number(bytes).min(BYTES), requests: number(requests) };
        Ok(rows.into_iter().map(|(id, bytes, requests)| (id, share(bytes, requests))).collect())
    }

    async fn answer(&self, id: &str, body: String) -> Result<(), ControlError> {
        let sql = self.own_words(TELL);
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(id).bind(&self.instance).bind(body).execute(pool).await?;
        });
        Ok(())
    }
}

impl Desk {
    /// Tells those who ask what this node remembers, one after another, for as long as it is asked to.
    pub(crate) async fn answer_others(&self) {
        loop {
            self.control.asked().await;
            if let Err(error) = timely(self.answer_all()).await {
                tracing::debug!(%error, "could not tell another node what this one remembers");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn answer_all(&self) -> Result<(), ControlError> {
        for (id, share) in self.control.questions().await? {
            let (sample, control, acting) = (self.sample(), Arc::clone(&self.control), self.acting());
            let writing = move || {
                let (now, Share { bytes, requests }) = (control.clock.now(), share);
                wire::write(sample.remembered(), now, (&control.hasher, &acting.rules), bytes, requests)
            };
            let body = tokio::task::spawn_blocking(writing).await;
            let body = body.map_err(|error| ControlError::Broken(error.to_string()))?;
            self.control.answer(&id, body).await?;
        }
        Ok(())
    }

    /// What others remember: asked now, or a moment ago where that is as good. Whoever waits for it may go away: what was
    /// told is taken away all the same.
    pub(crate) async fn hear_others(self: &Arc<Self>, how: Hearing) -> Arc<Others> {
        let own = Arc::clone(self);
        let hearing = tokio::spawn(async move {
            let mut heard = own.heard.lock().await;
            if let (Hearing::Lately, Some(others)) = (how, &*heard) {
                return Arc::clone(others);
            }
            let others = Arc::new(own.control.ask_others().await);
            *heard = Some(Arc::clone(&others));
            drop(heard);
            let (desk, asked) = (Arc::downgrade(&own), Arc::downgrade(&others));
            tokio::spawn(async move {
                tokio::time::sleep(FRESH).await;
                let Some(desk) = desk.upgrade() else { return };
                let mut heard = desk.heard.lock().await;
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
