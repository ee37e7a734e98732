//! A reservation as bytes: numbers little-endian, texts with their length.
//!
//! It contains each charge with its whole limit, because the node that closes the reservation may have other rules.
//! Bytes that cannot be read, of a later version or damaged, are no reservation.

use super::{ReservedCharge, Settlement};
use crate::charge_record::ChargeRecord;
use crate::consumption::ReservedConsumption;
use crate::decision_id::DecisionId;
use tollgate_core::{
    Algorithm, Calendar, CalendarUnit, Limit, LimitSpec, LossPolicy, Mode, Outcome, OwnedKeyPart, Period,
    Rate, Scope, TimeDelta, Timestamp, Verdict,
};

/// Version of a record without consumption, which earlier releases read as well.
const VERSION: u8 = 1;
/// Version of a record with consumption.
const VERSION_BILLED: u8 = 2;
/// Charges that a record may have: more than a request can match.
const MAX_CHARGES: u64 = 4_096;

/// What is stored of a reservation.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// The decision that made it, and the holder of its permits.
    pub(super) decision: DecisionId,
    /// The process that made it.
    pub(super) process: u64,
    /// By the store's clock.
    pub(super) deadline: Timestamp,
    /// Time at which a delayed request may proceed.
    pub(super) proceeds_at: Timestamp,
    /// The outcomes of each limit that were returned to its creator.
    pub(super) outcomes: Vec<Outcome>,
    pub(super) status: Status,
    pub(super) charges: Vec<ReservedCharge>,
    /// What is billed for it.
    pub(super) consumed: Vec<ReservedConsumption>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Open,
    /// A node moves the counters, until this instant at the latest.
    Closing(Settlement, Timestamp),
    Closed(Settlement),
}

