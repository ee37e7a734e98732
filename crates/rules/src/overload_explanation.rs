//! Explanation of the `overload` section: a request's priority, its tenant's guarantee, and what is shed before and after it.

use crate::overload::{Adapt, FLEET_RULE, Overload, TierFairness};
use crate::plan::Attributes;
use crate::rule::Rule;
use crate::sensitivity::may_be_secret;
use std::fmt;
use tollgate_core::{Algorithm, KeyPart, Priority};

/// What the `overload` section makes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverloadExplanation {
    /// The request's priority.
    pub priority: Priority,
    /// Number of the entry of `priorities` that matches, from 1; `None` if none does.
    pub entry: Option<usize>,
    /// Value of the attribute that names the tenant, if tenants share fairly and the request has it; masked if it may be a
    /// secret.
    pub tenant: Option<String>,
    /// Guarantee of its tier, as the rules write it: `5% each`. Requests within it are not shed because of others.
    pub guarantee: Option<String>,
    /// What the guarantee is of the fleet's capacity, such as `250/1s`; `None` if that is not shared.
    pub fleet_guarantee: Option<String>,
    /// Parts of the section that may shed the request: `fleet`, `workers`.
    pub shed_by: Vec<&'static str>,
    /// Whether nothing is shed, only reported.
    pub is_shadow: bool,
    /// When its limits are tightened by signals, and how far; `None` if they are not.
    pub tightened: Option<String>,
}

impl Overload {
    /// Explains what the section makes of a request of a caller of this tier. `rules` are those of the domain.
    #[must_use]
    pub(crate) fn explain(
        &self,
        rules: &[Rule],
        request: &Attributes<'_>,
        tier: Option<&str>,
    ) -> OverloadExplanation {
        let value = |key: &str| request.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let tenant = self.fairness.as_ref().and_then(|fairness| value(&fairness.by));
        let share = self
            .tier_index(tier)
            .zip(self.fairness.as_ref())
            .and_then(|(at, fairness)| fairness.tiers.get(at))
            .filter(|share| share.guarantee > 0 && (tenant.is_some() || !share.is_each));
        let in_fleet = self.tier_index(tier).and_then(|at| self.fleet_guarantee(rules, at));
        // A part of the fleet's capacity may be less than one request.
        let share = share.filter(|_| self.workers.is_some() || in_fleet.is_some());
        let parts = [("fleet", self.fleet.is_some()), ("workers", self.workers.is_some())];
        OverloadExplanation {
            priority: self.priority(request),
            entry: self.priority_entry(value).map(|at| at + 1),
            tenant: tenant.zip(self.fairness.as_ref()).map(|(tenant, fairness)| {
                match may_be_secret(&fairness.by) {
                    true => KeyPart::Secret(tenant).to_string(),
                    false => tenant.to_owned(),
                }
            }),
            guarantee: share.map(TierFairness::guarantee_text),
            fleet_guarantee: in_fleet.filter(|_| share.is_some()),
            shed_by: parts.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name).collect(),
            is_shadow: self.shadow,
            tightened: self.active_adapt().zip(tier).and_then(|(adapt, tier)| adapt.explain(tier)),
        }
    }
}

impl Overload {
    /// Returns what a tier has guaranteed of the fleet's capacity.
    fn fleet_guarantee(&self, rules: &[Rule], tier: usize) -> Option<String> {
        let shares = self.fleet.as_ref()?.shares.as_ref()?;
        let limits = &rules.get(shares.rule as usize)?.limits.limits;
        let limit = &limits.get((*shares.guarantees.get(tier)?)?)?.limit;
        Some(match limit.algorithm() {
            Algorithm::Concurrency => format!("{} in flight", limit.rate().count),
            _ => limit.rate().to_string(),
        })
    }
}

impl Adapt {
    /// Explains when the limits of a tier are tightened, and how far; `None` if they are not.
    fn explain(&self, tier: &str) -> Option<String> {
        let at = self.order.iter().position(|known| known == tier)?;
        let turn = match &self.order[..at] {
            [] => "first".to_owned(),
            earlier => format!("after {}", earlier.join(", ")),
        };
        let bounds: Vec<String> =
            self.signals.iter().map(|signal| format!("{} is above {}", signal.name, signal.above)).collect();
        let least = self.least as f64 / 10.0;
        Some(format!("{turn}, down to {least}%, while {}", bounds.join(" or ")))
    }
}

impl OverloadExplanation {
    /// Returns the priorities that are shed before the request's own.
    pub fn shed_earlier(&self) -> impl Iterator<Item = Priority> {
        Priority::ALL.into_iter().rev().take_while(|priority| *priority != self.priority)
    }
}

impl fmt::Display for OverloadExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "overload: priority {}", self.priority)?;
        match self.entry {
            Some(entry) => write!(f, " (entry {entry} of `priorities`)")?,
            None => f.write_str(" (no entry of `priorities` matches)")?,
        }
        let earlier: Vec<String> = self.shed_earlier().map(|priority| priority.to_string()).collect();
        match earlier.is_empty() {
            true => f.write_str("\n  shed first")?,
            false => write!(f, "\n  shed after {}", earlier.join(", "))?,
        }
        match self.shed_by.is_empty() {
            true => f.write_str("; nothing sheds: the section has neither `fleet` nor `workers`")?,
            false => write!(f, ", by {}", self.shed_by.join(" and "))?,
        }
        if self.is_shadow {
            f.write_str(" (shadow: reported, not shed)")?;
        }
        match (&self.tenant, &self.guarantee) {
            (Some(tenant), Some(guarantee)) => write!(f, "\n  tenant {tenant}: {guarantee} guaranteed")?,
            (None, Some(guarantee)) => write!(f, "\n  no tenant: {guarantee} guaranteed")?,
            (Some(tenant), None) => write!(f, "\n  tenant {tenant}: nothing guaranteed")?,
            (None, None) => {}
        }
        if let Some(part) = &self.fleet_guarantee {
            write!(f, ": {part} of the fleet's capacity, counted by {FLEET_RULE}")?;
        }
        match &self.tightened {
            Some(when) => write!(f, "\n  limits tightened {when}"),
            None => Ok(()),
        }
    }
}
