//! Keeps the record of a cell's tenure, and says so if its store is another cell's too.

use super::LinkedStore;
use super::dial::duration;
use super::repeated::Repeated;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, RecordStore};

/// Ticks without an answer after which that is said.
const MISSED: u32 = 25;

/// Reads and extends the record of the cell's tenure in each tick, for as long as the process runs.
pub async fn run_tenure<S: CounterStore, C: Clock + Clone>(
    store: Arc<LinkedStore<S, C>>,
    records: Arc<dyn RecordStore>,
) {
    let mut interval = tokio::time::interval(duration(store.members().config().tick));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (log, failures) = (Repeated::default(), Repeated::default());
    let (mut missed, mut known_from) = (0_u32, None);
    loop {
        interval.tick().await;
        match store.share_tenure(&*records).await {
            Ok(Some(other)) => {
                let message = format!(
                    "the store of this cell is that of cell `{other}` too, so both count every request of both: give each region \
                     a Redis of its own"
                );
                if log.is_due(&message, store.now()) {
                    tracing::error!("{message}");
                }
                missed = 0;
            }
            Ok(None) => {
                if log.end() {
                    tracing::info!("no other cell uses this cell's store any more");
                }
                missed = 0;
            }
            // That the store is down is said where it is asked to charge.
            Err(_) if store.own().is_down() => {}
            Err(error) => {
                missed = missed.saturating_add(1);
                if missed >= MISSED && failures.is_due("missed", store.now()) {
                    tracing::warn!(
                        %error,
                        "the record of since when this cell knows its counters cannot be kept: whenever a node is replaced, \
                         `security` and `strict` limits that a hash gives this cell count as used up"
                    );
                }
            }
        }
        let now_known_from = store.members().known_from();
        if now_known_from > known_from {
            let seconds_ago =
                now_known_from.map_or(0, |from| store.now().since(from).as_micros() / 1_000_000);
            tracing::info!(
                seconds_ago,
                "counters that a hash gives this cell are known since then; those of `security` and `strict` limits count as \
                 used up before it"
            );
        }
        known_from = now_known_from.or(known_from);
    }
}
