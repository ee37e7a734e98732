//! Counter scopes: domain, path, algorithm, period, and nothing that an operator changes while traffic flows.
//!
//! `api|user|endpoint=POST /orders|gcra|1m`. Parts are separated by `|`, a key from its value by `=` (exact) or `~`
//! (one counter for a pattern), and these characters are escaped inside parts, so no two paths have the same scope. The
//! count, the burst and the tier are left out: usage survives a changed number and a changed tier. A value that may be
//! a secret is written as its first characters and a hash. A wildcard with a counter for each value has the same scope
//! as the key alone, because each value matches only one of them.

use crate::region::RegionSetting;
use crate::rule::{CostFrom, Profile, Role};
use crate::sensitivity::may_be_secret;
use crate::tree::{Element, GLOBAL, ValueTest};
use std::fmt::Write;
use tollgate_core::{Algorithm, Limit, RegionMode, Scope, StableHasher, region_prefix, secret_prefix};

/// The part of a scope that all limits of a rule share.
#[derive(Clone, Debug)]
pub(crate) struct ScopePath {
    name: String,
    /// Domain and the keys whose values come from the request: limits with equal groups have counters for the same
    /// values, and stores keep them together.
    group: String,
    /// Whether values that may be secrets are written as they are.
    is_readable: bool,
}

impl ScopePath {
    pub(crate) fn domain(name: &str, is_readable: bool) -> Self {
        let mut domain = String::new();
        escape(&mut domain, name, "|%");
        Self { group: domain.clone(), name: domain, is_readable }
    }

    /// Returns the path one level down.
    pub(crate) fn child(&self, element: &Element) -> Self {
        let mut path = self.clone();
        key(&mut path.name, &element.key);
        match &element.test {
            ValueTest::Any | ValueTest::Like(_) => key(&mut path.group, &element.key),
            ValueTest::Exact(text) if may_be_secret(&element.key) && !path.is_readable => {
                value(&mut path.name, '=', &hidden(text));
            }
            ValueTest::Exact(text) => value(&mut path.name, '=', text),
            ValueTest::Shared(pattern) if may_be_secret(&element.key) && !path.is_readable => {
                value(&mut path.name, '~', &hidden(pattern.text()));
            }
            ValueTest::Shared(pattern) => value(&mut path.name, '~', pattern.text()),
            ValueTest::Network(prefix) => {
                key(&mut path.group, &element.key);
                let _ = write!(path.name, "{prefix}");
                let _ = write!(path.group, "{prefix}");
            }
        }
        path
    }

    /// Returns whether none of the values in its counter keys identifies a caller.
    pub(crate) fn is_shared(&self) -> bool {
        let identifies = |key: &str| key != GLOBAL.0 && crate::sensitivity::identifies_caller(key);
        !self.group.split('|').skip(1).any(identifies)
    }

    /// Returns a hash of the path that is the same on every node.
    pub(crate) fn stable_hash(&self) -> u64 {
        let mut hasher = StableHasher::default();
        hasher.bytes(self.name.as_bytes());
        hasher.finish()
    }

    /// Returns the path of counters that a store with this name keeps.
    pub(crate) fn in_store(&self, store: Option<&str>) -> Self {
        let Some(store) = store else { return self.clone() };
        let prefix = Scope::store_prefix(store);
        Self {
            name: format!("{prefix}{}", self.name),
            group: format!("{prefix}{}", self.group),
            is_readable: self.is_readable,
        }
    }

    /// Returns the scope on another path of what is on this one.
    pub(crate) fn moved(&self, scope: Scope, to: &Self) -> Scope {
        match scope.label().strip_prefix(&*self.name) {
            Some(rest) if self.name != to.name => Scope::in_group(format!("{}{rest}", to.name), &to.group),
            _ => scope,
        }
    }

    /// Returns the path of counters whose limits cells share in this way.
    pub(crate) fn in_region(&self, region: Option<&RegionSetting>) -> Self {
        let Some(region) = region.filter(|region| region.mode != RegionMode::Shared) else {
            return self.clone();
        };
        let prefix = region_prefix(region.mode, region.counter_owner());
        Self {
            name: format!("{prefix}{}", self.name),
            group: format!("{prefix}{}", self.group),
            is_readable: self.is_readable,
        }
    }

