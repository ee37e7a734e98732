//! Debits of more than a durable counter has room for: the record has what the counter holds.

use crate::durable::{Node, Table, charge, counters, debit, limits, node, reset, write};
use std::sync::Arc;
use tollgate_cells::durable::ReadBack;
use tollgate_core::{Cost, Limit, ManualClock, Timestamp};

fn recorded(table: &Table) -> i64 {
    table.saved().iter().map(|slot| slot.own).sum()
}

/// Without it a caller whose settlement was far beyond the limit, and whom an operator has reset, is denied again after the next
/// restart or loss, until the window ends.
#[test]
fn a_reset_takes_off_all_that_a_settlement_was_beyond_the_limit() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    for limit in limits() {
        for settled in [vec![2_900], vec![5_000], vec![u64::MAX], vec![900, 900, 900, 900], vec![150; 20]] {
            let (one, mut table) = (node(&counters(&clock), "one", &clock), Table::default());
            let give_back: [fn(&Node, &Limit); 2] = [
                |node, limit| reset(node, limit, "a"),
                |node, limit| debit(node, limit, "a", Cost::refund(2_000)),
            ];
            for give_back in give_back {
                charge(&one, &limit, "a", Cost::new(500));
                settled.iter().for_each(|units| debit(&one, &limit, "a", Cost::new(*units)));
                give_back(&one, &limit);
                assert_eq!(charge(&one, &limit, "a", Cost::new(50)), 950);
                write(&mut table, 0, &one);
                assert_eq!(recorded(&table), 50, "{:?}, {settled:?}", limit.algorithm());
                charge(&one, &limit, "a", Cost::refund(50));
            }
            charge(&one, &limit, "a", Cost::new(50));
            write(&mut table, 0, &one);
            let next = node(&counters(&clock), "two", &clock);
            next.durable().expect("a record").install(table.saved(), ReadBack::Loss);
            assert_eq!(charge(&next, &limit, "a", Cost::PEEK), 950, "{:?}, {settled:?}", limit.algorithm());
        }
    }
}
