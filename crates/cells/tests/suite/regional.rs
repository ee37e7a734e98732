//! The regional store: a store like every other, and what two cells do to each other's counters.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use tollgate_cells::message::{Hello, Message, encode};
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms, RegionalStore, SentCharge, Transport};
use tollgate_core::conformance::{block_on, run};
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterId, CounterKey, CounterOwner, CounterStore, Enforcement,
    KeyPart, Limit, LimitSpec, ManualClock, Mode, Outcomes, Permit, PermitId, Rate, RegionMode, Scope,
    StoreError, TimeDelta, Timestamp, Verdict, region_prefix,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Cell = RegionalStore<MemoryStore<Arc<ManualClock>>, Arc<Direct>, Arc<ManualClock>>;

/// A link that delivers at once, and remembers what it carried.
#[derive(Default)]
struct Direct {
    peer: OnceLock<Arc<Cell>>,
    from: OnceLock<Hello>,
    carried: Mutex<Vec<u8>>,
    is_down: AtomicBool,
}

impl Direct {
    async fn call(&self, message: Message) -> Result<Message, StoreError> {
        self.carried.lock().expect("bytes").extend(encode(1, &message));
        let (Some(peer), Some(from), false) =
            (self.peer.get(), self.from.get(), self.is_down.load(Ordering::Relaxed))
        else {
            return Err(StoreError::Unavailable("down".to_owned()));
        };
        Ok(peer.handle(from, message).await)
    }
}

impl Transport for Direct {
    async fn charge(
        &self,
        _: usize,
        charges: Vec<SentCharge>,
        _: Vec<CounterId>,
    ) -> Result<Outcomes, StoreError> {
        match self.call(Message::Charge(charges)).await? {
            Message::Outcomes(outcomes) => Ok(outcomes),
            other => Err(StoreError::Unavailable(format!("{other:?}"))),
        }
    }

    async fn send(&self, _: usize, message: Message, _: Vec<CounterId>) -> Result<(), StoreError> {
        match self.call(message).await? {
            Message::Failed(why) => Err(StoreError::Unavailable(why)),
            _ => Ok(()),
        }
    }

    fn post(&self, _: usize, message: Message) {
        let _ = block_on(self.call(message));
    }
}

fn cell(name: &str, peers: Vec<PeerConfig>, clock: &Arc<ManualClock>) -> (Arc<Cell>, Arc<Direct>) {
    let link = Arc::new(Direct::default());
    let own = MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), Arc::clone(clock)).expect("a store");
    let config = CellConfig::new(name, name, peers);
    let members = Arc::new(Members::new(config, 7, tollgate_core::Clock::now(&**clock)));
    let names = Pseudonyms::new(b"a secret of all cells");
    let store = Cell::new(own, members, Arc::clone(&link), names, Arc::clone(clock), LeaseConfig::default());
    (Arc::new(store), link)
}

/// Two cells, each the other's peer, that have just heard of each other.
struct Pair {
    clock: Arc<ManualClock>,
    cells: [(Arc<Cell>, Arc<Direct>); 2],
}

impl Pair {
    fn start() -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
        let peer = |name: &str| vec![PeerConfig::new(name, name)];
        let cells = [cell("eu", peer("us"), &clock), cell("us", peer("eu"), &clock)];
        for at in 0..2 {
            let ((own, link), (other, _)) = (&cells[at], &cells[1 - at]);
            assert!(link.peer.set(Arc::clone(other)).is_ok() && link.from.set(own.hello()).is_ok());
            own.members().on_hello(0, other.hello());
        }
        let pair = Self { clock, cells };
        // The second tells each that the other has had its answer.
        pair.exchange();
        pair.exchange();
        pair
    }

    /// Sends both cells' batches and applies them.
    fn exchange(&self) {
        for (cell, link) in &self.cells {
            cell.tick();
            let (batch, sent) = (cell.next_batch(0), cell.now());
            let sequence = batch.sequence;
            if let Ok(answer) = block_on(link.call(Message::Batch(batch))) {
                cell.on_batch_answer(0, sequence, sent, &answer);
            }
        }
        self.cells.iter().for_each(|(cell, _)| cell.tick());
    }
}

