//! Writes consumption: the rows of this process in one transaction, and old hours added up by month.
//!
//! Every writer first takes the next number of `consumption_head`. That serializes them, so numbers become visible in
//! order, and a reader that has seen one has seen all before it.

use crate::billing::ledger::PendingRow;
use crate::billing::row::Granularity;
use crate::control_plane::ControlPlane;
use crate::db::deadline::with_timeout;
use crate::db::on;
use crate::error::ControlError;
use sqlx::{AssertSqlSafe, PgConnection, SqliteConnection};
use std::sync::LazyLock;
use std::time::Duration;

/// Timeout of one transaction.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Rows per SQLite statement.
const ROWS_PER_STATEMENT: usize = 100;

const ADVANCE: &str = "UPDATE consumption_head SET change = change + 1 WHERE id = 1 RETURNING change";

const INTO: &str = "INSERT INTO consumption (hour, caller, caller_key, domain, rule, meter, part, caller_text, units, \
     requests, seq, instance, change)";

/// An earlier write that arrives late changes nothing.
const REPLACING: &str = " ON CONFLICT (hour, caller, caller_key, domain, rule, meter, instance, part) DO UPDATE SET \
     units = excluded.units, requests = excluded.requests, seq = excluded.seq, change = excluded.change \
     WHERE consumption.seq < excluded.seq";

const ROLL_UP: &str = "INSERT INTO consumption_months \
     (month, caller, caller_key, domain, rule, meter, caller_text, units, requests, change) \
     SELECT CAST($1 AS BIGINT), caller, caller_key, domain, rule, meter, MAX(caller_text), CAST(SUM(units) AS BIGINT), \
     CAST(SUM(requests) AS BIGINT), MAX(change) FROM consumption WHERE hour = $2 \
     GROUP BY caller, caller_key, domain, rule, meter \
     ON CONFLICT (month, caller, caller_key, domain, rule, meter) DO UPDATE SET \
     units = consumption_months.units + excluded.units, requests = consumption_months.requests + excluded.requests, \
     caller_text = excluded.caller_text, change = CASE WHEN consumption_months.change > excluded.change \
     THEN consumption_months.change ELSE excluded.change END";

/// Runs a body in a transaction with a number of its own.
macro_rules! changing {
    ($db:expr, |$tx:ident, $change:ident| $body:block) => {
        match $db {
            $crate::db::Db::Sqlite { write: pool, .. } => {
                let mut $tx = $crate::db::transaction::begin!(sqlite, pool);
                let ($change,): (i64,) = sqlx::query_as(ADVANCE).fetch_one(&mut *$tx).await?;
                let done = $body;
                $tx.commit().await?;
                done
            }
            $crate::db::Db::Postgres(pool) => {
                let mut $tx = $crate::db::transaction::begin!(postgres, pool);
                let ($change,): (i64,) = sqlx::query_as(ADVANCE).fetch_one(&mut *$tx).await?;
                let done = $body;
                $tx.commit().await?;
                done
            }
        }
    };
}

impl ControlPlane {
    /// Writes rows of this process. They are on disk when this returns.
    pub(crate) async fn write_consumption(&self, rows: &[PendingRow]) -> Result<(), ControlError> {
        if self.is_restored() {
            return Err(ControlError::Unavailable(sqlx::Error::PoolTimedOut));
        }
        with_timeout(WRITE_TIMEOUT, async {
            changing!(&self.db, |tx, change| {
                tx.write_many(rows, &self.instance, change).await?;
            });
            Ok(())
        })
        .await
    }

