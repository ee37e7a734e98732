//! How a node tells another that rehearses rules (`collect`) what it remembers. It answers one after another, a few at once, and
//! then pauses: whoever can write to the database could ask without end.

use crate::control_plane::Control;
use crate::db::deadline::timely;
use crate::db::{Db, at_now, on};
use crate::error::ControlError;
use crate::preview::collect::{BYTES, Question, bounded};
use crate::preview::encoding;
use crate::preview::pseudonym::Hiding;
use crate::preview::sample::Sample;
use std::sync::Arc;
use std::time::Duration;
use tollgate_rules::{Ruleset, Wildcards};

/// How often a file is looked at.
const FILE: Duration = Duration::from_millis(500);
/// A node answers at most so many times at once, and then not before this is over.
const AT_ONCE: i64 = 4;
const PAUSE: Duration = Duration::from_millis(250);
/// A question that is older is nobody's any more; in milliseconds, by the database's clock.
const OLD: i64 = 10_000;

const QUESTIONS: [&str; 2] = at_now!(
    "SELECT id, bytes, requests, wildcards FROM traffic_asked asked WHERE instance <> $1 AND NOT EXISTS
         (SELECT 1 FROM traffic_told told WHERE told.id = asked.id AND told.instance = $1)
     AND asked_at > ",
    " - $2 ORDER BY asked_at LIMIT $3"
);
/// Only as long as somebody waits for it.
const TELL: [&str; 2] = at_now!(
    "INSERT INTO traffic_told (id, instance, body, told_at) SELECT id, $2, $3, ",
    " FROM traffic_asked WHERE id = $1 ON CONFLICT (id, instance) DO NOTHING"
);

impl Control {
    /// Tells those who ask what this node remembers, one after another, for as long as it is asked to.
    pub(crate) async fn answer_others(
        self: &Arc<Self>,
        sample: &Arc<Sample>,
        acting: impl Fn() -> Arc<Ruleset>,
    ) {
        loop {
            self.asked().await;
            if let Err(error) = timely(self.answer_all(sample, &acting)).await {
                tracing::debug!(%error, "could not tell another node what this one remembers");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn answer_all(
        self: &Arc<Self>,
        sample: &Arc<Sample>,
        acting: impl Fn() -> Arc<Ruleset>,
    ) -> Result<(), ControlError> {
        let questions = self.questions().await?;
        // Where there may be more, nobody will tell of them again.
        if i64::try_from(questions.len()) == Ok(AT_ONCE) {
            self.traffic_asked.notify_one();
        }
        for (id, asked) in questions {
            let (sample, control, rules) = (Arc::clone(sample), Arc::clone(self), acting());
            let writing = move || {
                let wildcards = Wildcards::new(asked.wildcards.iter().map(String::as_str));
                let mut hiding = Hiding::new(&control.hasher, &rules, wildcards);
                let now = control.clock.now();
                encoding::write(sample.remembered(), now, &mut hiding, asked.bytes, asked.requests)
            };
            let body = tokio::task::spawn_blocking(writing).await;
            let body = body.map_err(|error| ControlError::Broken(error.to_string()))?;
            self.answer(&id, body).await?;
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
    async fn questions(&self) -> Result<Vec<(String, Question)>, ControlError> {
        let sql = self.db.dialect(QUESTIONS);
        let rows: Vec<(String, i64, i64, String)> = on!(&self.db, pool => {
            sqlx::query_as(sql).bind(&self.instance).bind(OLD).bind(AT_ONCE).fetch_all(pool).await?
        });
        let number = |number: i64| usize::try_from(number).unwrap_or(0);
        let question = |(id, bytes, requests, wildcards): (String, i64, i64, String)| {
            let wildcards: Vec<String> = serde_json::from_str(&wildcards).unwrap_or_default();
            let wildcards = bounded(wildcards.into_iter());
            (id, Question { bytes: number(bytes).min(BYTES), requests: number(requests), wildcards })
        };
        Ok(rows.into_iter().map(question).collect())
    }

    async fn answer(&self, id: &str, body: String) -> Result<(), ControlError> {
        let sql = self.db.dialect(TELL);
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(id).bind(&self.instance).bind(body).execute(pool).await?;
        });
        Ok(())
    }
}
