//! Small records that nodes share for a while, in the database: for nodes whose counters are not in a store that has records.
//!
//! Each exchange is one statement, so that the database itself compares and stores. Times are the database's own.

use crate::control_plane::ControlPlane;
use crate::db::deadline::with_timeout;
use crate::db::{at_now, on};
use crate::error::ControlError;
use std::time::Duration;
use tollgate_core::{Exchange, RecordFuture, RecordName, RecordStore, StoreError, TimeDelta, Timestamp};

/// Timeout of one statement.
const TIMEOUT: Duration = Duration::from_secs(5);

const NOW: [&str; 2] = at_now!("SELECT ", "");
const SELECT: [&str; 2] = at_now!("SELECT record FROM shared_records WHERE name = $1 AND expires_at > ", "");
/// A record that has expired is none.
const INSERT: [[&str; 2]; 2] = [
    at_now!("INSERT INTO shared_records (name, record, expires_at) VALUES ($1, $2, $3 + ", ")"),
    at_now!(
        " ON CONFLICT (name) DO UPDATE SET record = excluded.record, expires_at = excluded.expires_at \
         WHERE shared_records.expires_at <= ",
        ""
    ),
];
const UPDATE: [[&str; 2]; 2] = [
    at_now!("UPDATE shared_records SET record = $2, expires_at = $3 + ", " WHERE name = $1 AND record = $4"),
    at_now!(" AND expires_at > ", ""),
];

impl ControlPlane {
    fn both(&self, [first, second]: [[&'static str; 2]; 2]) -> String {
        format!("{}{}", self.db.dialect(first), self.db.dialect(second))
    }

    /// Stores a record if it is `expected`. Returns whether it was.
    async fn exchange_record(
        &self,
        name: RecordName,
        expected: Option<&[u8]>,
        record: &[u8],
        life: TimeDelta,
    ) -> Result<bool, ControlError> {
        let millis = i64::try_from(life.ceil_millis()).unwrap_or(i64::MAX / 2).max(1);
        let sql = self.both(if expected.is_some() { UPDATE } else { INSERT });
        let rows = on!(&self.db, write pool => {
            let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(&name.0[..]).bind(record).bind(millis);
            match expected {
                Some(expected) => query.bind(expected).execute(pool).await?.rows_affected(),
                None => query.execute(pool).await?.rows_affected(),
            }
        });
        Ok(rows > 0)
    }

    async fn read_record(&self, name: RecordName) -> Result<(Option<Vec<u8>>, Timestamp), ControlError> {
        let (record, now) = (self.db.dialect(SELECT), self.db.dialect(NOW));
        let (record, millis): (Option<(Vec<u8>,)>, (i64,)) = on!(&self.db, pool => (
            sqlx::query_as(record).bind(&name.0[..]).fetch_optional(pool).await?,
            sqlx::query_as(now).fetch_one(pool).await?,
        ));
        let at = Timestamp::from_micros(u64::try_from(millis.0).unwrap_or(0) * 1_000);
        Ok((record.map(|(record,)| record), at))
    }

    async fn delete_record(&self, name: RecordName) -> Result<(), ControlError> {
        on!(&self.db, write pool => {
            sqlx::query("DELETE FROM shared_records WHERE name = $1").bind(&name.0[..]).execute(pool).await?;
        });
        Ok(())
    }

    async fn within<T>(
        &self,
        operation: impl Future<Output = Result<T, ControlError>>,
    ) -> Result<T, StoreError> {
        if self.is_restored() {
            return Err(StoreError::Unavailable("the database has not been read yet".to_owned()));
        }
        let done = with_timeout(TIMEOUT, operation).await;
        done.map_err(|error| StoreError::Unavailable(error.to_string()))
    }
}

impl RecordStore for ControlPlane {
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange> {
        Box::pin(self.within(async move {
            let is_stored = match new {
                Some((record, life)) => self.exchange_record(name, expected, record, life).await?,
                None => false,
            };
            let (found, at) = self.read_record(name).await?;
            let record = if is_stored { expected.map(<[u8]>::to_vec) } else { found };
            Ok(Exchange { is_stored, record, at })
        }))
    }

    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()> {
        Box::pin(self.within(self.delete_record(name)))
    }
}
