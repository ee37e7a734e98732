//! The names of counters: domain, path, algorithm, period, and nothing that an operator changes while traffic flows.
//!
//! `api|user|endpoint=POST /orders|gcra|1m`. Parts are separated by `|`, a key from its value by `=` (exact) or `~` (one
//! counter for a pattern), and these marks are escaped inside parts, so no two paths share a name. The count, the burst
//! and the tier are left out: a changed number keeps what has been used, and so does a caller who changes tier.
//! A wildcard with a counter for each value is named like the key alone, since each value meets only one of them.

use crate::rule::Role;
use crate::tree::{Element, Test};
use std::fmt::Write;
use tollgate_core::{Algorithm, Limit, Scope};

/// The part of a name that all limits of a rule share.
#[derive(Clone, Debug)]
pub(crate) struct ScopePath(String);

impl ScopePath {
    pub(crate) fn domain(name: &str) -> Self {
        let mut path = Self(String::new());
        path.escaped(name, "|%");
        path
    }

    /// The path one level down.
    pub(crate) fn child(&self, element: &Element) -> Self {
        let mut path = self.clone();
        path.key(&element.key);
        match &element.test {
            Test::Any | Test::Like(_) => {}
            Test::Exact(value) => path.value('=', value),
            Test::Shared(pattern) => path.value('~', pattern.text()),
            Test::Network(prefix) => {
                let _ = write!(path.0, "{prefix}");
            }
        }
        path
    }

    /// The path of a descriptor that brings its own limit: its keys, all with values of the request's.
    pub(crate) fn own(&self, entries: &[(&str, &str)]) -> Self {
        let mut path = self.clone();
        entries.iter().for_each(|(key, _)| path.key(key));
        path
    }

    fn key(&mut self, key: &str) {
        self.0.push('|');
        self.escaped(key, "|%=~/");
    }

    fn value(&mut self, mark: char, value: &str) {
        self.0.push(mark);
        self.escaped(value, "|%");
    }

    fn escaped(&mut self, text: &str, marks: &str) {
        for c in text.chars() {
            if c.is_ascii() && (marks.contains(c) || c.is_ascii_control()) {
                let _ = write!(self.0, "%{:02x}", u32::from(c));
            } else {
                self.0.push(c);
            }
        }
    }

    /// The name of one limit's counters. Always two more parts, so a path never runs into them.
    pub(crate) fn limit(&self, kind: Kind, limit: &Limit, slots: Option<u64>) -> Scope {
        let mut label = self.0.clone();
        label.push('|');
        label.push_str(match kind {
            Kind::Role(Role::Live | Role::Quota) => "",
            Kind::Role(Role::Shadow) => "shadow:",
            Kind::Role(Role::Candidate) => "candidate:",
            Kind::Own => "own:",
        });
        label.push_str(limit.algorithm().name());
        // Windows of another grid cannot be compared.
        if let Some(slots) = slots {
            let _ = write!(label, ".{slots}");
        }
        if limit.is_jittered() {
            label.push_str(".jitter");
        }
        match limit.algorithm() {
            // Permits carry their own deadlines: a changed time to live keeps them.
            Algorithm::Concurrency => label.push_str("|held"),
            _ => {
                let _ = write!(label, "|{}", limit.quota().period);
            }
        }
        Scope::new(label)
    }
}

/// Which of several counters on one path.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Role(Role),
    /// A limit that a request brought with it.
    Own,
}
