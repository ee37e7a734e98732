//! Background lease tasks: refill before units run out, return what is idle.
//!
//! Whoever runs the process drives it: `task_ready` waits until there is something to do, `due_tasks` tells what, `run_task` does one.
//! No runtime is assumed, so a simulation drives the same code in its own time.

use super::LeasedStore;
use super::config::MARK_UNITS;
use super::key_lease::{LeaseAction, LeaseKey, RefillRequest};
use super::stats::add;
use super::units::LeasedUnits;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, PermitId, UnitReturn,
};

/// One thing to do.
#[derive(Debug)]
pub struct LeaseTask {
    name: u64,
    key: Arc<LeaseKey>,
    action: LeaseAction,
}

impl<S: CounterStore, A: CounterStore, C: Clock + Clone> LeasedStore<S, A, C> {
    /// Waits until there is something to do. What is idle is only seen by asking for errands now and then, too.
    pub async fn task_ready(&self) {
        self.table.task_ready.notified().await;
    }

    /// What is to be done now.
    pub fn due_tasks(&self) -> Vec<LeaseTask> {
        self.collect_tasks(false)
    }

    /// Everything in hand, to be given back: the process is about to end, or to be told other things.
    pub fn shutdown_tasks(&self) -> Vec<LeaseTask> {
        self.collect_tasks(true)
    }

    fn collect_tasks(&self, all: bool) -> Vec<LeaseTask> {
        let now = self.clock.now();
        add(&self.counts.demoted, self.table.sweep(&self.config, now, all));
        self.table
            .take_due()
            .into_iter()
            .map(|(name, named, task)| LeaseTask { name, key: named, action: task })
            .collect()
    }

    /// Does one. `id` names the grant that it may bring: never the same twice, on any node.
    pub async fn run_task(&self, task: LeaseTask, id: PermitId) {
        let LeaseTask { name, key: named, action: task } = task;
        match task {
            LeaseAction::Refill => self.refill(name, &named, id).await,
            LeaseAction::Return(leased, units) => self.return_units_of(&named, &leased, units).await,
        }
    }

    async fn refill(&self, name: u64, named: &Arc<LeaseKey>, id: PermitId) {
        let asked = self.clock.now();
        let Some((units, spent, marks)) = self.table.next_refill(name, &self.config, asked) else { return };
        let parts = named.parts();
        // What is out no longer makes room for what is asked for.
        let out = if units >= spent { Cost::new(units - spent) } else { Cost::refund(spent - units) };
        let mut charges: SmallVec<[Charge<'_>; 3]> = SmallVec::new();
        let asked_for = Charge::new(named.key(&parts), &named.limit, Cost::new(units));
        charges.push(Charge { loss_policy: named.loss_policy, ..asked_for });
        charges.push(Charge::new(CounterKey { scope: &named.escrow.0, parts: &parts }, &named.escrow.1, out));
        if marks {
            let key = CounterKey { scope: &named.mark.0, parts: &parts };
            let mark = Charge::new(key, &named.mark.1, Cost::new(MARK_UNITS));
            charges.push(Charge { enforcement: Enforcement::Independent, ..mark });
        }
        add(&self.counts.requested, 1);
        let answer = self.authority.charge(&charges).await;
        let now = self.clock.now();
        let Ok(outcomes) = answer else {
            add(&self.counts.failed, 1);
            return self.table.refill_failed(name, now);
        };
        let granted = outcomes.admission == Admission::Admitted;
        add(
            if granted { &self.counts.granted } else { &self.counts.denied_refills },
            if granted { units } else { 1 },
        );
        let ask = RefillRequest { units, spent, marks, sent_at: asked, id };
        if !self.table.refilled(name, named, &ask, &outcomes, self.config.ttl, now) && granted {
            // The lease was given up meanwhile.
            if let Some(leased) = named.leased_units(&ask, &outcomes, self.config.ttl) {
                self.return_units_of(named, &leased, leased.available(now)).await;
            }
        }
    }

    async fn return_units_of(&self, named: &LeaseKey, leased: &LeasedUnits, units: u64) {
        if units == 0 {
            return;
        }
        let parts = named.parts();
        let (taken, full_at, id) = (leased.taken_at(units), leased.full_at, leased.id);
        let back =
            UnitReturn { key: named.key(&parts), limit: &named.limit, units, taken_at: taken, full_at, id };
        // If it is lost, time gives them back. Sent once: it may have been done.
        if self.authority.return_units(&back).await.is_ok() {
            add(&self.counts.returned, units);
        }
    }
}
