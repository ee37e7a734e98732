//! Requests as the argument of a script: little-endian numbers, which cost a script next to nothing to read.
//!
//! `lua/read.lua` and `lua/decode.lua` say what stands where. A number a argument was rejected: reading twenty arguments
//! costs Redis more than deciding on them.

use super::key_encoding::Name;
use super::shard_request::{Request, Want};
use tollgate_core::{Cost, Limit, LimitParams, Period, TimeDelta, Timestamp};

/// More than any limit has, and small enough that sums stay exact in a script.
const PLENTY: u64 = 1 << 42;

/// What is done with charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Charge,
    Debit,
    Release,
}

/// The ask of one script call.
pub(super) struct Ask {
    counters: Vec<u8>,
    count: u16,
    body: Vec<u8>,
    told: Option<Timestamp>,
    /// Where calendars take their borders from: the script's own time is near.
    near: Timestamp,
}

impl Ask {
    /// An ask at a time that is told, or at the server's own, which is about `near`.
    pub(super) fn new(told: Option<Timestamp>, near: Timestamp) -> Self {
        Self { counters: Vec::new(), count: 0, body: Vec::new(), told, near }
    }

    /// Declares a counter of a bundle, both numbered from 1.
    pub(super) fn counter(&mut self, bundle: usize, name: &Name) -> u16 {
        self.counters.extend_from_slice(&u16::try_from(bundle).unwrap_or(u16::MAX).to_le_bytes());
        self.counters.extend_from_slice(name);
        self.counters.push(0);
        self.count += 1;
        self.count
    }

    /// When something was taken that is now given back.
    pub(super) fn taken(&mut self, at: Timestamp) {
        self.number(at.as_micros());
    }

    /// One charge that was taken ahead at `at`, to be given back.
    pub(super) fn hand_back(
        &mut self,
        request: &Request,
        numbers: &[u16],
        at: Timestamp,
        full_at: Timestamp,
    ) {
        self.taken(at);
        self.taken(full_at);
        let want = &request.wants[0];
        let (units, interval, k) = match want.limit.params() {
            LimitParams::Bucket { k, interval, .. } => {
                (want.cost.units().min(2 * want.limit.capacity()), interval, k)
            }
            _ => (0, 0, 0),
        };
        for number in [units, interval, k] {
            self.number(number);
        }
        self.wants(request, numbers, Verb::Charge);
    }

    /// The names of the marks that leases may be out, one for each charge of a request.
    pub(super) fn marks(&mut self, request: &Request) {
        for mark in &request.marks {
            self.body.extend_from_slice(mark);
            self.body.push(0);
        }
    }

    /// A request whose counters have these numbers.
    pub(super) fn request(&mut self, request: &Request, numbers: &[u16]) {
        self.body.extend_from_slice(&u16::try_from(request.wants.len()).unwrap_or(u16::MAX).to_le_bytes());
        self.body.push(u8::from(!request.is_partial));
        self.wants(request, numbers, Verb::Charge);
    }

    /// Charges without the frame of a request.
    pub(super) fn wants(&mut self, request: &Request, numbers: &[u16], verb: Verb) {
        let near = request.near.unwrap_or(self.near);
        for want in &request.wants {
            let ago = request.loss.bears_on(want).filter(|_| verb != Verb::Release);
            self.want(want, numbers[want.counter], verb, near, ago);
        }
    }

    pub(super) fn finish(self) -> Vec<u8> {
        let mut ask = Vec::with_capacity(10 + self.counters.len() + self.body.len());
        let time = self.told.map_or(-1.0, |now| double(now.as_micros()));
        ask.extend_from_slice(&time.to_le_bytes());
        ask.extend_from_slice(&self.count.to_le_bytes());
        ask.extend(self.counters);
        ask.extend(self.body);
        ask
    }

    /// A request of nothing but buckets in whole microseconds, as `lua/buckets.lua` takes it.
    pub(super) fn buckets(&mut self, request: &Request, bundle: usize) {
        self.body.extend_from_slice(&u16::try_from(bundle).unwrap_or(u16::MAX).to_le_bytes());
        let usual = |want: &Want| match want.limit.params() {
            LimitParams::Bucket { max_ahead: furthest, .. } => {
                numbers(&want.limit, want.cost, want.phase).1[1].saturating_mul(2) == furthest
            }
            _ => true,
        };
        // Nearly all: those whose burst is all that their period lets through.
        let are_usual = request.wants.iter().all(usual);
        let count = u8::try_from(request.wants.len()).unwrap_or(FAR - 1);
        self.body.push(if are_usual { count } else { count | FAR });
        for want in &request.wants {
            self.body.push(b';');
            self.body.extend_from_slice(&request.counters[want.counter].1);
            self.body.extend_from_slice(b":\0");
            let (_, [cost, capacity, ..]) = numbers(&want.limit, want.cost, want.phase);
            self.number(cost);
            self.number(capacity);
            if !are_usual {
                self.furthest(&want.limit);
            }
        }
    }

