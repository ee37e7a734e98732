//! `CL.THROTTLE key max_burst count period [quantity]`, compatible with redis-cell: each call carries an inline limit. The
//! units that a key has used stay used when a call comes with other numbers.
//!
//! Pipelined calls are decided in batches, so that the store can fetch all their counters at once. Building a limit
//! from three numbers costs more than deciding by it, so recent limits are cached.

use super::batch::PendingCommand;
use super::encode;
use super::session::Session;
use super::{App, CommandError, frame};
use smallvec::SmallVec;
use std::cell::RefCell;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, Outcome, Rate, Scope,
    StoreError, TimeDelta, Verdict,
};
use tollgate_http::value;

/// Returns whether a command is `CL.THROTTLE`; nearly all clients write it in upper case.
#[inline]
pub(super) fn is_name(word: &[u8]) -> bool {
    const NAME: &[u8] = b"CL.THROTTLE";
    word == NAME || word.eq_ignore_ascii_case(NAME)
}

/// The parameters of an inline limit; the period is in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThrottleParams {
    max_burst: u64,
    count: u64,
    period: u64,
}

/// A parsed call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Throttle<'a> {
    key: &'a [u8],
    pub(super) params: ThrottleParams,
    cost: Cost,
}

impl<'a> Throttle<'a> {
    #[inline]
    pub(super) fn read(words: &[&'a [u8]]) -> Result<Self, CommandError> {
        let (key, max_burst, count, period, quantity) = match *words {
            [_, key, max_burst, count, period] => (key, max_burst, count, period, None),
            [_, key, max_burst, count, period, quantity] => (key, max_burst, count, period, Some(quantity)),
            _ => return Err(CommandError::wrong_number("cl.throttle")),
        };
        let params = ThrottleParams {
            max_burst: at_least(0, max_burst, "max_burst")?,
            count: at_least(1, count, "count")?,
            period: at_least(1, period, "period")?,
        };
        let cost = match quantity {
            None => Cost::ONE,
            Some(quantity) => match frame::integer(quantity) {
                Some(units @ 0..) => Cost::new(units.unsigned_abs()),
                Some(units) => Cost::refund(units.unsigned_abs()),
                None => return Err(not_an_integer("quantity")),
            },
        };
        Ok(Self { key, params, cost })
    }

    /// Charges the call alone, not in a batch.
    pub(super) async fn charge<S: CounterStore>(
        &self,
        app: &App<S>,
        limit: &Limit,
    ) -> Result<Outcome, StoreError> {
        let key = Key::from_bytes(self.key);
        let parts = key.parts(app.config.has_secret_keys);
        let key = CounterKey { scope: &app.scope, parts: &parts };
        app.limiter.charge_inline(Charge::new(key, limit, self.cost)).await
    }
}

#[inline]
fn at_least(min: u64, word: &[u8], name: &str) -> Result<u64, CommandError> {
    match frame::integer(word).map(u64::try_from) {
        Some(Ok(number)) if number >= min => Ok(number),
        Some(_) => Err(CommandError::new(format!("{name} must be at least {min}"))),
        None => Err(not_an_integer(name)),
    }
}

#[cold]
fn not_an_integer(name: &str) -> CommandError {
    CommandError::new(format!("{name} is not an integer or out of range"))
}

impl ThrottleParams {
    /// Builds the limit.
    ///
    /// # Errors
    /// The parameters are out of range for a limit.
    pub(super) fn limit(self) -> Result<Limit, CommandError> {
        let quota = Rate::per(self.count, TimeDelta::from_secs(self.period));
        let burst = self.max_burst.saturating_add(1);
        let limit = LimitSpec::new(Algorithm::Gcra, quota).burst(burst).any_period().build();
        limit.map_err(|error| CommandError::new(error.to_string()))
    }
}

/// A key as part of a counter key: text unchanged; other bytes as hexadecimal digits, with a second part that
/// distinguishes them from text of the same digits. A key that is too long is [replaced](value), and marked likewise.
enum Key<'a> {
    Text(&'a str),
    Bytes(String),
    Long(String),
}

impl<'a> Key<'a> {
    fn from_bytes(key: &'a [u8]) -> Self {
        match std::str::from_utf8(key) {
            _ if key.len() > value::MAX_VALUE => Self::Long(value::from_bytes(key).into_owned()),
            Ok(text) => Self::Text(text),
            Err(_) => Self::Bytes(key.iter().map(|byte| format!("{byte:02x}")).collect()),
        }
    }

