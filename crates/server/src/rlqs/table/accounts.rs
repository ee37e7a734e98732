//! All accounts by number, and when each must be looked at, so that a pass costs as much as there is to do, and not as much as
//! there are accounts.

use super::{Bucket, StreamId};
use crate::rlqs::account::Account;
#[cfg(test)]
use crate::rlqs::account::Due;
use crate::rlqs::places::Place;
use slab::Slab;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tollgate_core::Timestamp;

/// Number of an account, free again when the account is gone.
pub(in crate::rlqs) type AccountId = u32;

pub(super) struct Entry {
    pub(super) account: Account,
    pub(super) stream: StreamId,
    pub(super) bucket: Arc<Bucket>,
    /// Free again when the account is gone.
    _place: Arc<Place>,
    /// The limits that it uses, each once.
    pub(super) counters: SmallVec<[u64; 2]>,
    pub(super) is_lost: bool,
    /// Its limits have become known in this pass, and it has no share yet.
    pub(super) is_new: bool,
    /// Number of the pass that served it last.
    pub(super) served: u64,
    /// When the account must be looked at; `None` if the next pass does.
    look: Option<Timestamp>,
}

/// All accounts.
#[derive(Default)]
pub(super) struct Accounts {
    entries: Slab<Entry>,
    ids: BTreeMap<(StreamId, Arc<Bucket>), AccountId>,
    /// Those that the next pass looks at.
    next: Vec<AccountId>,
    /// The others, by the time when they must be looked at.
    later: BTreeSet<(Timestamp, AccountId)>,
}

impl Accounts {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the account of this bucket on this stream.
    pub(super) fn find(&self, stream: StreamId, bucket: &Arc<Bucket>) -> Option<AccountId> {
        self.ids.get(&(stream, Arc::clone(bucket))).copied()
    }

    /// Adds an account, which the next pass looks at.
    pub(super) fn insert(&mut self, stream: StreamId, place: Arc<Place>, account: Account) {
        let bucket = Arc::clone(&place.bucket);
        let id = self.entries.insert(Entry {
            account,
            stream,
            bucket: Arc::clone(&bucket),
            _place: place,
            counters: SmallVec::new(),
            is_lost: false,
            is_new: false,
            served: 0,
            look: None,
        });
        let id = AccountId::try_from(id).unwrap_or(AccountId::MAX);
        self.ids.insert((stream, bucket), id);
        self.next.push(id);
    }

    /// Removes an account. Only in a pass, which has taken it: another one of its number would be looked at twice.
    pub(super) fn remove(&mut self, id: AccountId) -> Option<Entry> {
        let entry = self.entries.try_remove(id as usize)?;
        self.ids.remove(&(entry.stream, Arc::clone(&entry.bucket)));
        if let Some(at) = entry.look {
            self.later.remove(&(at, id));
        }
        Some(entry)
    }

    pub(super) fn get(&self, id: AccountId) -> Option<&Entry> {
        self.entries.get(id as usize)
    }

    pub(super) fn get_mut(&mut self, id: AccountId) -> Option<&mut Entry> {
        self.entries.get_mut(id as usize)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().map(|(_, entry)| entry)
    }

    /// Returns all accounts of a stream.
    pub(super) fn of_stream(&self, stream: StreamId) -> Vec<AccountId> {
        let first = Bucket { domain: Arc::from(""), entries: Box::default() };
        let all = self.ids.range((stream, Arc::new(first))..);
        all.take_while(|((own, _), _)| *own == stream).map(|(_, id)| *id).collect()
    }

    /// Makes the next pass look at an account.
    pub(super) fn look_next(&mut self, id: AccountId) {
        let Some(entry) = self.entries.get_mut(id as usize) else { return };
        if let Some(at) = entry.look.take() {
            self.later.remove(&(at, id));
            self.next.push(id);
        }
    }

    /// Returns the accounts that this pass looks at. Those that stay are to be handed to [`Self::look_later`].
    pub(super) fn take(&mut self, now: Timestamp) -> Vec<AccountId> {
        while let Some((at, id)) = self.later.first().copied().filter(|(at, _)| *at <= now) {
            self.later.remove(&(at, id));
            if let Some(entry) = self.entries.get_mut(id as usize) {
                entry.look = None;
                self.next.push(id);
            }
        }
        std::mem::take(&mut self.next)
    }

    /// Checks that no account is due before it is looked at.
    #[cfg(test)]
    pub(super) fn check_looks(&self, now: Timestamp) {
        for entry in self.values().filter(|entry| entry.look.is_some_and(|at| at > now)) {
            let mut account = entry.account.clone();
            let is_due = match entry.is_lost {
                true => account.has_debt() || account.is_spent(now),
                false => account.is_abandoned(now) || account.due(true, now) != Due::No,
            };
            assert!(!is_due, "{:?}: {:?}", entry.look, entry.account);
        }
    }

    /// Looks at these accounts when they need it.
    pub(super) fn look_later(&mut self, ids: &[AccountId]) {
        for id in ids {
            let Some(entry) = self.entries.get_mut(*id as usize) else { continue };
            let at = entry.account.next_look(entry.is_lost);
            if let Some(before) = entry.look.replace(at) {
                self.later.remove(&(before, *id));
            }
            self.later.insert((at, *id));
        }
    }
}
