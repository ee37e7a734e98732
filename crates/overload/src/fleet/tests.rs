use super::*;
use crate::shares::{GuaranteeScope, NO_TIER, TierIndex};

fn at(millis: u64) -> Timestamp {
    Timestamp::from_micros(1_000_000 + millis * 1_000)
}

fn one(tenant: u64, tier: TierIndex) -> TenantRequest {
    TenantRequest { tenant, tier, units: 1 }
}

fn unknown() -> NodePart {
    NodePart::Unknown
}

/// Sends requests of tenants with these rates per 10 ms, of which the first `room` are admitted, fair ones first.
fn contend(fairness: &FleetFairness, rates: &[u64], room: u64, millis: std::ops::Range<u64>) -> Vec<u64> {
    let mut served = vec![0; rates.len()];
    for now in millis.step_by(10).map(at) {
        let mut ranked: Vec<(bool, usize)> = Vec::new();
        for (tenant, rate) in rates.iter().enumerate() {
            ranked.extend(
                (0..*rate).map(|_| (fairness.is_excess(now, one(tenant as u64, NO_TIER), unknown), tenant)),
            );
        }
        ranked.sort_by_key(|(is_excess, _)| *is_excess);
        for (at, (_, tenant)) in (0..).zip(ranked) {
            if at < room {
                fairness.count_admitted(1);
                served[tenant] += 1;
            } else {
                fairness.press(now);
            }
        }
    }
    served
}

#[test]
fn calm_capacity_is_not_shared_out() {
    let fairness = FleetFairness::new(7, &[]);
    assert!(!fairness.is_pressed(at(0)));
    fairness.press(at(0));
    assert!(fairness.is_pressed(at(999)));
    assert!(!fairness.is_pressed(at(1_000)), "a second after the last request that found it in use");
    assert!(fairness.states(at(1_000)).is_empty());
}

#[test]
fn tables_of_tenants_are_made_when_the_capacity_is_contended() {
    let fairness = FleetFairness::new(7, &[]);
    assert!(!fairness.is_pressed(at(0)) && fairness.states(at(0)).is_empty());
    assert!(fairness.ranking.get().is_none(), "nothing before");
    fairness.press(at(0));
    assert!(!fairness.is_excess(at(50), one(1, NO_TIER), unknown));
    assert!(fairness.ranking.get().is_some());
    assert_eq!(fairness.states(at(60)).len(), 1, "those without a tier");
}

/// Otherwise one place of a reserve stays free while its only tenant is shed.
#[test]
fn one_tenant_that_has_all_nodes_to_itself_is_never_beyond_its_share() {
    for (tenants, part, is_ever_excess) in
        [(1, NodePart::Whole, false), (2, NodePart::Whole, true), (1, NodePart::Unknown, true)]
    {
        let fairness = FleetFairness::new(7, &[]);
        let mut has_excess = false;
        for now in (0..3_000).step_by(10).map(at) {
            fairness.press(now);
            for request in 0..4 {
                let is_excess = fairness.is_excess(now, one(1 + request % tenants, NO_TIER), || part);
                has_excess |= is_excess;
                if request < 3 {
                    fairness.count_admitted(1);
                }
            }
        }
        assert_eq!(has_excess, is_ever_excess, "{tenants} tenants, {part:?}");
    }
}

/// One that takes all that others leave has no share besides that.
#[test]
fn what_is_taken_beyond_a_share_is_debited_from_it() {
    let served_as_fair = |debits: bool| {
        let fairness = FleetFairness::new(7, &[]);
        fairness.press(at(0));
        let mut fair = 0;
        for now in (0..10_000).step_by(10).map(at) {
            for tenant in [1, 1, 1, 1, 2] {
                let is_excess = fairness.is_excess(now, one(tenant, NO_TIER), || NodePart::Rate(200.0));
                match is_excess && debits {
                    true => fairness.count_excess(now, one(tenant, NO_TIER)),
                    false => fairness.count_admitted(1),
                }
                fair += u32::from(tenant == 1 && !is_excess);
            }
            fairness.press(now);
        }
        fair
    };
    // 500 of 500 per second are admitted, of which the first asks for 400: all but what is not shared out are within its share.
    assert!(served_as_fair(false) > 3_600, "{}", served_as_fair(false));
    assert!(served_as_fair(true) < 3_600, "{}", served_as_fair(true));
}

#[test]
fn before_a_throughput_is_known_nobody_is_beyond_its_share() {
    let fairness = FleetFairness::new(7, &[]);
    fairness.press(at(0));
    assert!((0..1_000).all(|_| !fairness.is_excess(at(50), one(1, NO_TIER), unknown)));
}

