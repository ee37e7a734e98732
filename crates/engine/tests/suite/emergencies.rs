//! An emergency measure applies to its target, to no other caller, and until it expires.

use crate::rig::{Memory, check, rules};
use std::sync::Arc;
use tollgate_core::{
    Charge, Clock, Cost, CounterKey, LimitSpec, ManualClock, Rate, Scope, TimeDelta, Timestamp, nonzero,
};
use tollgate_engine::{
    ActiveMeasures, Check, Decision, Limiter, Measure, MeasureAction, MeasureTarget, Origin,
};
use tollgate_rules::Descriptor;
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, limit: 8/minute, name: per-key}
  - {key: endpoint, value: POST /orders, limit: 2/minute, name: orders}
  - {key: endpoint, value: GET /orders, limit: 100/minute, concurrency: 10, name: reads}
";

struct Rig {
    limiter: Limiter<Memory>,
    clock: Arc<ManualClock>,
    emergencies: Arc<ActiveMeasures>,
}

/// A key's word is its length.
fn rig() -> Rig {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let emergencies = Arc::new(ActiveMeasures::new(|key| key.len() as u64));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let limiter = Limiter::new(rules(RULES), store, time).with_measures(Arc::clone(&emergencies));
    Rig { limiter, clock, emergencies }
}

impl Rig {
    /// These are on for a minute, named by their place.
    fn on(&self, measures: &[(MeasureAction, MeasureTarget)]) {
        let until = self.clock.now() + TimeDelta::from_secs(60);
        let measure = |(at, (act, target)): (usize, &(MeasureAction, MeasureTarget))| Measure {
            name: format!("emergency:{at}").into(),
            action: *act,
            target: target.clone(),
            expires_at: until,
        };
        self.emergencies.replace(measures.iter().enumerate().map(measure));
    }

    fn take(&self, attributes: &[(&str, &str)]) -> Decision {
        check(&self.limiter, attributes, Cost::ONE)
    }

    fn passes(&self, attributes: &[(&str, &str)]) -> usize {
        (0..50).take_while(|_| self.take(attributes).is_allowed()).count()
    }
}

fn address(text: &str) -> MeasureTarget {
    MeasureTarget::Address(text.parse().expect("a network"))
}

#[test]
fn a_block_applies_to_its_target_alone_and_is_named() {
    type Values<'a> = &'a [(&'a str, &'a str)];
    let targets: [(MeasureTarget, Values<'_>, Values<'_>); 7] = [
        (MeasureTarget::ApiKey(3), &[("api_key", "bad")], &[("api_key", "good")]),
        (MeasureTarget::Tenant("t1".into()), &[("tenant", "t1")], &[("tenant", "t2")]),
        (address("10.0.0.0/8"), &[("remote_address", "10.9.8.7")], &[("remote_address", "11.0.0.1")]),
        (address("10.0.0.0/8"), &[("remote_address", "::ffff:10.9.8.7")], &[("remote_address", "nonsense")]),
        (
            address("2001:db8::/32"),
            &[("remote_address", "2001:db8::7")],
            &[("remote_address", "2001:db9::7")],
        ),
        (MeasureTarget::Endpoint("POST /a".into()), &[("endpoint", "POST /a")], &[("endpoint", "POST /ab")]),
        (MeasureTarget::Endpoint("POST /a*".into()), &[("endpoint", "POST /ab")], &[("endpoint", "GET /ab")]),
    ];
    for (target, met, other) in targets {
        let rig = rig();
        rig.on(&[(MeasureAction::Block, target.clone())]);
        let denied = rig.take(met);
        assert!(!denied.is_allowed(), "{target:?}");
        assert_eq!(denied.denied_by_name(), Some("emergency:0"));
        assert_eq!((denied.origin, denied.emergency()), (Origin::Emergency, Some("emergency:0")));
        assert_eq!(denied.retry_after(), Some(TimeDelta::from_secs(60)), "until it ends");
        let descriptors = [Descriptor { entries: met, ..Descriptor::default() }];
        let by_descriptor = pollster::block_on(rig.limiter.check(&Check::descriptors("d", &descriptors)));
        assert_eq!((by_descriptor.is_allowed(), by_descriptor.descriptors.len()), (false, 1));
        let passed = rig.take(other);
        assert!(passed.is_allowed() && passed.emergency().is_none(), "{target:?}");
        rig.clock.advance(TimeDelta::from_secs(60));
        assert!(rig.take(met).is_allowed(), "it ends by itself, on time");
        rig.emergencies.remove_expired(rig.clock.now());
        assert!(!rig.emergencies.any_active());
    }
}

#[test]
fn networks_are_read_strictly() {
    for wrong in ["", "10.0.0.1/8", "10.0.0.0/33", "::/129", "10.0.0", "10.0.0.0/x", "2001:db8::1/32"] {
        assert!(wrong.parse::<tollgate_engine::Network>().is_err(), "{wrong}");
    }
    for right in ["10.0.0.0/8", "0.0.0.0/0", "::/0", "192.0.2.7", "2001:db8::7", "2001:db8::/32"] {
        assert!(right.parse::<tollgate_engine::Network>().is_ok(), "{right}");
    }
}

