//! Max–min fair shares of limits by reported demand. Pure: claims in, rates out.
//!
//! A claim is the demand of one stream for one bucket, and draws on every limit that the bucket matches. A limit is
//! divided by water-filling: those that want less than the level get what they want, all others get the level. A claim
//! gets the least of what its limits give it; what it therefore leaves at another limit is divided again in the next
//! round. A limit that is still over after the last round is cut back, so the sum is always within each limit.
//!
//! Half of the unclaimed part of the sustained rate is divided evenly, so that a burst need not wait for the next report; and
//! a small part of what is left of the burst, among those that have demand. The rest stays in the counters, for checks by
//! other protocols. Rejected: half of all that is left, because an idle stream then takes a window of an hour or a day.
//!
//! Rejected: exact progressive filling, which takes one round for each limit; three rounds suffice unless limits overlap
//! in long chains, and cost the same for any number of limits.

use smallvec::SmallVec;

const ROUNDS: usize = 3;

/// The demand of one stream for one bucket.
#[derive(Clone, Debug, Default)]
pub(super) struct Claim {
    /// Wanted rate per second; `None` if unknown. Until its first report a stream wants no more than the rate, whatever is left of
    /// the burst or window.
    pub(super) want: Option<f64>,
    /// Indexes of the limits that it draws on; none if nothing is claimed.
    pub(super) limits: SmallVec<[u32; 2]>,
}

/// What a limit can give, per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    /// To those that want it: its rate, and what is left of its burst or window, over some time.
    pub(super) most: f64,
    /// Its rate.
    pub(super) sustained: f64,
    /// The part of its burst or window that is given to those that have not claimed it.
    pub(super) unclaimed: f64,
}

/// Returns the rate of each claim.
pub(super) fn allocate(claims: &[Claim], limits: &[Capacity]) -> Vec<f64> {
    let capacity: Vec<f64> = limits.iter().map(|limit| limit.most).collect();
    let want = |claim: &Claim| {
        let sustained = || claim.limits.iter().map(|limit| limits[*limit as usize].sustained);
        claim.want.unwrap_or_else(|| sustained().fold(f64::INFINITY, f64::min))
    };
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); capacity.len()];
    for (index, claim) in (0_u32..).zip(claims) {
        for limit in &claim.limits {
            members[*limit as usize].push(index);
        }
    }
    let mut levels = vec![f64::INFINITY; capacity.len()];
    let overlap = claims.iter().any(|claim| claim.limits.len() > 1);
    for _ in 0..if overlap { ROUNDS } else { 1 } {
        let next = (0_u32..).zip(&members).zip(&capacity).map(|((limit, own), capacity)| {
            // What a claim can take elsewhere bounds what it takes here.
            let bound = |claim: &u32| {
                let claim = &claims[*claim as usize];
                let others = claim.limits.iter().filter(|other| **other != limit);
                others.map(|other| levels[*other as usize]).fold(want(claim), f64::min)
            };
            level(own.iter().map(bound), *capacity)
        });
        levels = next.collect();
    }
    let least =
        |claim: &Claim| claim.limits.iter().map(|limit| levels[*limit as usize]).fold(want(claim), f64::min);
    let mut rates: Vec<f64> = claims.iter().map(least).collect();
    // A level that assumed less of some claims than they got is too high, and its limit is cut back.
    for (own, capacity) in members.iter().zip(&capacity) {
        let sum: f64 = own.iter().map(|claim| rates[*claim as usize]).sum();
        if sum > *capacity {
            own.iter().for_each(|claim| rates[*claim as usize] *= capacity / sum);
        }
    }
    // What is left for each claim, and for one that has demand.
    let left = |(own, limit): (&Vec<u32>, &Capacity)| {
        let (sum, count): (f64, _) =
            (own.iter().map(|claim| rates[*claim as usize]).sum(), own.len().max(1) as f64);
        let half = |of: f64| (of - sum).max(0.0) / 2.0 / count;
        let (most, idle) = (half(limit.most), half(limit.sustained.min(limit.most)));
        (idle, (idle + limit.unclaimed / count).min(most))
    };
    let spare: Vec<(f64, f64)> = members.iter().zip(limits).map(left).collect();
    for (claim, rate) in claims.iter().zip(&mut rates) {
        let is_active = claim.want.is_some_and(|want| want > 0.0);
        let own = |limit: &u32| if is_active { spare[*limit as usize].1 } else { spare[*limit as usize].0 };
        let bonus = claim.limits.iter().map(own).reduce(f64::min);
        *rate += bonus.unwrap_or(0.0);
    }
    rates
}

