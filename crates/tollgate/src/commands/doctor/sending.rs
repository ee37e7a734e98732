//! What filters send: for each filter and each route, whether the filter is enabled there, which `rate_limits` apply, and
//! for which domain. As Envoy 1.40 does it:
//!
//! 1. The most specific level (weighted cluster, route, virtual host, route configuration) that names the filter enables or
//!    disables it; without one, the filter's `disabled` counts.
//! 2. A route that responds itself sends nothing.
//! 3. `rate_limits` of the route's settings for the filter come first, then those of the filter itself; both replace the rest.
//! 4. Otherwise those of the route with the filter's stage; those of its virtual host only if the route has none of any
//!    stage, or asks for both.

use super::actions::Template;
use super::filter::HttpFilter;
use super::finding::Report;
use super::routes::{ForFilter, HostLimits, RouteConfig, Target, Way};
use std::collections::{BTreeMap, BTreeSet};

/// Filters and the routes that they see.
#[derive(Debug, Default)]
pub(super) struct Scope<'p> {
    pub(super) place: &'p str,
    pub(super) filters: Vec<&'p HttpFilter>,
    pub(super) routes: Vec<&'p RouteConfig>,
    /// Whether more routes may come from elsewhere.
    pub(super) is_partial: bool,
}

/// What a filter sends for a route, and what it does not send and why.
#[derive(Debug)]
pub(super) struct Sent<'p> {
    pub(super) domain: &'p str,
    /// What has the domain: the filter, or the route's settings for it.
    pub(super) domain_place: &'p str,
    pub(super) templates: Vec<&'p Template>,
    unsent: Vec<(&'p Template, String)>,
}

/// Returns what a filter sends for a route.
pub(super) fn sent<'p>(filter: &'p HttpFilter, way: Way<'p>) -> Sent<'p> {
    let settings = way.settings(&filter.name);
    let (domain, domain_place) = settings
        .and_then(|settings| Some((settings.domain.as_deref()?, settings.place.as_str())))
        .unwrap_or((&filter.domain, &filter.place));
    let of_settings = settings.map(|settings| &settings.limits);
    let mut all: Vec<&Template> = Vec::new();
    all.extend(
        way.all_settings()
            .filter(|(name, _)| *name == filter.name)
            .flat_map(|(_, one)| &one.limits.templates),
    );
    all.extend(&filter.limits.templates);
    all.extend(&way.route.limits.templates);
    all.extend(&way.host.limits.templates);
    let is_off = match way.for_filter(&filter.name) {
        Some(ForFilter::Disabled) => Some(format!("a route disables the filter `{}`", filter.name)),
        None if filter.is_disabled => Some("the filter is disabled, and no route enables it".to_owned()),
        _ => filter.why_off().map(str::to_owned),
    };
    let is_off = is_off.or_else(|| {
        (way.route.target == Target::Response).then(|| {
            "the route responds itself (redirect or direct response), which Envoy does not limit".to_owned()
        })
    });
    if let Some(why) = is_off {
        return Sent {
            domain,
            domain_place,
            templates: Vec::new(),
            unsent: all.into_iter().map(|one| (one, why.clone())).collect(),
        };
    }
    let mut templates: Vec<&Template> = Vec::new();
    let mut unsent = Vec::new();
    let replaced = match of_settings.filter(|limits| limits.is_set) {
        Some(limits) => {
            templates.extend(&limits.templates);
            let place = settings.map_or("", |settings| settings.place.as_str());
            Some(format!(
                "the route's settings for the filter have `rate_limits`, which replace all others ({place})"
            ))
        }
        None if filter.limits.is_set => {
            templates.extend(&filter.limits.templates);
            Some(format!("the filter has `rate_limits` of its own ({})", filter.place))
        }
        None => None,
    };
    if let Some(why) = replaced {
        let is_sent = |one: &Template| templates.iter().any(|sent| std::ptr::eq(*sent, one));
        unsent.extend(all.into_iter().filter(|one| !is_sent(one)).map(|one| (one, why.clone())));
        return Sent { domain, domain_place, templates, unsent };
    }
    let host_limits = match settings {
        _ if way.route.includes_host => HostLimits::Include,
        Some(settings) => settings.host_limits,
        None => HostLimits::Override,
    };
    let no_host = match host_limits {
        HostLimits::Override if way.route.limits.is_set => Some(
            "its routes have `rate_limits` of their own; `include_vh_rate_limits: true` in a route adds those of the virtual host",
        ),
        HostLimits::Ignore => Some("its routes have `vh_rate_limits: IGNORE`"),
        _ => None,
    };
    for template in &way.route.limits.templates {
        by_stage(filter, template, &mut templates, &mut unsent);
    }
    for template in &way.host.limits.templates {
        match no_host {
            Some(why) => unsent.push((template, why.to_owned())),
            None => by_stage(filter, template, &mut templates, &mut unsent),
        }
    }
    // Settings of a level whose place those of a more specific one take.
    for (_, other) in way.all_settings().filter(|(name, _)| *name == filter.name) {
        let why = "a more specific level has settings for the filter, and Envoy does not merge them";
        unsent.extend(other.limits.templates.iter().map(|one| (one, why.to_owned())));
    }
    Sent { domain, domain_place, templates, unsent }
}

