//! Records late charges: what a store applies after its deadline, if the caller keeps it, counts as every other charge.

use crate::charge_codec::{SentCharge, as_charge};
use crate::ledger::Ledger;
use crate::unanswered::{self, Ending};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::{Charge, CounterId, KeyPart, LateAnswer, LateCharge, OwnedKeyPart, StoreError};

/// Debits that are recorded once they are answered; more are recorded at once.
const MAX_UNANSWERED: usize = 16_384;

/// Makes the late charges of an error, of those that `is_wanted`, be written to a ledger if they are applied and kept.
#[cold]
pub(crate) fn record_if_kept(
    ledger: &Arc<Ledger>,
    charges: &[Charge<'_>],
    error: StoreError,
    is_wanted: impl Fn(&Charge<'_>) -> bool,
) -> StoreError {
    if error.late().is_empty() {
        return error;
    }
    let wanted = charges.iter().filter(|charge| is_wanted(charge));
    let wanted: Arc<[(CounterId, SentCharge)]> =
        wanted.map(|charge| (charge.key.id(), SentCharge::new(charge))).collect();
    for late in error.late().into_iter().filter(|_| !wanted.is_empty()) {
        let (ledger, wanted) = (Arc::clone(ledger), Arc::clone(&wanted));
        late.map_answer(move |answer| {
            if let LateAnswer::Charged(ids) = &answer {
                for (_, sent) in wanted.iter().filter(|(id, _)| ids.contains(id)) {
                    let parts: Vec<KeyPart<'_>> = sent.parts.iter().map(OwnedKeyPart::as_part).collect();
                    ledger.record(&as_charge(sent, &parts));
                }
            }
            answer
        });
    }
    error
}

/// Adds what a debit has taken, of the charges that `is_wanted`. What the store may still make counts once it has answered, if
/// the caller keeps it: a debit that it refuses is made again, and would count twice.
pub(crate) fn record_debited(
    ledger: &Arc<Ledger>,
    charges: &[Charge<'_>],
    result: &Result<(), StoreError>,
    is_wanted: impl Fn(&Charge<'_>) -> bool,
) {
    let record = |charge: &Charge<'_>| {
        if is_wanted(charge) {
            ledger.record(charge);
        }
    };
    let Err(error) = result else { return charges.iter().for_each(record) };
    let (failed, beside) = (error.failed_of(charges.len()), error.late_beside());
    let is_late = |at: &usize| beside.iter().any(|(places, _)| places.contains(at));
    let done = (0..charges.len()).filter(|at| !failed.contains(at) && !is_late(at));
    done.for_each(|at| record(&charges[at]));
    for (places, late) in beside {
        record_late(ledger, places.iter().filter_map(|at| charges.get(*at)), late, &is_wanted);
    }
    let (late, named): (Vec<LateCharge>, _) =
        (error.late().into_iter().cloned().collect(), failed.iter().filter_map(|at| charges.get(*at)));
    if late.is_empty() || error.is_lost() {
        // What will never be known counts on the safe side.
        named.filter(|charge| error.is_in_doubt() && !charge.cost.is_refund()).for_each(record);
    } else {
        record_late(ledger, named, &late, &is_wanted);
    }
}

#[cold]
fn record_late<'c>(
    ledger: &Arc<Ledger>,
    charges: impl Iterator<Item = &'c Charge<'c>>,
    late: &[LateCharge],
    is_wanted: impl Fn(&Charge<'_>) -> bool,
) {
    let wanted: Vec<&Charge<'_>> = charges.filter(|charge| is_wanted(charge)).collect();
    if wanted.is_empty() {
        return;
    }
    if ledger.unanswered.fetch_add(wanted.len(), Ordering::Relaxed) + wanted.len() > MAX_UNANSWERED {
        ledger.unanswered.fetch_sub(wanted.len(), Ordering::Relaxed);
        return wanted
            .into_iter()
            .filter(|charge| !charge.cost.is_refund())
            .for_each(|one| ledger.record(one));
    }
    let debits = wanted.into_iter().map(|charge| (charge.key.id(), SentCharge::new(charge))).collect();
    let ledger = Arc::clone(ledger);
    unanswered::watch(late, debits, move |sent: SentCharge, ending| {
        ledger.unanswered.fetch_sub(1, Ordering::Relaxed);
        if ending == Ending::Made || (ending == Ending::Unknown && !sent.cost.is_refund()) {
            let parts: Vec<KeyPart<'_>> = sent.parts.iter().map(OwnedKeyPart::as_part).collect();
            ledger.record(&as_charge(&sent, &parts));
        }
    });
}
