//! Load of the process by its own checks: while checks wait too long for the counter store, some are decided without it, class
//! by class.
//!
//! What is measured is how long checks wait until their outcome is in the hands of the task that asked, be it the store, the
//! connection or the runtime that is late. Checks that need not wait (counters in memory, leased units) pass nothing here
//! and cost nothing.
//!
//! Overload is a wait above the target and twice that without load, while dozens of checks wait at once: a store that is far
//! away is slow and not overloaded, and a few late checks are an accident. Then the level rises, by a quarter of a class in
//! each interval, and falls slowly afterwards. A class is shed in part before the next one is touched: comfort, then cost,
//! then security. Rejected: a fixed number of pending checks, which with a deadline of milliseconds is reached only after
//! the checks have failed.

use crate::striped::{Padded, Striped};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tollgate_core::{TimeDelta, Timestamp};

/// Time between two control steps.
const INTERVAL: TimeDelta = TimeDelta::from_millis(100);
/// Checks that wait at once, on average, below which nothing is shed.
const MIN_WAITING: f64 = 32.0;
/// How many times the wait without load a wait must be.
const QUEUED: f64 = 2.0;
/// Intervals in a row that show overload before anything is shed.
const CONFIRMED: u32 = 2;
/// Thousandths of a class by which the level rises in an interval, and falls.
const RISE: u32 = 250;
const FALL: u32 = 50;
/// Thousandths of a class.
const WHOLE: u32 = 1_000;
/// How long the lowest wait is remembered, at least; at most twice as long.
const MEMORY: TimeDelta = TimeDelta::from_secs(300);

/// Place of a check in the order of shedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShedOrder {
    /// Shed first.
    Comfort,
    /// Shed when all of comfort is.
    Cost,
    /// Shed last.
    Security,
}

impl ShedOrder {
    /// All, the one that is shed first first.
    pub const ALL: [Self; 3] = [Self::Comfort, Self::Cost, Self::Security];

    /// Returns the name in metrics and responses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Comfort => "comfort",
            Self::Cost => "cost",
            Self::Security => "security",
        }
    }
}

/// Load of the process by its own checks.
#[derive(Debug)]
pub struct CheckLoad {
    target: TimeDelta,
    pending: Padded<AtomicU32>,
    waits: Striped<1>,
    /// Thousandths of classes that are shed.
    level: Padded<AtomicU32>,
    next_step: AtomicU64,
    /// Mean wait of the last interval, in microseconds.
    wait: AtomicU64,
    turn: AtomicU32,
    shed: [Padded<AtomicU64>; 3],
    control: Mutex<Control>,
    on_change: fn(ShedChange),
}

/// A class of checks begins or ceases to be shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShedChange {
    /// The last class that was shed, in part at least.
    pub before: Option<ShedOrder>,
    /// The last class that is.
    pub after: Option<ShedOrder>,
    /// Mean wait in the last interval.
    pub wait: TimeDelta,
    /// Wait above which checks are shed.
    pub target: TimeDelta,
    /// Checks that wait now.
    pub pending: u32,
}

#[derive(Debug, Default)]
struct Control {
    last: Timestamp,
    overloaded: u32,
    /// No further rise before this time: checks that began before the last one are still to come.
    hold: Timestamp,
    /// Lowest mean wait in microseconds of this span of memory and the one before, and when this one began.
    lowest: [Option<f64>; 2],
    since: Timestamp,
}

/// State of a [`CheckLoad`], for metrics and reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckLoadState {
    /// Checks that wait for the store now.
    pub pending: u32,
    /// Mean wait in the last interval with answers, in seconds.
    pub wait: f64,
    /// Wait above which checks are shed, in seconds.
    pub target: f64,
    /// Part of the checks of each class that is shed, by [`ShedOrder`].
    pub shed_part: [f64; 3],
    /// Checks shed since the start, by [`ShedOrder`].
    pub shed: [u64; 3],
}

