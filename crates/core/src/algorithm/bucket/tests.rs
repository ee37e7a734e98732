//! The two widths of a TAT are one arithmetic.

use super::{Bucket, Shaping, Sharing, Tat};
use crate::cost::Cost;
use crate::time::{TimeDelta, Timestamp};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Without it a limit answers otherwise as soon as its count needs the wider width: a rule that goes from 2048 to
    /// 2049 a second would change more than its number.
    #[test]
    fn narrow_and_wide_agree(
        (count, period, burst) in (1_u64..=2_048, 1_000_u64..100_000_000, 1_u64..=5_000),
        late in any::<bool>(),
        steps in proptest::collection::vec((0_u64..2_000, -3_i64..=9, 0_u64..12_000), 1..60),
    ) {
        for shaping in [Shaping::Police, Shaping::Delay] {
            let bucket = Bucket::new(count, TimeDelta::from_micros(period), burst, shaping, Sharing::SamePeriod).expect("fills in time");
            prop_assert!(bucket.is_narrow());
            let mut now = if late { Timestamp::MAX - TimeDelta::from_secs(1) } else { Timestamp::from_secs(1_700_000_000) };
            let (mut narrow, mut wide) = (0_u64, 0_u128);
            for (permille, cost, units) in &steps {
                now = now + TimeDelta::from_micros(period * permille / 1_000);
                let cost = match cost {
                    -1 => Cost::refund(*units),
                    0 => Cost::PEEK,
                    9 => Cost::new(*units),
                    few => Cost::new(few.unsigned_abs()),
                };
                if cost == Cost::new(3) {
                    bucket.debit(&mut narrow, 0, now, *units);
                    bucket.debit(&mut wide, 0, now, *units);
                } else {
                    prop_assert_eq!(bucket.step(&mut narrow, 0, now, cost), bucket.step(&mut wide, 0, now, cost));
                }
                prop_assert_eq!(u128::from(narrow), wide);
                prop_assert_eq!(Tat::from_units(narrow, bucket.k).units::<u64>(bucket.k), narrow);
                prop_assert_eq!(Tat::from_units(wide, bucket.k), Tat::from_units(narrow, bucket.k));
            }
        }
    }
}

/// Without it the slowest bucket that is accepted overflows in its last years: debt on debt at the end of time.
#[test]
fn the_slowest_bucket_has_room_at_the_end_of_time() {
    // 2^50 microseconds to fill at k = 2047, the largest odd number that is narrow.
    let burst = 2_047 * (1 << 20);
    let bucket =
        Bucket::new(2_047, TimeDelta::from_micros(1 << 30), burst, Shaping::Police, Sharing::SamePeriod)
            .expect("just fits");
    assert_eq!((bucket.k, bucket.horizon()), (2_047, Bucket::MAX_FILL));
    assert!(bucket.is_narrow());
    let (mut narrow, mut wide) = (0_u64, 0_u128);
    for units in [burst, u64::MAX, u64::MAX] {
        bucket.debit(&mut narrow, 0, Timestamp::MAX, units);
        bucket.debit(&mut wide, 0, Timestamp::MAX, units);
        assert_eq!(u128::from(narrow), wide);
        for cost in [Cost::new(burst), Cost::ONE, Cost::new(u64::MAX), Cost::PEEK] {
            let outcome = bucket.step(&mut narrow, 0, Timestamp::MAX, cost);
            assert_eq!(outcome, bucket.step(&mut wide, 0, Timestamp::MAX, cost));
            assert_eq!(outcome.remaining, 0);
        }
    }
    assert!(
        Bucket::new(2_047, TimeDelta::from_micros(1 << 30), burst + 1, Shaping::Police, Sharing::SamePeriod)
            .is_none()
    );
}
