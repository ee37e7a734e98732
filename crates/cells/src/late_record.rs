//! Records late charges: what a store applies after its deadline, if the caller keeps it, counts as every other charge.

use crate::charge_codec::{SentCharge, as_charge};
use crate::ledger::Ledger;
use std::sync::Arc;
use tollgate_core::{Charge, CounterId, KeyPart, LateAnswer, OwnedKeyPart, StoreError};

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
