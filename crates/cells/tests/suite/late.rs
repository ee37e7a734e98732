//! A late peer: what it is assumed to use is kept free, and is gone when its report comes.

use crate::no_link::NoLink;
use std::sync::Arc;
use tollgate_cells::message::Message;
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms, RegionalStore};
use tollgate_core::conformance::block_on;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, ManualClock,
    Outcomes, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Cell = RegionalStore<MemoryStore<Arc<ManualClock>>, NoLink, Arc<ManualClock>>;

const TICK: TimeDelta = TimeDelta::from_millis(200);

fn cell(name: &str, peer: &str, clock: &Arc<ManualClock>) -> Cell {
    let own = MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), Arc::clone(clock)).expect("a store");
    let config = CellConfig::new(name, name, vec![PeerConfig::new(peer, peer)]);
    let incarnation = u64::from(name.as_bytes()[0]);
    let members = Arc::new(Members::new(config, incarnation, tollgate_core::Clock::now(&**clock)));
    let names = Pseudonyms::new(b"a secret of all cells");
    Cell::new(own, members, NoLink, names, Arc::clone(clock), LeaseConfig::default())
}

/// Two cells whose links this test carries, or holds back.
struct Pair {
    clock: Arc<ManualClock>,
    near: Cell,
    far: Cell,
    limit: Limit,
    scope: Scope,
}

impl Pair {
    fn start(limit: LimitSpec) -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
        let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
        near.members().on_hello(0, far.hello());
        far.members().on_hello(0, near.hello());
        let pair =
            Self { clock, near, far, limit: limit.build().expect("valid"), scope: Scope::new("api|user") };
        pair.deliver(&pair.near, &pair.far);
        pair.deliver(&pair.far, &pair.near);
        // It has had an answer of the near cell by now, and says so.
        pair.deliver(&pair.near, &pair.far);
        pair
    }

    /// Carries one batch, and its answer.
    fn deliver(&self, from: &Cell, to: &Cell) {
        from.tick();
        let (batch, sent) = (from.next_batch(0), from.now());
        let sequence = batch.sequence;
        let answer = block_on(to.handle(&from.hello(), Message::Batch(batch)));
        assert!(matches!(answer, Message::Done(_)), "{answer:?}");
        from.on_batch_answer(0, sequence, sent, &answer);
        from.tick();
    }

    /// One tick in which the far cell uses these units. Its report arrives, or is late; the near cell's always arrives.
    fn tick(&self, far: u64, is_late: bool) {
        self.clock.advance(TICK);
        let charged = self.charge(&self.far, far);
        assert_eq!(charged.admission, Admission::Admitted, "by the far cell");
        self.deliver(&self.near, &self.far);
        match is_late {
            true => self.far.tick(),
            false => self.deliver(&self.far, &self.near),
        }
        self.near.tick();
    }

    fn charge(&self, cell: &Cell, units: u64) -> Outcomes {
        let parts = [KeyPart::Text("a")];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        let charge = [Charge::new(key, &self.limit, Cost::new(units))];
        let mut outcomes = Outcomes::default();
        match cell.try_charge(&charge, &mut outcomes) {
            true => outcomes,
            false => block_on(cell.charge(&charge)).expect("decided"),
        }
    }

    /// Takes single units of the near cell until it denies, at most this many.
    fn take(&self, most: u64) -> u64 {
        let admits = || self.charge(&self.near, 1).admission == Admission::Admitted;
        (0..most).take_while(|_| admits()).count() as u64
    }

    fn left(&self) -> u64 {
        self.charge(&self.near, 0).per_charge[0].remaining
    }
}

fn daily(units: u64) -> LimitSpec {
    LimitSpec::new(Algorithm::Gcra, Rate::per(units, TimeDelta::from_secs(86_400)))
}