/// Returns the level up to which all get what they want.
fn level(wants: impl Iterator<Item = f64>, capacity: f64) -> f64 {
    let mut wants: Vec<f64> = wants.collect();
    wants.sort_unstable_by(f64::total_cmp);
    let (mut left, mut count) = (capacity.max(0.0), wants.len());
    for want in wants {
        let share = left / count as f64;
        if want >= share {
            return share;
        }
        left -= want;
        count -= 1;
    }
    f64::INFINITY
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(want: f64, limits: &[u32]) -> Claim {
        Claim { want: Some(want), limits: SmallVec::from_slice(limits) }
    }

    fn allocate(claims: &[Claim], rates: &[f64]) -> Vec<f64> {
        let limits = rates.iter().map(|rate| Capacity { most: *rate, sustained: *rate, unclaimed: 0.0 });
        super::allocate(claims, &limits.collect::<Vec<_>>())
    }

    #[test]
    fn small_demands_are_met_and_the_others_share_the_rest_evenly() {
        let shares = allocate(&[claim(5.0, &[0]), claim(200.0, &[0]), claim(90.0, &[0])], &[100.0]);
        assert_eq!(shares, [5.0, 47.5, 47.5]);
    }

    /// A stream that has not reported yet would otherwise be denied for an interval.
    #[test]
    fn unknown_demand_gets_an_equal_share() {
        let unknown = Claim { want: None, ..claim(0.0, &[0]) };
        assert_eq!(allocate(&[unknown, claim(80.0, &[0])], &[100.0]), [50.0, 50.0]);
    }

    #[test]
    fn half_of_what_is_left_is_divided() {
        assert_eq!(allocate(&[claim(10.0, &[0]), claim(0.0, &[0])], &[100.0]), [32.5, 22.5]);
    }

    /// An idle stream must not take the window of an hour.
    #[test]
    fn an_idle_claim_has_no_part_of_what_is_left_of_a_window() {
        let limits = [Capacity { most: 361.0, sustained: 1.0, unclaimed: 7.5 }];
        assert_eq!(super::allocate(&[claim(0.0, &[0])], &limits), [0.5]);
        assert_eq!(super::allocate(&[claim(100.0, &[0]), claim(0.0, &[0])], &limits), [103.75, 0.0]);
    }

    /// What a claim cannot use because of another limit is not lost.
    #[test]
    fn a_share_that_another_limit_cuts_goes_to_the_others() {
        let shares = allocate(&[claim(100.0, &[0, 1]), claim(100.0, &[0])], &[100.0, 10.0]);
        assert_eq!(shares, [10.0, 90.0]);
    }

    proptest! {
        /// No set of demands takes more than a limit has, whatever the overlap.
        #[test]
        fn no_limit_gives_more_than_it_has(
            claims in prop::collection::vec((0.0..500.0_f64, prop::collection::vec(0_u32..4, 1..3)), 1..20),
            capacity in prop::collection::vec(0.0..300.0_f64, 4),
        ) {
            let claims: Vec<Claim> = claims.into_iter().map(|(want, mut limits)| {
                limits.sort_unstable();
                limits.dedup();
                claim(want, &limits)
            }).collect();
            let shares = allocate(&claims, &capacity);
            for (limit, capacity) in (0_u32..).zip(&capacity) {
                let used: f64 = claims.iter().zip(&shares).filter(|(claim, _)| claim.limits.contains(&limit)).map(|(_, share)| share).sum();
                prop_assert!(used <= capacity + 1e-6, "{used} of {capacity}");
            }
            prop_assert!(shares.iter().all(|share| *share >= 0.0));
        }
    }
}
