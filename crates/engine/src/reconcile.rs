//! What this node let through while the store was away, to be charged to the shared counters when it is back.
//!
//! Without it every outage would hand out a fresh burst at its end. Whoever owes pays before he is served: a check charges
//! its counters' debts first, and if that cannot be done the store is as good as away for them; the rest is paid in the
//! background ([`Limiter::pay_debts`]). The whole is charged, though time has given some of it back: that errs on the
//! limit's side. Bounded: beyond [`MOST`] counters what is let through is only counted here.

use crate::charge_record::Holding;
use crate::limiter::Limiter;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, Cost, CounterStore, StoreError};

const MOST: usize = 65_536;
/// Counters charged in one call.
const BATCH: usize = 64;

/// Which counter: its scope and a hash of its values.
type Name = (u64, u64);

#[derive(Default)]
pub(crate) struct Debts {
    /// Whether there is anything to look up: false on the usual path, which then takes no lock.
    any: AtomicBool,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    owed: HashMap<Name, Holding>,
    /// Debts of these counters are on their way to the store.
    paying: HashSet<Name>,
}

/// Debts on their way to the store; back in the book if they do not get there, also when the caller has gone.
struct Paying<'a> {
    debts: &'a Debts,
    list: Vec<(Name, Holding)>,
}

fn name(charge: &Charge<'_>) -> Name {
    (charge.key.scope.id(), charge.key.stable_hash())
}

impl Debts {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any counter owes anything.
    #[inline]
    pub(crate) fn are_open(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Notes what a charge on a local counter took of the shared one.
    pub(crate) fn add(&self, charge: &Charge<'_>) {
        let mut book = self.book();
        book.add(name(charge), Holding::of(charge));
        self.any.store(true, Ordering::Release);
    }

    /// Takes what some of these counters owe, to be paid. An error tells which are being paid by somebody else.
    fn take<'a>(&'a self, names: &[Name]) -> Result<Paying<'a>, Vec<usize>> {
        let mut book = self.book();
        let busy = |at: &usize| book.paying.contains(&names[*at]);
        let busy: Vec<usize> = (0..names.len()).filter(busy).collect();
        if !busy.is_empty() {
            return Err(busy);
        }
        let list: Vec<_> = names.iter().filter_map(|name| book.owed.remove_entry(name)).collect();
        book.paying.extend(list.iter().map(|(name, _)| *name));
        Ok(Paying { debts: self, list })
    }
}

impl Book {
    fn add(&mut self, name: Name, debt: Holding) {
        if let Some(known) = self.owed.get_mut(&name) {
            known.units = known.units.saturating_add(debt.units).min(2 * known.limit.capacity());
        } else if self.owed.len() < MOST {
            self.owed.insert(name, debt);
        }
    }
}

impl Paying<'_> {
    async fn pay(mut self, store: &impl CounterStore) -> Result<(), StoreError> {
        {
            let parts: Vec<_> = self.list.iter().map(|(_, debt)| debt.parts()).collect();
            let charges: Vec<_> = self
                .list
                .iter()
                .zip(&parts)
                .map(|((_, debt), parts)| debt.charge(parts, Cost::new(debt.units)))
                .collect();
            store.debit(&charges).await?;
        }
        let mut book = self.debts.book();
        for (name, _) in self.list.drain(..) {
            book.paying.remove(&name);
        }
        if book.owed.is_empty() && book.paying.is_empty() {
            self.debts.any.store(false, Ordering::Release);
        }
        drop(book);
        Ok(())
    }
}

impl Drop for Paying<'_> {
    fn drop(&mut self) {
        if !self.list.is_empty() {
            let mut book = self.debts.book();
            for (name, debt) in self.list.drain(..) {
                book.paying.remove(&name);
                book.add(name, debt);
            }
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Charges the shared counters with what was let through without them. To be called now and then; does nothing, at no
    /// cost, when nothing is owed. What cannot be charged yet is kept; whether there is any such.
    pub async fn pay_debts(&self) -> bool {
        if !self.debts.are_open() {
            return false;
        }
        let owing: Vec<Name> = self.debts.book().owed.keys().copied().collect();
        for batch in owing.chunks(BATCH) {
            let Ok(paying) = self.debts.take(batch) else { continue };
            if !paying.list.is_empty() && paying.pay(&self.store).await.is_err() {
                return true;
            }
        }
        false
    }

    /// Pays what the counters of these charges owe. An error says for which of them the store is as good as away.
    pub(crate) async fn pay_first(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        if !self.debts.are_open() {
            return Ok(());
        }
        let names: Vec<Name> = charges.iter().map(name).collect();
        let (failed, why) = match self.debts.take(&names) {
            Ok(paying) if paying.list.is_empty() => return Ok(()),
            Ok(paying) => {
                let owing: HashSet<Name> = paying.list.iter().map(|(name, _)| *name).collect();
                match paying.pay(&self.store).await {
                    Ok(()) => return Ok(()),
                    Err(why) => ((0..names.len()).filter(|at| owing.contains(&names[*at])).collect(), why),
                }
            }
            Err(busy) => (busy, StoreError::Unavailable("what was let through is being charged".to_owned())),
        };
        // Its own numbers are of debts, not of charges.
        let why = if let StoreError::Partial { cause: why, .. } = why { *why } else { why };
        let all = failed.len() == charges.len();
        Err(if all { why } else { StoreError::Partial { failed, cause: Box::new(why) } })
    }
}
