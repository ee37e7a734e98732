//! How a node tells another that rehearses rules (`collect`) what it remembers. It answers one after another, a few at once, and
//! then pauses: whoever can write to the database could ask without end.

use crate::control_plane::ControlPlane;
use crate::db::deadline::with_read_timeout;
use crate::db::{Db, at_now, on};
use crate::error::ControlError;
use crate::preview::collect::{MAX_BYTES_PER_NODE, SampleRequest, bounded};
use crate::preview::encoding;
use crate::preview::pseudonym::Pseudonymizer;
use crate::preview::sample::TrafficSample;
use std::sync::Arc;
use std::time::Duration;
use tollgate_rules::{Ruleset, Wildcards};

/// How often a file is looked at.
const FILE_POLL: Duration = Duration::from_millis(500);
/// A node answers at most so many times at once, and then not before this is over.
const AT_ONCE: i64 = 4;
const PAUSE: Duration = Duration::from_millis(250);
/// A question that is older is nobody's any more; in milliseconds, by the database's clock.
const MAX_REQUEST_AGE_MS: i64 = 10_000;

const SELECT_REQUESTS: [&str; 2] = at_now!(
    "SELECT id, bytes, requests, wildcards FROM traffic_asked asked WHERE instance <> $1 AND NOT EXISTS
         (SELECT 1 FROM traffic_told told WHERE told.id = asked.id AND told.instance = $1)
     AND asked_at > ",
    " - $2 ORDER BY asked_at LIMIT $3"
);
/// Only as long as somebody waits for it.
const INSERT_RESPONSE: [&str; 2] = at_now!(
    "INSERT INTO traffic_told (id, instance, body, told_at) SELECT id, $2, $3, ",
    " FROM traffic_asked WHERE id = $1 ON CONFLICT (id, instance) DO NOTHING"
);

impl ControlPlane {
    /// Tells those who ask what this node remembers, one after another, for as long as it is asked to.
    pub(crate) async fn serve_sample_requests(
        self: &Arc<Self>,
        sample: &Arc<TrafficSample>,
        acting: impl Fn() -> Arc<Ruleset>,
    ) {
        loop {
            self.wait_for_request().await;
            if let Err(error) = with_read_timeout(self.respond_to_all(sample, &acting)).await {
                tracing::debug!(%error, "could not tell another node what this one remembers");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn respond_to_all(
        self: &Arc<Self>,
        sample: &Arc<TrafficSample>,
        acting: impl Fn() -> Arc<Ruleset>,
    ) -> Result<(), ControlError> {
        let questions = self.sample_requests().await?;
        // Where there may be more, nobody will tell of them again.
        if i64::try_from(questions.len()) == Ok(AT_ONCE) {
            self.sample_requested.notify_one();
        }
        for (id, asked) in questions {
            let (sample, control, rules) = (Arc::clone(sample), Arc::clone(self), acting());
            let writing = move || {
                let wildcards = Wildcards::new(asked.wildcards.iter().map(String::as_str));
                let mut hiding = Pseudonymizer::new(&control.hasher, &rules, wildcards);
                let now = control.clock.now();
                encoding::encode(sample.slices(), now, &mut hiding, asked.bytes, asked.requests)
            };
            let body = tokio::task::spawn_blocking(writing).await;
            let body = body.map_err(|error| ControlError::Corrupt(error.to_string()))?;
            self.respond(&id, body).await?;
        }
        Ok(())
    }

    /// Waits until somebody may have asked.
    async fn wait_for_request(&self) {
        match &self.db {
            Db::Sqlite { .. } => tokio::time::sleep(FILE_POLL).await,
            Db::Postgres(_) => self.sample_requested.notified().await,
        }
    }

    /// What this node has been asked and has not yet answered.
    async fn sample_requests(&self) -> Result<Vec<(String, SampleRequest)>, ControlError> {
        let sql = self.db.dialect(SELECT_REQUESTS);
        let rows: Vec<(String, i64, i64, String)> = on!(&self.db, pool => {
            sqlx::query_as(sql).bind(&self.instance).bind(MAX_REQUEST_AGE_MS).bind(AT_ONCE).fetch_all(pool).await?
        });
        let number = |number: i64| usize::try_from(number).unwrap_or(0);
        let question = |(id, bytes, requests, wildcards): (String, i64, i64, String)| {
            let wildcards: Vec<String> = serde_json::from_str(&wildcards).unwrap_or_default();
            let wildcards = bounded(wildcards.into_iter());
            (
                id,
                SampleRequest {
                    bytes: number(bytes).min(MAX_BYTES_PER_NODE),
                    requests: number(requests),
                    wildcards,
                },
            )
        };
        Ok(rows.into_iter().map(question).collect())
    }

    async fn respond(&self, id: &str, body: String) -> Result<(), ControlError> {
        let sql = self.db.dialect(INSERT_RESPONSE);
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(id).bind(&self.instance).bind(body).execute(pool).await?;
        });
        Ok(())
    }
}