#[test]
fn what_is_left_goes_by_max_min() {
    let fairness = FleetFairness::new(7, &[]);
    fairness.press(at(0));
    contend(&fairness, &[30, 2, 2, 1], 10, 0..2_000);
    let served = contend(&fairness, &[30, 2, 2, 1], 10, 2_000..12_000);
    // 1,000 steps with room for 10: the small ones have all they ask for, the greedy one the rest.
    assert!(served[1] >= 1_980 && served[2] >= 1_980 && served[3] >= 990, "{served:?}");
    assert!(served[0] >= 4_950, "{served:?}");
}

/// A request of ten units is ten: a tenant that asks for little must not be beyond its share because it asks more often.
#[test]
fn shares_are_counted_by_what_requests_cost() {
    let fairness = FleetFairness::new(7, &[]);
    fairness.press(at(0));
    let mut room = 0;
    let mut is_fair = |now: Timestamp, request: TenantRequest| {
        let is_fair = !fairness.is_excess(now, request, || NodePart::Rate(100.0));
        // 100 units are admitted in a second.
        if room < now.since(at(2_000)).as_micros() / 10_000 {
            room += request.units;
            fairness.count_admitted(request.units);
        }
        u32::from(is_fair)
    };
    let (mut light, mut heavy) = (0, 0);
    for step in 0..1_000 {
        let now = at(2_000 + step * 10);
        // Of 100 units per second the one asks for 500, in 50 requests, and the other for 30.
        if step % 2 == 0 {
            heavy += is_fair(now, TenantRequest { units: 10, ..one(1, NO_TIER) });
        }
        if step % 10 < 3 {
            light += is_fair(now, one(2, NO_TIER));
        }
        fairness.press(now);
    }
    assert!(light >= 290, "{light} of 300");
    // 65 units per second for ten seconds; before anything is measured, all requests are within their shares.
    assert!((60..=85).contains(&heavy), "{heavy} of 500");
}

#[test]
fn weights_count_between_those_that_want_more() {
    let tiers = [TierShare { guarantee: 0.5, scope: GuaranteeScope::Each, weight: 3.0 }];
    let fairness = FleetFairness::new(7, &tiers);
    fairness.press(at(0));
    let mut served = [0_u32; 2];
    for now in (0..20_000).step_by(10).map(at) {
        let mut ranked: Vec<(bool, usize)> = Vec::new();
        ranked.extend((0..20).map(|_| (fairness.is_excess(now, one(1, 0), unknown), 0)));
        ranked.extend((0..20).map(|_| (fairness.is_excess(now, one(2, NO_TIER), unknown), 1)));
        ranked.sort_by_key(|(is_excess, _)| *is_excess);
        for (_, tenant) in ranked.into_iter().take(8) {
            fairness.count_admitted(1);
            served[tenant] += 1;
        }
        fairness.press(now);
    }
    let share = f64::from(served[0]) / f64::from(served[0] + served[1]);
    assert!((0.7..0.8).contains(&share), "{share} of {served:?}");
}

#[test]
fn a_part_in_flight_is_a_rate_by_how_long_requests_last() {
    let part = |now, begun| NodePart::InFlight { places: 50.0, held: NodePlaces::Reported { now, begun } };
    let close = |rate: f64, expected: f64| (rate / expected - 1.0).abs() < 0.02;
    let mut durations = Durations::default();
    // 40 places, each for two seconds: 20 requests begin and end in a second.
    let steps = (0..100).map(|step| durations.shared_out(part(40, 40 + 2 * step), 0.1, 20.0));
    let rates: Vec<f64> = steps.collect();
    assert!(rates[10..].iter().all(|rate| close(*rate, 25.0)), "50 places for two seconds: {rates:?}");
    // Nothing begins or ends any more: requests last longer, but the node is owed what it does not hold.
    let owed: Vec<f64> = (0..400).map(|_| durations.shared_out(part(40, 238), 0.1, 0.0)).collect();
    assert!(owed[100] < 10.0 && owed[399] > 1e6, "{} and {}", owed[100], owed[399]);
    assert!(durations.shared_out(part(20, 238), 0.1, 0.0) > 1e6, "less than half its part");
    assert!(close(durations.shared_out(part(60, 278), 0.1, 400.0), 360.0), "more than its part");
    assert!(Durations::default().shared_out(part(0, 0), 0.1, 0.0) > 1e6, "nothing was admitted here");
    assert!(close(Durations::default().shared_out(part(0, 0), 0.1, 5.0), 5.0), "reservations");
    let lasting = NodePart::InFlight { places: 50.0, held: NodePlaces::Lasting(10.0) };
    assert!(close(Durations::default().shared_out(lasting, 0.1, 0.1), 5.0));
    assert!(close(Durations::default().shared_out(lasting, 0.1, 10.0), 9.0), "more than its part");
    assert!(close(Durations::default().shared_out(NodePart::Rate(7.0), 0.1, 10.0), 10.0));
    assert!(close(Durations::default().shared_out(NodePart::Rate(7.0), 0.1, 5.0), 7.0));
}
