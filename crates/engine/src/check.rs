//! The input of a check: a request's domain, attributes or descriptors, and cost.

use crate::trace::TraceContext;
use std::net::IpAddr;
use tollgate_core::{Cost, is_same_name};
use tollgate_rules::{Attributes, CALLER_KEY, Descriptor, identifies_caller};

/// One request to decide. Borrows all its data.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// Domain of the rule file.
    pub domain: &'a str,
    /// Attributes or descriptors of the request.
    pub input: CheckInput<'a>,
    /// Cost in units, unless the rules or the descriptor specify another.
    pub cost: Cost,
    /// Name of the protocol server, for observers; empty if not set.
    pub protocol: &'static str,
    /// Trace of the request, if an observer records traces.
    pub trace: Option<&'a TraceContext>,
    /// Full address of the client, if the protocol server has more of it than the attribute `remote_address` contains:
    /// rules identify an IPv6 client by its network, but a measure may target a single address in it.
    pub address: Option<IpAddr>,
    /// Why the request passes although it would be shed, for observers. See
    /// [`WorkerPermit::would_be_shed`](crate::WorkerPermit::would_be_shed).
    pub reason: Option<&'a str>,
}

/// The two forms of a request.
#[derive(Clone, Copy, Debug)]
pub enum CheckInput<'a> {
    /// A set of attributes, which matches every rule whose keys it contains.
    Attributes(&'a Attributes<'a>),
    /// Descriptors, each of which matches one rule, as in Envoy.
    Descriptors(&'a [Descriptor<'a>]),
}

impl<'a> Check<'a> {
    /// Creates a check with a cost of one, described by attributes.
    #[must_use]
    pub const fn attributes(domain: &'a str, attributes: &'a Attributes<'a>) -> Self {
        Self::new(domain, CheckInput::Attributes(attributes))
    }

    /// Creates a check with a cost of one, described by descriptors.
    #[must_use]
    pub const fn descriptors(domain: &'a str, descriptors: &'a [Descriptor<'a>]) -> Self {
        Self::new(domain, CheckInput::Descriptors(descriptors))
    }

    const fn new(domain: &'a str, request: CheckInput<'a>) -> Self {
        Self {
            domain,
            input: request,
            cost: Cost::ONE,
            protocol: "",
            trace: None,
            address: None,
            reason: None,
        }
    }

    /// Returns the value of an attribute: of several, the first.
    #[must_use]
    #[inline]
    pub fn value(&self, name: &str) -> Option<&'a str> {
        let find = |entries: &'a [(&'a str, &'a str)]| {
            entries.iter().find(|(key, _)| is_same_name(key, name)).map(|(_, value)| *value)
        };
        match self.input {
            CheckInput::Attributes(attributes) => find(attributes),
            CheckInput::Descriptors(descriptors) => descriptors.iter().find_map(|one| find(one.entries)),
        }
    }

    /// Returns the value of an attribute; `None` if the request has several different ones.
    #[must_use]
    #[inline]
    pub fn only_value(&self, name: &str) -> Option<&'a str> {
        let value = self.value(name)?;
        let agrees =
            |entries: &[(&str, &str)]| entries.iter().all(|(key, other)| *key != name || *other == value);
        let is_only = match self.input {
            CheckInput::Attributes(attributes) => agrees(attributes),
            CheckInput::Descriptors(descriptors) => descriptors.iter().all(|one| agrees(one.entries)),
        };
        is_only.then_some(value)
    }

    /// Returns the key and value that identify the caller: the API key if there is one, else the first attribute that
    /// identifies a caller, else the first. `None` if the request has no attributes.
    #[must_use]
    #[inline]
    pub fn caller(&self) -> Option<(&'a str, &'a str)> {
        let named =
            |entries: &'a [(&'a str, &'a str)]| entries.iter().find(|(key, _)| is_same_name(key, CALLER_KEY));
        let telling =
            |entries: &'a [(&'a str, &'a str)]| entries.iter().find(|(key, _)| identifies_caller(key));
        let found = match self.input {
            CheckInput::Attributes(all) => named(all).or_else(|| telling(all)).or_else(|| all.first()),
            CheckInput::Descriptors(all) => {
                let first = || all.iter().find_map(|one| telling(one.entries));
                let any = || all.iter().find_map(|one| one.entries.first());
                all.iter().find_map(|one| named(one.entries)).or_else(first).or_else(any)
            }
        };
        found.copied()
    }

    /// Sets the cost.
    #[must_use]
    pub const fn with_cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the protocol server.
    #[must_use]
    pub const fn with_protocol(mut self, protocol: &'static str) -> Self {
        self.protocol = protocol;
        self
    }

    /// Sets the trace.
    #[must_use]
    pub const fn with_trace(mut self, trace: Option<&'a TraceContext>) -> Self {
        self.trace = trace;
        self
    }

    /// Sets the client's address.
    #[must_use]
    pub const fn with_client_address(mut self, address: IpAddr) -> Self {
        self.address = Some(address);
        self
    }

    /// Sets why the request passes although it would be shed.
    #[must_use]
    pub const fn with_reason(mut self, reason: Option<&'a str>) -> Self {
        self.reason = reason;
        self
    }
}
