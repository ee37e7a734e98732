//! The body of a decision: all of it, in memory that the thread reuses.
//!
//! A decision is handed through several futures, from the limiter to the response. By value it was 480 bytes, and each
//! hand copied them right after they were written, when the processor is slowest at it: a sixth of a check's time. So
//! the body has a place of its own, is written there once, and returns to the thread that drops it. A thread allocates
//! only if more decisions are alive at once than it has kept before, and keeps [`MAX_KEPT`] at most.
//!
//! A kept body keeps its rule set too, with the generation of the limiter's rules that it was read at. While that is
//! the current one, a decision takes its rules without an atomic write; an `arc_swap` guard takes two, a tenth of a
//! check. In return a thread that decides nothing keeps the rules of its last decision alive; one that decides drops
//! all earlier ones with its first decision by new rules.
//!
//! Rejected: `Arc::clone` of the rules, which threads would fight over, and a smaller decision by value, because the
//! time goes into waiting for what was written last, not into the number of bytes.

use crate::decision::DecisionDetails;
use crate::emergency::MeasureEffect;
use crate::grant::Grants;
use crate::quota_provider::Quotas;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_rules::Ruleset;

/// Maximum number of bodies that a thread keeps.
const MAX_KEPT: usize = 16;
/// Bodies with longer lists are not kept: one request with thousands of descriptors must not cost memory forever.
const MAX_LIST: usize = 64;

thread_local! {
    static KEPT: Kept = const { Kept { first: Cell::new(None), others: Cell::new(None) } };
}

/// The bodies that a thread keeps.
struct Kept {
    /// The one that most decisions take and return: a thread that makes one after another needs no more.
    first: Cell<Option<Box<Contents>>>,
    /// The first of the others; each holds the next. A list of boxes would be looked up twice.
    others: Cell<Option<Box<Contents>>>,
}

/// Generation of a limiter's rules. No two in a process are equal, whichever limiters they belong to.
#[derive(Debug)]
pub(crate) struct Generation(AtomicU64);

impl Generation {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(Self::next()))
    }

    fn next() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the current generation. Rules that are read afterwards may be newer, never older.
    #[inline]
    pub(crate) fn current(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Starts a new generation; called after the rules have been replaced, so that a reader of the generation sees the new rules.
    pub(crate) fn advance(&self) {
        self.0.store(Self::next(), Ordering::Release);
    }
}

/// The parts of a decision.
#[derive(Clone, Debug)]
pub(crate) struct Contents {
    pub(crate) details: DecisionDetails,
    pub(crate) rules: Arc<Ruleset>,
    /// Generation at which `rules` was read.
    generation: u64,
    /// Quotas of the request's callers.
    pub(crate) quotas: Quotas,
    /// Grants of the caller.
    pub(crate) grants: Option<Arc<Grants>>,
    /// Effect of the emergency measures on the request.
    pub(crate) effect: Option<Box<MeasureEffect>>,
    /// The next body that the thread keeps, while this one is kept.
    next: Option<Box<Self>>,
    /// Number of bodies that the thread keeps from this one on, and as its first, while it is kept as another one.
    kept: usize,
}

impl Kept {
    #[cold]
    #[inline(never)]
    fn take_other(&self) -> Option<Box<Contents>> {
        let mut other = self.others.take()?;
        self.others.set(other.next.take());
        Some(other)
    }

    #[cold]
    #[inline(never)]
    fn keep_other(&self, mut other: Box<Contents>) {
        let next = self.others.take();
        // One more is kept as the first.
        other.kept = next.as_ref().map_or(1, |next| next.kept) + 1;
        if other.kept > MAX_KEPT {
            return self.others.set(next);
        }
        other.next = next;
        self.others.set(Some(other));
    }
}

impl Contents {
    /// Takes a body that the thread keeps.
    #[inline(always)]
    fn take_kept() -> Option<Box<Self>> {
        KEPT.try_with(|kept| kept.first.take().or_else(|| kept.take_other())).ok().flatten()
    }

    /// Keeps the body, unless the thread has enough of them. A thread that is ending keeps nothing.
    #[inline(always)]
    fn keep(self: Box<Self>) {
        let _ = KEPT.try_with(|kept| {
            if let Some(other) = kept.first.replace(Some(self)) {
                kept.keep_other(other);
            }
        });
    }

    /// Returns whether it has something that few decisions have.
    #[inline]
    fn has_rare_parts(&self) -> bool {
        let Self { details, quotas, grants, effect, .. } = self;
        // Not `||`: of parts that hardly any decision has, one test of all is faster than a branch for each.
        details.has_rare_parts() | !quotas.is_empty() | grants.is_some() | effect.is_some()
    }

    /// Clears what few decisions have, and keeps the body unless a list's memory is too large. Apart, to keep the usual drop
    /// short.
    #[cold]
    #[inline(never)]
    fn keep_without_rare_parts(mut self: Box<Self>) {
        self.details.clear_rare_parts();
        self.quotas.clear();
        (self.grants, self.effect) = (None, None);
        if !self.details.has_list_beyond(MAX_LIST) {
            self.details.clear();
            self.keep();
        }
    }
}

/// Owner of a decision's [`Contents`]. Present until it is dropped.
#[derive(Clone, Debug)]
pub(crate) struct DecisionBody(Option<Box<Contents>>);

impl DecisionBody {
    /// Returns the body of a request that no limit applies to, with the rules of the current generation; `load` reads
    /// them if the thread does not have them.
    #[inline(always)]
    pub(crate) fn new(generation: &Generation, load: impl FnOnce() -> Arc<Ruleset>) -> Self {
        // Read before the rules: they may then be newer than it says, never older.
        let current = generation.current();
        let kept = Contents::take_kept();
        match kept {
            Some(contents) if contents.generation == current => Self(Some(contents)),
            kept => Self::with_rules(kept, current, load()),
        }
    }

    #[cold]
    fn with_rules(kept: Option<Box<Contents>>, generation: u64, rules: Arc<Ruleset>) -> Self {
        // The first has been taken, or there is none.
        let mut others = KEPT.try_with(|kept| kept.others.take()).ok().flatten();
        while let Some(mut other) = others {
            others = other.next.take();
            if other.generation == generation {
                other.keep();
            }
        }
        Self(Some(match kept {
            Some(mut contents) => {
                (contents.rules, contents.generation) = (rules, generation);
                contents
            }
            None => Box::new(Contents {
                details: DecisionDetails::unmatched(),
                rules,
                generation,
                quotas: Quotas::new(),
                grants: None,
                effect: None,
                next: None,
                kept: 0,
            }),
        }))
    }
}

impl Drop for DecisionBody {
    #[inline]
    fn drop(&mut self) {
        let Some(mut contents) = self.0.take() else { return };
        if contents.has_rare_parts() {
            return contents.keep_without_rare_parts();
        }
        contents.details.clear();
        contents.keep();
    }
}

impl Deref for DecisionBody {
    type Target = Contents;
    #[inline]
    fn deref(&self) -> &Contents {
        match &self.0 {
            Some(contents) => contents,
            None => unreachable!("only a drop takes the contents"),
        }
    }
}

impl DerefMut for DecisionBody {
    #[inline]
    fn deref_mut(&mut self) -> &mut Contents {
        match &mut self.0 {
            Some(contents) => contents,
            None => unreachable!("only a drop takes the contents"),
        }
    }
}
