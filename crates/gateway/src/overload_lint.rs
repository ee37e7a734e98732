//! Warnings about endpoints, costs and overload settings of the rules that do not fit the routes: rules are valid without a
//! gateway, so only the gateway can find these.

use crate::config::GatewayConfig;
use crate::route::Routes;
use std::collections::{BTreeMap, BTreeSet};
use tollgate_rules::{Ruleset, SignalSource};

/// Returns the warnings, for the log.
pub(crate) fn warnings(config: &GatewayConfig, rules: &Ruleset, routes: &Routes) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut limiting: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut upstreams: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for route in &config.routes {
        let Some(domain) = route.domain.as_deref().and_then(|name| rules.domain(name)) else { continue };
        upstreams.entry(domain.name()).or_default().insert(&route.upstream);
        if domain.overload().is_some_and(|overload| overload.workers.is_some()) {
            limiting.entry(&route.upstream).or_default().insert(domain.name());
        }
    }
    for (upstream, domains) in limiting.iter().filter(|(_, domains)| domains.len() > 1) {
        let domains = domains.iter().copied().collect::<Vec<_>>().join(", ");
        warnings.push(format!(
            "upstream `{upstream}` has a limit of requests in flight for each of the domains {domains}, so it gets the sum of them; use one domain for its routes"
        ));
    }
    for domain in upstreams.keys().filter_map(|name| rules.domain(name)) {
        warnings.extend(config.identity.cost_warnings(domain, "the gateway"));
    }
    for (name, own) in &upstreams {
        let Some(domain) = rules.domain(name) else { continue };
        let endpoints: BTreeSet<&str> = domain.endpoints().collect();
        for endpoint in endpoints.into_iter().filter(|endpoint| !routes.serve_endpoint(name, endpoint)) {
            warnings.push(format!(
                "domain `{name}`: no route of it takes requests to the endpoint `{endpoint}`, so what the rules say of it never applies; write it as `POST /path` of a route"
            ));
        }
        let Some(overload) = domain.overload() else { continue };
        for signal in overload.adapt.iter().flat_map(|adapt| &adapt.signals) {
            if let SignalSource::Measured { upstream: Some(upstream), .. } = &signal.source
                && !own.contains(upstream.as_str())
            {
                warnings.push(format!(
                    "domain `{name}`: no route of it has the upstream `{upstream}`, so the signal `{}` is never measured",
                    signal.name
                ));
            }
        }
    }
    warnings
}

#[cfg(test)]
mod tests;