    /// The ask of `lua/buckets.lua`: the time and the requests.
    pub(super) fn finish_buckets(self) -> Vec<u8> {
        let mut ask = Vec::with_capacity(8 + self.body.len());
        let time = self.told.map_or(-1.0, |now| double(now.as_micros()));
        ask.extend_from_slice(&time.to_le_bytes());
        ask.extend(self.body);
        ask
    }

    fn want(&mut self, want: &Want, number: u16, verb: Verb, near: Timestamp, ago: Option<TimeDelta>) {
        let verb = match (verb, want.cost) {
            (Verb::Release, _) => 4,
            (_, cost) if cost.is_refund() => 2,
            (Verb::Debit, _) => 3,
            (Verb::Charge, cost) => u8::from(!cost.is_peek()),
        };
        let (op, numbers) = numbers(&want.limit, want.cost, want.phase);
        let how = want.enforcement as u8 + if ago.is_some() { LOST } else { 0 };
        self.body.extend_from_slice(&[op, verb, how]);
        self.body.extend_from_slice(&number.to_le_bytes());
        for number in numbers {
            self.number(number);
        }
        match (&want.limit.rate().period, op) {
            (Period::Calendar(calendar), _) => {
                let (start, end) = calendar.window(near);
                let before = calendar.window(start - TimeDelta::from_micros(1)).0;
                for border in [before, start, end, calendar.window(end).1] {
                    self.number(border.as_micros());
                }
            }
            (_, 1 | 2) => self.furthest(&want.limit),
            (_, PERMITS) => {
                self.body.extend_from_slice(format!("{:x}\0", want.permit.0).as_bytes());
            }
            _ => {}
        }
        if let Some(ago) = ago {
            self.number(ago.as_micros());
        }
    }

    /// The longest that a bucket's state is believed to be ahead.
    fn furthest(&mut self, limit: &Limit) {
        if let LimitParams::Bucket { max_ahead: furthest, .. } = limit.params() {
            self.number(furthest);
        }
    }

    fn number(&mut self, number: u64) {
        self.body.extend_from_slice(&double(number).to_le_bytes());
    }
}

/// Marks buckets that say how far ahead they may be.
const FAR: u8 = 128;
const PERMITS: u8 = 10;
/// Marks a charge whose state may have been lost.
const LOST: u8 = 4;

/// The step's number in `lua/step.lua`, and its five numbers.
fn numbers(limit: &Limit, cost: Cost, phase: TimeDelta) -> (u8, [u64; 5]) {
    let (units, capacity) = (cost.units().min(PLENTY), limit.capacity());
    let (period, phase) = (limit.rate().period.length().as_micros(), phase.as_micros());
    let by_calendar = u8::from(matches!(limit.rate().period, Period::Calendar(_))) * 2;
    match limit.params() {
        LimitParams::Bucket { k, interval, .. } => {
            let time = |units: u64| {
                let all = u128::from(units) * u128::from(interval);
                let whole = |part: u128| u64::try_from(part).unwrap_or(u64::MAX);
                (whole(all / u128::from(k)), whole(all % u128::from(k)))
            };
            // Twice the bucket is never let through, and never debited.
            let most = if cost.is_refund() { limit.refill_cost() } else { 2 * capacity };
            let (cost, capacity) = (time(units.min(most)), time(capacity));
            (if k == 1 { 1 } else { 2 }, [cost.0, capacity.0, cost.1, capacity.1, k])
        }
        LimitParams::Fixed { max_count: most } => (3 + by_calendar, [units, capacity, period, phase, most]),
        LimitParams::Attempts { max_count: most } => {
            (4 + by_calendar, [units, capacity, period, phase, most])
        }
        LimitParams::Sliding => (7, [units, capacity, period, phase, 0]),
        LimitParams::Strict { k, width } => (8, [units, capacity, width, phase, k]),
        LimitParams::Log => (9, [units, capacity, period, 0, 0]),
        LimitParams::Permits => (PERMITS, [units, capacity, period, 0, 0]),
        // Blocked, and what is yet to come.
        _ => (0, [units, 0, 0, 0, 0]),
    }
}

/// Exact: every number here is below 2^53.
fn double(number: u64) -> f64 {
    number as f64
}