fn limit(count: u64, burst: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(1)))
        .burst(burst)
        .build()
        .expect("valid")
}

fn scope(mode: RegionMode, owner: CounterOwner<'_>, name: &str) -> Scope {
    Scope::new(format!("{}api|{name}", region_prefix(mode, owner)))
}

fn charge(cell: &Cell, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
    let mut outcomes = Outcomes::default();
    if cell.try_charge(charges, &mut outcomes) { Ok(outcomes) } else { block_on(cell.charge(charges)) }
}

fn left(cell: &Cell, one: &Charge<'_>) -> u64 {
    charge(cell, &[Charge { cost: Cost::PEEK, ..*one }]).expect("decided").per_charge[0].remaining
}

#[test]
fn a_cell_without_peers_is_a_store_like_every_other() {
    let make = async |clock: Arc<ManualClock>| cell("eu", Vec::new(), &clock).0;
    if let Err(broken) = block_on(run(make)) {
        panic!("{broken:?}");
    }
}

/// Without it a denied request eats the quota of a limit that another cell owns, or the other way round.
#[test]
fn a_request_over_two_cells_is_charged_in_both_or_in_none() {
    let pair = Pair::start();
    let us = &pair.cells[1].0;
    let owned = scope(RegionMode::Owner, CounterOwner::Region("eu"), "owned");
    let own = scope(RegionMode::Shared, CounterOwner::Hash, "own");
    let (five, three, parts) = (limit(1, 5), limit(1, 3), [KeyPart::Text("a")]);
    let there = Charge::new(CounterKey { scope: &owned, parts: &parts }, &five, Cost::ONE);
    let here = Charge::new(CounterKey { scope: &own, parts: &parts }, &three, Cost::ONE);
    for _ in 0..3 {
        assert_eq!(charge(us, &[here, there]).expect("decided").admission, Admission::Admitted);
    }
    let denied = charge(us, &[here, there]).expect("decided");
    assert_eq!(denied.admission, Admission::Denied);
    assert_eq!(left(us, &there), 2, "the own limit denied: the owner was not charged");
    let more = Charge { cost: Cost::new(2), ..there };
    assert_eq!(charge(us, &[more]).expect("decided").admission, Admission::Admitted);
    pair.clock.advance(TimeDelta::from_millis(300));
    let before = left(us, &here);
    let denied = charge(us, &[Charge { cost: Cost::PEEK, ..here }, there]).expect("decided");
    assert_eq!(
        (denied.admission, left(us, &here)),
        (Admission::Denied, before),
        "the owner denied: undone here"
    );
    // An owner that does not answer fails its own charges alone, and nothing stays charged.
    pair.cells[1].1.is_down.store(true, Ordering::Relaxed);
    pair.clock.advance(TimeDelta::from_secs(1));
    let before = left(us, &here);
    match charge(us, &[here, there]) {
        Err(StoreError::Partial { failed, .. }) => assert_eq!(failed, [1]),
        other => panic!("{other:?}"),
    }
    assert_eq!(left(us, &here), before);
    let known = us.last_known(&there).expect("what the owner said");
    assert!(known.used > 0, "without the owner a cell goes on from there");
}

