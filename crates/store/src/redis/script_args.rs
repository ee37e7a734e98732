//! Script arguments: requests as little-endian numbers, which are cheap for a script to read.
//!
//! `lua/begin.lua` and `lua/decode.lua` describe the layout. One number per argument was rejected: reading twenty
//! arguments costs Redis more than deciding on them.

use super::compact::Short;
use super::permit_sets::PermitSet;
use super::shard_request::{BundleCounter, ShardCharge, ShardRequest};
use tollgate_core::{Cost, Limit, LimitParams, Period, TimeDelta, Timestamp};

/// Above the capacity of any limit, and small enough that sums stay exact in a script.
const MAX_REFUND: u64 = 1 << 42;

/// The operation on a list of charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptOp {
    Charge,
    Debit,
    Release,
}

/// The argument of one script call.
pub(super) struct ScriptArgs {
    counters: Vec<u8>,
    count: u16,
    body: Vec<u8>,
    now: Option<Timestamp>,
    /// Time from which calendar bounds are computed; the script's own time is near it.
    near: Timestamp,
}

impl ScriptArgs {
    /// Starts an argument with the time `fixed_time`, or with the server's own, which is about `near`.
    pub(super) fn new(fixed_time: Option<Timestamp>, near: Timestamp) -> Self {
        Self { counters: Vec::new(), count: 0, body: Vec::new(), now: fixed_time, near }
    }

    /// Declares a counter, and the set of its permits with the number of its key; all are numbered from 1.
    pub(super) fn counter(&mut self, counter: &BundleCounter, permits: Option<(&PermitSet, usize)>) {
        self.counters.extend_from_slice(&u16::try_from(counter.bundle + 1).unwrap_or(u16::MAX).to_le_bytes());
        self.counters.extend_from_slice(&counter.name);
        self.counters.push(0);
        match permits {
            Some((set, key)) => set.declare(key, &mut self.counters),
            None => self.counters.extend_from_slice(&counter.short),
        }
        self.counters.push(0);
        self.count += 1;
    }

    /// Appends the time at which units were taken that are now returned.
    pub(super) fn taken_at(&mut self, at: Timestamp) {
        self.number(at.as_micros());
    }

    /// Appends one charge that was taken ahead at `at`, to be returned.
    pub(super) fn return_units(
        &mut self,
        request: &ShardRequest,
        numbers: &[u16],
        at: Timestamp,
        full_at: Timestamp,
    ) {
        self.taken_at(at);
        self.taken_at(full_at);
        let want = &request.charges[0];
        let (units, interval, k) = match want.limit.params() {
            // Never taken ahead; a unit of less than a microsecond is not returned.
            LimitParams::Bucket { .. } if want.limit.refill_interval().is_some() => (0, 1, 2),
            LimitParams::Bucket { k, interval, .. } => {
                (want.cost.units().min(2 * want.limit.capacity()), interval, k)
            }
            _ => (0, 0, 0),
        };
        for number in [units, interval, k] {
            self.number(number);
        }
        self.charges(request, numbers, ScriptOp::Charge);
    }

    /// Appends the names of the lease marks, one per charge of a request.
    pub(super) fn marks(&mut self, request: &ShardRequest) {
        for mark in &request.marks {
            self.body.extend_from_slice(mark);
            self.body.push(0);
        }
    }

    /// Appends a request whose counters have these numbers.
    pub(super) fn request(&mut self, request: &ShardRequest, numbers: &[u16]) {
        self.body.extend_from_slice(&u16::try_from(request.charges.len()).unwrap_or(u16::MAX).to_le_bytes());
        self.body.push(u8::from(!request.is_partial));
        self.charges(request, numbers, ScriptOp::Charge);
    }

    /// Appends charges without the header of a request.
    pub(super) fn charges(&mut self, request: &ShardRequest, numbers: &[u16], verb: ScriptOp) {
        let near = request.server_time.unwrap_or(self.near);
        for want in &request.charges {
            let ago = request.loss.applies_to(want).filter(|_| verb != ScriptOp::Release);
            self.charge(want, numbers[want.counter], verb, near, ago);
        }
    }

    /// Appends debits that `lua/short_debit.lua` can step: each counter once, in the order of their bundles. Those of one
    /// limit that follow each other share its numbers.
    pub(super) fn debits(&mut self, request: &ShardRequest) {
        let mut last = None;
        let mut costs: Vec<u64> = Vec::new();
        for want in &request.charges {
            let (op, [cost, capacity, length, _, most]) = numbers(&want.limit, want.cost, want.phase);
            let most = match want.limit.params() {
                LimitParams::Bucket { max_ahead, .. } => max_ahead,
                _ => most,
            };
            let group = (op, &request.counters[want.counter].short, [capacity, length, most]);
            if let Some(before) = last.filter(|last| *last != group) {
                self.debit_group(before, &mut costs);
            }
            last = Some(group);
            costs.push(cost);
        }
        if let Some(last) = last {
            self.debit_group(last, &mut costs);
        }
    }

