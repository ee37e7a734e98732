//! What a check or the end of a reservation resulted in, and why.

use bytes::Bytes;
use std::fmt;
use std::time::Duration;

/// Why a server could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// No connection, or one that broke.
    Unreachable,
    /// No response in time.
    Timeout,
    /// A response that the server, or a proxy before it, cannot decide.
    Unavailable,
    /// The client's token is missing or wrong.
    Unauthorized,
    /// A response that is not Tollgate's.
    InvalidResponse,
}

impl Fault {
    /// Returns the name that all clients use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
            Self::Unauthorized => "unauthorized",
            Self::InvalidResponse => "invalid_response",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Who decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResultSource {
    /// A server.
    Server,
    /// This process, by a server's denial that is still in force.
    Cache,
    /// The fail policy, because no server could be used.
    Policy,
}

impl ResultSource {
    /// Returns the name that all clients use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Cache => "cache",
            Self::Policy => "policy",
        }
    }
}

/// Why a request is allowed or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckReason {
    /// All limits have room.
    Allowed,
    /// A limit has none.
    Denied,
    /// No limit applies.
    Unmatched,
    /// The server's store is unavailable, and the rules allow then.
    FailOpen,
    /// The server's store is unavailable, and the rules deny then.
    FailClosed,
    /// The server is overloaded and did not ask its store; the rules allow or deny then.
    Shed,
    /// The check itself is invalid; no fail policy lets it through.
    Rejected,
    /// The fail policy decided, because of this fault of the server that was asked last.
    Fault(Fault),
}

impl CheckReason {
    /// Returns the name that all clients use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Unmatched => "unmatched",
            Self::FailOpen => "fail_open",
            Self::FailClosed => "fail_closed",
            Self::Shed => "shed",
            Self::Rejected => "rejected",
            Self::Fault(fault) => fault.as_str(),
        }
    }
}

/// What to respond to a caller whose request cannot be checked because of itself: its head is ambiguous or too large, or its
/// credential is unreadable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerProblem {
    /// 400, 401 or 431.
    pub status: u16,
    /// A problem document, `application/problem+json`.
    pub body: Bytes,
}

/// What the denying rule has callers answered with, in place of the program's own response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleResponse {
    /// The status, if the rule sets one.
    pub status: Option<u16>,
    /// The body, if the rule sets one.
    pub body: Option<Bytes>,
    /// The media type of the body.
    pub content_type: Option<String>,
}

/// The decision about one request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckResult {
    /// The request may pass.
    pub is_allowed: bool,
    /// Who decided.
    pub source: ResultSource,
    /// Why.
    pub reason: CheckReason,
    /// What the server's decision rests on, such as `store`.
    pub origin: Option<String>,
    /// The server was overloaded itself and decided without its store. Denials say when to ask again, and are not cached.
    pub is_shed: bool,
    /// The rule that denied, or the one whose limit is reported.
    pub rule: Option<String>,
    /// The limit that denied, or that has the least remaining.
    pub limit: Option<u64>,
    /// Units that remain of it.
    pub remaining: Option<u64>,
    /// Time until all of it is available again; with nothing left, until its next unit.
    pub reset_after: Option<Duration>,
    /// Time after which the same request may pass: zero if it is allowed; `None` if it never will, or that is unknown.
    pub retry_after: Option<Duration>,
    /// How long to hold back a request that is allowed (rules with `action: delay`).
    pub delay: Duration,
    /// The id of the decision in the server's log.
    pub decision_id: Option<String>,
    /// What to respond, if the request itself is the reason that it was rejected.
    pub problem: Option<CallerProblem>,
    /// What the denying rule has callers answered with.
    pub response: Option<RuleResponse>,
}

impl CheckResult {
    /// A result without anything known but the verdict.
    const fn bare(is_allowed: bool, source: ResultSource, reason: CheckReason) -> Self {
        Self {
            is_allowed,
            source,
            reason,
            origin: None,
            is_shed: false,
            rule: None,
            limit: None,
            remaining: None,
            reset_after: None,
            retry_after: if is_allowed { Some(Duration::ZERO) } else { None },
            delay: Duration::ZERO,
            decision_id: None,
            problem: None,
            response: None,
        }
    }

    pub(crate) const fn by_policy(is_allowed: bool, fault: Fault) -> Self {
        Self::bare(is_allowed, ResultSource::Policy, CheckReason::Fault(fault))
    }

    pub(crate) const fn by_server(is_allowed: bool, reason: CheckReason) -> Self {
        Self::bare(is_allowed, ResultSource::Server, reason)
    }

    pub(crate) fn rejected(problem: Option<CallerProblem>) -> Self {
        Self { problem, ..Self::by_server(false, CheckReason::Rejected) }
    }
}

/// What became of a reservation that was to be settled or canceled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Closed {
    /// It was settled at this cost.
    Settled(u64),
    /// It was canceled.
    Canceled,
    /// The server has no such reservation, or its time has passed, and it stands as it was taken.
    Unknown,
    /// It was closed otherwise before.
    Conflict,
    /// The request is invalid.
    Rejected,
    /// The server could not be used; the same call may be repeated.
    Fault(Fault),
}