#[test]
fn an_exempt_caller_passes_uncounted() {
    let rig = rig();
    let vip = [("api_key", "vip")];
    rig.on(&[(MeasureAction::Exempt, MeasureTarget::ApiKey(3))]);
    assert_eq!(rig.passes(&vip), 50);
    let decision = rig.take(&vip);
    assert_eq!((decision.origin, decision.emergency()), (Origin::Emergency, Some("emergency:0")));
    rig.on(&[]);
    assert_eq!(rig.passes(&vip), 8, "nothing was counted meanwhile");
}

#[test]
fn a_tightened_limit_keeps_what_was_used_and_gets_its_size_back() {
    let rig = rig();
    let key = [("api_key", "abc")];
    assert!(rig.take(&key).is_allowed() && rig.take(&key).is_allowed());
    rig.on(&[
        (MeasureAction::Tighten(500), MeasureTarget::ApiKey(3)),
        (MeasureAction::Tighten(900), MeasureTarget::All),
    ]);
    // Half of eight, two of which are used.
    assert_eq!(rig.passes(&key), 2);
    let denied = rig.take(&key);
    assert_eq!((denied.denied_by_name(), denied.emergency()), (Some("per-key"), Some("emergency:0")));
    assert_eq!(denied.limit(&denied.limits[0]).expect("a limit").limit.rate().count, 4);
    assert_eq!(rig.passes(&[("api_key", "other")]), 7, "0.9 of eight, for all others");
    rig.on(&[]);
    assert_eq!(rig.passes(&key), 4, "what was used meanwhile stays used");
}

#[test]
fn a_disabled_rule_is_skipped_and_the_others_are_not() {
    let rig = rig();
    let order = [("api_key", "k"), ("endpoint", "POST /orders")];
    rig.on(&[(MeasureAction::DisableRule, MeasureTarget::Rule("orders".into()))]);
    assert_eq!(rig.passes(&order), 8);
    assert_eq!(rig.take(&order).denied_by_name(), Some("per-key"));
    let alone = rig.take(&[("endpoint", "POST /orders")]);
    assert_eq!((alone.origin, alone.emergency()), (Origin::Emergency, Some("emergency:0")));
    let untouched = rig.take(&[("endpoint", "GET /orders")]);
    assert_eq!((untouched.origin, untouched.emergency()), (Origin::Store, None));
}

#[test]
fn the_kill_switches_allow_everything() {
    let order = [("api_key", "bad"), ("endpoint", "POST /orders")];
    for switch in [MeasureAction::AllowAll, MeasureAction::ShadowAll] {
        let rig = rig();
        rig.on(&[(switch, MeasureTarget::All), (MeasureAction::Block, MeasureTarget::ApiKey(3))]);
        assert_eq!(rig.passes(&order), 50);
        assert_eq!(rig.take(&order).emergency(), Some("emergency:0"), "{switch:?}");
        // What callers bring themselves, too.
        let (scope, limit) = (
            Scope::new("own"),
            LimitSpec::new(tollgate_core::Algorithm::Gcra, Rate::per_minute(nonzero!(1))).build(),
        );
        let (limit, key) = (limit.expect("a limit"), CounterKey { scope: &scope, parts: &[] });
        for _ in 0..3 {
            let outcome = pollster::block_on(rig.limiter.charge_inline(Charge::new(key, &limit, Cost::ONE)));
            assert!(outcome.expect("an answer").verdict.is_allowed());
        }
        rig.on(&[]);
        let left = if switch == MeasureAction::ShadowAll { 0 } else { 2 };
        assert_eq!(rig.passes(&order), left, "shadow counts, letting pass does not");
    }
}

#[test]
fn a_block_wins_over_an_exemption_whatever_the_order() {
    for flipped in [false, true] {
        let rig = rig();
        let mut both = vec![
            (MeasureAction::Block, MeasureTarget::ApiKey(3)),
            (MeasureAction::Exempt, address("10.0.0.0/8")),
        ];
        if flipped {
            both.reverse();
        }
        rig.on(&both);
        assert!(!rig.take(&[("api_key", "bad"), ("remote_address", "10.0.0.1")]).is_allowed());
        assert!(rig.take(&[("api_key", "okay"), ("remote_address", "10.0.0.1")]).is_allowed());
    }
}

#[test]
fn permits_taken_under_a_tightened_limit_are_released() {
    let rig = rig();
    rig.on(&[(MeasureAction::Tighten(100), MeasureTarget::Endpoint("GET *".into()))]);
    let read = [("endpoint", "GET /orders")];
    for _ in 0..5 {
        let (first, held) = pollster::block_on(rig.limiter.admit(&Check::attributes("d", &read)));
        assert!(first.is_allowed());
        assert!(!rig.take(&read).is_allowed(), "one permit of ten");
        pollster::block_on(rig.limiter.release(&held.expect("a permit"))).expect("given back");
    }
}
