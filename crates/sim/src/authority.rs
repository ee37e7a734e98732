//! The store of the simulation: the plainest there is, with a clock that may jump, a replica that lags behind, and bugs
//! that can be planted in it.

use crate::Bug;
use std::collections::VecDeque;
use tollgate_core::conformance::Ledger;
use tollgate_core::{
    Admission, Charge, Cost, CounterKey, Enforcement, GiveBack, Limit, Outcomes, OwnedPart, Part, PermitId,
    Scope, Timestamp,
};

/// A charge that travels.
#[derive(Clone, Debug)]
pub(crate) struct SentCharge {
    scope: Scope,
    parts: Vec<OwnedPart>,
    limit: Limit,
    cost: Cost,
    enforcement: Enforcement,
}

/// What a node asks.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Charge(Vec<SentCharge>),
    Debit(Vec<SentCharge>),
    ReturnUnits { what: Box<SentCharge>, taken: Timestamp, full_at: Timestamp, id: PermitId },
}

impl SentCharge {
    pub(crate) fn charge(charge: &Charge<'_>) -> Self {
        Self {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedPart::from).collect(),
            limit: charge.limit.clone(),
            cost: charge.cost,
            enforcement: charge.enforcement,
        }
    }

    /// Whether it is about what leases keep beside a counter, not about the counter.
    fn is_lease_counter(&self) -> bool {
        ["|escrow", "|leased"].iter().any(|suffix| self.scope.label().ends_with(suffix))
    }
}

/// Does something with charges as they were before they travelled.
fn arrived<T>(sent: &[SentCharge], with: impl FnOnce(&[Charge<'_>]) -> T) -> T {
    let parts: Vec<Vec<Part<'_>>> =
        sent.iter().map(|sent| sent.parts.iter().map(OwnedPart::borrowed).collect()).collect();
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
    /// What the replica has, and since when.
    replica: (Ledger, u64),
    /// Units deducted of late: when, how many.
    deducted: VecDeque<(u64, u64)>,
    /// How far its clock is off, in microseconds.
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

    /// Its time, where this is the true one.
    pub(crate) fn time(&self, now: u64) -> Timestamp {
        Timestamp::from_micros(now.saturating_add_signed(self.offset))
    }

    pub(crate) fn handle(&mut self, request: &Request, now: u64) -> Outcomes {
        let time = self.time(now);
        match request {
            Request::Charge(sent) => {
                let leases = sent.iter().any(SentCharge::is_lease_counter);
                let mut told = arrived(sent, |charges| self.ledger.charge(time, charges));
                if told.admission == Admission::Admitted {
                    let units =
                        sent.iter().filter(|sent| !sent.is_lease_counter()).map(|sent| sent.cost.units());
                    self.deducted.push_back((now, units.sum()));
                    if leases && self.bug == Some(Bug::SkipsDeduction) {
                        let back: Vec<SentCharge> = sent
                            .iter()
                            .map(|sent| SentCharge { cost: sent.cost.reversed(), ..sent.clone() })
                            .collect();
                        arrived(&back, |charges| self.ledger.debit(time, charges));
                    }
                }
                told.at = time;
                told
            }
            Request::Debit(sent) => {
                arrived(sent, |charges| self.ledger.debit(time, charges));
                nothing(time)
            }
            Request::ReturnUnits { what, taken, full_at, id } => {
                let times = if self.bug == Some(Bug::ReturnsTwice) { 2 } else { 1 };
                arrived(std::slice::from_ref(what.as_ref()), |charges| {
                    for turn in 0..times {
                        let id = PermitId(id.0 ^ (turn << 120));
                        let units = what.cost.units();
                        let back = GiveBack {
                            key: charges[0].key,
                            limit: &what.limit,
                            units,
                            taken: *taken,
                            full_at: *full_at,
                            id,
                        };
                        self.ledger.give_back(time, &back);
                    }
                });
                nothing(time)
            }
        }
    }

    /// The replica catches up.
    pub(crate) fn replicate(&mut self, now: u64) {
        self.replica = (self.ledger.clone(), now);
        self.deducted.clear();
    }

    /// The replica takes over. How many units of what was deducted it does not know.
    pub(crate) fn fail_over(&mut self, now: u64) -> u64 {
        let lost = self.deducted.iter().map(|(_, units)| units).sum();
        self.ledger = self.replica.0.clone();
        self.replicate(now);
        lost
    }

    /// What remains of a counter.
    pub(crate) fn remaining(&mut self, key: CounterKey<'_>, limit: &Limit, now: u64) -> u64 {
        let time = self.time(now);
        let told = self.ledger.charge(time, &[Charge::new(key, limit, Cost::LOOK)]);
        told.each.first().map_or(0, |outcome| outcome.remaining)
    }

    /// How far it is ahead of the true time.
    pub(crate) fn jump(&mut self, by: i64) {
        self.offset = (self.offset + by).max(-3_600_000_000);
    }
}

fn nothing(at: Timestamp) -> Outcomes {
    Outcomes { admission: Admission::Admitted, at, each: Default::default() }
}
