//! Binary codec of charges, limits and outcomes. A charge contains its complete limit, because the cell that decides
//! may have other rules for a moment: the sender's rules determine the charge.

use crate::key_values::KeyValues;
use crate::wire::{Reader, Writer};
use smallvec::SmallVec;
use tollgate_core::{
    Admission, Algorithm, Calendar, CalendarUnit, Charge, Cost, CounterKey, Enforcement, KeyPart, Limit,
    LimitSpec, LossPolicy, Outcome, Outcomes, OwnedKeyPart, Period, PermitId, Rate, Scope, TimeDelta,
    Timestamp, Verdict,
};

/// Maximum number of charges in one request: more than a request can match.
pub(crate) const MAX_CHARGES: usize = 4_096;
/// Maximum number of values in a counter key.
const MAX_PARTS: usize = 256;
/// Maximum bytes of a label or a value.
const MAX_TEXT: usize = 64 << 10;

/// A counter's limit, as another cell names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentCounter {
    /// Scope of its key.
    pub scope: Scope,
    /// Limit that it enforces.
    pub limit: Limit,
}

/// A charge in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentCharge {
    /// The counter's scope and limit.
    pub counter: SentCounter,
    /// Values of the counter's key; secrets as keyed hashes.
    pub parts: Vec<OwnedKeyPart>,
    /// Cost in units.
    pub cost: Cost,
    /// Effect of a denial on the others.
    pub enforcement: Enforcement,
    /// Holder of a permit.
    pub permit: PermitId,
    /// Assumption about lost state.
    pub loss_policy: LossPolicy,
}

impl SentCharge {
    /// Copies a charge.
    #[must_use]
    pub fn new(charge: &Charge<'_>) -> Self {
        Self {
            counter: SentCounter { scope: charge.key.scope.clone(), limit: charge.limit.clone() },
            parts: charge.key.parts.iter().map(OwnedKeyPart::from).collect(),
            cost: charge.cost,
            enforcement: charge.enforcement,
            permit: charge.permit,
            loss_policy: charge.loss_policy,
        }
    }

    /// Returns the same charge in the other direction.
    #[must_use]
    pub fn negated(&self) -> Self {
        Self { cost: self.cost.negated(), ..self.clone() }
    }
}

/// Borrows a charge of a message, whose values are `parts`.
pub(crate) fn as_charge<'a>(sent: &'a SentCharge, parts: &'a [KeyPart<'a>]) -> Charge<'a> {
    Charge {
        enforcement: sent.enforcement,
        permit: sent.permit,
        loss_policy: sent.loss_policy,
        ..Charge::new(CounterKey { scope: &sent.counter.scope, parts }, &sent.counter.limit, sent.cost)
    }
}

impl Writer {
    pub(crate) fn counter(&mut self, counter: &SentCounter) {
        let (group, shared) = counter.scope.placement();
        self.text(counter.scope.label());
        self.0.extend_from_slice(&group.to_le_bytes());
        self.maybe(shared.map(|length| length as u64));
        self.limit(&counter.limit, counter.scope.is_durable());
    }

