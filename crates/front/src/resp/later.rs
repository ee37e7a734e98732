//! What one read brought, over a store that has to be waited for: the commands are asked at the same time, a bounded number
//! of them, and answered in their order.

use super::check::{self, Question};
use super::encode;
use super::frame::{self, Words};
use super::session::{After, Session};
use super::throttle::{self, Throttle};
use super::turn::{FULL, Stop};
use super::{App, Refusal};
use futures_util::future::join_all;
use tollgate_core::{CounterStore, Limit, Outcome};
use tollgate_engine::Decision;

/// Commands of one connection that the store is asked at once.
const ASKED: usize = 64;

/// One command that the store is asked.
enum Ask<'a> {
    Throttle(Throttle<'a>, Box<Limit>),
    Check(Box<Question<'a>>),
}

/// What came of it.
enum Told {
    Throttled(Box<Limit>, Outcome),
    Checked(Box<Decision>),
    Unavailable(Refusal),
}

/// As `turn::answer`.
pub(super) async fn answer<S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    input: &[u8],
    out: &mut Vec<u8>,
) -> (usize, Stop) {
    let mut asks = Vec::new();
    let mut at = 0;
    loop {
        if asks.len() == ASKED || out.len() >= FULL {
            settle(app, session, &mut asks, out).await;
        }
        if out.len() >= FULL {
            return (at, Stop::Full);
        }
        let mut words = Words::new();
        let length = match frame::parse(&input[at..], &mut words) {
            Ok(Some(length)) => length,
            Ok(None) => {
                settle(app, session, &mut asks, out).await;
                return (at, Stop::Rest);
            }
            Err(fault) => {
                settle(app, session, &mut asks, out).await;
                encode::error(out, "ERR", &format!("Protocol error: {}", fault.message()));
                return (at, Stop::Close);
            }
        };
        match Ask::of(session, &words) {
            Some(Ok(ask)) => asks.push(ask),
            Some(Err(refusal)) => {
                settle(app, session, &mut asks, out).await;
                refusal.write(out);
            }
            None if words.is_empty() => {}
            None => {
                settle(app, session, &mut asks, out).await;
                if session.answer(&app.config, &words, out) == After::Close {
                    return (at + length, Stop::Close);
                }
            }
        }
        at += length;
    }
}

async fn settle<S: CounterStore>(
    app: &App<S>,
    session: &mut Session,
    asks: &mut Vec<Ask<'_>>,
    out: &mut Vec<u8>,
) {
    for told in join_all(asks.drain(..).map(|ask| ask.put(app))).await {
        session.decided += u64::from(!matches!(told, Told::Unavailable(_)));
        match told {
            Told::Throttled(limit, outcome) => throttle::reply(out, &limit, &outcome),
            Told::Checked(decision) => check::reply(out, session.protocol, &decision),
            Told::Unavailable(refusal) => refusal.write(out),
        }
    }
}

impl<'a> Ask<'a> {
    /// The question that a command is to the store; `None` if it is none.
    fn of(session: &Session, words: &Words<'a>) -> Option<Result<Self, Refusal>> {
        if !session.is_authenticated {
            return None;
        }
        if throttle::is_name(words.first()?) {
            return Some(Throttle::read(words).and_then(|call| {
                let limit = Box::new(call.numbers.limit()?);
                Ok(Self::Throttle(call, limit))
            }));
        }
        Question::of(words).map(|question| question.map(|question| Self::Check(Box::new(question))))
    }

    async fn put<S: CounterStore>(self, app: &App<S>) -> Told {
        match self {
            Self::Throttle(call, limit) => match call.ask(app, &limit).await {
                Ok(outcome) => Told::Throttled(limit, outcome),
                Err(error) => Told::Unavailable(throttle::unavailable(&error)),
            },
            Self::Check(question) => Told::Checked(Box::new(app.limiter.check(&question.check()).await)),
        }
    }
}
