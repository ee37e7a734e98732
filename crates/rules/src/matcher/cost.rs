//! Cost of a request under a rule or one of its limits: the request's, a fixed one, or an attribute's.

use super::find;
use crate::plan::{Attributes, Plan};
use crate::rule::{CostFrom, Rule, RuleLimit};
use tollgate_core::{Algorithm, Cost};

/// Inputs from which a rule's cost is computed.
#[derive(Clone, Copy)]
pub(super) struct CostResolver<'a, 'p> {
    pub(super) cost: Cost,
    pub(super) attributes: &'a Attributes<'p>,
}

impl Rule {
    /// Returns the cost of a request under this rule; `asked` is the cost that the request specifies. A peek stays a
    /// peek. A refund under an attribute cost uses `asked`: the attribute specified the units to take. `None` if the
    /// attribute is not a whole number.
    #[must_use]
    #[inline]
    pub fn resolve_cost(&self, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        if matches!(self.cost, CostFrom::Request) {
            Some(asked)
        } else {
            self.cost.resolve(asked, attributes)
        }
    }
}

impl CostFrom {
    /// Like [`Self::resolve`], for the cost of one limit of several: a correction is about what the request consumed, so
    /// that a fixed cost, such as one per request, stays counted.
    fn resolve_own(&self, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        match self {
            Self::Fixed(_) if asked.is_refund() => Some(Cost::PEEK),
            own => own.resolve(asked, attributes),
        }
    }

    #[inline(never)]
    fn resolve(&self, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        match self {
            Self::Request => Some(asked),
            Self::Fixed(_) if asked.is_peek() => Some(asked),
            Self::Fixed(units) if asked.is_refund() => Some(Cost::refund(*units)),
            Self::Fixed(units) => Some(Cost::new(*units)),
            Self::Attribute(name) => match find(attributes, name) {
                None => Some(asked),
                // What a peek or a refund does not use must be a number all the same.
                Some(value) if asked.is_peek() || asked.is_refund() => parse_units(value).map(|_| asked),
                Some(value) => parse_units(value).map(Cost::new),
            },
        }
    }
}

/// Parses the number in a cost attribute: digits alone, because every other spelling is a mistake or a trick.
fn parse_units(value: &str) -> Option<u64> {
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| is_number)
}

impl RuleLimit {
    /// Returns the units that this limit takes for a request; `asked` is the cost that the request specifies, and `None`
    /// means that the cost attribute is not a whole number.
    #[must_use]
    pub fn resolve_cost(&self, rule: &Rule, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        let cost = match &self.cost {
            None => rule.resolve_cost(asked, attributes),
            Some(own) => own.resolve_own(asked, attributes),
        };
        cost.map(|cost| self.cost_for(cost))
    }

    /// Returns the units that this limit takes for a request of this cost: a request holds one permit whatever its
    /// cost, and gives one back.
    #[must_use]
    #[inline]
    pub fn cost_for(&self, cost: Cost) -> Cost {
        match self.limit.algorithm() {
            Algorithm::Concurrency if cost.is_peek() => cost,
            Algorithm::Concurrency if cost.is_refund() => Cost::refund(1),
            Algorithm::Concurrency => Cost::ONE,
            _ => cost,
        }
    }
}

/// Returns the cost of a limit with its own source of it.
#[inline(never)]
pub(super) fn own_cost<'p>(
    plan: &mut Plan<'p>,
    is_live: bool,
    own: &'p CostFrom,
    look: CostResolver<'_, '_>,
) -> Cost {
    own.resolve_own(look.cost, look.attributes).unwrap_or_else(|| {
        if let (CostFrom::Attribute(name), true) = (own, is_live) {
            plan.malformed_cost = Some(name);
        }
        look.cost
    })
}
