//! Late replies: what to do with replies to requests whose callers no longer wait.
//!
//! A request that reaches its deadline, or whose caller leaves, stays with the server. Its waiter leaves an entry here
//! before it stops waiting; the pipeline finds it when the reply comes, and reports the answer to the keeper of the
//! charge or undoes it (`core/src/late.rs`). The table has entries only for requests that are late, so a request in time
//! never touches it.

use super::RedisStore;
use super::key_encoding::Name;
use super::pipeline::{Command, FailedJob, Failure, ShardReply};
use super::shard_request;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;
use tollgate_core::{Admission, Charge, CounterId, Enforcement, LateAnswer, LateCharge, LateResponder};

/// Identity and lease mark of each charge of the original request.
pub(super) type CounterList = Arc<[(CounterId, Name)]>;

/// The counters of a request, as far as a late reply needs them. Borrowed where that is possible: nearly all replies
/// are in time.
#[derive(Clone)]
pub(super) enum Counters<'a> {
    Borrowed(&'a [Charge<'a>]),
    Listed(CounterList),
}

impl Counters<'_> {
    pub(super) fn list(&self) -> CounterList {
        match self {
            Self::Borrowed(charges) => {
                charges.iter().map(|charge| (charge.key.id(), shard_request::mark(charge))).collect()
            }
            Self::Listed(list) => Arc::clone(list),
        }
    }
}

/// Requests whose callers no longer wait.
#[derive(Default)]
pub(super) struct LateReplies {
    next_id: AtomicU64,
    entries: Mutex<HashMap<u64, LateEntry>>,
}

struct LateEntry {
    counters: CounterList,
    responder: LateResponder,
    store: RedisStore,
    slot: u16,
}

impl LateReplies {
    /// Returns an identifier for a request.
    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn take(&self, id: u64) -> Option<LateEntry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }

    /// Reports a reply that came too late.
    pub(super) fn resolve(&self, id: u64, command: &Command, result: Result<ShardReply, FailedJob>) {
        let Some(entry) = self.take(id) else { return };
        let reply = match result {
            Ok(reply) => reply,
            Err(failed) => {
                let lost = matches!(failed.failure, Failure::Lost(_));
                let answer = if lost { LateAnswer::Unknown } else { LateAnswer::NotCharged };
                return entry.responder.answer(answer, || ());
            }
        };
        if !matches!(command, Command::Charge) {
            // What has already happened is not undone.
            let all = reply.request.charges.iter().map(|want| entry.counters[want.index].0).collect();
            return entry.responder.answer(LateAnswer::Charged(all), || ());
        }
        let mut request = reply.request;
        let is_admitted = reply.admission == Admission::Admitted;
        let (mut charged, mut is_undoable) = (Vec::new(), false);
        for (want, recomputed) in request.charges.iter().zip(&reply.outcomes) {
            let fits = recomputed.outcome.verdict.is_allowed();
            // Independent charges stand whatever the others do, and are never undone.
            let is_taken = match want.enforcement {
                Enforcement::Independent => fits || want.limit.counts_denied(),
                _ => fits && is_admitted,
            };
            if is_taken && !want.cost.is_peek() && !want.cost.is_refund() {
                charged.push(entry.counters[want.index].0);
                is_undoable |= want.enforcement != Enforcement::Independent;
            }
        }
        if charged.is_empty() {
            return entry.responder.answer(LateAnswer::NotCharged, || ());
        }
        if !is_undoable {
            return entry.responder.answer(LateAnswer::Charged(charged), || ());
        }
        let LateEntry { counters, responder, store, slot } = entry;
        // Without the prior contents a counter is not restored but refunded: what time has refilled is kept.
        let priors =
            if reply.priors.is_empty() { vec![Vec::new(); request.bundles.len()] } else { reply.priors };
        request.marks = request.charges.iter().map(|want| counters[want.index].1.clone()).collect();
        let undo = Command::Undo { taken_at: reply.now, priors };
        responder.answer(LateAnswer::Charged(charged), move || store.undo_late(undo, slot, request));
    }
}

/// Waits for the reply to one job. Dropped without one, it leaves the job's charges to be undone.
pub(super) struct ReplyWaiter<'a> {
    pub(super) receiver: oneshot::Receiver<Result<ShardReply, FailedJob>>,
    pub(super) id: u64,
    pub(super) slot: u16,
    pub(super) command: Command,
    pub(super) store: &'a RedisStore,
    /// `None` for a command whose late reply needs no action, and once the reply has come.
    pub(super) counters: Option<Counters<'a>>,
}

impl ReplyWaiter<'_> {
    /// Stops waiting. Returns the reply if it came at the last moment, else the handle of the late charge, if its reply
    /// needs action.
    pub(super) fn abandon(mut self) -> Result<Result<ShardReply, FailedJob>, Option<LateCharge>> {
        let late = self.leave_entry();
        self.receiver.close();
        if let Ok(reply) = self.receiver.try_recv() {
            self.store.shared.late.take(self.id);
            return Ok(reply);
        }
        Err(late)
    }

    fn leave_entry(&mut self) -> Option<LateCharge> {
        let counters = self.counters.take()?.list();
        let (late, responder) = LateCharge::new();
        let entry = LateEntry { counters, responder, store: self.store.clone(), slot: self.slot };
        let entries = &self.store.shared.late.entries;
        entries.lock().unwrap_or_else(PoisonError::into_inner).insert(self.id, entry);
        Some(late)
    }
}

impl Drop for ReplyWaiter<'_> {
    fn drop(&mut self) {
        if self.counters.is_none() {
            return;
        }
        // The caller left: its handle is dropped here, so the charge is undone once it is known.
        let late = self.leave_entry();
        self.receiver.close();
        if let Ok(reply) = self.receiver.try_recv() {
            self.store.shared.late.resolve(self.id, &self.command, reply);
        }
        drop(late);
    }
}
