//! What is done beside the traffic: units are asked for before they run out, and given back when nobody uses them.
//!
//! Whoever runs the process drives it: `called` waits until there is something to do, `errands` tells what, `run` does one.
//! No runtime is assumed, so a simulation drives the same code in its own time.

use super::Leased;
use super::config::MARK;
use super::key_lease::{Asked, Named, Task};
use super::stats::add;
use super::units::Pocket;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, PermitId, UnitReturn,
};

/// One thing to do.
#[derive(Debug)]
pub struct Errand {
    name: u64,
    named: Arc<Named>,
    task: Task,
}

impl<S: CounterStore, A: CounterStore, C: Clock + Clone> Leased<S, A, C> {
    /// Waits until there is something to do. What is idle is only seen by asking for errands now and then, too.
    pub async fn called(&self) {
        self.table.called.notified().await;
    }

    /// What is to be done now.
    pub fn errands(&self) -> Vec<Errand> {
        self.gather(false)
    }

    /// Everything in hand, to be given back: the process is about to end, or to be told other things.
    pub fn farewell(&self) -> Vec<Errand> {
        self.gather(true)
    }

    fn gather(&self, all: bool) -> Vec<Errand> {
        let now = self.clock.now();
        add(&self.counts.demoted, self.table.sweep(&self.config, now, all));
        self.table.due().into_iter().map(|(name, named, task)| Errand { name, named, task }).collect()
    }

    /// Does one. `id` names the grant that it may bring: never the same twice, on any node.
    pub async fn run(&self, errand: Errand, id: PermitId) {
        let Errand { name, named, task } = errand;
        match task {
            Task::Ask => self.ask_for(name, &named, id).await,
            Task::Return(pocket, units) => self.hand_back(&named, &pocket, units).await,
        }
    }

    async fn ask_for(&self, name: u64, named: &Arc<Named>, id: PermitId) {
        let asked = self.clock.now();
        let Some((units, spent, marks)) = self.table.ask(name, &self.config, asked) else { return };
        let parts = named.parts();
        // What is out no longer makes room for what is asked for.
        let out = if units >= spent { Cost::new(units - spent) } else { Cost::refund(spent - units) };
        let mut charges: SmallVec<[Charge<'_>; 3]> = SmallVec::new();
        let asked_for = Charge::new(named.key(&parts), &named.limit, Cost::new(units));
        charges.push(Charge { loss_policy: named.after_loss, ..asked_for });
        charges.push(Charge::new(CounterKey { scope: &named.escrow.0, parts: &parts }, &named.escrow.1, out));
        if marks {
            let key = CounterKey { scope: &named.mark.0, parts: &parts };
            let mark = Charge::new(key, &named.mark.1, Cost::new(MARK));
            charges.push(Charge { enforcement: Enforcement::Independent, ..mark });
        }
        add(&self.counts.asked, 1);
        let answer = self.authority.charge(&charges).await;
        let now = self.clock.now();
        let Ok(outcomes) = answer else {
            add(&self.counts.failed, 1);
            return self.table.unanswered(name, now);
        };
        let granted = outcomes.admission == Admission::Admitted;
        add(
            if granted { &self.counts.granted } else { &self.counts.refused },
            if granted { units } else { 1 },
        );
        let ask = Asked { units, spent, marks, asked, id };
        if !self.table.granted(name, named, &ask, &outcomes, self.config.ttl, now) && granted {
            // The lease was given up meanwhile.
            if let Some(pocket) = named.pocket(&ask, &outcomes, self.config.ttl) {
                self.hand_back(named, &pocket, pocket.good(now)).await;
            }
        }
    }

    async fn hand_back(&self, named: &Named, pocket: &Pocket, units: u64) {
        if units == 0 {
            return;
        }
        let parts = named.parts();
        let (taken, full_at, id) = (pocket.taken(units), pocket.full_at, pocket.id);
        let back =
            UnitReturn { key: named.key(&parts), limit: &named.limit, units, taken_at: taken, full_at, id };
        // If it is lost, time gives them back. Sent once: it may have been done.
        if self.authority.return_units(&back).await.is_ok() {
            add(&self.counts.returned, units);
        }
    }
}
