//! Shards of a split counter: selects the one that a request is charged to, round robin.
//!
//! Every counter has its own cursor on every thread, and threads start their rounds at different shards. Rejected: one
//! cursor for all counters, because two split rules in one request, or two alternating callers, would each reach only
//! every second shard and be denied half of the limit; and a hash of the request, because one caller would always reach
//! the same shard. The cursors are stored in a small table by hash; two counters that share a cursor may still skip
//! shards, and the engine then moves a denied charge to a shard that has room. A request that other limits deny returns its
//! turn: it was not charged, and a turn without a charge would make what remains of the whole a wrong guess.

use foldhash::fast::{FixedState, RandomState};
use std::cell::Cell;
use std::hash::{BuildHasher, Hasher};
use tollgate_core::{Cost, KeyPart};

/// The maximum number of shards of a counter.
pub(crate) const MAX_SHARDS: u64 = 256;

static NAMES: [&str; 256] = all_names();

const fn all_names() -> [&'static str; 256] {
    const DIGITS: &str = include_str!("counter_shards.txt");
    let mut names = [""; 256];
    let mut at = 0;
    while at < 256 {
        names[at] = DIGITS.split_at(at * 2).1.split_at(2).0;
        at += 1;
    }
    names
}

const CURSORS: usize = 1024;

thread_local! {
    static NEXT: [Cell<u16>; CURSORS] = const { [const { Cell::new(0) }; CURSORS] };
    /// Shard at which this thread's rounds start.
    static FIRST: u16 = RandomState::default().build_hasher().finish() as u16;
}

/// Returns the shard that this request is charged to, and its position in this thread's round. A peek reads the next
/// shard and does not advance the cursor; a refund returns to the last shard.
pub(crate) fn next_shard<'p>(
    split: u16,
    rule: u32,
    path: impl Iterator<Item = &'p KeyPart<'p>>,
    cost: Cost,
) -> (u16, u16) {
    let split = split.clamp(1, NAMES.len() as u16);
    let first = FIRST.with(|first| *first) % split;
    let position = NEXT.with(|turns| {
        let turn = &turns[slot(rule, path)];
        let next = turn.get() % split;
        let back = (next + split - 1) % split;
        let (position, next) = match () {
            () if cost.is_peek() => (next, next),
            () if cost.is_refund() => (back, back),
            () => (next, (next + 1) % split),
        };
        turn.set(next);
        position
    });
    ((first + position) % split, position)
}

/// Returns a turn that this thread took for a request which was not charged: the next one is charged to the same shard. Nothing
/// happens if the turn was another thread's, or if later requests have taken theirs.
pub(crate) fn return_turn<'p>(
    split: u16,
    rule: u32,
    path: impl Iterator<Item = &'p KeyPart<'p>>,
    (shard, position): (u16, u16),
) {
    let split = split.clamp(1, NAMES.len() as u16);
    let first = FIRST.with(|first| *first) % split;
    if (first + position) % split != shard {
        return;
    }
    NEXT.with(|turns| {
        let turn = &turns[slot(rule, path)];
        if turn.get() % split == (position + 1) % split {
            turn.set(position);
        }
    });
}

fn slot<'p>(rule: u32, path: impl Iterator<Item = &'p KeyPart<'p>>) -> usize {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write_u32(rule);
    for part in path {
        match part {
            KeyPart::Text(text) | KeyPart::Secret(text) => hasher.write(text.as_bytes()),
            KeyPart::Network { address, .. } => hasher.write_u128(*address),
        }
    }
    hasher.finish() as usize % CURSORS
}

/// Returns the names of all shards of a counter that is split into `split` shards.
pub(crate) fn names(split: u16) -> &'static [&'static str] {
    &NAMES[..usize::from(split).min(NAMES.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards(rule: u32, key: &str, cost: Cost, count: usize) -> Vec<u16> {
        // Positions, because the first shard of a round differs from thread to thread.
        (0..count).map(|_| next_shard(4, rule, [KeyPart::Text(key)].iter(), cost).1).collect()
    }

    #[test]
    fn every_counter_has_its_own_turn() {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for _ in 0..8 {
            one.extend(shards(1, "a", Cost::ONE, 1));
            other.extend(shards(2, "a", Cost::ONE, 1));
        }
        assert_eq!(one, [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(other, one);
    }

    #[test]
    fn peeks_and_refunds_leave_the_others_in_turn() {
        assert_eq!(shards(7, "b", Cost::ONE, 2), [0, 1]);
        assert_eq!(shards(7, "b", Cost::PEEK, 3), [2, 2, 2]);
        assert_eq!(shards(7, "b", Cost::refund(1), 1), [1]);
        assert_eq!(shards(7, "b", Cost::ONE, 4), [1, 2, 3, 0]);
    }

    #[test]
    fn only_the_last_turn_is_returned() {
        let take = || next_shard(4, 11, [KeyPart::Text("d")].iter(), Cost::ONE);
        let give_back = |turn| return_turn(4, 11, [KeyPart::Text("d")].iter(), turn);
        let first = take();
        give_back(first);
        assert_eq!(take(), first);
        let second = take();
        give_back(first);
        assert_eq!(take().1, 2, "a later request has its turn");
        give_back(second);
        let last = take();
        assert_eq!(last.1, 3);
        give_back(((last.0 + 1) % 4, last.1));
        assert_eq!(take().1, 0, "another thread's turn");
    }

    #[test]
    fn a_round_reaches_every_shard_once() {
        let mut all: Vec<u16> =
            (0..16).map(|_| next_shard(16, 9, [KeyPart::Text("c")].iter(), Cost::ONE).0).collect();
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn shards_have_names_of_their_own() {
        let mut all = names(256).to_vec();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 256);
    }
}
