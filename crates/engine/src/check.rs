//! The input of a check: a request's domain, attributes or descriptors, and cost.

use crate::trace::TraceContext;
use std::net::IpAddr;
use tollgate_core::Cost;
use tollgate_rules::{Attributes, Descriptor};

/// One request to decide on. Borrows everything from the caller.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The rule file's domain.
    pub domain: &'a str,
    /// Who asks for what.
    pub input: CheckInput<'a>,
    /// What it costs, where the rules or the descriptor say nothing else.
    pub cost: Cost,
    /// Which front asks, for those who watch: a word of the front's own, empty if it says none.
    pub protocol: &'static str,
    /// The trace that it is part of, where somebody follows it.
    pub trace: Option<&'a TraceContext>,
    /// The client's whole address, where the front knows more of it than the attribute `remote_address` tells: rules know
    /// an IPv6 client by its network, but a measure may be about one address of it.
    pub address: Option<IpAddr>,
}

/// The two forms that a request comes in.
#[derive(Clone, Copy, Debug)]
pub enum CheckInput<'a> {
    /// A bag of attributes: meets every rule whose keys it has.
    Attributes(&'a Attributes<'a>),
    /// Descriptors, each of which meets one rule, as Envoy has it.
    Descriptors(&'a [Descriptor<'a>]),
}

impl<'a> Check<'a> {
    /// A request of cost one, described by attributes.
    #[must_use]
    pub const fn attributes(domain: &'a str, attributes: &'a Attributes<'a>) -> Self {
        Self::new(domain, CheckInput::Attributes(attributes))
    }

    /// A request of cost one, described by descriptors.
    #[must_use]
    pub const fn descriptors(domain: &'a str, descriptors: &'a [Descriptor<'a>]) -> Self {
        Self::new(domain, CheckInput::Descriptors(descriptors))
    }

    const fn new(domain: &'a str, request: CheckInput<'a>) -> Self {
        Self { domain, input: request, cost: Cost::ONE, protocol: "", trace: None, address: None }
    }

    /// The same request at another cost.
    #[must_use]
    pub const fn with_cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// The same request, asked by this front.
    #[must_use]
    pub const fn with_protocol(mut self, front: &'static str) -> Self {
        self.protocol = front;
        self
    }

    /// The same request, as a part of this trace.
    #[must_use]
    pub const fn with_trace(mut self, trace: Option<&'a TraceContext>) -> Self {
        self.trace = trace;
        self
    }

    /// The same request, of a client at this address.
    #[must_use]
    pub const fn with_client_address(mut self, address: IpAddr) -> Self {
        self.address = Some(address);
        self
    }
}
