//! Requests of other cells: charges of counters that this cell owns, debits, releases, and batches of consumption.

use super::{Charges, RegionalStore};
use crate::charge_codec::{SentCharge, as_charge};
use crate::late_debits::TakenBy;
use crate::message::{Hello, Message};
use crate::owner::Transport;
use crate::stats::add;
use tollgate_core::{
    Clock, CounterKey, CounterStore, KeyPart, Outcomes, OwnedKeyPart, Permit, StoreError, UnitReturn,
};

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Performs a request of another cell, and returns the reply.
    pub async fn handle(&self, from: &Hello, message: Message) -> Message {
        self.members.on_request(&from.cell, self.clock.now());
        let done = |result: Result<(), StoreError>| match result {
            Ok(()) => Message::Done(Vec::new()),
            Err(error) => Message::Failed(error.to_string()),
        };
        match message {
            Message::Charge(sent) => {
                add(&self.counts.charges_received, 1);
                match self.charge_received(&sent).await {
                    Ok(outcomes) => Message::Outcomes(outcomes),
                    Err(error) => Message::Failed(error.to_string()),
                }
            }
            Message::Debit(sent) => done(self.debit_received(&sent).await),
            Message::Release(sent) => done(self.release_received(&sent).await),
            Message::Return { units, taken_at, full_at, id } => {
                let parts: Vec<KeyPart<'_>> = units.parts.iter().map(OwnedKeyPart::as_part).collect();
                let (key, limit) =
                    (CounterKey { scope: &units.counter.scope, parts: &parts }, &units.counter.limit);
                let units = units.cost.units();
                done(self.own.return_units(&UnitReturn { key, limit, units, taken_at, full_at, id }).await)
            }
            Message::Batch(batch) => match self.apply(from, &batch).await {
                Message::Failed(why) => Message::NotApplied(why, self.members.sightings(self.clock.now())),
                answer => answer,
            },
            Message::Unknown(_) => {
                add(&self.counts.unknown_messages, 1);
                Message::Failed("unknown message".to_owned())
            }
            Message::Hello(_)
            | Message::Outcomes(_)
            | Message::Done(_)
            | Message::Failed(_)
            | Message::NotApplied(..)
            | Message::OtherProcess(_)
            | Message::Busy(_) => {
                add(&self.counts.unknown_messages, 1);
                Message::Failed("unexpected message".to_owned())
            }
        }
    }

    async fn charge_received(&self, sent: &[SentCharge]) -> Result<Outcomes, StoreError> {
        let parts = parts_of(sent);
        let charges = charges_of(sent, &parts);
        // The sender may know other living cells: two must not decide one counter.
        if !charges.iter().all(|charge| self.is_own(&charge.key)) {
            return Err(StoreError::Unavailable("this cell is not the owner".to_owned()));
        }
        self.charge_own(&charges).await
    }

    async fn debit_received(&self, sent: &[SentCharge]) -> Result<(), StoreError> {
        let parts = parts_of(sent);
        let charges = charges_of(sent, &parts);
        let debited = self.debit_own(&charges).await;
        match debited {
            Err(error) => {
                self.keep_late(&charges, &error, TakenBy::Owned);
                // It may be applied, and the sender would repeat what failed.
                if error.is_in_doubt() { Ok(()) } else { Err(error) }
            }
            debited => debited,
        }
    }

    async fn release_received(&self, sent: &[SentCharge]) -> Result<(), StoreError> {
        let parts = parts_of(sent);
        let permits: Vec<Permit<'_>> = sent
            .iter()
            .zip(&parts)
            .map(|(sent, parts)| Permit {
                key: CounterKey { scope: &sent.counter.scope, parts },
                limit: &sent.counter.limit,
                id: sent.permit,
            })
            .collect();
        self.own.release(&permits).await
    }
}

/// Returns the values of each charge's key.
fn parts_of(sent: &[SentCharge]) -> Vec<Vec<KeyPart<'_>>> {
    sent.iter().map(|sent| sent.parts.iter().map(OwnedKeyPart::as_part).collect()).collect()
}

/// Returns the charges of a message, whose values are `parts`.
fn charges_of<'a>(sent: &'a [SentCharge], parts: &'a [Vec<KeyPart<'a>>]) -> Charges<'a> {
    sent.iter().zip(parts).map(|(sent, parts)| as_charge(sent, parts)).collect()
}