    /// Returns the path of split counters.
    pub(crate) fn split(&self, into: u64) -> Self {
        Self {
            name: format!("{}|split={into}", self.name),
            group: format!("{}|split={into}", self.group),
            is_readable: self.is_readable,
        }
    }

    /// Returns the path of a descriptor with an inline limit: its keys, all with values from the request.
    pub(crate) fn inline(&self, entries: &[(&str, &str)]) -> Self {
        let mut path = self.clone();
        for (name, _) in entries {
            key(&mut path.name, name);
            key(&mut path.group, name);
        }
        path
    }

    /// Returns the scope of one limit's counters. `cost` is its own, if it has one, and the rule's. Always appends two more parts, so that it never equals a path.
    pub(crate) fn limit(
        &self,
        kind: Kind,
        limit: &Limit,
        slots: Option<u64>,
        cost: Option<(&CostFrom, &CostFrom)>,
    ) -> Scope {
        let mut label = self.name.clone();
        label.push('|');
        label.push_str(match kind {
            Kind::Role(Role::Live | Role::Quota | Role::Unenforced) => "",
            Kind::Role(Role::Shadow) => "shadow:",
            Kind::Role(Role::Candidate) => "candidate:",
            Kind::Inline => "own:",
        });
        label.push_str(limit.algorithm().name());
        // Windows of another grid are not comparable.
        if let Some(slots) = slots {
            let _ = write!(label, ".{slots}");
        }
        if let Some(interval) = limit.refill_interval() {
            let _ = write!(label, ".every={interval}");
        }
        if limit.is_jittered() {
            label.push_str(".jitter");
        }
        // Requests and tokens are not comparable either. One per request is what a limit counts whose rule and caller
        // specify nothing else, so a limit keeps its usage when one on tokens is added beside it.
        match cost {
            None | Some((CostFrom::Request, _) | (CostFrom::Fixed(1), CostFrom::Request)) => {}
            Some((CostFrom::Fixed(units), _)) => {
                let _ = write!(label, ".cost={units}");
            }
            Some((CostFrom::Attribute(name), _)) => {
                label.push_str(".cost~");
                escape(&mut label, name, "|%");
            }
        }
        match limit.algorithm() {
            // Permits carry their own deadlines, so they survive a changed time to live.
            Algorithm::Concurrency => label.push_str("|held"),
            _ => {
                let _ = write!(label, "|{}", limit.rate().period);
            }
        }
        Scope::in_group(label, &self.group)
    }
}

fn key(path: &mut String, key: &str) {
    path.push('|');
    escape(path, key, "|%=~/");
}

fn value(path: &mut String, mark: char, value: &str) {
    path.push(mark);
    escape(path, value, "|%");
}

/// Returns the masked form of a secret for scopes, which appear in lists and logs.
fn hidden(secret: &str) -> String {
    let mut hasher = StableHasher::default();
    hasher.bytes(secret.as_bytes());
    format!("{}…{:016x}", secret_prefix(secret), hasher.finish())
}

fn escape(path: &mut String, text: &str, marks: &str) {
    for c in text.chars() {
        if c.is_ascii() && (marks.contains(c) || c.is_ascii_control()) {
            let _ = write!(path, "%{:02x}", u32::from(c));
        } else {
            path.push(c);
        }
    }
}

/// Which of several counters on one path.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Role(Role),
    /// An inline limit that arrived with the request.
    Inline,
}

impl Kind {
    /// Returns the kind of a rule's limit in this role. Under `profile: envoy` every limit counts on its own, and its counter
    /// is the descriptor's, as in envoyproxy/ratelimit: a rule that leaves shadow mode goes on with what it has counted.
    /// Natively a rule in shadow mode also counts requests that other limits deny, and one that is enforced does not: the
    /// two are not comparable.
    pub(crate) const fn of(role: Role, profile: Profile) -> Self {
        match (role, profile) {
            (Role::Shadow, Profile::Envoy) => Self::Role(Role::Live),
            _ => Self::Role(role),
        }
    }
}