    /// Adds the hours before `hours` up by month, and deletes them; deletes the months before `months`. Returns the
    /// number of rows deleted.
    pub(crate) async fn purge_consumption(&self, hours: i64, months: i64) -> Result<u64, ControlError> {
        let mut deleted = 0;
        loop {
            let (oldest,): (Option<i64>,) = on!(&self.db, pool => {
                sqlx::query_as("SELECT MIN(hour) FROM consumption").fetch_one(pool).await?
            });
            let Some(hour) = oldest.filter(|hour| *hour < hours) else { break };
            // One hour a transaction: others must not wait long.
            deleted += changing!(&self.db, |tx, _change| {
                let month = Granularity::Month.start(hour);
                sqlx::query(ROLL_UP).bind(month).bind(hour).execute(&mut *tx).await?;
                let delete = "DELETE FROM consumption WHERE hour = $1";
                sqlx::query(delete).bind(hour).execute(&mut *tx).await?.rows_affected()
            });
        }
        deleted += on!(&self.db, write pool => {
            let delete = "DELETE FROM consumption_months WHERE month < $1";
            sqlx::query(delete).bind(Granularity::Month.start(months)).execute(pool).await?.rows_affected()
        });
        Ok(deleted)
    }
}

/// Bulk write for each database: few statements, with constant text.
trait BulkWrite {
    async fn write_many(
        &mut self,
        rows: &[PendingRow],
        instance: &str,
        change: i64,
    ) -> Result<(), sqlx::Error>;
}

/// Returns a SQLite statement for this many rows.
fn sqlite(rows: usize) -> String {
    format!("{INTO} VALUES {}{REPLACING}", vec!["(?,?,?,?,?,?,?,?,?,?,?,?,?)"; rows].join(","))
}

static SQLITE_MANY: LazyLock<String> = LazyLock::new(|| sqlite(ROWS_PER_STATEMENT));
static SQLITE_ONE: LazyLock<String> = LazyLock::new(|| sqlite(1));
static POSTGRES: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{INTO} SELECT *, $12::text, $13::bigint FROM UNNEST($1::bigint[], $2::bytea[], $3::text[], $4::text[], \
         $5::text[], $6::text[], $7::bigint[], $8::text[], $9::bigint[], $10::bigint[], $11::bigint[]){REPLACING}"
    )
});

impl BulkWrite for SqliteConnection {
    async fn write_many(
        &mut self,
        rows: &[PendingRow],
        instance: &str,
        change: i64,
    ) -> Result<(), sqlx::Error> {
        let (many, rest) = rows.as_chunks::<ROWS_PER_STATEMENT>();
        let many = many.iter().map(|rows| (SQLITE_MANY.as_str(), &rows[..]));
        for (text, rows) in many.chain(rest.chunks(1).map(|row| (SQLITE_ONE.as_str(), row))) {
            let mut query = sqlx::query(AssertSqlSafe(text));
            for row in rows {
                query = query
                    .bind(row.hour)
                    .bind(&row.caller.0[..])
                    .bind(row.caller_key.as_str())
                    .bind(row.domain.as_str())
                    .bind(row.rule.as_str())
                    .bind(row.meter.as_str())
                    .bind(row.part)
                    .bind(row.caller_text.as_str())
                    .bind(row.units)
                    .bind(row.requests)
                    .bind(row.seq)
                    .bind(instance)
                    .bind(change);
            }
            query.execute(&mut *self).await?;
        }
        Ok(())
    }
}

impl BulkWrite for PgConnection {
    async fn write_many(
        &mut self,
        rows: &[PendingRow],
        instance: &str,
        change: i64,
    ) -> Result<(), sqlx::Error> {
        fn column<'a, T>(rows: &'a [PendingRow], field: impl Fn(&'a PendingRow) -> T) -> Vec<T> {
            rows.iter().map(field).collect()
        }
        sqlx::query(AssertSqlSafe(POSTGRES.as_str()))
            .bind(column(rows, |row| row.hour))
            .bind(column(rows, |row| &row.caller.0[..]))
            .bind(column(rows, |row| row.caller_key.as_str()))
            .bind(column(rows, |row| row.domain.as_str()))
            .bind(column(rows, |row| row.rule.as_str()))
            .bind(column(rows, |row| row.meter.as_str()))
            .bind(column(rows, |row| row.part))
            .bind(column(rows, |row| row.caller_text.as_str()))
            .bind(column(rows, |row| row.units))
            .bind(column(rows, |row| row.requests))
            .bind(column(rows, |row| row.seq))
            .bind(instance)
            .bind(change)
            .execute(self)
            .await?;
        Ok(())
    }
}
