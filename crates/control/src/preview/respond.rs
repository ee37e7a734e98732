//! Sends this node's traffic sample to nodes that request it (`collect`). It serves a few requests in a row and then
//! pauses: anybody with write access to the database could send requests without end.

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

/// Poll interval for a SQLite file.
const FILE_POLL: Duration = Duration::from_millis(500);
/// Maximum number of requests served in a row, before the pause that follows.
const AT_ONCE: i64 = 4;
const PAUSE: Duration = Duration::from_millis(250);
/// Maximum age of a request, in milliseconds by the database's clock; no node waits for an older one.
const MAX_REQUEST_AGE_MS: i64 = 10_000;

const SELECT_REQUESTS: [&str; 2] = at_now!(
    "SELECT id, bytes, requests, wildcards FROM traffic_asked asked WHERE instance <> $1 AND NOT EXISTS
         (SELECT 1 FROM traffic_told told WHERE told.id = asked.id AND told.instance = $1)
     AND asked_at > ",
    " - $2 ORDER BY asked_at LIMIT $3"
);
/// Inserts a response only while its request still exists.
const INSERT_RESPONSE: [&str; 2] = at_now!(
    "INSERT INTO traffic_told (id, instance, body, told_at) SELECT id, $2, $3, ",
    " FROM traffic_asked WHERE id = $1 ON CONFLICT (id, instance) DO NOTHING"
);

impl ControlPlane {
    /// Serves sample requests of other nodes, one at a time; never returns.
    pub(crate) async fn serve_sample_requests(
        self: &Arc<Self>,
        sample: &Arc<TrafficSample>,
        active: impl Fn() -> Arc<Ruleset>,
    ) {
        loop {
            self.wait_for_request().await;
            if let Err(error) = with_read_timeout(self.respond_to_all(sample, &active)).await {
                tracing::debug!(%error, "serving sample requests failed");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn respond_to_all(
        self: &Arc<Self>,
        sample: &Arc<TrafficSample>,
        active: impl Fn() -> Arc<Ruleset>,
    ) -> Result<(), ControlError> {
        let requests = self.sample_requests().await?;
        // There may be more requests, and no further notification will come for them.
        if i64::try_from(requests.len()) == Ok(AT_ONCE) {
            self.sample_requested.notify_one();
        }
        for (id, request) in requests {
            let (sample, control, rules) = (Arc::clone(sample), Arc::clone(self), active());
            let encode = move || {
                let wildcards = Wildcards::new(request.wildcards.iter().map(String::as_str));
                let mut pseudonymizer = Pseudonymizer::new(&control.hasher, &rules, wildcards);
                let now = control.clock.now();
                encoding::encode(sample.slices(), now, &mut pseudonymizer, request.bytes, request.requests)
            };
            let body = tokio::task::spawn_blocking(encode).await;
            let body = body.map_err(|error| ControlError::Corrupt(error.to_string()))?;
            self.respond(&id, body).await?;
        }
        Ok(())
    }

    /// Waits until there may be a request.
    async fn wait_for_request(&self) {
        match &self.db {
            Db::Sqlite { .. } => tokio::time::sleep(FILE_POLL).await,
            Db::Postgres(_) => self.sample_requested.notified().await,
        }
    }

    /// Returns the requests that this node has not served yet.
    async fn sample_requests(&self) -> Result<Vec<(String, SampleRequest)>, ControlError> {
        let sql = self.db.dialect(SELECT_REQUESTS);
        let rows: Vec<(String, i64, i64, String)> = on!(&self.db, pool => {
            sqlx::query_as(sql).bind(&self.instance).bind(MAX_REQUEST_AGE_MS).bind(AT_ONCE).fetch_all(pool).await?
        });
        let number = |number: i64| usize::try_from(number).unwrap_or(0);
        let request = |(id, bytes, requests, wildcards): (String, i64, i64, String)| {
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
        Ok(rows.into_iter().map(request).collect())
    }

    async fn respond(&self, id: &str, body: String) -> Result<(), ControlError> {
        let sql = self.db.dialect(INSERT_RESPONSE);
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(id).bind(&self.instance).bind(body).execute(pool).await?;
        });
        Ok(())
    }
}
