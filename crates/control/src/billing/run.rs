//! Billing of a node: the meter, the ledger, and the background task that writes.

use crate::billing::ledger::{DisplayCaller, Ledger, MAX_ROWS};
use crate::billing::meter::{ThreadMeter, hour_of};
use crate::control_plane::ControlPlane;
use crate::error::ControlError;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tollgate_core::Clock;
use tollgate_engine::Meter;

/// Interval between writes. What a crash loses is this and the duration of a write: less than a second.
const INTERVAL: Duration = Duration::from_millis(500);
/// Rows per transaction.
const BATCH: usize = 2_000;
/// Interval between purges.
const PURGE_INTERVAL: Duration = Duration::from_secs(3_600);
/// Maximum time that shutdown waits for the last write.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
const DAY: i64 = 86_400;

/// How long consumption is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BillingRetention {
    /// Days for which hours are kept.
    pub hourly_days: u32,
    /// Days for which months are kept.
    pub monthly_days: u32,
}

impl Default for BillingRetention {
    fn default() -> Self {
        Self { hourly_days: 35, monthly_days: 400 }
    }
}

/// State of billing, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BillingStats {
    /// Rows that are not written yet.
    pub pending_rows: usize,
    /// Time since everything was written, in milliseconds; 0 if it is.
    pub behind_millis: i64,
    /// Writes that failed.
    pub failures: u64,
    /// Units that could not be attributed to a caller.
    pub unattributed_units: u64,
    /// Units that were dropped.
    pub dropped_units: u64,
}

/// Billing of a node.
pub struct Billing {
    control: Arc<ControlPlane>,
    meter: Arc<ThreadMeter>,
    ledger: Mutex<Ledger>,
    retention: BillingRetention,
    failures: AtomicU64,
    /// Time at which everything was written last, in milliseconds.
    written_at: AtomicI64,
    is_failing: AtomicBool,
}

impl Billing {
    /// Creates the billing of a node. `display` returns a caller for display, from its key and value.
    #[must_use]
    pub fn new(control: Arc<ControlPlane>, display: DisplayCaller, retention: BillingRetention) -> Arc<Self> {
        let ledger = Mutex::new(Ledger::new(control.hasher.clone(), display, MAX_ROWS));
        Arc::new(Self {
            meter: Arc::default(),
            ledger,
            retention,
            failures: AtomicU64::new(0),
            written_at: AtomicI64::new(control.now_millis()),
            is_failing: AtomicBool::new(false),
            control,
        })
    }

    /// Returns the meter, for the limiter.
    #[must_use]
    pub fn meter(&self) -> Arc<dyn Meter> {
        Arc::clone(&self.meter) as _
    }

    /// Returns the state, for metrics.
    #[must_use]
    pub fn stats(&self) -> BillingStats {
        let ledger = self.ledger();
        let behind = self.control.now_millis() - self.written_at.load(Ordering::Relaxed);
        BillingStats {
            pending_rows: ledger.unwritten(),
            behind_millis: if ledger.unwritten() == 0 { 0 } else { behind.max(0) },
            failures: self.failures.load(Ordering::Relaxed),
            unattributed_units: ledger.unattributed,
            dropped_units: ledger.dropped,
        }
    }

    /// Writes everything that has been counted.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable; what is not written stays in memory.
    pub async fn flush(&self) -> Result<(), ControlError> {
        let counted_at = self.control.now_millis();
        {
            let mut ledger = self.ledger();
            self.meter.drain(|entry| ledger.add(entry));
            let now = self.control.clock.now();
            // A day less than the database keeps: what it has added up by month must not be written again.
            let oldest = self.control.now_seconds() - (i64::from(self.retention.hourly_days) - 1) * DAY;
            ledger.forget(hour_of(now), oldest);
        }
        loop {
            let batch = self.ledger().pending(BATCH);
            if batch.is_empty() {
                break;
            }
            if let Err(error) = self.control.write_consumption(&batch).await {
                self.failures.fetch_add(1, Ordering::Relaxed);
                return Err(error);
            }
            self.ledger().record_written(&batch);
        }
        self.written_at.store(counted_at, Ordering::Relaxed);
        Ok(())
    }

    /// Adds hours that are no longer kept up by month, and deletes months that are no longer kept. Returns the number
    /// of rows deleted.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn purge(&self) -> Result<u64, ControlError> {
        // By the earlier of two clocks: a node whose clock is ahead must not delete what others bill by.
        let now = self.control.now_seconds().min(self.control.database_seconds().await?);
        let BillingRetention { hourly_days, monthly_days } = self.retention;
        let (hours, months) = (now - i64::from(hourly_days) * DAY, now - i64::from(monthly_days) * DAY);
        self.control.purge_consumption(hours, months).await
    }

    /// Writes twice a second until `end` completes, and then once more.
    pub async fn run(self: Arc<Self>, end: impl Future<Output = ()> + Send) {
        let writing = async {
            let mut end = pin!(end);
            while tokio::time::timeout(INTERVAL, &mut end).await.is_err() {
                self.flush_and_log().await;
            }
        };
        tokio::select! {
            () = writing => {}
            () = self.purge_periodically() => {}
        }
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.flush_and_log()).await.is_err() {
            tracing::warn!("the last consumption could not be written in time");
        }
        let BillingStats { pending_rows, .. } = self.stats();
        if pending_rows > 0 {
            tracing::warn!(pending_rows, "consumption is lost at shutdown; the database is unavailable");
        }
    }

    async fn flush_and_log(&self) {
        match self.flush().await {
            Ok(()) => {
                if self.is_failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("consumption is written again");
                }
            }
            Err(error) => {
                if !self.is_failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "cannot write consumption; it is kept in memory");
                }
            }
        }
    }

    /// Every node purges; that is harmless, whatever its clock says.
    async fn purge_periodically(&self) {
        loop {
            match self.purge().await {
                Ok(0) => {}
                Ok(rows) => tracing::info!(rows, "old consumption purged"),
                Err(error) => tracing::debug!(%error, "purging old consumption failed"),
            }
            tokio::time::sleep(PURGE_INTERVAL).await;
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Billing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Billing").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
