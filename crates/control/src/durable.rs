//! Rows of durable counters: consumption that survives the counter store. Written each second by every node, read back after a
//! loss, deleted when it no longer counts.

use crate::control_plane::ControlPlane;
use crate::db::deadline::with_timeout;
use crate::db::{Db, on};
use crate::error::ControlError;
use ring::hmac;
use sqlx::AssertSqlSafe;
use std::sync::LazyLock;
use std::time::Duration;

/// Timeout of one statement.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Rows per SQLite statement.
const ROWS_PER_STATEMENT: usize = 100;
/// Slots per page.
const PAGE: i64 = 5_000;

const INTO: &str = "INSERT INTO durable_consumption \
     (counter, slot, part, units, reported, last_at, expires_at, seq, cell, instance)";

/// An earlier write that arrives late changes nothing.
const REPLACING: &str = " ON CONFLICT (counter, slot, cell, instance, part) DO UPDATE SET units = excluded.units, \
     reported = excluded.reported, last_at = excluded.last_at, expires_at = excluded.expires_at, seq = excluded.seq \
     WHERE durable_consumption.seq < excluded.seq";

const SELECT: &str = "SELECT counter, slot, MAX(last_at), \
     CAST(SUM(CASE WHEN cell = $1 THEN units ELSE 0 END) AS BIGINT), \
     CAST(SUM(CASE WHEN cell = $1 THEN reported ELSE 0 END) AS BIGINT), CAST(SUM(units) AS BIGINT) \
     FROM durable_consumption WHERE expires_at > $2 AND (counter, slot) > ($3, $4) \
     GROUP BY counter, slot ORDER BY counter, slot LIMIT $5";

/// Deletes a batch of rows that no longer count: no write waits for more than that.
const PURGE: [&str; 2] = [
    "DELETE FROM durable_consumption WHERE rowid IN \
     (SELECT rowid FROM durable_consumption WHERE expires_at < $1 LIMIT $2)",
    // Rows that another node deletes at the same time are left to it.
    "DELETE FROM durable_consumption WHERE ctid = ANY(ARRAY \
     (SELECT ctid FROM durable_consumption WHERE expires_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED))",
];

fn sqlite(rows: usize) -> String {
    format!("{INTO} VALUES {}{REPLACING}", vec!["(?,?,?,?,?,?,?,?,?,?)"; rows].join(","))
}

static SQLITE_MANY: LazyLock<String> = LazyLock::new(|| sqlite(ROWS_PER_STATEMENT));
static SQLITE_ONE: LazyLock<String> = LazyLock::new(|| sqlite(1));
static POSTGRES: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{INTO} SELECT *, $9::text, $10::text FROM UNNEST($1::bytea[], $2::bigint[], $3::bigint[], $4::bigint[], \
         $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[]){REPLACING}"
    )
});

/// What one process has counted of one counter in one slot of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableUnits {
    /// Keyed hash of the counter.
    pub counter: [u8; 16],
    /// Start of the slot, in microseconds.
    pub slot: i64,
    /// Distinguishes rows of one process about the same slot.
    pub part: i64,
    /// Units admitted.
    pub units: i64,
    /// Units that other cells have reported.
    pub reported: i64,
    /// Last use, in microseconds.
    pub last_at: i64,
    /// Time from which the row no longer counts, in seconds.
    pub expires_at: i64,
    /// Number of the last change.
    pub seq: i64,
}

/// What all processes have counted of one counter in one slot of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableTotal {
    /// Keyed hash of the counter.
    pub counter: [u8; 16],
    /// Start of the slot, in microseconds.
    pub slot: i64,
    /// Last use, in microseconds.
    pub last_at: i64,
    /// Units admitted by processes of the cell that reads.
    pub own: i64,
    /// Units that other cells have reported to them.
    pub reported: i64,
    /// Units admitted by all processes.
    pub all: i64,
}