impl Record {
    /// Returns how the reservation has ended by `now`; `None` if it is open or being closed.
    pub(super) fn end(&self, now: Timestamp) -> Option<Settlement> {
        match self.status {
            Status::Closed(end) => Some(end),
            Status::Closing(end, until) if until <= now => Some(end),
            Status::Closing(..) => None,
            Status::Open => (self.deadline <= now).then_some(Settlement::Expired),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let version = if self.consumed.is_empty() { VERSION } else { VERSION_BILLED };
        let mut out = Writer(vec![version]);
        out.0.extend_from_slice(&self.decision.0.to_le_bytes());
        for number in [self.process, self.deadline.as_micros(), self.proceeds_at.as_micros()] {
            out.number(number);
        }
        let (state, end, until) = match self.status {
            Status::Open => (0, Settlement::Expired, Timestamp::ZERO),
            Status::Closing(end, until) => (1, end, until),
            Status::Closed(end) => (2, end, Timestamp::ZERO),
        };
        let (kind, cost) = match end {
            Settlement::Expired => (0, 0),
            Settlement::Canceled => (1, 0),
            Settlement::Settled(cost) => (2, cost),
        };
        for number in [state, kind, cost, until.as_micros(), self.outcomes.len() as u64] {
            out.number(number);
        }
        for Outcome { verdict, remaining, reset_after, .. } in &self.outcomes {
            let (kind, wait) = match verdict {
                Verdict::Allowed { delay } => (0, delay.as_micros()),
                Verdict::Denied { retry_after: Some(wait) } => (1, wait.as_micros()),
                Verdict::Denied { retry_after: None } => (2, 0),
                Verdict::Unknown => (3, 0),
            };
            for number in [kind, wait, *remaining, reset_after.as_micros()] {
                out.number(number);
            }
        }
        out.number(self.charges.len() as u64);
        self.charges.iter().for_each(|charge| out.charge(charge));
        if version == VERSION_BILLED {
            out.number(self.consumed.len() as u64);
            self.consumed.iter().for_each(|one| out.consumption(one));
        }
        out.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let version = from.take(1)?[0];
        if version != VERSION && version != VERSION_BILLED {
            return None;
        }
        let decision = DecisionId(u128::from_le_bytes(from.take(16)?.try_into().ok()?));
        let process = from.number()?;
        let (deadline, proceeds_at) = (from.time()?, from.time()?);
        let (state, kind, cost, until) = (from.number()?, from.number()?, from.number()?, from.time()?);
        let end = match kind {
            0 => Settlement::Expired,
            1 => Settlement::Canceled,
            2 => Settlement::Settled(cost),
            _ => return None,
        };
        let status = match state {
            0 => Status::Open,
            1 => Status::Closing(end, until),
            2 => Status::Closed(end),
            _ => return None,
        };
        let count = from.number().filter(|count| *count <= MAX_CHARGES)?;
        let outcomes = (0..count).map(|_| from.outcome()).collect::<Option<_>>()?;
        let count = from.number().filter(|count| *count <= MAX_CHARGES)?;
        let charges = (0..count).map(|_| from.charge()).collect::<Option<_>>()?;
        let mut consumed = Vec::new();
        if version == VERSION_BILLED {
            let count = from.number().filter(|count| *count <= MAX_CHARGES)?;
            consumed = (0..count).map(|_| from.consumption()).collect::<Option<_>>()?;
        }
        from.0.is_empty().then_some(Self {
            decision,
            process,
            deadline,
            proceeds_at,
            outcomes,
            status,
            charges,
            consumed,
        })
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    /// A number that may be absent.
    fn maybe(&mut self, number: Option<u64>) {
        self.number(u64::from(number.is_some()));
        self.number(number.unwrap_or(0));
    }

    fn charge(&mut self, charge: &ReservedCharge) {
        let ReservedCharge { record, rule, taken_at, turn, follows } = charge;
        self.text(rule);
        for number in [taken_at.as_micros(), turn.as_micros(), u64::from(*follows), record.units] {
            self.number(number);
        }
        let (group, shared) = record.scope.placement();
        self.text(record.scope.label());
        self.number(group);
        self.maybe(shared.map(|length| length as u64));
        self.number(match record.mode {
            Mode::Central => 0,
            Mode::Adaptive => 1,
            Mode::Leased => 2,
            Mode::Local => 3,
        });
        let is_exhausted = record.loss_policy == LossPolicy::AssumeExhausted;
        self.number(u64::from(is_exhausted) | u64::from(record.scope.is_durable()) << 1);
        self.number(record.parts.len() as u64);
        for part in &record.parts {
            match part {
                OwnedKeyPart::Text(text) => {
                    self.number(0);
                    self.text(text);
                }
                OwnedKeyPart::Secret(text) => {
                    self.number(1);
                    self.text(text);
                }
                OwnedKeyPart::Network { address, prefix } => {
                    self.number(2);
                    self.0.extend_from_slice(&address.to_le_bytes());
                    self.number(u64::from(*prefix));
                }
            }
        }
        self.limit(&record.limit);
    }

    fn consumption(&mut self, one: &ReservedConsumption) {
        let ReservedConsumption { domain, rule, meter, key, caller, units, follows, at } = one;
        [domain, rule, meter, key, caller].into_iter().for_each(|text| self.text(text));
        for number in [*units, u64::from(*follows), at.as_micros()] {
            self.number(number);
        }
    }

    fn limit(&mut self, limit: &Limit) {
        let LimitSpec {
            algorithm,
            rate,
            burst,
            delay,
            slots,
            jitter,
            refill_interval,
            count_denied,
            any_period,
        } = limit.spec();
        self.text(algorithm.name());
        self.number(rate.count);
        match (&rate.period, refill_interval) {
            (Period::Rolling(span), None) => {
                self.number(0);
                self.number(span.as_micros());
            }
            (Period::Rolling(span), Some(interval)) => {
                self.number(3);
                self.number(span.as_micros());
                self.number(interval.as_micros());
            }
            (Period::Calendar(calendar), _) => {
                self.number(match calendar.unit() {
                    CalendarUnit::Day => 1,
                    CalendarUnit::Month => 2,
                });
                self.text(calendar.zone());
            }
        }
        self.maybe(burst);
        self.maybe(slots);
        for flag in [delay, jitter, count_denied, any_period] {
            self.number(u64::from(flag));
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn flag(&mut self) -> Option<bool> {
        Some(self.number()? == 1)
    }

    fn time(&mut self) -> Option<Timestamp> {
        self.number().map(Timestamp::from_micros)
    }

    fn text(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.number()?).ok()?;
        std::str::from_utf8(self.take(length)?).ok()
    }

    fn maybe(&mut self) -> Option<Option<u64>> {
        let present = self.flag()?;
        Some(Some(self.number()?).filter(|_| present))
    }

    fn outcome(&mut self) -> Option<Outcome> {
        let (kind, wait) = (self.number()?, TimeDelta::from_micros(self.number()?));
        let verdict = match kind {
            0 => Verdict::Allowed { delay: wait },
            1 => Verdict::Denied { retry_after: Some(wait) },
            2 => Verdict::Denied { retry_after: None },
            3 => Verdict::Unknown,
            _ => return None,
        };
        let (remaining, reset_after) = (self.number()?, TimeDelta::from_micros(self.number()?));
        // When a unit comes back is not stored: the reset is not too early.
        let next_after = if remaining == 0 { reset_after } else { TimeDelta::ZERO };
        Some(Outcome { verdict, remaining, next_after, reset_after })
    }

    fn charge(&mut self) -> Option<ReservedCharge> {
        let rule = self.text()?.to_owned();
        let (taken_at, turn, follows, units) = (self.time()?, self.time()?, self.flag()?, self.number()?);
        let (label, group, shared) = (self.text()?, self.number()?, self.maybe()?);
        let shared = shared.and_then(|length| usize::try_from(length).ok());
        let mode = match self.number()? {
            0 => Mode::Central,
            1 => Mode::Adaptive,
            2 => Mode::Leased,
            3 => Mode::Local,
            _ => return None,
        };
        let flags = self.number()?;
        let loss_policy = if flags & 1 == 1 { LossPolicy::AssumeExhausted } else { LossPolicy::AssumeUnused };
        let count = self.number().filter(|count| *count <= MAX_CHARGES)?;
        let parts = (0..count).map(|_| self.part()).collect::<Option<_>>()?;
        let limit = self.limit()?;
        let scope = Scope::from_placement(label, (group, shared)).with_durable(flags >> 1 & 1 == 1);
        let record = ChargeRecord { scope, parts, limit, units, loss_policy, mode, refill: None };
        Some(ReservedCharge { record, rule, taken_at, turn, follows })
    }

    fn consumption(&mut self) -> Option<ReservedConsumption> {
        let mut text = || self.text().map(str::to_owned);
        let (domain, rule, meter, key, caller) = (text()?, text()?, text()?, text()?, text()?);
        let (units, follows, at) = (self.number()?, self.flag()?, self.time()?);
        Some(ReservedConsumption { domain, rule, meter, key, caller, units, follows, at })
    }

    fn part(&mut self) -> Option<OwnedKeyPart> {
        Some(match self.number()? {
            0 => OwnedKeyPart::Text(self.text()?.into()),
            1 => OwnedKeyPart::Secret(self.text()?.into()),
            2 => {
                let address = u128::from_le_bytes(self.take(16)?.try_into().ok()?);
                OwnedKeyPart::Network { address, prefix: u8::try_from(self.number()?).ok()? }
            }
            _ => return None,
        })
    }

    fn limit(&mut self) -> Option<Limit> {
        let name = self.text()?;
        let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name)?;
        let count = self.number()?;
        let mut refill_interval = None;
        let period = match self.number()? {
            0 => Period::Rolling(TimeDelta::from_micros(self.number()?)),
            3 => {
                let length = TimeDelta::from_micros(self.number()?);
                refill_interval = Some(TimeDelta::from_micros(self.number()?));
                Period::Rolling(length)
            }
            1 => Period::Calendar(Calendar::new(CalendarUnit::Day, self.text()?).ok()?),
            2 => Period::Calendar(Calendar::new(CalendarUnit::Month, self.text()?).ok()?),
            _ => return None,
        };
        let (burst, slots) = (self.maybe()?, self.maybe()?);
        let (delay, jitter, count_denied, any_period) =
            (self.flag()?, self.flag()?, self.flag()?, self.flag()?);
        let rate = Rate { count, period };
        LimitSpec { algorithm, rate, burst, delay, slots, jitter, refill_interval, count_denied, any_period }
            .build()
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let scope = Scope::in_group("d|user|gcra|1m", "d|user");
        let zone = Calendar::new(CalendarUnit::Month, "Europe/Zurich").expect("a zone");
        let month = Rate { count: 9, period: Period::Calendar(zone) };
        let specs = [
            LimitSpec::new(Algorithm::Gcra, Rate::per(7, TimeDelta::from_secs(1))).burst(90),
            LimitSpec::new(Algorithm::LeakyBucket, Rate::per(7, TimeDelta::from_secs(1))).with_delay(),
            LimitSpec::new(Algorithm::FixedWindow, month),
            LimitSpec::new(Algorithm::StrictWindow, Rate::per(7, TimeDelta::from_secs(60))).slots(7).jitter(),
            LimitSpec::new(Algorithm::Concurrency, Rate::per(7, TimeDelta::from_secs(60))),
            LimitSpec::new(Algorithm::TokenBucket, Rate::per(7, TimeDelta::from_secs(60)))
                .refill_interval(TimeDelta::from_secs(10)),
        ];
        let parts = vec![
            OwnedKeyPart::Text("alice".into()),
            OwnedKeyPart::Secret("sk_live_42".into()),
            OwnedKeyPart::Network { address: 7 << 99, prefix: 64 },
        ];
        let charges = specs.into_iter().enumerate().map(|(number, spec)| ReservedCharge {
            record: ChargeRecord {
                scope: scope.clone(),
                parts: parts.clone(),
                limit: spec.build().expect("in range"),
                units: 5,
                loss_policy: LossPolicy::AssumeExhausted,
                mode: Mode::Local,
                refill: None,
            },
            rule: format!("rule {number}"),
            taken_at: Timestamp::from_secs(1_000),
            turn: Timestamp::from_secs(1_001),
            follows: number == 0,
        });
        Record {
            decision: DecisionId(u128::MAX - 5),
            process: 77,
            deadline: Timestamp::from_secs(2_000),
            proceeds_at: Timestamp::from_secs(1_500),
            outcomes: vec![Outcome::UNKNOWN, Outcome { verdict: Verdict::ALLOWED, ..Outcome::UNKNOWN }],
            status: Status::Closing(Settlement::Settled(8), Timestamp::from_secs(1_600)),
            charges: charges.collect(),
            consumed: vec![ReservedConsumption {
                domain: "d".to_owned(),
                rule: "rule".to_owned(),
                meter: "tokens".to_owned(),
                key: "api_key".to_owned(),
                caller: "sk_live_42".to_owned(),
                units: 5,
                follows: true,
                at: Timestamp::from_secs(1_000),
            }],
        }
    }

    /// Without it another node moves other counters than those that were charged.
    #[test]
    fn what_is_read_is_what_was_written() {
        for status in [Status::Open, Status::Closed(Settlement::Canceled), record().status] {
            let written = Record { status, ..record() };
            let read = Record::decode(&written.encode()).expect("readable");
            assert_eq!(format!("{read:?}"), format!("{written:?}"));
            // Earlier releases read a record that is not billed.
            let unbilled = Record { consumed: Vec::new(), ..written };
            let bytes = unbilled.encode();
            let read = Record::decode(&bytes).expect("readable");
            assert_eq!((bytes[0], format!("{read:?}")), (VERSION, format!("{unbilled:?}")));
        }
    }

    /// Without it a damaged record, or one of a later version, ends the process.
    #[test]
    fn what_cannot_be_read_is_no_reservation() {
        let bytes = record().encode();
        for length in 0..bytes.len() {
            assert!(Record::decode(&bytes[..length]).is_none(), "{length} bytes");
        }
        assert!(Record::decode(&[&bytes[..], b"x"].concat()).is_none());
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            let _ = Record::decode(&damaged);
        }
    }
}