    pub(crate) fn parts<'a>(&mut self, parts: impl ExactSizeIterator<Item = KeyPart<'a>>) {
        self.number(parts.len() as u64);
        for part in parts {
            match part {
                KeyPart::Text(text) => {
                    self.byte(0);
                    self.text(text);
                }
                // A keyed hash by now: see `pseudonym`.
                KeyPart::Secret(text) => {
                    self.byte(1);
                    self.text(text);
                }
                KeyPart::Network { address, prefix } => {
                    self.byte(2);
                    self.wide(address);
                    self.byte(prefix);
                }
            }
        }
    }

    pub(crate) fn charge(&mut self, charge: &SentCharge) {
        self.counter(&charge.counter);
        self.parts(charge.parts.iter().map(OwnedKeyPart::as_part));
        self.signed(signed(charge.cost));
        self.byte(match charge.enforcement {
            Enforcement::Required => 0,
            Enforcement::Alternative => 1,
            Enforcement::Independent => 2,
        });
        self.wide(charge.permit.0);
        self.byte(u8::from(charge.loss_policy == LossPolicy::AssumeExhausted));
    }

    pub(crate) fn outcomes(&mut self, outcomes: &Outcomes) {
        self.byte(u8::from(outcomes.admission == Admission::Denied));
        self.number(outcomes.at.as_micros());
        self.number(outcomes.per_charge.len() as u64);
        for Outcome { verdict, remaining, reset_after, .. } in &outcomes.per_charge {
            let (kind, wait) = match verdict {
                Verdict::Allowed { delay } => (0, *delay),
                Verdict::Denied { retry_after: Some(wait) } => (1, *wait),
                Verdict::Denied { retry_after: None } => (2, TimeDelta::ZERO),
                Verdict::Unknown => (3, TimeDelta::ZERO),
            };
            self.byte(kind);
            for number in [wait.as_micros(), *remaining, reset_after.as_micros()] {
                self.number(number);
            }
        }
        // Last, where receivers of earlier versions end.
        for outcome in &outcomes.per_charge {
            self.number(outcome.next_after.as_micros());
        }
    }

    /// Writes a limit. One that counts parts of a unit, as refunds of buckets do, is that of whole units and how many parts
    /// one has, in the place of a window's slots. A limit of parts alone would be one of another scale: its parts would be
    /// taken for units. Whether consumption is durable is one of its flags: the receiver may have other rules, or none for a
    /// quota of the database.
    fn limit(&mut self, limit: &Limit, is_durable: bool) {
        let parts = limit.parts_of_unit();
        let spec = if parts > 1 { limit.in_whole_units().spec() } else { limit.spec() };
        self.text(spec.algorithm.name());
        self.number(spec.rate.count);
        match &spec.rate.period {
            Period::Rolling(span) => {
                self.byte(0);
                self.number(span.as_micros());
            }
            Period::Calendar(calendar) => {
                self.byte(match calendar.unit() {
                    CalendarUnit::Day => 1,
                    CalendarUnit::Month => 2,
                });
                self.text(calendar.zone());
            }
        }
        self.maybe(spec.burst);
        self.maybe(if parts > 1 { Some(parts) } else { spec.slots });
        self.maybe(spec.refill_interval.map(TimeDelta::as_micros));
        let flags = [spec.delay, spec.jitter, spec.count_denied, spec.any_period, is_durable];
        self.byte(flags.iter().rev().fold(0, |bits, flag| bits << 1 | u8::from(*flag)));
    }
}

pub(crate) fn signed(cost: Cost) -> i64 {
    let units = i64::try_from(cost.units()).unwrap_or(i64::MAX);
    if cost.is_refund() { -units } else { units }
}

pub(crate) fn cost(units: i64) -> Cost {
    if units < 0 { Cost::refund(units.unsigned_abs()) } else { Cost::new(units.unsigned_abs()) }
}

impl<'a> Reader<'a> {
    pub(crate) fn counter(&mut self) -> Option<SentCounter> {
        let label = self.text(MAX_TEXT)?;
        let group = u64::from_le_bytes(self.take(8)?.try_into().ok()?);
        let shared = match self.maybe()? {
            None => None,
            Some(length) => Some(usize::try_from(length).ok().filter(|length| *length <= label.len())?),
        };
        let (limit, is_durable) = self.limit()?;
        let scope = Scope::from_placement(label, (group, shared)).with_durable(is_durable);
        Some(SentCounter { scope, limit })
    }

    pub(crate) fn parts(&mut self) -> Option<Vec<OwnedKeyPart>> {
        let count = self.count(MAX_PARTS)?;
        (0..count).map(|_| Some(OwnedKeyPart::from(&self.part(MAX_TEXT)?))).collect()
    }

    /// Reads the values of a key, and leaves them encoded.
    pub(crate) fn values(&mut self) -> Option<KeyValues> {
        let start = self.0;
        for _ in 0..self.count(MAX_PARTS)? {
            self.skip_part()?;
        }
        Some(KeyValues::from_encoded(&start[..start.len() - self.0.len()]))
    }

