//! Shares signals between nodes: what one node is told bears on all, through the records in Redis, or in the database if counters
//! are in memory.
//!
//! Nothing is exchanged while no active rule adapts limits. Without the store each node follows the signals that it receives
//! itself.

use super::shared_values::{MAX_BYTES, Values};
use crate::server::store::Store;
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::{RecordName, RecordStore, StoreError, TimeDelta};
use tollgate_engine::Limiter;

/// Name of the record.
const RECORD: RecordName = RecordName(*b"tollgate/signals");
/// Bounds of the time between two exchanges: a quarter of the shortest step, so that no step misses a value.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(2);
/// How long a record is kept beyond its last value.
const KEPT: TimeDelta = TimeDelta::from_secs(60);

/// Exchanges signals with the other nodes.
pub(super) struct Sharing {
    limiter: Arc<Limiter<Store>>,
    records: Arc<dyn RecordStore>,
    /// What this node has reported and still counts.
    own: Values,
    /// What this node has read before.
    seen: Values,
    is_unavailable: bool,
}

impl Sharing {
    pub(super) fn new(limiter: Arc<Limiter<Store>>, records: Arc<dyn RecordStore>) -> Self {
        Self { limiter, records, own: Values::default(), seen: Values::default(), is_unavailable: false }
    }

    pub(super) async fn run(mut self) {
        loop {
            let step = self.limiter.shortest_adapt_step();
            if step.is_some() {
                let exchanged = self.exchange().await;
                self.log(exchanged.err());
            }
            let pause = step.map_or(LONGEST, |step| Duration::from(step) / 4);
            tokio::time::sleep(pause.clamp(SHORTEST, LONGEST)).await;
        }
    }

    /// Reads what others have reported, and writes what they do not know.
    async fn exchange(&mut self) -> Result<(), StoreError> {
        let read = self.records.exchange(RECORD, None, None).await?;
        let now = read.at;
        for signal in self.limiter.take_own_signals() {
            self.own.add(signal, now);
        }
        self.own.expire(now);
        let mut values = read.record.as_deref().map(Values::read).unwrap_or_default();
        values.expire(now);
        self.limiter.record_shared_signals(&values.signals(&self.own, &self.seen));
        self.seen = values.clone();
        if !values.merge(&self.own) {
            return Ok(());
        }
        let bytes = values.write();
        if bytes.len() > MAX_BYTES {
            tracing::warn!(bytes = bytes.len(), "signals not shared: too many bytes");
            return Ok(());
        }
        // If another node was faster, the next exchange tries again.
        let life = (values.last() + KEPT).since(now);
        self.records.exchange(RECORD, read.record.as_deref(), Some((&bytes, life))).await.map(|_| ())
    }

    fn log(&mut self, error: Option<StoreError>) {
        let was_unavailable = std::mem::replace(&mut self.is_unavailable, error.is_some());
        match error {
            Some(error) if !was_unavailable => {
                tracing::warn!(%error, "signals are not shared with other nodes");
            }
            None if was_unavailable => tracing::info!("signals are shared with other nodes again"),
            _ => {}
        }
    }
}
