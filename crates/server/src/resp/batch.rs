//! What one read brought: commands parsed in place, decided, and answered in order into one buffer.
//!
//! Over a store that charges without waiting, every command is decided in its first poll. Where the store must be waited
//! for, the command's future stays pending, and the commands behind it are decided at the same time, a bounded number of
//! them; replies keep the order. `CL.THROTTLE` commands in a row are charged together, so that the store can start all their
//! cache misses at once.

use super::check::{self, CheckCommand};
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

/// Replies that are written before more commands are read.
const FULL: usize = 256 * 1024;

/// Commands of one connection that wait for the store at the same time.
const MAX_PENDING: usize = 64;

/// Why a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// What is left of the input is no whole command.
    Rest,
    /// Enough replies for one write.
    Full,
    /// The connection is over.
    Close,
}

/// Answers the commands of `input`, appending to `out`. Returns how much of the input is done with, and why it ended there.
pub(super) async fn run<S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    input: &[u8],
    out: &mut Vec<u8>,
) -> (usize, Stop) {
    let mut words = Words::new();
    let mut batch = Batch::new();
    let mut at = 0;
    // Whatever is not one of a batch has to come after it.
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
                // The command is parsed again when the batch is settled.
                Ok(Enqueued::Full) => settle!(),
                Ok(Enqueued::Odd) => {
                    settle!();
                    let odd = PendingCommand::parse(session, &words).and_then(Result::ok);
                    let calls = odd.into_iter().collect();
                    at = wait(app, session, None::<Pin<&mut Never>>, calls, (input, at + length), out).await;
                }
                Err(refusal) => {
                    settle!();
                    refusal.write(out);
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
            Some(Err(refusal)) => refusal.write(out),
            None => {
                if session.run(&app.config, &words, out) == NextState::Close {
                    return (at, Stop::Close);
                }
            }
        }
    }
}

/// The future of a command that there is not.
type Never = std::future::Pending<Reply>;

/// Waits for the command whose future is pending and for `calls`, decides as many of those behind them in `input` as may be
/// decided at the same time, and answers all in order. Returns where the commands begin that are left.
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
    let behind = join_all(calls.into_iter().map(|call| call.decide(app)));
    let (first, behind) = match first {
        Some(first) => {
            let (first, behind) = futures_util::future::join(first, behind).await;
            (Some(first), behind)
        }
        None => (None, behind.await),
    };
    first.into_iter().chain(behind).for_each(|reply| reply.write(session, out));
    at
}

/// A command that the store decides.
pub(super) enum PendingCommand<'a> {
    Throttle(Throttle<'a>, Box<Limit>),
    Check(Box<CheckCommand<'a>>),
}

/// What came of it.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one, and lives for a moment")]
enum Reply {
    Throttled(Box<Limit>, Outcome),
    Checked(Decision),
    Unavailable(CommandError),
}

impl<'a> PendingCommand<'a> {
    /// The command; `None` if the store has no part in it.
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
    Reply::Checked(app.limiter.check(&command.check()).await)
}

impl Reply {
    fn write(self, session: &mut Session, out: &mut Vec<u8>) {
        session.decided += u64::from(!matches!(self, Self::Unavailable(_)));
        match self {
            Self::Throttled(limit, outcome) => throttle::reply(out, &limit, &outcome),
            Self::Checked(decision) => check::reply(out, session.protocol, &decision),
            Self::Unavailable(refusal) => refusal.write(out),
        }
    }
}
