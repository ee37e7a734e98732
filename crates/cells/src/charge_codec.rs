//! Binary codec of charges, limits and outcomes. A charge contains its complete limit, because the cell that decides
//! may have other rules for a moment: the sender's rules determine the charge.

use crate::wire::{Reader, Writer};
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

/// Calls `with` on the charges of a message.
pub fn with_charges<T>(sent: &[SentCharge], with: impl FnOnce(&[Charge<'_>]) -> T) -> T {
    let parts: Vec<Vec<KeyPart<'_>>> =
        sent.iter().map(|sent| sent.parts.iter().map(OwnedKeyPart::as_part).collect()).collect();
    let charges: Vec<Charge<'_>> =
        sent.iter().zip(&parts).map(|(sent, parts)| as_charge(sent, parts)).collect();
    with(&charges)
}

/// Returns whether a receiver can read the values of a key.
pub(crate) fn can_be_sent(parts: &[OwnedKeyPart]) -> bool {
    let is_short = |part: &OwnedKeyPart| match part {
        OwnedKeyPart::Text(text) | OwnedKeyPart::Secret(text) => text.len() <= MAX_TEXT,
        OwnedKeyPart::Network { .. } => true,
    };
    parts.len() <= MAX_PARTS && parts.iter().all(is_short)
}

/// Returns about the bytes of a counter's values, in memory and in a message.
pub(crate) fn parts_bytes(parts: &[OwnedKeyPart]) -> usize {
    let one = |part: &OwnedKeyPart| match part {
        OwnedKeyPart::Text(text) | OwnedKeyPart::Secret(text) => text.len() + 3,
        OwnedKeyPart::Network { .. } => 18,
    };
    parts.iter().map(one).sum()
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
        self.limit(&counter.limit);
    }

    pub(crate) fn parts(&mut self, parts: &[OwnedKeyPart]) {
        self.number(parts.len() as u64);
        for part in parts {
            match part {
                OwnedKeyPart::Text(text) => {
                    self.byte(0);
                    self.text(text);
                }
                // A keyed hash by now: see `pseudonym`.
                OwnedKeyPart::Secret(text) => {
                    self.byte(1);
                    self.text(text);
                }
                OwnedKeyPart::Network { address, prefix } => {
                    self.byte(2);
                    self.wide(*address);
                    self.byte(*prefix);
                }
            }
        }
    }

    pub(crate) fn charge(&mut self, charge: &SentCharge) {
        self.counter(&charge.counter);
        self.parts(&charge.parts);
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
        for Outcome { verdict, remaining, reset_after } in &outcomes.per_charge {
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
    }

    fn limit(&mut self, limit: &Limit) {
        let spec = limit.spec();
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
        self.maybe(spec.slots);
        self.maybe(spec.refill_interval.map(TimeDelta::as_micros));
        let flags = [spec.delay, spec.jitter, spec.count_denied, spec.any_period];
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

impl Reader<'_> {
    pub(crate) fn counter(&mut self) -> Option<SentCounter> {
        let label = self.text(MAX_TEXT)?;
        let group = u64::from_le_bytes(self.take(8)?.try_into().ok()?);
        let shared = match self.maybe()? {
            None => None,
            Some(length) => Some(usize::try_from(length).ok().filter(|length| *length <= label.len())?),
        };
        Some(SentCounter { scope: Scope::from_placement(label, (group, shared)), limit: self.limit()? })
    }

    pub(crate) fn parts(&mut self) -> Option<Vec<OwnedKeyPart>> {
        let count = self.count(MAX_PARTS)?;
        (0..count).map(|_| self.part()).collect()
    }

    fn part(&mut self) -> Option<OwnedKeyPart> {
        Some(match self.byte()? {
            0 => OwnedKeyPart::Text(self.text(MAX_TEXT)?.into()),
            1 => OwnedKeyPart::Secret(self.text(MAX_TEXT)?.into()),
            2 => OwnedKeyPart::Network {
                address: self.wide()?,
                prefix: self.byte().filter(|bits| *bits <= 128)?,
            },
            _ => return None,
        })
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
        let per_charge = (0..count).map(|_| self.outcome()).collect::<Option<_>>()?;
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
            reset_after: TimeDelta::from_micros(self.number()?),
        })
    }

    fn limit(&mut self) -> Option<Limit> {
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
        let refill_interval = self.maybe()?.map(TimeDelta::from_micros);
        let flags = self.byte()?;
        let [delay, jitter, count_denied, any_period] = [0, 1, 2, 3].map(|bit| flags >> bit & 1 == 1);
        let rate = Rate { count, period };
        LimitSpec { algorithm, rate, burst, delay, slots, jitter, refill_interval, count_denied, any_period }
            .build()
            .ok()
    }
}
