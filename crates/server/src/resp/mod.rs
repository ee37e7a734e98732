//! The Redis protocol (RESP) server: a limiter for every language that has a Redis client.
//!
//! | file | contents |
//! |---|---|
//! | `server` | settings, accept loop and drain |
//! | `connection` | one connection: read, run, one write; disconnects slow clients |
//! | `frame` | the command parser |
//! | `batch` | the commands of one read: parsed, decided, answered in order |
//! | `throttle` | `CL.THROTTLE`: inline limits |
//! | `check` | `TG.CHECK`, `TG.PEEK`: checks against the rules |
//! | `session` | `HELLO`, `AUTH` and other commands about the connection |
//! | `commands` | the command table for `COMMAND` |
//! | `encode` | the reply encoder |
//!
//! User documentation: `docs/api/resp.md`.

mod batch;
mod check;
mod commands;
mod connection;
mod encode;
mod frame;
mod server;
mod session;
mod throttle;

pub use server::{RespConfig, serve};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use tollgate_core::Scope;
use tollgate_engine::Limiter;
use tollgate_observe::escape;

/// State shared by all connections.
struct App<S> {
    limiter: Arc<Limiter<S>>,
    config: RespConfig,
    /// The scope of `CL.THROTTLE` counters. Scopes of rules contain a `|` after their domain, so none is equal to it.
    scope: Scope,
    connections: AtomicU64,
    draining: AtomicBool,
}

/// An error reply: its code and message.
#[derive(Debug, PartialEq, Eq)]
struct CommandError {
    code: &'static str,
    message: String,
}

impl CommandError {
    fn new(message: impl Into<String>) -> Self {
        Self { code: "ERR", message: message.into() }
    }

    fn with_code(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    fn wrong_number(command: &str) -> Self {
        Self::new(format!("wrong number of arguments for '{command}' command"))
    }

    #[cold]
    fn write(&self, out: &mut Vec<u8>) {
        // The message may repeat what the client sent, and is shown on terminals.
        encode::error(out, self.code, &escape::text(&self.message));
    }
}

/// See [`crate::properties::resp_commands`].
pub(crate) fn properties(bytes: &[u8]) {
    use frame::{MAX_COMMAND, MAX_WORD, MAX_WORDS, Words, parse};
    let mut words = Words::new();
    let whole = parse(bytes, &mut words);
    match &whole {
        Ok(Some(length)) => {
            assert!(*length <= bytes.len().min(MAX_COMMAND) && words.len() <= MAX_WORDS);
            assert!(words.iter().all(|word| word.len() <= MAX_WORD));
            let mut part = Words::new();
            assert_eq!(parse(&bytes[..*length], &mut part), whole, "what follows changes a command");
            assert_eq!(parse(&bytes[..*length - 1], &mut part), Ok(None), "it ends before its end");
            let mut written = format!("*{}\r\n", words.len()).into_bytes();
            for word in &words {
                written.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                written.extend_from_slice(word);
                written.extend_from_slice(b"\r\n");
            }
            let mut again = Words::new();
            assert_eq!(parse(&written, &mut again), Ok(Some(written.len())));
            assert_eq!(again, words);
            let _ = check::CheckCommand::parse(&words);
            let _ = throttle::Throttle::read(&words);
        }
        Ok(None) => assert!(bytes.len() <= MAX_COMMAND, "a connection would wait for ever"),
        Err(_) => {}
    }
    let mut part = Words::new();
    for cut in (0..bytes.len()).step_by(bytes.len() / 64 + 1) {
        let parsed = parse(&bytes[..cut], &mut part);
        assert!(parsed == Ok(None) || parsed == whole, "at {cut}: {parsed:?}, then {whole:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Errors repeat what a client sent, and an operator reads them on a terminal: whatever it was, the reply is one
        /// line of characters that are shown.
        #[test]
        fn an_error_is_one_line_that_a_terminal_shows(sent in "\\PC{0,20}[\\x00-\\x1f\u{7f}\u{202e}\u{2066}\u{200b}\u{9b}]{0,4}\\PC{0,20}") {
            let mut out = Vec::new();
            CommandError::new(format!("unknown command '{sent}'")).write(&mut out);
            let line = std::str::from_utf8(&out).expect("text").strip_suffix("\r\n").expect("a line");
            prop_assert!(line.starts_with("-ERR unknown command '"), "{line:?}");
            prop_assert!(!line.chars().any(escape::is_unsafe), "{line:?}");
        }
    }
}
