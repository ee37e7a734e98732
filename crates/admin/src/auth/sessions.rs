//! Browser sessions, in the memory of this process: a random cookie maps to the id of a verified token. The token's
//! secret is not kept, and a restart logs every browser out. The token is looked up for each request, so its expiry
//! or revocation ends the session.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::COOKIE;
use http::request::Parts;
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tollgate_core::{Clock, SystemClock, TimeDelta, Timestamp};

pub(crate) const COOKIE_NAME: &str = "tollgate_session";

/// Lifetime of a session: a working day.
pub(super) const TTL: TimeDelta = TimeDelta::from_secs(12 * 3_600);

/// Maximum number of sessions; a new one replaces the one that would expire first.
const MAX_SESSIONS: usize = 1_024;

/// The open sessions.
pub struct Sessions {
    clock: Box<dyn Clock>,
    open: Mutex<HashMap<String, Session>>,
}

struct Session {
    token: String,
    ends: Timestamp,
}

impl Default for Sessions {
    fn default() -> Self {
        Self::with_clock(Box::new(SystemClock::new()))
    }
}

impl Sessions {
    fn with_clock(clock: Box<dyn Clock>) -> Self {
        Self { clock, open: Mutex::default() }
    }

    /// Opens a session for a token id and returns the cookie's value, or `None` if no randomness is available.
    pub(super) fn begin(&self, token: &str) -> Option<String> {
        let mut bytes = [0; 32];
        SystemRandom::new().fill(&mut bytes).ok()?;
        let cookie = URL_SAFE_NO_PAD.encode(bytes);
        let now = self.clock.now();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, session| session.ends > now);
        while open.len() >= MAX_SESSIONS {
            let first = open.iter().min_by_key(|(_, session)| session.ends).map(|(cookie, _)| cookie.clone());
            open.remove(&first?);
        }
        let session = Session { token: token.to_owned(), ends: now + TTL };
        open.insert(cookie.clone(), session);
        Some(cookie)
    }

    /// Returns the token id of a request's session.
    pub(super) fn token(&self, head: &Parts) -> Option<String> {
        let now = self.clock.now();
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let session = cookies(head).find_map(|cookie| open.get(cookie))?;
        (session.ends > now).then(|| session.token.clone())
    }

    /// Ends the sessions of a request's cookies.
    pub(super) fn end(&self, head: &Parts) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for cookie in cookies(head) {
            open.remove(cookie);
        }
    }
}

/// Returns the session cookies of a request; browsers send at most one.
fn cookies(head: &Parts) -> impl Iterator<Item = &str> {
    let lines = head.headers.get_all(COOKIE).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(';')).filter_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        (name == COOKIE_NAME).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::{COOKIE_NAME, MAX_SESSIONS, Sessions, TTL};
    use http::Request;
    use http::request::Parts;
    use std::sync::Arc;
    use tollgate_core::{ManualClock, TimeDelta, Timestamp};

    fn head(cookies: &str) -> Parts {
        Request::builder().header("cookie", cookies).body(()).expect("a request").into_parts().0
    }

    fn sessions() -> (Arc<ManualClock>, Sessions) {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        (Arc::clone(&clock), Sessions::with_clock(Box::new(clock)))
    }

    #[test]
    fn a_session_ends_by_logout_or_expiry() {
        let (clock, sessions) = sessions();
        let (one, other) = (sessions.begin("a").expect("a cookie"), sessions.begin("b").expect("a cookie"));
        let one = head(&format!("theme=dark; {COOKIE_NAME}={one}"));
        let other = head(&format!("{COOKIE_NAME}={other}"));
        assert_eq!(sessions.token(&one).as_deref(), Some("a"));
        assert_eq!(sessions.token(&other).as_deref(), Some("b"));
        assert_eq!(sessions.token(&head(&format!("{COOKIE_NAME}=x; other={COOKIE_NAME}"))), None);
        sessions.end(&one);
        assert_eq!(sessions.token(&one), None);
        clock.advance(TimeDelta::from_secs(TTL.as_micros() / 1_000_000 - 1));
        assert_eq!(sessions.token(&other).as_deref(), Some("b"));
        clock.advance(TimeDelta::from_secs(1));
        assert_eq!(sessions.token(&other), None);
    }

    #[test]
    fn the_number_of_sessions_is_bounded() {
        let (clock, sessions) = sessions();
        let mut all = Vec::new();
        for _ in 0..=MAX_SESSIONS {
            clock.advance(TimeDelta::from_millis(1));
            let cookie = sessions.begin("t").expect("a cookie");
            all.push(head(&format!("{COOKIE_NAME}={cookie}")));
        }
        let known = all.iter().map(|head| sessions.token(head).is_some());
        assert_eq!(known.clone().filter(|known| *known).count(), MAX_SESSIONS);
        assert_eq!(known.take(2).collect::<Vec<_>>(), [false, true], "the oldest was evicted");
    }
}