/// Without it, anyone who reads a link or another cell's memory can use a caller's key.
#[test]
fn an_api_key_does_not_leave_its_cell() {
    let pair = Pair::start();
    let (us, link) = &pair.cells[1];
    let secret = "sk_live_4242424242424242";
    let parts = [KeyPart::Secret(secret)];
    let limit = limit(10, 10);
    let own = scope(RegionMode::Shared, CounterOwner::Hash, "own");
    for owner in [CounterOwner::Region("eu"), CounterOwner::Hash] {
        let owned = scope(RegionMode::Owner, owner, "owned");
        let _ = charge(us, &[Charge::new(CounterKey { scope: &owned, parts: &parts }, &limit, Cost::ONE)]);
    }
    let shared = Charge::new(CounterKey { scope: &own, parts: &parts }, &limit, Cost::new(4));
    charge(us, &[shared]).expect("decided");
    pair.exchange();
    assert_eq!(left(&pair.cells[0].0, &shared), 6, "the other cell finds the same caller's counter");
    let carried = link.carried.lock().expect("bytes");
    assert!(!carried.is_empty() && !carried.windows(8).any(|bytes| bytes == &secret.as_bytes()[..8]));
}

/// Without it a caller that invents homes has a fresh limit for each of them.
#[test]
fn homes_that_are_no_region_share_the_counter_of_requests_without_one() {
    let pair = Pair::start();
    // Until each may own counters by hash.
    for _ in 0..20 {
        pair.clock.advance(TimeDelta::from_millis(200));
        pair.exchange();
    }
    let hourly = LimitSpec::new(Algorithm::FixedWindow, Rate::per(5, TimeDelta::from_secs(3_600)));
    let five = hourly.build().expect("valid");
    for (cell, _) in &pair.cells {
        for mode in [RegionMode::Owner, RegionMode::Leased] {
            let owned = scope(mode, CounterOwner::Home, &format!("login-{}", cell.hello().cell));
            let admits = |home: &str| {
                let parts = [KeyPart::Text("u"), KeyPart::Text(home)];
                let one = Charge::new(CounterKey { scope: &owned, parts: &parts }, &five, Cost::ONE);
                charge(cell, &[one]).expect("decided").admission == Admission::Admitted
            };
            let invented: Vec<String> = (0..100).map(|at| format!("z{at}")).collect();
            let admitted = invented.iter().filter(|home| admits(home)).count();
            assert!(admitted <= 5, "{mode:?}: {admitted}");
            if mode == RegionMode::Owner {
                assert_eq!((admitted, admits("")), (5, false));
            }
            assert!(admits("eu") && admits("us"), "each region has its own");
        }
    }
}

/// Without it a repeated batch locks a caller out, and one that no cell can have sent for ever.
#[test]
fn a_replayed_or_absurd_batch_does_little_harm() {
    let pair = Pair::start();
    let ((eu, _), (us, _)) = (&pair.cells[0], &pair.cells[1]);
    let (own, parts, ten) =
        (scope(RegionMode::Shared, CounterOwner::Hash, "own"), [KeyPart::Text("a")], limit(10, 10));
    let one = Charge::new(CounterKey { scope: &own, parts: &parts }, &ten, Cost::new(3));
    charge(us, &[one]).expect("decided");
    us.tick();
    let batch = us.next_batch(0);
    for _ in 0..5 {
        block_on(eu.handle(&us.hello(), Message::Batch(batch.clone())));
    }
    assert_eq!(left(eu, &one), 7, "applied once");
    assert_eq!(eu.stats().batches_repeated, 4);
    let mut batch = batch;
    let absurd = Arc::make_mut(&mut batch);
    absurd.sequence += 1;
    absurd.entries[0].units = i64::MAX;
    block_on(eu.handle(&us.hello(), Message::Batch(batch)));
    assert_eq!(charge(eu, &[one]).expect("decided").admission, Admission::Denied);
    pair.clock.advance(TimeDelta::from_secs(60));
    pair.exchange();
    assert_eq!(
        charge(eu, &[one]).expect("decided").admission,
        Admission::Admitted,
        "a minute later, of 10/s"
    );
}

