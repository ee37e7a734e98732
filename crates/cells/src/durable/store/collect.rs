//! Moves consumption from the ledgers into the rows of this process.

use super::Durable;
use crate::durable::slots::slot_of;
use crate::ledger::Consumed;
use tollgate_core::{Clock, CounterKey};

impl<C: Clock> Durable<C> {
    /// Moves what was consumed since the last call into the rows of this process.
    pub fn collect(&self) {
        let now = self.clock.now();
        let (taken, reported) = (self.taken.drain(), self.reported.drain());
        let mut kept = self.kept();
        let all = taken.iter().map(|consumed| (consumed, (consumed.units, 0)));
        for (consumed, units) in all.chain(reported.iter().map(|consumed| (consumed, (0, consumed.units)))) {
            let Consumed { counter, values, .. } = consumed;
            let parts = values.parts();
            let key = CounterKey { scope: &counter.scope, parts: &parts };
            let slot = slot_of(&counter.limit, now, key.stable_hash());
            kept.add_parts(self.digest(&key), slot, units, counter.limit.parts_of_unit(), now);
        }
        kept.forget(now);
    }
}
