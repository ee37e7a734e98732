//! Delivery of consumption to a webhook: what is sent next, and which node sends.
//!
//! Rows are sent once their hour has ended and every node has had time to write; a row that changes afterwards is sent
//! again. One round sends the corrections of hours that were sent before, and then the hours that have ended since. How
//! far it is stands in the database, so that another process goes on where one stopped. A page counts as sent only when
//! the receiver has accepted it: pages may be repeated, never skipped.
//!
//! One node sends at a time: the holder of a lease in the same row, by the database's clock.

use crate::billing::read::{ConsumptionFilter, HourRow, Positioned, sums};
use crate::billing::row::{ConsumptionCursor, ConsumptionRow, Granularity, HOUR};
use crate::control_plane::ControlPlane;
use crate::db::deadline::with_read_timeout;
use crate::db::{at_now, on};
use crate::error::ControlError;

/// Time after the end of an hour until it is sent, in seconds.
const GRACE: i64 = 60;
/// Maximum time for which a node that no longer sends keeps others from sending, in milliseconds.
const LEASE_MS: i64 = 60_000;
/// Rows per delivery.
const ROWS: usize = 500;

const NOW: [&str; 2] = at_now!("SELECT ", "");

const TAKE_LEASE: &str = "UPDATE consumption_head SET holder = $1, held_until = $2 WHERE id = 1 \
     AND (holder = $1 OR held_until < $3)";

const STATE: &str = "SELECT change, sent_hour, sent_change, round_hour, round_change, round_after \
     FROM consumption_head WHERE id = 1";

const CORRECTIONS: &str = concat!(
    "SELECT hour, ",
    sums!(),
    " FROM consumption WHERE (hour, caller, caller_key, domain, rule, meter) IN \
     (SELECT DISTINCT hour, caller, caller_key, domain, rule, meter FROM consumption \
     WHERE change > $1 AND hour <= $2 \
     AND (hour, caller, caller_key, domain, rule, meter) > ($3, $4, $5, $6, $7, $8) \
     ORDER BY hour, caller, caller_key, domain, rule, meter LIMIT $9) \
     GROUP BY hour, caller, caller_key, domain, rule, meter \
     ORDER BY hour, caller, caller_key, domain, rule, meter"
);

const ADVANCE_ROUND: &str = "UPDATE consumption_head SET round_hour = $2, round_change = $3, round_after = $4 \
     WHERE id = 1 AND holder = $1";

const END_ROUND: &str = "UPDATE consumption_head SET sent_hour = $2, sent_change = $3, round_hour = NULL, \
     round_change = NULL, round_after = '' WHERE id = 1 AND holder = $1";

/// Rows to send to the webhook.
#[derive(Debug)]
pub struct Delivery {
    /// The rows.
    pub rows: Vec<ConsumptionRow>,
    round: Round,
    /// Position of the last row; `None` if the round ends with it.
    after: Option<ConsumptionCursor>,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    /// Last hour of the round, and the last change before it began.
    hour: i64,
    change: i64,
}

impl ControlPlane {
    /// Returns the rows to send next; `None` if there are none, or another node sends.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn next_delivery(&self) -> Result<Option<Delivery>, ControlError> {
        with_read_timeout(async {
            if !self.take_delivery_lease().await? {
                return Ok(None);
            }
            type State = (i64, i64, i64, Option<i64>, Option<i64>, String);
            let (change, sent_hour, sent_change, round_hour, round_change, after): State =
                on!(&self.db, write pool => sqlx::query_as(STATE).fetch_one(pool).await?);
            let ended = Granularity::Hour.start(self.now_seconds() - HOUR - GRACE).max(sent_hour);
            let (round, after) = match (round_hour, round_change) {
                (Some(hour), Some(change)) => (Round { hour, change }, ConsumptionCursor::parse(&after)),
                _ => (Round { hour: ended, change }, None),
            };
            let mut rows = self.corrections(sent_hour, sent_change, after.as_ref()).await?;
            if rows.len() < ROWS {
                let new = ConsumptionFilter {
                    from: sent_hour + 1,
                    to: round.hour + 1,
                    after: after.filter(|after| after.start > sent_hour),
                    ..ConsumptionFilter::default()
                };
                rows.extend(self.consumption_hours(&new, ROWS - rows.len()).await?);
            }
            let after = rows.last().filter(|_| rows.len() >= ROWS).map(|(_, position)| position.clone());
            let delivery = Delivery { rows: rows.into_iter().map(|(row, _)| row).collect(), round, after };
            if !delivery.rows.is_empty() {
                return Ok(Some(delivery));
            }
            // Without rows only a new hour is worth a write.
            if round.hour > sent_hour || round_hour.is_some() {
                self.record_delivered(&delivery).await?;
            }
            Ok(None)
        })
        .await
    }

    /// Records that the receiver has accepted a delivery. If another node sends by now, nothing is recorded, and the
    /// rows are sent again.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable; the rows are sent again.
    pub async fn record_delivered(&self, delivery: &Delivery) -> Result<(), ControlError> {
        let Round { hour, change } = delivery.round;
        let instance = self.instance.clone();
        on!(&self.db, write pool => match &delivery.after {
            Some(after) => {
                let text = after.to_string();
                sqlx::query(ADVANCE_ROUND).bind(instance).bind(hour).bind(change).bind(text).execute(pool).await?;
            }
            None => {
                sqlx::query(END_ROUND).bind(instance).bind(hour).bind(change).execute(pool).await?;
            }
        });
        Ok(())
    }

    /// Lets another node send.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable; the lease then ends by itself.
    pub async fn release_delivery_lease(&self) -> Result<(), ControlError> {
        let text = "UPDATE consumption_head SET held_until = 0 WHERE id = 1 AND holder = $1";
        on!(&self.db, write pool => {
            sqlx::query(text).bind(self.instance.clone()).execute(pool).await?;
        });
        Ok(())
    }

    /// Returns the database's time, in seconds since the epoch.
    pub(crate) async fn database_seconds(&self) -> Result<i64, ControlError> {
        let text = self.db.dialect(NOW);
        let (now,): (i64,) = on!(&self.db, pool => sqlx::query_as(text).fetch_one(pool).await?);
        Ok(now / 1_000)
    }

    async fn take_delivery_lease(&self) -> Result<bool, ControlError> {
        let now = self.db.dialect(NOW);
        let taken = on!(&self.db, write pool => {
            let (now,): (i64,) = sqlx::query_as(now).fetch_one(pool).await?;
            let lease = sqlx::query(TAKE_LEASE).bind(self.instance.clone()).bind(now + LEASE_MS).bind(now);
            lease.execute(pool).await?.rows_affected()
        });
        Ok(taken > 0)
    }

    async fn corrections(
        &self,
        sent_hour: i64,
        sent_change: i64,
        after: Option<&ConsumptionCursor>,
    ) -> Result<Positioned, ControlError> {
        let after = after.cloned().unwrap_or_else(|| ConsumptionCursor::before(-1));
        if after.start > sent_hour {
            return Ok(Positioned::new());
        }
        let rows: Vec<HourRow> = on!(&self.db, pool => {
            sqlx::query_as(CORRECTIONS)
                .bind(sent_change)
                .bind(sent_hour)
                .bind(after.start)
                .bind(after.caller)
                .bind(after.key)
                .bind(after.domain)
                .bind(after.rule)
                .bind(after.meter)
                .bind(i64::try_from(ROWS).unwrap_or(i64::MAX))
                .fetch_all(pool)
                .await?
        });
        self.positioned(rows)
    }
}