/// Without it a small burst forgets what others consume: each cell admits the whole rate.
#[test]
fn a_debit_beyond_the_burst_is_kept() {
    let pair = Pair::start();
    let ((eu, _), (us, _)) = (&pair.cells[0], &pair.cells[1]);
    let (own, parts, small) =
        (scope(RegionMode::Shared, CounterOwner::Hash, "own"), [KeyPart::Text("a")], limit(1_000, 10));
    let one = Charge::new(CounterKey { scope: &own, parts: &parts }, &small, Cost::ONE);
    let mut admitted = 0;
    for step in 0..10_000 {
        for cell in [eu, us] {
            admitted += u64::from(charge(cell, &[one]).expect("decided").admission == Admission::Admitted);
        }
        pair.clock.advance(TimeDelta::from_micros(500));
        if step % 400 == 0 {
            pair.exchange();
        }
    }
    // Five seconds of 1,000/s, and what the bound allows beyond: B, and once more B + r·Λ of the other cell.
    assert!((4_000..=5_000 + 10 + 10 + 2 * 200 + 50).contains(&admitted), "{admitted}");
}

/// Without it one silent cell denies all limits of one unit, or cells that are cut off admit more than the limit or less.
#[test]
fn cells_that_are_cut_off_admit_the_limit_together() {
    let pair = Pair::start();
    pair.cells.iter().for_each(|(_, link)| link.is_down.store(true, Ordering::Relaxed));
    pair.clock.advance(TimeDelta::from_secs(3));
    pair.exchange();
    let own = scope(RegionMode::Shared, CounterOwner::Hash, "own");
    for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow] {
        for units in [1, 2, 3, 7, 90] {
            let hourly = LimitSpec::new(algorithm, Rate::per(units, TimeDelta::from_secs(3_600)));
            let limit = hourly.build().expect("valid");
            for name in (0..20).map(|at| format!("{algorithm:?}-{units}-{at}")) {
                let parts = [KeyPart::Text(&name)];
                let one = Charge::new(CounterKey { scope: &own, parts: &parts }, &limit, Cost::ONE);
                let admitted = |(cell, _): &(Arc<Cell>, _)| {
                    let is_admitted = |_: &u64| {
                        let outcomes = charge(cell, &[one]).expect("decided");
                        if outcomes.admission == Admission::Denied {
                            let verdict = outcomes.per_charge[0].verdict;
                            assert!(
                                matches!(verdict, Verdict::Denied { retry_after: Some(wait) } if wait > TimeDelta::ZERO),
                                "{name}: {verdict:?}"
                            );
                        }
                        outcomes.admission == Admission::Admitted
                    };
                    (0..100_u64).take_while(is_admitted).count() as u64
                };
                let all: u64 = pair.cells.iter().map(admitted).sum();
                assert_eq!(all, units, "{name}");
            }
        }
    }
}

/// Without it two cells decide one counter while their views of who is alive differ.
#[test]
fn a_cell_decides_no_counter_that_it_does_not_own() {
    let pair = Pair::start();
    let (us, five, parts) = (&pair.cells[1].0, limit(1, 5), [KeyPart::Text("a")]);
    let owned = scope(RegionMode::Owner, CounterOwner::Region("eu"), "owned");
    let one = Charge::new(CounterKey { scope: &owned, parts: &parts }, &five, Cost::ONE);
    let asked = Message::Charge(vec![SentCharge::new(&one)]);
    let from = pair.cells[0].0.hello();
    assert!(matches!(block_on(us.handle(&from, asked)), Message::Failed(_)));
    // What has happened is still counted.
    let debit = Message::Debit(vec![SentCharge::new(&one)]);
    assert_eq!(block_on(us.handle(&from, debit)), Message::Done(Vec::new()));
}

