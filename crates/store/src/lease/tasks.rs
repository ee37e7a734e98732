//! Background lease tasks: refill before units run out, return what is idle.
//!
//! The process drives the tasks: `task_ready` waits until there is work, `due_tasks` returns it, `run_task` performs
//! one task. No runtime is assumed, so a simulation drives the same code in its own time.

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

/// One task.
#[derive(Debug)]
pub struct LeaseTask {
    name: u64,
    key: Arc<LeaseKey>,
    action: LeaseAction,
}

impl<S: CounterStore, A: CounterStore, C: Clock + Clone> LeasedStore<S, A, C> {
    /// Waits until there is work. Idle leases do not cause a wakeup: they are found only if `due_tasks` is also called
    /// periodically.
    pub async fn task_ready(&self) {
        self.table.task_ready.notified().await;
    }

    /// Returns the tasks that are due now.
    pub fn due_tasks(&self) -> Vec<LeaseTask> {
        self.collect_tasks(false)
    }

    /// Returns tasks that hand back all available units, for a shutdown or a change of configuration.
    pub fn shutdown_tasks(&self) -> Vec<LeaseTask> {
        self.collect_tasks(true)
    }

    fn collect_tasks(&self, all: bool) -> Vec<LeaseTask> {
        let now = self.clock.now();
        let hot_names = self.hot_list.names(now);
        add(&self.counts.demoted, self.table.sweep(&self.config, hot_names.as_ref(), now, all));
        self.table
            .take_due()
            .into_iter()
            .map(|(name, named, task)| LeaseTask { name, key: named, action: task })
            .collect()
    }

    /// Runs one task. `id` identifies the refill that it may bring and must be unique across all nodes.
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
        // Units no longer outstanding make room for the units requested.
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
            // The lease was dropped in the meantime.
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
        // If the message is lost, the units recover with time. It is sent only once, because it may have been applied.
        if self.authority.return_units(&back).await.is_ok() {
            add(&self.counts.returned, units);
        }
    }
}