impl CheckLoad {
    /// Creates one that sheds while the mean wait is above `target`. `on_change` is called on the thread of a check: it must not
    /// block.
    #[must_use]
    pub fn new(target: TimeDelta, on_change: fn(ShedChange)) -> Self {
        Self {
            target,
            pending: Padded(AtomicU32::new(0)),
            waits: Striped::new(),
            level: Padded(AtomicU32::new(0)),
            next_step: AtomicU64::new(0),
            wait: AtomicU64::new(0),
            turn: AtomicU32::new(0),
            shed: Default::default(),
            control: Mutex::default(),
            on_change,
        }
    }

    /// Returns the classes of which a check that would wait now is to go without the store: none, or all up to the one
    /// returned. Call it once for a check.
    #[inline]
    pub fn sheds_up_to(&self, now: Timestamp) -> Option<ShedOrder> {
        self.step_if_due(now);
        let level = self.level.0.load(Ordering::Relaxed);
        if level == 0 { None } else { self.draw(level) }
    }

    /// Selects checks evenly: of four in a row at 250 thousandths, one.
    #[cold]
    fn draw(&self, level: u32) -> Option<ShedOrder> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9);
        let drawn = (u64::from(turn) * u64::from(WHOLE)) >> 32;
        let whole = (level / WHOLE) as usize;
        let upto = whole + usize::from(drawn < u64::from(level % WHOLE));
        upto.checked_sub(1).and_then(|at| ShedOrder::ALL.get(at)).copied()
    }

    /// Counts a check of which charges of this class went without the store.
    pub fn count_shed(&self, class: ShedOrder) {
        self.shed[class as usize].0.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a check that begins to wait. Call [`CheckLoad::end`] once for it.
    #[inline]
    pub fn begin(&self) {
        self.pending.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the wait of a check. `waited` is how long it did for an answer, or for its deadline; `None` if it did not wait: its
    /// client left, or the store is known to be unavailable.
    #[inline]
    pub fn end(&self, now: Timestamp, waited: Option<TimeDelta>) {
        self.pending.0.fetch_sub(1, Ordering::Relaxed);
        if let Some(waited) = waited {
            self.waits.add(0, waited.as_micros());
        }
        self.step_if_due(now);
    }

    #[inline]
    fn step_if_due(&self, now: Timestamp) {
        if now.as_micros() >= self.next_step.load(Ordering::Relaxed) {
            self.step(now);
        }
    }

    #[cold]
    fn step(&self, now: Timestamp) {
        let Ok(mut control) = self.control.try_lock() else { return };
        let elapsed = now.since(control.last);
        if elapsed < INTERVAL {
            return;
        }
        self.next_step.store((now + INTERVAL).as_micros(), Ordering::Relaxed);
        if std::mem::replace(&mut control.last, now) == Timestamp::ZERO {
            return;
        }
        let (count, sum) = self.waits.take(0);
        let level = self.level.0.load(Ordering::Relaxed);
        if count == 0 {
            // Nothing was answered. While checks wait, that is no sign of calm.
            if self.pending.0.load(Ordering::Relaxed) == 0 {
                control.overloaded = 0;
                self.fall(level, elapsed);
            }
            return;
        }
        let mean = sum as f64 / f64::from(count);
        self.wait.store(mean as u64, Ordering::Relaxed);
        let lowest = control.lowest(mean, now);
        // How many waited at once, by Little's law, or wait now: where a store answers many at once, the first answer ends an
        // interval and is alone in it.
        let pending = f64::from(self.pending.0.load(Ordering::Relaxed));
        let waiting = (sum as f64 / elapsed.as_micros() as f64).max(pending);
        let is_late = mean > self.target.as_micros() as f64 && mean > QUEUED * lowest;
        if !is_late || waiting < MIN_WAITING {
            control.overloaded = 0;
            return self.fall(level, elapsed);
        }
        control.overloaded += 1;
        if control.overloaded >= CONFIRMED && now >= control.hold {
            control.hold = now + TimeDelta::from_micros(mean as u64);
            let most = WHOLE * ShedOrder::ALL.len() as u32;
            self.set(level, (level + RISE).min(most));
        }
    }

    fn fall(&self, level: u32, elapsed: TimeDelta) {
        let intervals = u32::try_from(elapsed.as_micros() / INTERVAL.as_micros()).unwrap_or(u32::MAX);
        self.set(level, level.saturating_sub(FALL.saturating_mul(intervals)));
    }

    /// Sets the level, and reports when a class begins or ceases to be shed.
    fn set(&self, from: u32, to: u32) {
        if from == to {
            return;
        }
        self.level.0.store(to, Ordering::Relaxed);
        let last = |level: u32| {
            let touched = level.div_ceil(WHOLE) as usize;
            touched.checked_sub(1).and_then(|at| ShedOrder::ALL.get(at)).copied()
        };
        let (before, after) = (last(from), last(to));
        if before != after {
            let wait = TimeDelta::from_micros(self.wait.load(Ordering::Relaxed));
            let pending = self.pending.0.load(Ordering::Relaxed);
            (self.on_change)(ShedChange { before, after, wait, target: self.target, pending });
        }
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self, now: Timestamp) -> CheckLoadState {
        self.step_if_due(now);
        let level = self.level.0.load(Ordering::Relaxed);
        let part = |at: usize| {
            let own = level.saturating_sub(WHOLE * at as u32).min(WHOLE);
            f64::from(own) / f64::from(WHOLE)
        };
        CheckLoadState {
            pending: self.pending.0.load(Ordering::Relaxed),
            wait: self.wait.load(Ordering::Relaxed) as f64 / 1e6,
            target: self.target.as_micros() as f64 / 1e6,
            shed_part: std::array::from_fn(part),
            shed: std::array::from_fn(|at| self.shed[at].0.load(Ordering::Relaxed)),
        }
    }
}

impl Control {
    /// Records a mean wait. Returns the lowest of late.
    fn lowest(&mut self, mean: f64, now: Timestamp) -> f64 {
        if now.since(self.since) >= MEMORY {
            self.since = now;
            self.lowest = [None, self.lowest[0]];
        }
        let lower = |known: Option<f64>| known.map_or(mean, |known| known.min(mean));
        self.lowest[0] = Some(lower(self.lowest[0]));
        lower(self.lowest[1]).min(lower(self.lowest[0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slow store answers a whole batch at once, and the state is read before they are counted.
    #[test]
    fn checks_that_are_answered_all_at_once_are_seen_to_wait() {
        let (load, mut now) =
            (CheckLoad::new(TimeDelta::from_millis(500), |_| {}), Timestamp::from_secs(1_000));
        let mut pass = |load: &CheckLoad| {
            now = now + INTERVAL;
            let _ = load.state(now);
            now
        };
        load.begin();
        let fast = pass(&load);
        load.end(fast, Some(TimeDelta::from_millis(1)));
        for _ in 0..5 {
            (0..96).for_each(|_| load.begin());
            let asked = (0..20).map(|_| pass(&load)).last().expect("some");
            (0..96).for_each(|_| load.end(asked + INTERVAL, Some(TimeDelta::from_secs(2))));
        }
        assert!(load.state(pass(&load)).shed_part[0] > 0.0);
    }

    /// A store that works on one check after the other, and checks that arrive evenly.
    struct Run {
        load: CheckLoad,
        now: Timestamp,
        /// Checks shed and asked, by class.
        shed: [u64; 3],
        asked: [u64; 3],
    }

    impl Run {
        fn new(target: TimeDelta) -> Self {
            let now = Timestamp::from_secs(1_000);
            Self { load: CheckLoad::new(target, |_| {}), now, shed: [0; 3], asked: [0; 3] }
        }

        /// Lets `rate` checks a second arrive for some seconds, of all classes in turn. Those that are not shed wait as long as
        /// `wait` says, given how many of a second are not.
        fn run(&mut self, seconds: u64, rate: u64, wait: impl Fn(f64) -> TimeDelta) {
            (self.shed, self.asked) = ([0; 3], [0; 3]);
            let mut served = 1.0;
            for n in 0..seconds * rate {
                self.now = self.now + TimeDelta::from_micros(1_000_000 / rate);
                let class = ShedOrder::ALL[(n % 3) as usize];
                self.asked[class as usize] += 1;
                let is_shed = self.load.sheds_up_to(self.now).is_some_and(|upto| class <= upto);
                served += (f64::from(u8::from(!is_shed)) - served) / (rate as f64 / 10.0);
                if is_shed {
                    self.load.count_shed(class);
                    self.shed[class as usize] += 1;
                    continue;
                }
                self.load.begin();
                self.load.end(self.now, Some(wait(served * rate as f64)));
            }
        }
    }

    const TARGET: TimeDelta = TimeDelta::from_millis(5);

    fn fast(_: f64) -> TimeDelta {
        TimeDelta::from_micros(300)
    }

    #[test]
    fn a_healthy_store_sheds_nothing_and_neither_does_a_distant_one() {
        let mut run = Run::new(TARGET);
        run.run(5, 30_000, fast);
        run.run(5, 30_000, |_| TimeDelta::from_millis(4));
        assert_eq!(run.shed, [0; 3]);
        let mut distant = Run::new(TARGET);
        distant.run(20, 30_000, |_| TimeDelta::from_millis(9));
        assert_eq!(distant.shed, [0; 3], "always slow is not overloaded");
    }

    #[test]
    fn a_few_late_checks_are_no_overload() {
        let mut run = Run::new(TARGET);
        run.run(5, 1_000, fast);
        run.run(10, 1_000, |_| TimeDelta::from_millis(10));
        assert_eq!(run.shed, [0; 3], "ten wait at once");
    }

    #[test]
    fn comfort_is_shed_first_and_as_much_as_is_needed() {
        let mut run = Run::new(TARGET);
        run.run(5, 30_000, fast);
        // The store answers 25,000 in a second, and above that not in time.
        let overloaded = |served: f64| TimeDelta::from_micros(if served > 25_000.0 { 10_000 } else { 400 });
        run.run(20, 30_000, overloaded);
        assert!(run.shed[0] > 0 && run.shed[0] < run.asked[0], "{:?} of {:?}", run.shed, run.asked);
        assert_eq!(run.shed[1..], [0, 0]);
        run.run(5, 10_000, fast);
        run.run(1, 10_000, fast);
        assert_eq!((run.shed, run.load.state(run.now).shed_part), ([0; 3], [0.0; 3]), "and comes back");
    }

    #[test]
    fn security_is_shed_last_and_asks_again() {
        let mut run = Run::new(TARGET);
        run.run(5, 30_000, fast);
        run.run(10, 30_000, |_| TimeDelta::from_millis(10));
        let [comfort, cost, security] = run.shed;
        assert!(comfort > cost && cost > security && security > 0, "{:?}", run.shed);
        assert!(security < run.asked[2], "some ask, so that the end of the overload is seen");
        let state = run.load.state(run.now);
        assert_eq!((state.shed_part[0], state.shed_part[1]), (1.0, 1.0));
        run.run(8, 30_000, fast);
        assert_eq!(run.load.state(run.now).shed_part, [0.0; 3]);
    }

    #[test]
    fn checks_without_an_answer_are_no_calm() {
        let load = CheckLoad::new(TARGET, |_| {});
        load.level.0.store(500, Ordering::Relaxed);
        let at = |millis| Timestamp::from_secs(1) + TimeDelta::from_millis(millis);
        load.sheds_up_to(at(0));
        load.begin();
        load.sheds_up_to(at(5_000));
        assert_eq!(load.state(at(5_000)).shed_part[0], 0.5);
        load.end(at(5_001), None);
        assert_eq!(load.state(at(5_500)).shed_part[0], 0.25, "nobody waits any more");
    }
}