impl ControlPlane {
    /// Returns a key for hashes of counters: the same on all nodes of this database.
    #[must_use]
    pub fn counter_hash_key(&self) -> [u8; 32] {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.secret);
        let tag = hmac::sign(&key, b"tollgate: durable counters");
        tag.as_ref().try_into().unwrap_or_default()
    }

    /// Returns the id of this process.
    #[must_use]
    pub fn instance_id(&self) -> &str {
        &self.instance
    }

    /// Writes rows of this process, which belongs to `cell`. A row with a smaller `seq` than the stored one is ignored.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn write_durable(&self, cell: &str, rows: &[DurableUnits]) -> Result<(), ControlError> {
        if self.is_restored() {
            return Err(ControlError::Unavailable(sqlx::Error::PoolTimedOut));
        }
        with_timeout(TIMEOUT, async {
            match &self.db {
                Db::Sqlite { write: pool, .. } => {
                    let mut tx = crate::db::transaction::begin!(sqlite, pool);
                    let (many, rest) = rows.as_chunks::<ROWS_PER_STATEMENT>();
                    let many = many.iter().map(|rows| (SQLITE_MANY.as_str(), &rows[..]));
                    for (text, rows) in many.chain(rest.chunks(1).map(|row| (SQLITE_ONE.as_str(), row))) {
                        let mut query = sqlx::query(AssertSqlSafe(text));
                        for row in rows {
                            query = query
                                .bind(&row.counter[..])
                                .bind(row.slot)
                                .bind(row.part)
                                .bind(row.units)
                                .bind(row.reported)
                                .bind(row.last_at)
                                .bind(row.expires_at)
                                .bind(row.seq)
                                .bind(cell)
                                .bind(self.instance.as_str());
                        }
                        query.execute(&mut *tx).await?;
                    }
                    tx.commit().await?;
                }
                Db::Postgres(pool) => {
                    let column =
                        |field: fn(&DurableUnits) -> i64| -> Vec<i64> { rows.iter().map(field).collect() };
                    sqlx::query(AssertSqlSafe(POSTGRES.as_str()))
                        .bind(rows.iter().map(|row| &row.counter[..]).collect::<Vec<_>>())
                        .bind(column(|row| row.slot))
                        .bind(column(|row| row.part))
                        .bind(column(|row| row.units))
                        .bind(column(|row| row.reported))
                        .bind(column(|row| row.last_at))
                        .bind(column(|row| row.expires_at))
                        .bind(column(|row| row.seq))
                        .bind(cell)
                        .bind(self.instance.as_str())
                        .execute(pool)
                        .await?;
                }
            }
            Ok(())
        })
        .await
    }

    /// Reads what still counts, for a process of `cell`: at most `limit` slots.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn read_durable(&self, cell: &str, limit: usize) -> Result<Vec<DurableTotal>, ControlError> {
        type Row = (Vec<u8>, i64, i64, i64, i64, i64);
        let (mut all, mut after) = (Vec::new(), (Vec::new(), i64::MIN));
        loop {
            let page: Vec<Row> = with_timeout(TIMEOUT, async {
                Ok(on!(&self.db, pool => {
                    sqlx::query_as(SELECT)
                        .bind(cell)
                        .bind(self.now_seconds())
                        .bind(&after.0)
                        .bind(after.1)
                        .bind(PAGE)
                        .fetch_all(pool)
                        .await?
                }))
            })
            .await?;
            let is_last = i64::try_from(page.len()).unwrap_or(PAGE) < PAGE;
            if let Some((counter, slot, ..)) = page.last() {
                after = (counter.clone(), *slot);
            }
            all.extend(page.into_iter().filter_map(|(counter, slot, last_at, own, reported, all)| {
                let counter = counter.try_into().ok()?;
                Some(DurableTotal { counter, slot, last_at, own, reported, all })
            }));
            if is_last || all.len() >= limit {
                all.truncate(limit);
                return Ok(all);
            }
        }
    }

    /// Deletes up to `limit` rows that no longer count, by the earlier of two clocks and an hour later: a node whose clock
    /// is ahead must not delete what others count. Returns the number of rows; less than `limit` if none is left, or
    /// another node is deleting them.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn purge_durable(&self, limit: u32) -> Result<u64, ControlError> {
        const MARGIN: i64 = 3_600;
        let now = self.now_seconds().min(self.database_seconds().await?) - MARGIN;
        let delete = self.db.dialect(PURGE);
        with_timeout(TIMEOUT, async {
            Ok(on!(&self.db, write pool => {
                let query = sqlx::query(delete).bind(now).bind(i64::from(limit));
                query.execute(pool).await?.rows_affected()
            }))
        })
        .await
    }
}
