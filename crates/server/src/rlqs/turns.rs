//! Turns: which of the accounts that are due a pass serves, if they are more than it can serve in time. Pure.
//!
//! Accounts whose assignments must be charged so that they stay covered come first, up to three quarters. The others are
//! served by stream, one account of each in turn, and of a stream those that have waited longest. So a stream with one
//! bucket is served in its first pass, however many buckets others have. Rejected: the order of arrival, because a flood
//! of one client's reports would then delay everyone's.

use super::table::StreamId;

/// An account that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) stream: StreamId,
    /// What the client may admit is no longer covered.
    pub(super) is_urgent: bool,
    /// Number of the pass that served it last.
    pub(super) served: u64,
}

/// Returns the indexes of at most `most` accounts, in their order. `waiting` is in the order of streams. The turn begins with
/// the first stream after `last`, which becomes the one where it ends.
pub(super) fn choose(waiting: &[Waiting], most: usize, last: &mut Option<StreamId>) -> Vec<usize> {
    if waiting.len() <= most {
        return (0..waiting.len()).collect();
    }
    let (mut urgent, others): (Vec<usize>, Vec<usize>) =
        (0..waiting.len()).partition(|at| waiting[*at].is_urgent);
    urgent.sort_by_key(|at| waiting[*at].served);
    urgent.truncate((most - most / 4).max(most - others.len().min(most)));
    let mut chosen = urgent;
    let mut streams: Vec<Vec<usize>> =
        others.chunk_by(|a, b| waiting[*a].stream == waiting[*b].stream).map(<[usize]>::to_vec).collect();
    let next = streams.partition_point(|own| last.is_some_and(|last| waiting[own[0]].stream <= last));
    streams.rotate_left(next);
    for own in &mut streams {
        // The longest wait last, from where they are taken.
        own.sort_by_key(|at| std::cmp::Reverse(waiting[*at].served));
    }
    while chosen.len() < most && !streams.is_empty() {
        let free = most - chosen.len();
        for own in streams.iter_mut().take(free) {
            *last = own.last().map(|at| waiting[*at].stream);
            chosen.extend(own.pop());
        }
        streams.retain(|own| !own.is_empty());
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(stream: StreamId, served: u64) -> Waiting {
        Waiting { stream, is_urgent: false, served }
    }

    /// A flood of one stream must not delay the assignment of another.
    #[test]
    fn every_stream_has_its_turn() {
        let mut all = vec![waiting(1, 0); 1_000];
        all.extend(vec![waiting(2, 0); 1_000]);
        all.push(waiting(3, 0));
        let chosen = choose(&all, 100, &mut None);
        assert_eq!(chosen.len(), 100);
        let of = |stream| chosen.iter().filter(|at| all[**at].stream == stream).count();
        assert_eq!((of(1), of(2), of(3)), (50, 49, 1));
    }

    #[test]
    fn more_streams_than_turns_are_served_one_after_the_other() {
        let all: Vec<Waiting> = (0..10).map(|stream| waiting(stream, 0)).collect();
        let mut last = Some(7);
        assert_eq!(choose(&all, 4, &mut last), [0, 1, 8, 9]);
        assert_eq!(choose(&all, 4, &mut last), [2, 3, 4, 5]);
        assert_eq!(choose(&all, 4, &mut last), [6, 7, 8, 9]);
    }

    #[test]
    fn of_a_stream_the_longest_wait_comes_first() {
        let all = [waiting(1, 7), waiting(1, 2), waiting(1, 9), waiting(1, 3)];
        assert_eq!(choose(&all, 2, &mut None), [1, 3]);
    }

    /// What clients admit must stay covered, and new streams must not wait for ever.
    #[test]
    fn urgent_ones_come_first_and_leave_a_quarter() {
        let mut all = vec![waiting(1, 0); 50];
        all.extend(vec![Waiting { is_urgent: true, ..waiting(2, 0) }; 200]);
        let urgent = |chosen: &[usize]| chosen.iter().filter(|at| all[**at].is_urgent).count();
        let chosen = choose(&all, 100, &mut None);
        assert_eq!((chosen.len(), urgent(&chosen)), (100, 75));
        // All turns are used.
        let chosen = choose(&all[40..], 100, &mut None);
        assert_eq!((chosen.len(), all[40..].len()), (100, 210));
    }
}