fn by_stage<'p>(
    filter: &HttpFilter,
    template: &'p Template,
    templates: &mut Vec<&'p Template>,
    unsent: &mut Vec<(&'p Template, String)>,
) {
    if template.stage == filter.stage {
        templates.push(template);
    } else {
        unsent.push((
            template,
            format!(
                "the filter is for stage {}, and the actions are for stage {}",
                filter.stage, template.stage
            ),
        ));
    }
}

impl<'p> Scope<'p> {
    pub(super) fn ways(&self) -> impl Iterator<Item = Way<'p>> {
        self.routes.clone().into_iter().flat_map(RouteConfig::ways)
    }

    /// Returns whether routes or virtual hosts have `rate_limits`.
    pub(super) fn has_actions(&self) -> bool {
        self.ways().any(|way| {
            way.route.limits.is_set
                || way.host.limits.is_set
                || way.all_settings().any(|(_, settings)| settings.limits.is_set)
        })
    }

    /// Checks that each filter sends something, and that each entry of `rate_limits` is sent.
    pub(super) fn check(&self, report: &mut Report) {
        let mut sent_places = BTreeSet::new();
        let mut reasons: BTreeMap<&str, (&Template, String)> = BTreeMap::new();
        let mut is_any_sent = false;
        for filter in &self.filters {
            let mut sends = filter.limits.is_set && self.routes.is_empty() && filter.why_off().is_none();
            let mut why_not = None;
            for way in self.ways() {
                let sent = sent(filter, way);
                sends |= !sent.templates.is_empty();
                for template in sent.templates {
                    sent_places.insert(template.place.as_str());
                }
                for (template, why) in sent.unsent {
                    why_not.get_or_insert_with(|| why.clone());
                    reasons.entry(&template.place).or_insert((template, why));
                }
            }
            is_any_sent |= sends;
            if !sends {
                self.check_silent(filter, why_not, report);
            }
        }
        if is_any_sent {
            for (place, (template, why)) in &reasons {
                if !sent_places.contains(place) {
                    report.problem(
                        place,
                        format!("Envoy ignores the descriptor {template}: {why}"),
                        "move it to where Envoy reads it, or remove it",
                    );
                }
            }
        }
        self.check_names(report);
        self.count_unlimited(report);
    }

    fn check_silent(&self, filter: &HttpFilter, why: Option<String>, report: &mut Report) {
        let place = &filter.place;
        let why = why.or_else(|| filter.why_off().map(str::to_owned)).or_else(|| {
            let is_off = filter.is_disabled && filter.limits.is_set;
            (is_off && !self.is_partial).then(|| "the filter is disabled, and no route enables it".to_owned())
        });
        match why {
            Some(why) => report.problem(
                place,
                format!("the filter sends nothing, and nothing is limited: {why}"),
                "change that, or remove the filter",
            ),
            // What is wrong is reported there.
            None if self.has_refused(filter) => {}
            None if self.is_partial => report.note(
                place,
                "no `rate_limits` here; routes that come from elsewhere must have them, or the filter sends nothing",
            ),
            None => report.problem(
                place,
                "no route or virtual host has `rate_limits`: the filter sends nothing, and nothing is limited",
                "add `rate_limits: [{actions: [...]}]` to routes; `tollgate doctor --rules FILE --print-envoy` prints them",
            ),
        }
    }

    /// Returns whether Envoy refuses `rate_limits` that the filter would send.
    fn has_refused(&self, filter: &HttpFilter) -> bool {
        filter.limits.has_refused
            || self.ways().any(|way| {
                let of_settings =
                    way.settings(&filter.name).is_some_and(|settings| settings.limits.has_refused);
                of_settings || way.route.limits.has_refused || way.host.limits.has_refused
            })
    }

    /// Reports settings of routes for filters that do not exist.
    fn check_names(&self, report: &mut Report) {
        let names: Vec<&str> = self.filters.iter().map(|filter| filter.name.as_str()).collect();
        if names.is_empty() {
            return;
        }
        for way in self.ways() {
            for (name, settings) in way.all_settings().filter(|(name, _)| !names.contains(name)) {
                let message =
                    format!("no rate limit filter here is named `{name}`: these settings have no effect");
                if self.is_partial {
                    report.note(&settings.place, message);
                } else {
                    let fix = format!("write the filter's name in `http_filters`: {}", names.join(", "));
                    report.problem(&settings.place, message, fix);
                }
            }
        }
    }

    /// Notes how many routes no filter limits, where others are limited.
    fn count_unlimited(&self, report: &mut Report) {
        let (mut silent, mut all) = (Vec::new(), 0);
        for way in self.ways() {
            all += 1;
            if self.filters.iter().all(|filter| sent(filter, way).templates.is_empty()) {
                silent.push(way.route.place.as_str());
            }
        }
        if !silent.is_empty() && silent.len() < all && !self.filters.is_empty() {
            let shown = silent.iter().take(5).copied().collect::<Vec<_>>().join(", ");
            let more = if silent.len() > 5 { ", …" } else { "" };
            report.note(
                self.place,
                format!(
                    "{} of {all} routes send no descriptor and are not limited: {shown}{more}",
                    silent.len()
                ),
            );
        }
    }
}
