//! The simulated store: a plain ledger with a clock that may jump, a replica that lags behind, and bugs that can be planted.

use crate::Bug;
use std::collections::VecDeque;
use tollgate_core::conformance::Ledger;
use tollgate_core::{
    Admission, Charge, Cost, CounterKey, Enforcement, KeyPart, Limit, Outcomes, OwnedKeyPart, PermitId,
    Scope, Timestamp, UnitReturn,
};

/// A charge in a message.
#[derive(Clone, Debug)]
pub(crate) struct SentCharge {
    scope: Scope,
    parts: Vec<OwnedKeyPart>,
    limit: Limit,
    cost: Cost,
    enforcement: Enforcement,
}

/// A message from a node to the store.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Charge(Vec<SentCharge>),
    Debit(Vec<SentCharge>),
    ReturnUnits { what: Box<SentCharge>, taken: Timestamp, full_at: Timestamp, id: PermitId },
}

impl Request {
    /// Returns whether the message refunds units, which a node sends at most once.
    pub(crate) fn is_refund(&self) -> bool {
        match self {
            Self::Charge(sent) | Self::Debit(sent) => {
                sent.iter().any(|sent| sent.cost.is_refund() && !sent.is_derived())
            }
            Self::ReturnUnits { .. } => false,
        }
    }
}

impl SentCharge {
    pub(crate) fn charge(charge: &Charge<'_>) -> Self {
        Self {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedKeyPart::from).collect(),
            limit: charge.limit.clone(),
            cost: charge.cost,
            enforcement: charge.enforcement,
        }
    }

    /// Returns whether the charge is on a counter derived for leases, not on the limit's own counter.
    fn is_derived(&self) -> bool {
        ["|escrow", "|leased"].iter().any(|suffix| self.scope.label().ends_with(suffix))
    }
}

/// Calls `with` on the charges of a received message.
fn arrived<T>(sent: &[SentCharge], with: impl FnOnce(&[Charge<'_>]) -> T) -> T {
    let parts: Vec<Vec<KeyPart<'_>>> =
        sent.iter().map(|sent| sent.parts.iter().map(OwnedKeyPart::as_part).collect()).collect();
    let charges: Vec<Charge<'_>> = sent
        .iter()
        .zip(&parts)
        .map(|(sent, parts)| Charge {
            enforcement: sent.enforcement,
            ..Charge::new(CounterKey { scope: &sent.scope, parts }, &sent.limit, sent.cost)
        })
        .collect();
    with(&charges)
}

pub(crate) struct Authority {
    ledger: Ledger,
    /// State of the replica, and the time it was replicated.
    replica: (Ledger, u64),
    /// Recently deducted units: time and number.
    deducted: VecDeque<(u64, u64)>,
    /// Offset of its clock in microseconds.
    pub(crate) offset: i64,
    bug: Option<Bug>,
}

impl Authority {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        Self {
            ledger: Ledger::default(),
            replica: (Ledger::default(), 0),
            deducted: VecDeque::new(),
            offset: 0,
            bug,
        }
    }

    /// Returns the store's time at the true time `now`.
    pub(crate) fn time(&self, now: u64) -> Timestamp {
        Timestamp::from_micros(now.saturating_add_signed(self.offset))
    }

    pub(crate) fn handle(&mut self, request: &Request, now: u64) -> Outcomes {
        let time = self.time(now);
        match request {
            Request::Charge(sent) => {
                let leases = sent.iter().any(SentCharge::is_derived);
                let mut outcomes = arrived(sent, |charges| self.ledger.charge(time, charges));
                if outcomes.admission == Admission::Admitted {
                    let units = sent.iter().filter(|sent| !sent.is_derived()).map(|sent| sent.cost.units());
                    self.deducted.push_back((now, units.sum()));
                    if leases && self.bug == Some(Bug::SkipsDeduction) {
                        let back: Vec<SentCharge> = sent
                            .iter()
                            .map(|sent| SentCharge { cost: sent.cost.negated(), ..sent.clone() })
                            .collect();
                        arrived(&back, |charges| self.ledger.debit(time, charges));
                    }
                }
                outcomes.at = time;
                outcomes
            }
            Request::Debit(sent) => {
                arrived(sent, |charges| self.ledger.debit(time, charges));
                nothing(time)
            }
            Request::ReturnUnits { what, taken, full_at, id } => {
                let times = if self.bug == Some(Bug::ReturnsTwice) { 2 } else { 1 };
                arrived(std::slice::from_ref(what.as_ref()), |charges| {
                    for copy in 0..times {
                        let id = PermitId(id.0 ^ (copy << 120));
                        let units = what.cost.units();
                        let back = UnitReturn {
                            key: charges[0].key,
                            limit: &what.limit,
                            units,
                            taken_at: *taken,
                            full_at: *full_at,
                            id,
                        };
                        self.ledger.return_units(time, &back);
                    }
                });
                nothing(time)
            }
        }
    }

    /// Brings the replica up to date.
    pub(crate) fn replicate(&mut self, now: u64) {
        self.replica = (self.ledger.clone(), now);
        self.deducted.clear();
    }

    /// Fails over to the replica. Returns the number of deducted units that it does not have.
    pub(crate) fn fail_over(&mut self, now: u64) -> u64 {
        let lost = self.deducted.iter().map(|(_, units)| units).sum();
        self.ledger = self.replica.0.clone();
        self.replicate(now);
        lost
    }

    /// Returns what remains of a counter.
    pub(crate) fn remaining(&mut self, key: CounterKey<'_>, limit: &Limit, now: u64) -> u64 {
        let time = self.time(now);
        let outcomes = self.ledger.charge(time, &[Charge::new(key, limit, Cost::PEEK)]);
        outcomes.per_charge.first().map_or(0, |outcome| outcome.remaining)
    }

    /// Moves the clock by `by` microseconds.
    pub(crate) fn jump(&mut self, by: i64) {
        self.offset = (self.offset + by).max(-3_600_000_000);
    }
}

fn nothing(at: Timestamp) -> Outcomes {
    Outcomes { admission: Admission::Admitted, at, per_charge: Default::default() }
}
