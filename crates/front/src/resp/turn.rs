//! What one read brought, answered without waiting: parse, decide, encode, for as many commands as there are.

use super::encode;
use super::frame::{self, Words};
use super::session::{After, Session};
use super::throttle::{self, Batch, Limits, Taken, Throttle};
use super::{App, check};
use tollgate_core::{CounterStore, Outcome};

/// Replies that are written before more commands are read.
pub(super) const FULL: usize = 256 * 1024;

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// What is left of the input is no whole command.
    Rest,
    /// The next command has to wait for the store.
    Store,
    /// Enough replies for one write.
    Full,
    /// The connection is over.
    Close,
}

/// What a thread keeps for the connections that it serves, one at a time.
pub(super) struct Tools {
    pub(super) limits: Limits,
    pub(super) outcomes: Vec<Outcome>,
}

impl Tools {
    pub(super) fn new() -> Self {
        Self { limits: Limits::new(), outcomes: Vec::new() }
    }
}

/// Answers the commands of `input`, appending to `out`. How much of the input is done with, and why it ended there.
pub(super) fn answer<S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    tools: &mut Tools,
    input: &[u8],
    out: &mut Vec<u8>,
) -> (usize, Stop) {
    let Tools { limits, outcomes } = tools;
    let mut words = Words::new();
    let mut batch = Batch::new();
    let mut at = 0;
    // Whatever is not one of a batch has to come after it.
    macro_rules! settle {
        () => {
            match batch.settle(app, limits, outcomes, out) {
                Some(decided) => session.decided += decided,
                None => return (batch.from, Stop::Store),
            }
        };
    }
    loop {
        if out.len() >= FULL {
            settle!();
            return (at, Stop::Full);
        }
        let length = match frame::parse(&input[at..], &mut words) {
            Ok(Some(length)) => length,
            Ok(None) => {
                settle!();
                return (at, Stop::Rest);
            }
            Err(fault) => {
                settle!();
                encode::error(out, "ERR", &format!("Protocol error: {}", fault.message()));
                return (at, Stop::Close);
            }
        };
        if words.first().is_some_and(|name| throttle::is_name(name)) && session.is_authenticated {
            let call = Throttle::read(&words);
            let mut taken = call.and_then(|call| Ok((batch.take(&call, at, limits)?, call)));
            if let Ok((Taken::Full, call)) = taken {
                settle!();
                taken = batch.take(&call, at, limits).map(|taken| (taken, call));
            }
            match taken {
                Ok((Taken::Yes | Taken::Full, _)) => {}
                Ok((Taken::Odd, call)) => {
                    settle!();
                    match throttle::odd(app, &call, out) {
                        Some(decided) => session.decided += decided,
                        None => return (at, Stop::Store),
                    }
                }
                Err(refusal) => {
                    settle!();
                    refusal.write(out);
                }
            }
        } else if !words.is_empty() {
            settle!();
            match other(app, session, &words, out) {
                Some(After::Stay) => {}
                Some(After::Close) => return (at + length, Stop::Close),
                None => return (at, Stop::Store),
            }
        }
        at += length;
    }
}

/// Any command but the usual one. `None` if it has to wait for the store.
fn other<S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    words: &Words<'_>,
    out: &mut Vec<u8>,
) -> Option<After> {
    let question = if session.is_authenticated { check::Question::of(words) } else { None };
    match question {
        Some(Ok(question)) => {
            let decision = app.limiter.check_now(&question.check())?;
            check::reply(out, session.protocol, &decision);
            session.decided += 1;
        }
        Some(Err(refusal)) => refusal.write(out),
        None => return Some(session.answer(&app.config, words, out)),
    }
    Some(After::Stay)
}