/// Without it a cell admits units that a late peer has used, or denies what no cell has used once the report is there.
#[test]
fn what_a_late_peer_goes_on_using_is_kept_free_until_it_reports() {
    let pair = Pair::start(daily(200));
    (0..5).for_each(|_| pair.tick(10, false));
    assert_eq!((pair.left(), pair.near.stats().late_peers), (150, 0));
    // One report that does not come is no reason yet.
    pair.tick(10, true);
    pair.tick(10, true);
    assert_eq!(pair.near.stats().late_peers, 0);
    pair.tick(10, true);
    assert_eq!(pair.near.stats().late_peers, 1);
    // Two reports are overdue, of 10 each; the third is not.
    assert_eq!(pair.take(200), 130);
    assert_eq!(pair.left(), 20, "kept free, and not used");
    pair.deliver(&pair.far, &pair.near);
    assert_eq!(pair.near.stats().late_peers, 0);
    assert_eq!(pair.left(), 0, "200 less 80 reported and 130 used here, which is 10 too many");
    assert!(pair.near.stats().late_assumed > 0);
}

/// Without it a report that brings less than was assumed costs the callers of this cell the difference.
#[test]
fn nothing_is_counted_twice_when_the_report_brings_less() {
    let pair = Pair::start(daily(200));
    (0..5).for_each(|_| pair.tick(10, false));
    (0..5).for_each(|_| pair.tick(0, true));
    assert_eq!(pair.take(200), 200 - 50 - 40);
    pair.deliver(&pair.far, &pair.near);
    assert_eq!(pair.left(), 40, "no more is used than was reported");
    assert_eq!(pair.take(200), 40);
}

/// Without it a single burst of a peer shuts out the callers of this cell while its next report is late.
#[test]
fn a_burst_is_no_rate() {
    let pair = Pair::start(daily(200));
    pair.tick(0, false);
    pair.tick(90, false);
    (0..5).for_each(|_| pair.tick(0, true));
    assert_eq!((pair.near.stats().late_peers, pair.take(200)), (1, 110));
}

/// Without it a peer that uses half of the rate leaves this cell nothing, because a short burst is full of assumed units.
#[test]
fn a_cell_keeps_the_part_of_the_rate_that_the_peer_does_not_use() {
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(1_000, TimeDelta::from_secs(1))).burst(100);
    let pair = Pair::start(limit);
    for _ in 0..10 {
        pair.tick(50, false);
    }
    let mut admitted = 0;
    for _ in 0..8 {
        pair.tick(50, true);
        // A quarter of the rate is assumed to be used: of the burst of 100, 75 are left.
        let now = pair.take(1_000);
        admitted += now;
        assert!((75..=100).contains(&now), "{now}");
    }
    assert!(admitted >= 8 * 75, "{admitted}");
}

/// Without it a cell that is gone keeps units from the others beyond the time after which they decide by their shares.
#[test]
fn the_assumption_ends_with_the_silence_time() {
    let pair = Pair::start(daily(200));
    (0..5).for_each(|_| pair.tick(10, false));
    (0..20).for_each(|_| pair.tick(0, true));
    assert_eq!(pair.near.stats().late_peers, 0, "nothing is kept free any more");
    // The far cell does not reach this one and has its part, so this one has the other.
    assert_eq!((pair.near.stats().share_millionths, pair.near.is_regional_only()), (500_000, true));
    let taken = pair.take(200);
    assert!((1..=100).contains(&taken), "{taken}");
}

/// Without it a refused or shortened window limit is another limit, and a caller's usage starts anew.
#[test]
fn windows_keep_units_free_as_well() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingLog, Algorithm::StrictWindow] {
        let spec = LimitSpec::new(algorithm, Rate::per(200, TimeDelta::from_secs(86_400)));
        let pair = Pair::start(spec);
        (0..5).for_each(|_| pair.tick(10, false));
        (0..3).for_each(|_| pair.tick(10, true));
        assert_eq!(pair.take(200), 130, "{algorithm:?}");
        pair.deliver(&pair.far, &pair.near);
        assert_eq!(pair.left(), 0, "{algorithm:?}");
    }
}
