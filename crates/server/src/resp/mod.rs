//! The Redis protocol: a limiter for every language that has a Redis client.
//!
//! | file | what |
//! |---|---|
//! | `server` | accepts connections, bounded in number; drains them |
//! | `connection` | the life of one: read, answer, one write; who is slow is let go |
//! | `frame` | bytes → the words of a command |
//! | `batch` | what one read brought: parsed, decided, answered in order |
//! | `throttle` | `CL.THROTTLE`: limits that callers bring themselves |
//! | `check` | `TG.CHECK`, `TG.PEEK`: requests decided by the rules |
//! | `session` | `HELLO`, `AUTH` and whatever else clients say before they come to the point |
//! | `commands` | the list of commands, as `COMMAND` tells it |
//! | `encode` | replies → bytes |
//!
//! `docs/resp.md` is the users' page.

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

/// What all connections share.
struct App<S> {
    limiter: Arc<Limiter<S>>,
    config: RespConfig,
    /// Names the counters of `CL.THROTTLE`. The names of rules' counters have a `|` after their domain: none is like it.
    scope: Scope,
    connections: AtomicU64,
    draining: AtomicBool,
}

/// A command that cannot be carried out: its code and why.
#[derive(Debug, PartialEq, Eq)]
struct CommandError {
    code: &'static str,
    message: String,
}

impl CommandError {
    fn new(why: impl Into<String>) -> Self {
        Self { code: "ERR", message: why.into() }
    }

    fn with_code(code: &'static str, why: impl Into<String>) -> Self {
        Self { code, message: why.into() }
    }

    fn wrong_number(command: &str) -> Self {
        Self::new(format!("wrong number of arguments for '{command}' command"))
    }

    #[cold]
    fn write(&self, out: &mut Vec<u8>) {
        encode::error(out, self.code, &self.message);
    }
}