/// Without it a denied request keeps units of an owner, where limits of which one must fit are in several places.
#[test]
fn a_denied_request_with_alternatives_in_two_cells_takes_nothing() {
    let pair = Pair::start();
    let (us, parts) = (&pair.cells[1].0, [KeyPart::Text("a")]);
    let far = |name| scope(RegionMode::Owner, CounterOwner::Region("eu"), name);
    let (must, either, other) =
        (far("must"), far("either"), scope(RegionMode::Shared, CounterOwner::Hash, "or"));
    let (five, none) = (limit(1, 5), limit(1, 1));
    let charge_of = |scope, limit, enforcement| Charge {
        enforcement,
        ..Charge::new(CounterKey { scope, parts: &parts }, limit, Cost::new(2))
    };
    let required = charge_of(&must, &five, Enforcement::Required);
    // Neither alternative fits: the owner admits its required part and must give it back.
    let near = charge_of(&other, &none, Enforcement::Alternative);
    let there = charge_of(&either, &none, Enforcement::Alternative);
    let denied = charge(us, &[required, near, there]).expect("decided");
    assert_eq!((denied.admission, left(us, &required)), (Admission::Denied, 5));
    // The owner's alternative fits and its required limit does not.
    let there = charge_of(&either, &five, Enforcement::Alternative);
    let near = charge_of(&other, &five, Enforcement::Alternative);
    let required = Charge { cost: Cost::new(6), ..required };
    let denied = charge(us, &[required, near, there]).expect("decided");
    let now = (denied.admission, left(us, &near), left(us, &there), left(us, &required));
    assert_eq!(now, (Admission::Denied, 5, 5, 5));
}

/// Without it a caller's permits of such a rule are used up for good.
#[test]
fn a_local_permit_of_a_secret_is_released() {
    let pair = Pair::start();
    let (us, parts) = (&pair.cells[1].0, [KeyPart::Secret("sk_live_4242424242424242")]);
    let own = scope(RegionMode::Shared, CounterOwner::Hash, "held");
    let rate = Rate::per(1, TimeDelta::from_secs(60));
    let one = LimitSpec::new(Algorithm::Concurrency, rate).build().expect("valid");
    for mode in [Mode::Local, Mode::Central] {
        for id in 1..4 {
            let key = CounterKey { scope: &own, parts: &parts };
            let held = Charge { mode, permit: PermitId(id), ..Charge::new(key, &one, Cost::ONE) };
            assert_eq!(charge(us, &[held]).expect("decided").admission, Admission::Admitted, "{mode:?}");
            block_on(us.release(&[Permit { key, limit: &one, id: PermitId(id) }])).expect("released");
        }
    }
}

/// A check names no holder, so a release frees nothing: permits of denied checks would be held until their time is over.
#[test]
fn a_denied_check_gives_permits_back_to_every_cell() {
    let pair = Pair::start();
    let (us, parts) = (&pair.cells[1].0, [KeyPart::Text("caller")]);
    let far = scope(RegionMode::Owner, CounterOwner::Region("eu"), "far");
    let near = scope(RegionMode::Shared, CounterOwner::Hash, "near");
    let two = LimitSpec::new(Algorithm::Concurrency, Rate::per(2, TimeDelta::from_secs(60))).build();
    let (two, five) = (two.expect("valid"), limit(1, 5));
    for (permits, other) in [(&far, &near), (&near, &far)] {
        for permit in [PermitId::ANONYMOUS, PermitId(7)] {
            let charge_of = |scope, limit, cost| Charge {
                permit,
                ..Charge::new(CounterKey { scope, parts: &parts }, limit, Cost::new(cost))
            };
            let held = charge_of(permits, &two, 1);
            for _ in 0..3 {
                let denied = charge(us, &[held, charge_of(other, &five, 6)]).expect("decided");
                assert_eq!((denied.admission, left(us, &held)), (Admission::Denied, 2), "{permit:?}");
            }
        }
    }
}

