//! Keeps the record of a cell's tenure, and says so if its store is another cell's too.

use super::LinkedStore;
use super::dial::duration;
use super::repeated::Repeated;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, RecordStore};

/// Reads and extends the record of the cell's tenure in each tick, for as long as the process runs.
pub async fn run_tenure<S: CounterStore, C: Clock + Clone>(
    store: Arc<LinkedStore<S, C>>,
    records: Arc<dyn RecordStore>,
) {
    let mut interval = tokio::time::interval(duration(store.members().config().tick));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let log = Repeated::default();
    loop {
        interval.tick().await;
        // That a store does not answer is said where it is asked to charge.
        match store.share_tenure(&*records).await {
            Ok(Some(other)) => {
                let message = format!(
                    "the store of this cell is that of cell `{other}` too, so both count every request of both: give each region \
                     a Redis of its own"
                );
                if log.is_due(&message, store.now()) {
                    tracing::error!("{message}");
                }
            }
            Ok(None) if log.end() => tracing::info!("no other cell uses this cell's store any more"),
            _ => {}
        }
    }
}
