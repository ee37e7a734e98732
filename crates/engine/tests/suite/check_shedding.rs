//! Checks that wait too long for the store: comfort goes without it first, security last, and every answer says so.

use crate::rig::{Memory, rules};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;
use tollgate_core::conformance::{Fault, FaultyStore};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, Limiter, Origin, ShedOrder};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: comfort, limit: 1000000/minute, on_error: open}
  - {key: tokens, name: cost, class: cost, limit: 1000000/minute, on_error: open}
  - {key: login, name: security, class: security, limit: 1000000/minute}
  - {key: shadow, name: shadow, limit: 1/minute, shadow_mode: true}
";

struct Overload {
    limiter: Limiter<FaultyStore<Memory>>,
    clock: Arc<ManualClock>,
    /// Answers of the store that the test lets through.
    answers: Arc<Semaphore>,
    /// Number of charges that the store has answered.
    charged: Arc<AtomicU64>,
}

impl Overload {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let counters =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let (answers, charged) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU64::new(0)));
        let store = FaultyStore::new(counters);
        let shared = (Arc::clone(&answers), Arc::clone(&charged));
        store.set_fault(move |_, charges| {
            let ((answers, charged), count) = (shared.clone(), charges.len() as u64);
            Fault::WaitThenApply(Box::pin(async move {
                answers.acquire().await.expect("open").forget();
                charged.fetch_add(count, Ordering::Relaxed);
            }))
        });
        let limiter = Limiter::new(rules(RULES), store, Arc::clone(&clock) as Arc<dyn Clock>);
        Self { limiter: limiter.with_check_shedding(TimeDelta::from_millis(5)), clock, answers, charged }
    }

    /// Makes a hundred checks at once, which the store answers after `wait`.
    fn round(&self, attributes: &[(&str, &str)], wait: TimeDelta) -> Vec<Decision> {
        let check = Check::attributes("d", attributes);
        let all = futures_util::future::join_all((0..100).map(|_| self.limiter.check(&check)));
        let answering = async {
            self.clock.advance(wait);
            self.answers.add_permits(100);
        };
        let (decisions, ()) = pollster::block_on(futures_util::future::join(all, answering));
        // Those that were shed took none.
        self.answers.forget_permits(100);
        decisions
    }

    fn run(&self, attributes: &[(&str, &str)], rounds: usize, wait: TimeDelta) -> Vec<Decision> {
        (0..rounds).flat_map(|_| self.round(attributes, wait)).collect()
    }

    fn shed_part(&self) -> [f64; 3] {
        self.limiter.check_load().expect("measured").shed_part
    }
}

const FAST: TimeDelta = TimeDelta::from_micros(500);
const LATE: TimeDelta = TimeDelta::from_millis(20);

fn shed(decisions: &[Decision]) -> usize {
    decisions.iter().filter(|decision| decision.shed_class.is_some()).count()
}

#[test]
fn comfort_passes_and_says_so_while_security_is_still_charged() {
    let overload = Overload::new();
    let user = [("user", "u")];
    assert_eq!(shed(&overload.run(&user, 400, FAST)), 0);
    // Five intervals are enough for comfort, not for security.
    let before = overload.run(&user, 26, LATE);
    assert!(shed(&before) > 0, "{:?}", overload.limiter.check_load());
    let part = overload.shed_part();
    assert!(part[0] > 0.0 && part[2] == 0.0, "{part:?}");
    let of_login = overload.round(&[("login", "u")], LATE);
    assert_eq!(shed(&of_login), 0);
    assert!(of_login.iter().all(|decision| decision.origin == Origin::Store));
    let both = overload.round(&[("user", "u"), ("login", "u")], LATE);
    let said = both.iter().find(|decision| decision.shed_class.is_some()).expect("some are shed");
    assert_eq!(
        (said.is_allowed(), said.origin, said.shed_class),
        (true, Origin::Shed, Some(ShedOrder::Comfort))
    );
    assert_eq!(said.reason.as_deref(), Some("Tollgate is overloaded and sheds checks of class comfort"));
    // The rest of it was charged.
    let charged = overload.charged.load(Ordering::Relaxed);
    overload.round(&[("user", "u"), ("login", "u")], LATE);
    let more = overload.charged.load(Ordering::Relaxed) - charged;
    assert!((100..200).contains(&more), "{more} of 200 charges");
    // Calm again.
    overload.clock.advance(TimeDelta::from_secs(10));
    overload.run(&[("login", "u")], 3, FAST);
    assert_eq!((overload.shed_part(), shed(&overload.round(&user, FAST))), ([0.0; 3], 0));
}

#[test]
fn security_is_shed_last_and_fails_closed() {
    let overload = Overload::new();
    let login = [("login", "u")];
    overload.run(&login, 400, FAST);
    let decisions = overload.run(&login, 100, LATE);
    let shed: Vec<&Decision> = decisions.iter().filter(|decision| decision.shed_class.is_some()).collect();
    assert!(!shed.is_empty(), "{:?}", overload.limiter.check_load());
    assert!(shed.iter().all(|decision| !decision.is_allowed() && decision.origin == Origin::FailClosed));
    assert_eq!(shed[0].reason.as_deref(), Some("Tollgate is overloaded and sheds checks of all classes"));
    assert!(shed.len() < decisions.len(), "some ask");
    let first = decisions.iter().position(|decision| decision.shed_class.is_some()).expect("one");
    // Comfort and cost are shed whole before.
    let load = overload.limiter.check_load().expect("measured");
    assert!(first > 4_000, "{first}");
    assert_eq!((load.shed_part[0], load.shed_part[1]), (1.0, 1.0), "{load:?}");
    assert!(load.shed[2] > 0 && load.shed[..2] == [0, 0], "{load:?}");
}

#[test]
fn a_check_whose_client_leaves_no_longer_waits() {
    let overload = Overload::new();
    let check = Check::attributes("d", &[("user", "u")]);
    {
        let mut waiting = std::pin::pin!(overload.limiter.check(&check));
        assert!(futures_util::FutureExt::now_or_never(waiting.as_mut()).is_none());
        assert_eq!(overload.limiter.check_load().expect("measured").pending, 1);
    }
    assert_eq!(overload.limiter.check_load().expect("measured").pending, 0);
}

/// Nothing that decides was shed: the answer is that of every other day.
#[test]
fn rules_in_shadow_mode_are_shed_without_a_word() {
    let overload = Overload::new();
    overload.run(&[("user", "u")], 400, FAST);
    overload.run(&[("user", "u")], 40, LATE);
    let decisions = overload.round(&[("shadow", "u")], LATE);
    assert!(decisions.iter().all(|one| one.is_allowed() && one.reason.is_none() && one.shed_class.is_none()));
}
