//! Gates that the current thread has used: a request finds the gate of its upstream here without writing to memory that
//! threads share.
//!
//! A look-up among all gates reads two `arc_swap` guards and hashes two names, and a clone of an `Arc` moves its counter
//! between the threads' caches. So a thread keeps the gates that it has used, and the bodies of permits that were dropped on it,
//! each with its reference to the gate. A thread that serves nothing any more keeps its gates alive.

use super::WorkerGate;
use super::permit::Body;
use std::cell::RefCell;
use std::sync::Arc;
use tollgate_core::is_same_name;
use tollgate_rules::Overload;

/// Most gates that a thread keeps.
const MAX_KNOWN: usize = 16;
/// Most bodies of a gate's permits that a thread keeps.
const MAX_RETURNED: usize = 64;

thread_local! {
    static KNOWN: RefCell<Vec<KnownGate>> = const { RefCell::new(Vec::new()) };
    /// Bodies of permits without a gate that were dropped on the thread.
    #[allow(clippy::vec_box, reason = "what is kept is the boxes")]
    static UNLIMITED: RefCell<Vec<Box<Body>>> = const { RefCell::new(Vec::new()) };
}

/// A gate, and the section of the rules by which requests pass it.
#[derive(Clone)]
pub(super) struct GateOfRules {
    pub(super) gate: Arc<WorkerGate>,
    pub(super) overload: Arc<Overload>,
}

/// Rules of a limiter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct RulesId {
    /// Generation of the rules: no two limiters have the same.
    pub(super) generation: u64,
    /// Address of the limiter's gates, which another limiter may have had before.
    pub(super) limiter: usize,
}

struct KnownGate {
    rules: RulesId,
    domain: Box<str>,
    upstream: Box<str>,
    known: GateOfRules,
    #[allow(clippy::vec_box, reason = "what is kept is the boxes")]
    returned: Vec<Box<Body>>,
}

/// Returns the body of a permit of an upstream's gate, and what `describe` makes of its rules. `find` looks the gate up if the
/// thread does not have it; `None` if it does not exist.
#[inline]
pub(super) fn body<D>(
    rules: RulesId,
    domain: &str,
    upstream: &str,
    find: impl FnOnce() -> Option<GateOfRules>,
    describe: impl Fn(&Overload) -> D,
) -> Option<(Box<Body>, D)> {
    let is_wanted = |own: &KnownGate| {
        own.rules.generation == rules.generation
            && is_same_name(&own.upstream, upstream)
            && is_same_name(&own.domain, domain)
    };
    let kept = KNOWN.try_with(|known| {
        let mut known = known.try_borrow_mut().ok()?;
        let at = known.iter().position(is_wanted)?;
        // Swapping an entry with itself would copy it twice, for a request to wait for.
        if at > 0 {
            known.swap(0, at);
        }
        let own = &mut known[0];
        let body = own.returned.pop().unwrap_or_else(|| Body::new(Some(Arc::clone(&own.known.gate))));
        Some((body, describe(&own.known.overload)))
    });
    if let Ok(Some(kept)) = kept {
        return Some(kept);
    }
    let found = find()?;
    keep(rules, domain, upstream, &found);
    let described = describe(&found.overload);
    Some((Body::new(Some(found.gate)), described))
}

/// Keeps a gate for the thread's next requests.
#[cold]
fn keep(rules: RulesId, domain: &str, upstream: &str, found: &GateOfRules) {
    let new = KnownGate {
        rules,
        domain: domain.into(),
        upstream: upstream.into(),
        known: found.clone(),
        returned: Vec::new(),
    };
    let replaced = KNOWN.try_with(|known| {
        let Ok(mut known) = known.try_borrow_mut() else { return Some(new) };
        let is_outdated = |own: &KnownGate| {
            own.rules.limiter == rules.limiter && *own.domain == *domain && *own.upstream == *upstream
        };
        let before = known.iter().position(is_outdated);
        let before = before.or_else(|| (known.len() >= MAX_KNOWN).then(|| known.len() - 1));
        let replaced = before.map(|at| known.swap_remove(at));
        known.push(new);
        replaced
    });
    // Dropped when nothing is borrowed: a gate wakes the requests that wait for it.
    drop(replaced);
}

/// Returns the body of a permit where requests in flight are measured, not limited.
#[inline]
pub(super) fn unlimited_body() -> Box<Body> {
    let kept = UNLIMITED.try_with(|kept| kept.try_borrow_mut().ok()?.pop());
    kept.ok().flatten().unwrap_or_else(|| Body::new(None))
}

/// Keeps the body of a permit that was dropped for the thread's next requests.
#[inline]
pub(super) fn give_back(body: Box<Body>) {
    if body.gate.is_none() {
        _ = UNLIMITED.try_with(|kept| {
            if let Ok(mut kept) = kept.try_borrow_mut()
                && kept.len() < MAX_RETURNED
            {
                kept.push(body);
            }
        });
        return;
    }
    let rest = KNOWN.try_with(|known| {
        let (Some(gate), Ok(mut known)) = (&body.gate, known.try_borrow_mut()) else { return Some(body) };
        match known.iter_mut().find(|own| Arc::ptr_eq(&own.known.gate, gate)) {
            Some(own) if own.returned.len() < MAX_RETURNED => own.returned.push(body),
            _ => return Some(body),
        }
        None
    });
    // Dropped when nothing is borrowed.
    drop(rest);
}
