//! Lints for the `overload` section that need the rest of the domain, or compare its parts.

use crate::compile::NodeLocation;
use crate::reader::Reader;
use crate::ruleset::Domain;
use std::collections::BTreeSet;

pub(super) fn section(domain: &Domain, places: &[NodeLocation], reader: &mut Reader<'_>) {
    let at = places.first().and_then(|root| root.overload);
    let (Some(overload), Some(at)) = (domain.overload(), at) else { return };
    let shares = overload.fairness.iter().flat_map(|fairness| &fairness.tiers);
    // Tiers may be anything that quotas have. Where the file names some, one that it names nowhere else is a mistake.
    let in_rules = domain.domain_rules().flat_map(|rule| rule.tiers.iter().map(|(tier, _)| tier.as_str()));
    let named: BTreeSet<&str> = in_rules.chain(shares.clone().map(|share| share.tier.as_str())).collect();
    let order = overload.adapt.iter().flat_map(|adapt| &adapt.order);
    for tier in order.filter(|tier| !named.is_empty() && !named.contains(tier.as_str())) {
        let known = named.iter().copied().collect::<Vec<_>>().join(", ");
        reader.warning(
            at,
            format!("`order` has the tier `{tier}`, which neither the rules nor `fairness` name"),
            format!("write one of {known}, or name it there too"),
        );
    }
    for share in shares.clone().filter(|share| share.is_each && share.guarantee > 500) {
        reader.warning(
            at,
            format!(
                "two tenants of tier `{}` with {} have more than the whole capacity guaranteed",
                share.tier,
                share.guarantee_text()
            ),
            "guarantee less to each, or write `together`",
        );
    }
    if overload.adapt.as_ref().is_some_and(|adapt| adapt.least >= 1000) {
        reader.warning(
            at,
            "`least: 100%` lets signals tighten nothing, so `adapt` has no effect",
            "lower it, as in `least: 20%`",
        );
    }
}