/// Without it the lag of a node that only stands by grows for ever, and with it the alert.
#[test]
fn a_node_that_stands_by_has_no_lag() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
    let node = |address: &str| PeerConfig { store: "us".to_owned(), ..PeerConfig::new("us", address) };
    let (eu, _) = cell("eu", vec![node("us-1"), node("us-2")], &clock);
    let (us, _) = cell("us", vec![PeerConfig::new("eu", "eu")], &clock);
    (0..2).for_each(|peer| eu.members().on_hello(peer, us.hello()));
    let tick = |answering: &[usize]| {
        clock.advance(TimeDelta::from_millis(200));
        eu.tick();
        for peer in answering {
            let (sequence, sent) = (eu.next_batch(*peer).sequence, eu.now());
            eu.on_batch_answer(*peer, sequence, sent, &Message::Done(Vec::new()));
        }
    };
    (0..50).for_each(|_| tick(&[0, 1]));
    let lags = || eu.stats().peers.iter().map(|peer| peer.lag).collect::<Vec<_>>();
    assert_eq!(lags(), [TimeDelta::ZERO; 2]);
    // One that does not answer is seen.
    (0..50).for_each(|_| tick(&[0]));
    assert_eq!(lags(), [TimeDelta::ZERO, TimeDelta::from_secs(10)]);
}

/// Without it an operator reads of a lag of nothing while all other cells are silent.
#[test]
fn the_part_of_a_cell_is_reported_while_others_are_silent() {
    let pair = Pair::start();
    let (eu, own) = (&pair.cells[0].0, scope(RegionMode::Shared, CounterOwner::Hash, "own"));
    let (ten, parts) = (limit(10, 10), [KeyPart::Text("a")]);
    let one = Charge::new(CounterKey { scope: &own, parts: &parts }, &ten, Cost::ONE);
    let part = || eu.region_status(&one).map(|status| (status.is_regional_only, status.part));
    assert_eq!(part(), Some((false, None)));
    pair.clock.advance(TimeDelta::from_secs(3));
    eu.tick();
    assert_eq!(part(), Some((true, Some(5))));
}

/// Without it a request that another owner denies moves a bucket back into a lease that a third cell holds, and its units are
/// admitted twice.
#[test]
fn a_leased_bucket_is_refunded_only_while_no_lease_is_outstanding() {
    let pair = Pair::start();
    let ((eu, _), (us, _)) = (&pair.cells[0], &pair.cells[1]);
    let leased = scope(RegionMode::Leased, CounterOwner::Region("eu"), "leased");
    let (hundred, parts) = (limit(1, 100), [KeyPart::Text("a")]);
    let key = CounterKey { scope: &leased, parts: &parts };
    let of = |cost| Charge::new(key, &hundred, cost);
    let from = us.hello();
    let undo = |units| {
        let debit = Message::Debit(vec![SentCharge::new(&of(Cost::refund(units)))]);
        assert_eq!(block_on(eu.handle(&from, debit)), Message::Done(Vec::new()));
    };
    assert_eq!(charge(eu, &[of(Cost::new(20))]).expect("decided").admission, Admission::Admitted);
    undo(5);
    assert_eq!(left(eu, &of(Cost::ONE)), 85, "no lease is outstanding");
    block_on(eu.debit(&[of(Cost::refund(5))])).expect("refunded");
    charge(eu, &[of(Cost::refund(2))]).expect("refunded");
    assert_eq!(left(eu, &of(Cost::ONE)), 92);
    for id in 1..5 {
        charge(us, &[of(Cost::ONE)]).expect("decided");
        for task in us.leases().due_tasks() {
            block_on(us.leases().run_task(task, PermitId(id)));
        }
    }
    assert!(us.leases().stats().available > 0, "a lease is outstanding");
    let before = left(eu, &of(Cost::ONE));
    undo(5);
    block_on(eu.debit(&[of(Cost::refund(5))])).expect("left to time");
    let shown = charge(eu, &[of(Cost::refund(2))]).expect("left to time");
    assert_eq!((shown.per_charge[0].remaining, left(eu, &of(Cost::ONE))), (before, before));
}