    fn parts(&self, is_secret: bool) -> SmallVec<[KeyPart<'_>; 2]> {
        match self {
            Self::Text(text) => SmallVec::from_slice(&[key_part(text, is_secret)]),
            Self::Bytes(digits) => SmallVec::from_slice(&[key_part(digits, is_secret), KeyPart::Text("hex")]),
            Self::Long(text) => SmallVec::from_slice(&[key_part(text, is_secret), KeyPart::Text("long")]),
        }
    }
}

#[inline]
const fn key_part(key: &str, is_secret: bool) -> KeyPart<'_> {
    if is_secret { KeyPart::Secret(key) } else { KeyPart::Text(key) }
}

/// Writes the reply to a call.
#[inline]
pub(super) fn reply(out: &mut Vec<u8>, limit: &Limit, outcome: &Outcome) {
    out.reserve(128);
    let retry_after = match outcome.verdict {
        Verdict::Denied { retry_after } => {
            out.extend_from_slice(b"*5\r\n:1\r\n:");
            retry_after
        }
        Verdict::Allowed { .. } | Verdict::Unknown => {
            out.extend_from_slice(b"*5\r\n:0\r\n:");
            None
        }
    };
    encode::digits(out, encode::as_i64(limit.capacity()));
    out.extend_from_slice(b"\r\n:");
    encode::digits(out, encode::as_i64(outcome.remaining));
    match retry_after {
        None => out.extend_from_slice(b"\r\n:-1\r\n:"),
        Some(wait) => {
            out.extend_from_slice(b"\r\n:");
            encode::digits(out, encode::seconds(wait));
            out.extend_from_slice(b"\r\n:");
        }
    }
    encode::digits(out, encode::seconds(outcome.reset_after));
    out.extend_from_slice(b"\r\n");
}

/// Returns the error for an unavailable store; inline limits have no fail policy.
pub(super) fn unavailable(error: &StoreError) -> CommandError {
    CommandError::with_code("TGUNAVAIL", error.to_string())
}

/// Cache of recent limits, each in the slot that its parameters hash to.
struct Limits {
    slots: Vec<Option<(ThrottleParams, Limit)>>,
}

impl Limits {
    const SLOTS: usize = 64;

    fn new() -> Self {
        Self { slots: vec![None; Self::SLOTS] }
    }

    #[inline]
    fn slot(params: ThrottleParams) -> usize {
        let mixed = params
            .max_burst
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(params.count)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(params.period)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 58) as usize
    }

    #[inline]
    fn find(&self, params: ThrottleParams) -> Option<usize> {
        let slot = Self::slot(params);
        matches!(&self.slots[slot], Some((known, _)) if *known == params).then_some(slot)
    }

    #[cold]
    fn make(&mut self, params: ThrottleParams) -> Result<usize, CommandError> {
        let slot = Self::slot(params);
        self.slots[slot] = Some((params, params.limit()?));
        Ok(slot)
    }

    #[inline]
    fn at(&self, slot: usize) -> Option<&Limit> {
        self.slots[slot].as_ref().map(|(_, limit)| limit)
    }
}

/// Maximum number of calls in a batch: as many as the store fetches at once.
const MAX_BATCH: usize = 32;

/// Per-thread state, shared by the batches of all its connections.
struct ThreadScratch {
    limits: Limits,
    outcomes: Vec<Outcome>,
}

thread_local! {
    static SCRATCH: RefCell<ThreadScratch> =
        RefCell::new(ThreadScratch { limits: Limits::new(), outcomes: Vec::new() });
}

/// Calls that are decided together. Nothing is awaited between the first call and the settling, so no other connection
/// of the thread replaces their limits in the cache.
pub(super) struct Batch<'a> {
    calls: SmallVec<[Call<'a>; MAX_BATCH]>,
}

#[derive(Clone, Copy)]
struct Call<'a> {
    key: &'a str,
    params: ThrottleParams,
    /// Slot of its limit in [`Limits`].
    slot: usize,
    cost: Cost,
}

/// Result of adding a call to a batch.
pub(super) enum Enqueued {
    Yes,
    /// The batch must be settled first.
    Full,
    /// The call cannot be part of a batch.
    Odd,
}

