//! The record of a cell's tenure in its store: read and extended once in a tick.

use super::RegionalStore;
use crate::members::{Kept, StoreClock, TenureRecord};
use crate::owner::Transport;
use tollgate_core::{Clock, CounterStore, RecordName, RecordStore, StoreError, TimeDelta};

/// Name of the record. Cells have one store each, so one name: that of another cell shows a store that two share.
const NAME: RecordName = RecordName(*b"tollgate tenure\0");
/// How long it is kept without being extended: longer than most limits remember.
const LIFE: TimeDelta = TimeDelta::from_secs(400 * 86_400);
/// For how many silence times another cell's record shows that this one is running.
const FRESH: u64 = 4;

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Shares with the nodes of this cell, and with processes to come, since when it knows what was counted. Returns the name of
    /// another cell that uses the same store, if there is one: then nothing is shared.
    ///
    /// # Errors
    /// The record store does not answer.
    pub async fn share_tenure(&self, records: &dyn RecordStore) -> Result<Option<String>, StoreError> {
        if !self.members.shares_tenure() {
            return Ok(None);
        }
        let sent = self.clock.now();
        let read = records.exchange(NAME, None, None).await?;
        let clock = StoreClock::new(sent, self.clock.now(), read.at);
        let config = self.members.config();
        let kept = TenureRecord::read(read.record.as_deref(), read.at);
        let (kept, other) = match kept {
            Kept::Record(other) if other.cell != config.cell => (Kept::Wrong, Some(other)),
            kept => (kept, None),
        };
        self.members.on_tenure(kept, clock, self.clock.now());
        let fresh = FRESH * config.silence.as_micros();
        if let Some(other) = other.filter(|other| read.at.since(other.until).as_micros() <= fresh) {
            return Ok(Some(other.cell));
        }
        if let Some(new) = self.members.tenure_to_write(clock, self.clock.now()) {
            // If another node has written meanwhile, the next call adds to that.
            let written = records.exchange(NAME, read.record.as_deref(), Some((&new.encode(), LIFE))).await?;
            if written.is_stored {
                self.members.on_tenure_written(&new);
            }
        }
        Ok(None)
    }
}