    /// Appends debits of one limit.
    fn debit_group(&mut self, (op, short, limit): (u8, &Short, [u64; 3]), costs: &mut Vec<u64>) {
        self.body.extend_from_slice(&u16::try_from(costs.len()).unwrap_or(u16::MAX).to_le_bytes());
        self.body.push(op);
        self.body.extend_from_slice(short);
        self.body.push(0);
        limit.into_iter().chain(costs.drain(..)).for_each(|number| self.number(number));
    }

    /// Returns the argument; `is_short` if `lua/short.lua` may decide it.
    pub(super) fn finish(self, is_short: bool) -> Vec<u8> {
        let mut ask = Vec::with_capacity(11 + self.counters.len() + self.body.len());
        let time = self.now.map_or(-1.0, |now| double(now.as_micros()));
        ask.extend_from_slice(&time.to_le_bytes());
        ask.push(u8::from(is_short));
        ask.extend_from_slice(&self.count.to_le_bytes());
        ask.extend(self.counters);
        ask.extend(self.body);
        ask
    }

    /// Returns the argument of `lua/short_debit.lua`: the time, and the debits.
    pub(super) fn finish_debits(self) -> Vec<u8> {
        let mut ask = Vec::with_capacity(8 + self.body.len());
        let time = self.now.map_or(-1.0, |now| double(now.as_micros()));
        ask.extend_from_slice(&time.to_le_bytes());
        ask.extend(self.body);
        ask
    }

    fn charge(
        &mut self,
        want: &ShardCharge,
        number: u16,
        verb: ScriptOp,
        near: Timestamp,
        ago: Option<TimeDelta>,
    ) {
        let verb = match (verb, want.cost) {
            (ScriptOp::Release, _) => 4,
            (_, cost) if cost.is_refund() => 2,
            (ScriptOp::Debit, _) => 3,
            (ScriptOp::Charge, cost) => u8::from(!cost.is_peek()),
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
            (_, 1 | 2) => self.bucket(&want.limit),
            (_, op) if op > STEPPED => {
                self.bucket(&want.limit);
                self.number(want.limit.refill_interval().map_or(1, TimeDelta::as_micros));
                self.number(want.phase.as_micros());
            }
            (_, PERMITS) => {
                self.body.extend_from_slice(format!("{:x}\0", want.permit.0).as_bytes());
            }
            _ => {}
        }
        if let Some(ago) = ago {
            self.number(ago.as_micros());
        }
    }

    /// Appends the longest time that a bucket's state may be ahead, negative if the state says so, and the time of a unit.
    fn bucket(&mut self, limit: &Limit) {
        if let LimitParams::Bucket { max_ahead: furthest, unit, reach, .. } = limit.params() {
            self.max_ahead(furthest, reach);
            self.number(unit);
        }
    }

    fn max_ahead(&mut self, furthest: u64, reach: u8) {
        let furthest = if reach > 0 { -double(furthest) } else { double(furthest) };
        self.body.extend_from_slice(&furthest.to_le_bytes());
    }

    fn number(&mut self, number: u64) {
        self.body.extend_from_slice(&double(number).to_le_bytes());
    }
}

const PERMITS: u8 = 10;
/// Added to the step of a bucket that is refilled at intervals.
const STEPPED: u8 = 10;
/// Marks a charge whose state may have been lost.
const LOST: u8 = 4;

/// Returns the number of the step in `lua/step.lua`, and its five parameters.
pub(super) fn numbers(limit: &Limit, cost: Cost, phase: TimeDelta) -> (u8, [u64; 5]) {
    let (units, capacity) = (cost.units().min(MAX_REFUND), limit.capacity());
    let (period, phase) = (limit.rate().period.length().as_micros(), phase.as_micros());
    let by_calendar = u8::from(matches!(limit.rate().period, Period::Calendar(_))) * 2;
    match limit.params() {
        LimitParams::Bucket { k, interval, .. } => {
            let time = |units: u64| {
                let all = u128::from(units) * u128::from(interval);
                let whole = |part: u128| u64::try_from(part).unwrap_or(u64::MAX);
                (whole(all / u128::from(k)), whole(all % u128::from(k)))
            };
            // Twice the capacity is never allowed, and never debited.
            let most = if cost.is_refund() { limit.refill_cost() } else { 2 * capacity };
            let (cost, capacity) = (time(units.min(most)), time(capacity));
            let stepped = if limit.refill_interval().is_some() { STEPPED } else { 0 };
            (stepped + if k == 1 { 1 } else { 2 }, [cost.0, capacity.0, cost.1, capacity.1, k])
        }
        LimitParams::Fixed { max_count: most } => (3 + by_calendar, [units, capacity, period, phase, most]),
        LimitParams::Attempts { max_count: most } => {
            (4 + by_calendar, [units, capacity, period, phase, most])
        }
        LimitParams::Sliding => (7, [units, capacity, period, phase, 0]),
        LimitParams::Strict { k, width } => (8, [units, capacity, width, phase, k]),
        LimitParams::Log { taken } => {
            (9, [units, capacity, period, taken.map_or(0, Timestamp::as_micros), 0])
        }
        LimitParams::Permits => (PERMITS, [units, capacity, period, 0, 0]),
        // Blocked limits, and algorithms added later.
        _ => (0, [units, 0, 0, 0, 0]),
    }
}

/// Converts exactly: every number here is below 2^53.
pub(super) fn double(number: u64) -> f64 {
    number as f64
}
