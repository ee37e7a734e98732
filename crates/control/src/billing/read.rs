//! Reads consumption, page by page, in the order of period and caller.

use crate::billing::row::{ConsumptionCursor, ConsumptionRow, Granularity, SumRow, from_sum};
use crate::control_plane::ControlPlane;
use crate::db::deadline::with_read_timeout;
use crate::db::on;
use crate::error::ControlError;
use serde::Serialize;
use tollgate_replica::{CallerRef, KeyHash};
use utoipa::ToSchema;

/// Maximum number of rows per page.
pub(crate) const MAX_PAGE: usize = 1_000;

/// The columns of a sum over processes.
macro_rules! sums {
    () => {
        "caller, caller_key, domain, rule, meter, MAX(caller_text), CAST(SUM(units) AS BIGINT), \
         CAST(SUM(requests) AS BIGINT), MAX(change)"
    };
}
pub(crate) use sums;

const HOURS: &str = concat!(
    "SELECT hour, ",
    sums!(),
    " FROM consumption WHERE hour >= $1 AND hour < $2 AND caller >= $3 AND caller <= $4 AND ($5 = '' OR rule = $5) \
     AND ($6 = '' OR domain = $6) \
     AND (hour, caller, caller_key, domain, rule, meter) > ($7, $8, $9, $10, $11, $12) \
     GROUP BY hour, caller, caller_key, domain, rule, meter \
     ORDER BY hour, caller, caller_key, domain, rule, meter LIMIT $13"
);

/// One month: the hours that are still kept, and the sum of those that are not.
const MONTH: &str = concat!(
    "SELECT ",
    sums!(),
    " FROM (SELECT caller, caller_key, domain, rule, meter, caller_text, units, requests, change \
     FROM consumption WHERE hour >= $1 AND hour < $2 UNION ALL \
     SELECT caller, caller_key, domain, rule, meter, caller_text, units, requests, change \
     FROM consumption_months WHERE month = $1) AS parts \
     WHERE caller >= $3 AND caller <= $4 AND ($5 = '' OR rule = $5) AND ($6 = '' OR domain = $6) \
     AND (caller, caller_key, domain, rule, meter) > ($7, $8, $9, $10, $11) \
     GROUP BY caller, caller_key, domain, rule, meter ORDER BY caller, caller_key, domain, rule, meter LIMIT $12"
);

/// A sum with its hour.
pub(crate) type HourRow = (i64, Vec<u8>, String, String, String, String, String, i64, i64, i64);

/// Rows and their positions.
pub(crate) type Positioned = Vec<(ConsumptionRow, ConsumptionCursor)>;

/// Selects the consumption to read.
#[derive(Clone, Debug, Default)]
pub struct ConsumptionFilter {
    /// Length of the periods.
    pub granularity: Granularity,
    /// Periods that begin at this time or later, in seconds.
    pub from: i64,
    /// Periods that begin before this time, in seconds.
    pub to: i64,
    /// Only this caller.
    pub caller: Option<KeyHash>,
    /// Only rules with this name.
    pub rule: Option<String>,
    /// Only rules of this domain.
    pub domain: Option<String>,
    /// Only rows after the last one of the previous page.
    pub after: Option<ConsumptionCursor>,
    /// Maximum number of rows, up to 1,000.
    pub limit: usize,
}

/// A page of consumption.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ConsumptionPage {
    /// The rows.
    pub rows: Vec<ConsumptionRow>,
    /// Cursor of the next page; `null` on the last one.
    #[schema(required = true)]
    pub next_cursor: Option<String>,
}

impl ControlPlane {
    /// Returns the keyed hash of a caller's value, or the one that was given.
    #[must_use]
    pub fn caller_hash(&self, caller: CallerRef<'_>) -> KeyHash {
        self.hasher.hash_caller(caller)
    }

