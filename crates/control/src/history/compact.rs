//! Compacts old history: minutes of all nodes become steps of ten minutes, and steps past the retention are deleted.
//!
//! Any node does this, one at a time and a bounded part each time, so that other writers never wait long. A node that
//! finds another one at it leaves.

use super::{COARSE, FRESH, MAX_CALLERS, MINUTE};
use crate::control_plane::ControlPlane;
use crate::db::Db;
use crate::error::ControlError;

/// Steps of ten minutes that one call compacts at most.
const MAX_STEPS: usize = 12;
/// Rows that one call deletes at most.
const BATCH: i64 = 20_000;
/// Advisory lock id in PostgreSQL.
const LOCK: i64 = 0x746f_6c6c_6869_7374;
/// How long a name is kept after its last row, in seconds.
const NAME_SLACK: i64 = 2 * 86_400;

const OLDEST: &str = "SELECT MIN(at) FROM history WHERE step = $1";
const SUM: &str =
    "INSERT INTO history (rule, caller, step, at, node, allow, deny, shadow_deny, fail_open, delayed, \
         unmatched, p50_us, p99_us, p999_us)
     SELECT rule, caller, $1, $2, '', CAST(SUM(allow) AS BIGINT), CAST(SUM(deny) AS BIGINT), \
         CAST(SUM(shadow_deny) AS BIGINT), CAST(SUM(fail_open) AS BIGINT), CAST(SUM(delayed) AS BIGINT), \
         CAST(SUM(unmatched) AS BIGINT), MAX(p50_us), MAX(p99_us), MAX(p999_us)
     FROM history WHERE step = $3 AND at >= $2 AND at < $2 + $1 GROUP BY rule, caller
     ON CONFLICT (rule, caller, step, at, node) DO UPDATE SET allow = history.allow + excluded.allow, \
         deny = history.deny + excluded.deny, shadow_deny = history.shadow_deny + excluded.shadow_deny, \
         fail_open = history.fail_open + excluded.fail_open, delayed = history.delayed + excluded.delayed, \
         unmatched = history.unmatched + excluded.unmatched";
const DELETE_SUMMED: &str = "DELETE FROM history WHERE step = $1 AND at >= $2 AND at < $3";
/// Of each step the callers with the most requests stay, and as many pairs of caller and rule.
const TRIM: [&str; 2] = [
    "DELETE FROM history WHERE step = $1 AND at = $2 AND caller <> 0 AND rule = 0 AND caller NOT IN
     (SELECT caller FROM history WHERE step = $1 AND at = $2 AND caller <> 0 AND rule = 0
      ORDER BY allow + deny DESC, caller LIMIT $3)",
    "DELETE FROM history WHERE step = $1 AND at = $2 AND caller <> 0 AND rule <> 0 AND (rule, caller) NOT IN
     (SELECT rule, caller FROM history WHERE step = $1 AND at = $2 AND caller <> 0 AND rule <> 0
      ORDER BY deny DESC, rule, caller LIMIT $3)",
];
const EXPIRE: &str = "DELETE FROM history WHERE (rule, caller, step, at, node) IN
     (SELECT rule, caller, step, at, node FROM history WHERE step = $1 AND at < $2 LIMIT $3)";
const FORGET: &str = "DELETE FROM history_names WHERE seen_at < $1";

/// The body for both databases.
macro_rules! compact {
    ($tx:ident, $now:ident, $keep:ident) => {{
        let mut rows = 0;
        for _ in 0..MAX_STEPS {
            let (oldest,): (Option<i64>,) = sqlx::query_as(OLDEST).bind(MINUTE).fetch_one(&mut *$tx).await?;
            let Some(oldest) = oldest else { break };
            let from = oldest - oldest.rem_euclid(COARSE);
            if from + COARSE > $now - FRESH {
                break;
            }
            sqlx::query(SUM).bind(COARSE).bind(from).bind(MINUTE).execute(&mut *$tx).await?;
            let summed = sqlx::query(DELETE_SUMMED)
                .bind(MINUTE)
                .bind(from)
                .bind(from + COARSE)
                .execute(&mut *$tx)
                .await?;
            rows += summed.rows_affected();
            for trim in TRIM {
                let most = i64::try_from(MAX_CALLERS).unwrap_or(i64::MAX);
                sqlx::query(trim).bind(COARSE).bind(from).bind(most).execute(&mut *$tx).await?;
            }
        }
        for step in [MINUTE, COARSE] {
            let expired =
                sqlx::query(EXPIRE).bind(step).bind($now - $keep).bind(BATCH).execute(&mut *$tx).await?;
            rows += expired.rows_affected();
        }
        sqlx::query(FORGET).bind($now - $keep - NAME_SLACK).execute(&mut *$tx).await?;
        $tx.commit().await?;
        rows
    }};
}

impl ControlPlane {
    /// Compacts and expires history that is older than `days`, and returns the number of rows summed or deleted; a
    /// caller that gets many may call again soon.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
    pub async fn compact_history(&self, days: u32) -> Result<u64, ControlError> {
        let (now, keep) = (self.now_seconds(), i64::from(days) * 86_400);
        Ok(match &self.db {
            Db::Sqlite { write: pool, .. } => {
                let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
                compact!(tx, now, keep)
            }
            Db::Postgres(pool) => {
                let mut tx = pool.begin().await?;
                let lock = sqlx::query_as("SELECT pg_try_advisory_xact_lock($1)").bind(LOCK);
                let (is_free,): (bool,) = lock.fetch_one(&mut *tx).await?;
                if !is_free {
                    return Ok(0);
                }
                compact!(tx, now, keep)
            }
        })
    }
}