impl<'a> Batch<'a> {
    pub(super) fn new() -> Self {
        Self { calls: SmallVec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Adds a call.
    ///
    /// # Errors
    /// The parameters are out of range for a limit.
    #[inline]
    pub(super) fn enqueue(&mut self, call: &Throttle<'a>) -> Result<Enqueued, CommandError> {
        if self.calls.len() == MAX_BATCH {
            return Ok(Enqueued::Full);
        }
        let key = std::str::from_utf8(call.key).ok().filter(|key| key.len() <= value::MAX_VALUE);
        let Some(key) = key else {
            // An invalid limit is rejected here too.
            return call.params.limit().map(|_| Enqueued::Odd);
        };
        let params = call.params;
        let slot = SCRATCH.with_borrow_mut(|ThreadScratch { limits, .. }| match limits.find(params) {
            Some(slot) => Ok(Some(slot)),
            // A new limit may evict one that a call in the batch uses.
            None if !self.is_empty() => Ok(None),
            None => limits.make(params).map(Some),
        })?;
        let Some(slot) = slot else { return Ok(Enqueued::Full) };
        self.calls.push(Call { key, params, slot, cost: call.cost });
        Ok(Enqueued::Yes)
    }

    /// Decides all calls and writes the replies. Returns false, without any effect, if the store has to be awaited.
    #[inline]
    pub(super) fn try_settle<S: CounterStore>(
        &mut self,
        app: &App<S>,
        session: &mut Session,
        out: &mut Vec<u8>,
    ) -> bool {
        let is_secret = app.config.has_secret_keys;
        SCRATCH.with_borrow_mut(|ThreadScratch { limits, outcomes }| {
            let parts: SmallVec<[[KeyPart<'_>; 1]; MAX_BATCH]> =
                self.calls.iter().map(|call| [key_part(call.key, is_secret)]).collect();
            let mut charges: SmallVec<[Charge<'_>; MAX_BATCH]> = SmallVec::new();
            for (call, parts) in self.calls.iter().zip(&parts) {
                let Some(limit) = limits.at(call.slot) else { continue };
                charges.push(Charge::new(CounterKey { scope: &app.scope, parts }, limit, call.cost));
            }
            outcomes.clear();
            if !app.limiter.try_charge_inline(&charges, outcomes) {
                return false;
            }
            for (charge, outcome) in charges.iter().zip(&*outcomes) {
                reply(out, charge.limit, outcome);
            }
            session.decided += charges.len() as u64;
            true
        }) && {
            self.calls.clear();
            true
        }
    }

    /// Removes the calls from the batch, to be awaited one by one.
    pub(super) fn pending(&mut self) -> Vec<PendingCommand<'a>> {
        let pending = |call: Call<'a>| {
            let limit = SCRATCH.with_borrow(|scratch| scratch.limits.at(call.slot).cloned())?;
            let throttle = Throttle { key: call.key.as_bytes(), params: call.params, cost: call.cost };
            Some(PendingCommand::Throttle(throttle, Box::new(limit)))
        };
        self.calls.drain(..).filter_map(pending).collect()
    }
}

/// Returns the scope of all counters of this command.
pub(super) fn scope() -> Scope {
    Scope::new("cl.throttle")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(ThrottleParams, Cost), String> {
        let words: Vec<&[u8]> = text.split(' ').map(str::as_bytes).collect();
        Throttle::read(&words).map(|call| (call.params, call.cost)).map_err(|error| error.message)
    }

    #[test]
    fn parameters_are_parsed_and_validated() {
        let params = ThrottleParams { max_burst: 15, count: 30, period: 60 };
        assert_eq!(read("CL.THROTTLE k 15 30 60"), Ok((params, Cost::ONE)));
        assert_eq!(read("CL.THROTTLE k 15 30 60 0"), Ok((params, Cost::PEEK)));
        assert_eq!(read("CL.THROTTLE k 15 30 60 -4"), Ok((params, Cost::refund(4))));
        for (wrong, message) in [
            ("CL.THROTTLE", "wrong number"),
            ("CL.THROTTLE k 15 30", "wrong number"),
            ("CL.THROTTLE k 15 30 60 1 1", "wrong number"),
            ("CL.THROTTLE k -1 30 60", "max_burst must be at least 0"),
            ("CL.THROTTLE k 15 0 60", "count must be at least 1"),
            ("CL.THROTTLE k 15 30 0", "period must be at least 1"),
            ("CL.THROTTLE k 15 30 -60", "period must be at least 1"),
            ("CL.THROTTLE k 1.5 30 60", "max_burst is not an integer"),
            ("CL.THROTTLE k 15 30 60 many", "quantity is not an integer"),
            ("CL.THROTTLE k 15 30 99999999999999999999", "period is not an integer"),
        ] {
            let error = read(wrong).expect_err(wrong);
            assert!(error.contains(message), "{wrong}: {error}");
        }
    }

    #[test]
    fn an_unreasonable_limit_is_rejected_with_advice() {
        let limit = |max_burst, count, period| ThrottleParams { max_burst, count, period }.limit();
        assert!(limit(i64::MAX as u64, 1, 1).expect_err("too many").message.contains("at most"));
        assert!(limit(1, 1, i64::MAX as u64).expect_err("too long").message.contains("out of range"));
        assert!(limit(1_000_000, 1, 86_400).expect_err("too slow").message.contains("35 years"));
    }

    #[test]
    fn binary_keys_differ_from_the_text_of_their_digits() {
        let key = |bytes: &'static [u8]| {
            let key = Key::from_bytes(bytes);
            key.parts(false).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(key(b"ff"), ["ff"]);
        assert_eq!(key(b"\xff"), ["ff", "hex"]);
    }
}
