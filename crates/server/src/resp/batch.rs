//! A batch of pipelined commands from one read: parsed in place, decided, and answered in order into one buffer.
//!
//! With a store that charges without waiting, every command is decided in its first poll. If the store has to be
//! awaited, the command's future stays pending and a bounded number of the commands after it are decided concurrently;
//! replies keep the order. Consecutive `CL.THROTTLE` commands are charged together, so that the store can overlap their
//! cache misses.

use super::check::{self, CheckCommand, LastField};
use super::encode;
use super::frame::{self, Words};
use super::session::{NextState, Session};
use super::throttle::{self, Batch, Enqueued, Throttle};
use super::{App, CommandError};
use futures_util::future::join_all;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use tollgate_core::{CounterStore, Limit, Outcome};
use tollgate_engine::Decision;

/// Bytes of replies after which they are sent before more commands run.
const FULL: usize = 256 * 1024;

/// Maximum number of commands of one connection that wait for the store concurrently.
const MAX_PENDING: usize = 64;

/// The reason a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The rest of the input is an incomplete command.
    Rest,
    /// There are enough replies for one write.
    Full,
    /// The connection must be closed.
    Close,
}

/// Runs the commands of `input` and appends the replies to `out`. Returns the number of bytes consumed, and why it
/// stopped.
pub(super) async fn run<S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    input: &[u8],
    out: &mut Vec<u8>,
) -> (usize, Stop) {
    let mut words = Words::new();
    let mut batch = Batch::new();
    let mut at = 0;
    // A command that is not part of the batch must be answered after it.
    macro_rules! settle {
        () => {
            if !batch.is_empty() && !batch.try_settle(app, session, out) {
                let calls = batch.pending();
                at = wait(app, session, None::<Pin<&mut Never>>, calls, (input, at), out).await;
                continue;
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
            match Throttle::read(&words).and_then(|call| batch.enqueue(&call)) {
                Ok(Enqueued::Yes) => at += length,
                // The command is parsed again after the batch is settled.
                Ok(Enqueued::Full) => settle!(),
                Ok(Enqueued::Odd) => {
                    settle!();
                    let odd = PendingCommand::parse(session, &words).and_then(Result::ok);
                    let calls = odd.into_iter().collect();
                    at = wait(app, session, None::<Pin<&mut Never>>, calls, (input, at + length), out).await;
                }
                Err(error) => {
                    settle!();
                    error.write(out);
                    at += length;
                }
            }
            continue;
        }
        if words.is_empty() {
            at += length;
            continue;
        }
        settle!();
        at += length;
        let command = if session.is_authenticated { CheckCommand::parse(&words) } else { None };
        match command {
            Some(Ok(command)) => {
                let mut checking = pin!(checked(app, &command));
                match poll_fn(|cx| Poll::Ready(checking.as_mut().poll(cx))).await {
                    Poll::Ready(reply) => reply.write(session, out),
                    Poll::Pending => {
                        at = wait(app, session, Some(checking), Vec::new(), (input, at), out).await;
                    }
                }
            }
            Some(Err(error)) => error.write(out),
            None => {
                if session.run(&app.config, &words, out) == NextState::Close {
                    return (at, Stop::Close);
                }
            }
        }
    }
}

/// The type of an absent command future.
type Never = std::future::Pending<Reply>;

/// Waits for the pending command `first` and for `calls`, runs as many of the following commands in `input` as may be
/// decided concurrently, and writes all replies in order. Returns the position of the remaining commands.
async fn wait<'i, S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    first: Option<Pin<&mut impl Future<Output = Reply>>>,
    mut calls: Vec<PendingCommand<'i>>,
    (input, mut at): (&'i [u8], usize),
    out: &mut Vec<u8>,
) -> usize {
    let mut words = Words::new();
    while calls.len() < MAX_PENDING
        && let Ok(Some(length)) = frame::parse(&input[at..], &mut words)
        && let Some(Ok(call)) = PendingCommand::parse(session, &words)
    {
        calls.push(call);
        at += length;
    }
    let following = join_all(calls.into_iter().map(|call| call.decide(app)));
    let (first, following) = match first {
        Some(first) => {
            let (first, following) = futures_util::future::join(first, following).await;
            (Some(first), following)
        }
        None => (None, following.await),
    };
    first.into_iter().chain(following).for_each(|reply| reply.write(session, out));
    at
}

/// A command that the store decides.
pub(super) enum PendingCommand<'a> {
    Throttle(Throttle<'a>, Box<Limit>),
    Check(Box<CheckCommand<'a>>),
}

/// The result of such a command.
#[allow(clippy::large_enum_variant, reason = "the large variant is the common one and short-lived")]
enum Reply {
    Throttled(Box<Limit>, Outcome),
    Checked(Decision, LastField),
    Unavailable(CommandError),
}

impl<'a> PendingCommand<'a> {
    /// Parses a command; `None` if it does not use the store.
    fn parse(session: &Session, words: &Words<'a>) -> Option<Result<Self, CommandError>> {
        if !session.is_authenticated {
            return None;
        }
        if throttle::is_name(words.first()?) {
            return Some(Throttle::read(words).and_then(|call| {
                let limit = Box::new(call.params.limit()?);
                Ok(Self::Throttle(call, limit))
            }));
        }
        CheckCommand::parse(words).map(|command| command.map(|command| Self::Check(Box::new(command))))
    }

    async fn decide<S: CounterStore>(self, app: &App<S>) -> Reply {
        match self {
            Self::Throttle(call, limit) => match call.charge(app, &limit).await {
                Ok(outcome) => Reply::Throttled(limit, outcome),
                Err(error) => Reply::Unavailable(throttle::unavailable(&error)),
            },
            Self::Check(command) => checked(app, &command).await,
        }
    }
}

async fn checked<S: CounterStore>(app: &App<S>, command: &CheckCommand<'_>) -> Reply {
    let attributes = command.attributes();
    Reply::Checked(app.limiter.check(&command.check(&attributes)).await, command.last_field)
}

impl Reply {
    fn write(self, session: &mut Session, out: &mut Vec<u8>) {
        session.decided += u64::from(!matches!(self, Self::Unavailable(_)));
        match self {
            Self::Throttled(limit, outcome) => throttle::reply(out, &limit, &outcome),
            Self::Checked(decision, last_field) => match decision.malformed_cost_message() {
                Some(message) => CommandError::new(message).write(out),
                None => check::reply(out, session.protocol, &decision, last_field),
            },
            Self::Unavailable(error) => error.write(out),
        }
    }
}