    pub(crate) fn part(&mut self, max_text: usize) -> Option<KeyPart<'a>> {
        Some(match self.byte()? {
            0 => KeyPart::Text(self.text(max_text)?),
            1 => KeyPart::Secret(self.text(max_text)?),
            2 => KeyPart::Network { address: self.wide()?, prefix: self.byte().filter(|bits| *bits <= 128)? },
            _ => return None,
        })
    }

    /// Does what [`Self::part`] does, without the value.
    fn skip_part(&mut self) -> Option<()> {
        let mut ahead = *self;
        if ahead.byte()? > 1 {
            return self.part(MAX_TEXT).map(drop);
        }
        let length = usize::try_from(ahead.number()?).ok().filter(|length| *length <= MAX_TEXT)?;
        let text = ahead.take(length)?;
        *self = ahead;
        // Almost all values are, and it is sooner known.
        (text.is_ascii() || std::str::from_utf8(text).is_ok()).then_some(())
    }

    pub(crate) fn charge(&mut self) -> Option<SentCharge> {
        Some(SentCharge {
            counter: self.counter()?,
            parts: self.parts()?,
            cost: cost(self.signed()?),
            enforcement: match self.byte()? {
                0 => Enforcement::Required,
                1 => Enforcement::Alternative,
                2 => Enforcement::Independent,
                _ => return None,
            },
            permit: PermitId(self.wide()?),
            loss_policy: match self.byte()? {
                0 => LossPolicy::AssumeUnused,
                1 => LossPolicy::AssumeExhausted,
                _ => return None,
            },
        })
    }

    pub(crate) fn charges(&mut self) -> Option<Vec<SentCharge>> {
        let count = self.count(MAX_CHARGES)?;
        (0..count).map(|_| self.charge()).collect()
    }

    pub(crate) fn outcomes(&mut self) -> Option<Outcomes> {
        let admission = if self.byte()? == 0 { Admission::Admitted } else { Admission::Denied };
        let at = Timestamp::from_micros(self.number()?);
        let count = self.count(MAX_CHARGES)?;
        let mut per_charge =
            (0..count).map(|_| self.outcome()).collect::<Option<SmallVec<[Outcome; 4]>>>()?;
        for outcome in &mut per_charge {
            // A sender of an earlier version does not know it.
            outcome.next_after = match self.0.is_empty() {
                true if outcome.remaining == 0 => outcome.reset_after,
                true => TimeDelta::ZERO,
                false => TimeDelta::from_micros(self.number()?),
            };
        }
        Some(Outcomes { admission, at, per_charge })
    }

    fn outcome(&mut self) -> Option<Outcome> {
        let (kind, wait) = (self.byte()?, TimeDelta::from_micros(self.number()?));
        let verdict = match kind {
            0 => Verdict::Allowed { delay: wait },
            1 => Verdict::Denied { retry_after: Some(wait) },
            2 => Verdict::Denied { retry_after: None },
            3 => Verdict::Unknown,
            _ => return None,
        };
        Some(Outcome {
            verdict,
            remaining: self.number()?,
            next_after: TimeDelta::ZERO,
            reset_after: TimeDelta::from_micros(self.number()?),
        })
    }

    /// Reads a limit, and whether its consumption is durable.
    fn limit(&mut self) -> Option<(Limit, bool)> {
        let name = self.text(64)?;
        let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name)?;
        let count = self.number()?;
        let period = match self.byte()? {
            0 => Period::Rolling(TimeDelta::from_micros(self.number()?)),
            1 => Period::Calendar(Calendar::new(CalendarUnit::Day, self.text(128)?).ok()?),
            2 => Period::Calendar(Calendar::new(CalendarUnit::Month, self.text(128)?).ok()?),
            _ => return None,
        };
        let (burst, slots) = (self.maybe()?, self.maybe()?);
        let (slots, parts) = if algorithm.has_burst() { (None, slots) } else { (slots, None) };
        let refill_interval = self.maybe()?.map(TimeDelta::from_micros);
        let flags = self.byte()?;
        let [delay, jitter, count_denied, any_period, is_durable] =
            [0, 1, 2, 3, 4].map(|bit| flags >> bit & 1 == 1);
        let rate = Rate { count, period };
        let spec = LimitSpec {
            algorithm,
            rate,
            burst,
            delay,
            slots,
            jitter,
            refill_interval,
            count_denied,
            any_period,
        };
        let limit = spec.build().ok()?;
        let limit = match parts {
            None => limit,
            Some(parts) => limit.in_parts(parts)?,
        };
        Some((limit, is_durable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it a batch is accepted whose values are no keys, or refused although they are.
    #[test]
    fn values_can_be_read_if_their_parts_can() {
        let long = "é".repeat(40);
        let network = KeyPart::Network { address: 1 << 100, prefix: 32 };
        let lists: [&[KeyPart<'_>]; 5] = [
            &[],
            &[KeyPart::Text("alice")],
            &[KeyPart::Secret("é"), network],
            &[network, KeyPart::Text(&long)],
            &[KeyPart::Text(""), KeyPart::Text("a"), KeyPart::Secret("é")],
        ];
        for list in lists {
            let mut encoded = Writer::default();
            encoded.parts(list.iter().copied());
            // Every byte changed in turn, and none.
            for at in 0..=encoded.0.len() {
                for changed in [0_u8, 1, 2, 3, 0x61, 0x80, 0xc3, 0xff] {
                    let mut bytes = encoded.0.clone();
                    bytes.extend([0x61; 4]);
                    bytes.get_mut(at).into_iter().for_each(|byte| *byte = changed);
                    let (mut values, mut parts) = (Reader(&bytes), Reader(&bytes));
                    assert_eq!(values.values().is_some(), parts.parts().is_some(), "{bytes:?}");
                    let mut ahead = Reader(&bytes);
                    if let Some(values) = ahead.values() {
                        assert_eq!(values.encoded().len(), bytes.len() - parts.0.len());
                        assert_eq!(ahead.0, parts.0);
                    }
                }
            }
        }
    }
}