    /// Returns a page of consumption.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn consumption(&self, filter: &ConsumptionFilter) -> Result<ConsumptionPage, ControlError> {
        let limit = filter.limit.clamp(1, MAX_PAGE);
        let rows = with_read_timeout(async {
            match filter.granularity {
                Granularity::Hour => self.consumption_hours(filter, limit).await,
                Granularity::Month => self.consumption_months(filter, limit).await,
            }
        })
        .await?;
        let next = rows.last().filter(|_| rows.len() == limit).map(|(_, position)| position.to_string());
        let rows = rows.into_iter().map(|(row, _)| row).collect();
        Ok(ConsumptionPage { rows, next_cursor: next })
    }

    pub(crate) async fn consumption_hours(
        &self,
        filter: &ConsumptionFilter,
        limit: usize,
    ) -> Result<Positioned, ControlError> {
        let after = filter.after.clone().unwrap_or_else(|| ConsumptionCursor::before(filter.from));
        let (first, last) = callers(filter);
        let rows: Vec<HourRow> = on!(&self.db, pool => {
            sqlx::query_as(HOURS)
                .bind(filter.from)
                .bind(filter.to)
                .bind(first)
                .bind(last)
                .bind(filter.rule.clone().unwrap_or_default())
                .bind(filter.domain.clone().unwrap_or_default())
                .bind(after.start)
                .bind(after.caller)
                .bind(after.key)
                .bind(after.domain)
                .bind(after.rule)
                .bind(after.meter)
                .bind(i64::try_from(limit).unwrap_or(i64::MAX))
                .fetch_all(pool)
                .await?
        });
        self.positioned(rows)
    }

    /// Returns rows of hours with their positions.
    pub(crate) fn positioned(&self, rows: Vec<HourRow>) -> Result<Positioned, ControlError> {
        let now = self.now_seconds();
        let rows = rows.into_iter().map(|row| {
            let (hour, caller, key, domain, rule, meter, text, units, requests, change) = row;
            let sum: SumRow = (caller, key, domain, rule, meter, text, units, requests, change);
            from_sum(Granularity::Hour, hour, sum, now)
        });
        rows.collect()
    }

    async fn consumption_months(
        &self,
        filter: &ConsumptionFilter,
        limit: usize,
    ) -> Result<Positioned, ControlError> {
        let now = self.now_seconds();
        let mut found = Positioned::new();
        let first = Granularity::Month.start(filter.from);
        let start = if first < filter.from { Granularity::Month.next(first) } else { first };
        // Neither before the first month that could have rows, nor after the current one.
        let oldest = self.oldest_month().await?.unwrap_or(i64::MAX);
        let begin = ConsumptionCursor::before(start.max(oldest));
        let mut after = filter.after.clone().filter(|after| after.start >= begin.start).unwrap_or(begin);
        while after.start < filter.to.min(now.saturating_add(1)) && found.len() < limit {
            let month = Granularity::Month.start(after.start);
            let next = Granularity::Month.next(month);
            let (first, last) = callers(filter);
            let rows: Vec<SumRow> = on!(&self.db, pool => {
                sqlx::query_as(MONTH)
                    .bind(month)
                    .bind(next)
                    .bind(first)
                    .bind(last)
                    .bind(filter.rule.clone().unwrap_or_default())
                    .bind(filter.domain.clone().unwrap_or_default())
                    .bind(after.caller)
                    .bind(after.key)
                    .bind(after.domain)
                    .bind(after.rule)
                    .bind(after.meter)
                    .bind(i64::try_from(limit - found.len()).unwrap_or(i64::MAX))
                    .fetch_all(pool)
                    .await?
            });
            for row in rows {
                found.push(from_sum(Granularity::Month, month, row, now)?);
            }
            after = ConsumptionCursor::before(next);
        }
        Ok(found)
    }

    async fn oldest_month(&self) -> Result<Option<i64>, ControlError> {
        let text = "SELECT MIN(first) FROM (SELECT MIN(hour) AS first FROM consumption UNION ALL \
                    SELECT MIN(month) AS first FROM consumption_months) AS both_tables";
        let (oldest,): (Option<i64>,) = on!(&self.db, pool => sqlx::query_as(text).fetch_one(pool).await?);
        Ok(oldest.map(|first| Granularity::Month.start(first)))
    }
}

/// Returns the first and the last caller that are wanted.
fn callers(filter: &ConsumptionFilter) -> (Vec<u8>, Vec<u8>) {
    match filter.caller {
        Some(KeyHash(caller)) => (caller.to_vec(), caller.to_vec()),
        None => (vec![0; 32], vec![0xff; 32]),
    }
}
