//! Debits of many counters at once, as other cells report them in one tick.
//!
//! They are sent in pieces, two of them at a time: a script that debits thousands of counters would block its server for
//! longer than a check may wait, and Lua cannot unpack more than about 8,000 keys. Each piece has the deadline of its own
//! call. Rejected: all pieces at once, because every check would wait behind them.

use super::RedisStore;
use super::late_replies::Counters;
use super::pipeline::Command;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::time::Duration;
use tollgate_core::{Charge, CounterKey, StoreError};

/// Maximum counters in one piece.
pub(super) const MAX_TOGETHER: usize = 128;
/// Pieces in flight.
const IN_FLIGHT: usize = 2;

/// Charges that were not debited, by position, and why.
type NotDebited = (Vec<usize>, StoreError);

impl RedisStore {
    /// Debits many counters. The error says which were not; those whose reply is late count as debited.
    pub(super) async fn debit_many(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let order = order(charges);
        let sorted: Vec<Charge<'_>> = order.iter().map(|at| charges[*at]).collect();
        let mut pieces = sorted.chunks(MAX_TOGETHER).zip(order.chunks(MAX_TOGETHER));
        let (mut running, mut errors) = (FuturesUnordered::new(), Vec::new());
        loop {
            while running.len() < IN_FLIGHT
                && let Some((piece, positions)) = pieces.next()
            {
                running.push(self.debit_piece(positions, piece));
            }
            match running.next().await {
                Some(failed) => errors.extend(failed),
                None => return StoreError::of_debits(errors, charges.len()),
            }
        }
    }

    /// Debits one piece, whose charges have these positions: its slots at once.
    async fn debit_piece(&self, positions: &[usize], piece: &[Charge<'_>]) -> Vec<NotDebited> {
        let until = self.deadline(Duration::MAX, Duration::ZERO);
        let each = self.parts(piece).into_iter().map(|(place, request)| async move {
            let positions = request.charges.iter().map(|want| positions[want.index]).collect();
            let counters = Some(Counters::Borrowed(piece));
            let sent = self.send(Command::Debit, place, request, until, counters).await;
            sent.err().map(|error| (positions, error))
        });
        join_all(each).await.into_iter().flatten().collect()
    }
}

/// Returns the positions of charges in the order in which they are sent: those of one limit together, because the script
/// reads its numbers once; and where counters share bundles, those of one bundle together, which is then written once.
fn order(charges: &[Charge<'_>]) -> Vec<usize> {
    let mut scopes: HashMap<u64, Option<u64>> = HashMap::new();
    for scope in charges.iter().map(|charge| charge.key.scope) {
        let known = scopes.entry(scope.group()).or_insert(Some(scope.id()));
        *known = known.filter(|known| *known == scope.id());
    }
    let place = |at: &usize| {
        let Charge { key, .. } = &charges[*at];
        let is_alone = scopes.get(&key.scope.group()).is_some_and(Option::is_some);
        (key.scope.group(), if is_alone { 0 } else { bundle_hash(key) })
    };
    let mut order: Vec<usize> = (0..charges.len()).collect();
    if scopes.len() > 1 || scopes.values().any(Option::is_none) {
        order.sort_by_cached_key(place);
    }
    order
}

/// Returns a hash of a key's values.
fn bundle_hash(key: &CounterKey<'_>) -> u64 {
    foldhash::fast::FixedState::default().hash_one(key.parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::LateCharge;

    /// A batch is sent again where it failed: what is late would otherwise be debited twice, what failed not at all.
    #[test]
    fn what_is_late_counts_as_debited_and_what_failed_does_not() {
        assert!(StoreError::of_debits(Vec::new(), 4).is_ok());
        let late = || (vec![0, 1], StoreError::Late(LateCharge::new().0));
        let failed = |positions: &[usize]| (positions.to_vec(), StoreError::Timeout);
        assert!(matches!(StoreError::of_debits(vec![late()], 4), Err(error) if error.late().len() == 1));
        let mixed = StoreError::of_debits(vec![late(), failed(&[3, 2])], 4);
        assert!(
            matches!(&mixed, Err(StoreError::Partial { failed, .. }) if *failed == [2, 3]),
            "only what failed is sent again: {mixed:?}"
        );
        let all = StoreError::of_debits(vec![failed(&[0, 1]), failed(&[2, 3])], 4);
        assert!(matches!(&all, Err(StoreError::Several(causes)) if causes.len() == 2), "{all:?}");
    }
}
