//! Routes of Envoy: route configurations, virtual hosts and routes, with their `rate_limits` and their settings for filters.

use super::actions::{Owner, Template, templates};
use super::finding::Report;
use super::proto::{all_typed, field, flag, list, text, typed, unknown_fields};
use serde_json::Value;

const PER_ROUTE: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute";
const ROUTE: &str = "envoy.config.route.v3.Route";
const FILTER_CONFIG: &str = "envoy.config.route.v3.FilterConfig";

/// `rate_limits` of a route or virtual host.
#[derive(Debug, Default)]
pub(super) struct Limits {
    pub(super) templates: Vec<Template>,
    /// Whether there are any, whatever their stage.
    pub(super) is_set: bool,
    /// Whether Envoy refuses some, which is reported there.
    pub(super) has_refused: bool,
}

/// The settings for filters of a route configuration, a virtual host, a route or a weighted cluster, by the filter's name.
#[derive(Debug, Default)]
pub(super) struct Level {
    settings: Vec<(String, ForFilter)>,
}

/// What a level says about a filter.
#[derive(Debug)]
pub(super) enum ForFilter {
    Disabled,
    /// Enabled, without settings: those of the level above apply.
    Enabled,
    RateLimit(PerRoute),
    /// Settings of another kind of filter.
    Other,
}

/// Settings for the rate limit filter.
#[derive(Debug)]
pub(super) struct PerRoute {
    pub(super) place: String,
    pub(super) domain: Option<String>,
    pub(super) limits: Limits,
    pub(super) host_limits: HostLimits,
}

/// When the `rate_limits` of the virtual host are sent for a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HostLimits {
    /// If the route has none.
    #[default]
    Override,
    Include,
    Ignore,
}

/// What happens to the requests of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// They are forwarded.
    Cluster,
    /// Envoy responds itself: a redirect or a direct response. The rate limit filter does nothing then.
    Response,
}

#[derive(Debug)]
pub(super) struct Route {
    pub(super) place: String,
    pub(super) target: Target,
    pub(super) limits: Limits,
    pub(super) includes_host: bool,
    level: Level,
    clusters: Vec<Level>,
}

#[derive(Debug)]
pub(super) struct VirtualHost {
    pub(super) limits: Limits,
    routes: Vec<Route>,
    level: Level,
}

#[derive(Debug, Default)]
pub(super) struct RouteConfig {
    pub(super) name: Option<String>,
    /// Whether virtual hosts may also come from elsewhere (`vhds`).
    pub(super) has_more: bool,
    hosts: Vec<VirtualHost>,
    level: Level,
}

/// A way of requests through a route configuration: the route, and for each of its weighted clusters with settings another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way<'r> {
    pub(super) host: &'r VirtualHost,
    pub(super) route: &'r Route,
    /// From the most specific on.
    levels: [Option<&'r Level>; 4],
}

impl<'r> Way<'r> {
    /// Returns what the most specific level says about a filter.
    pub(super) fn for_filter(&self, name: &str) -> Option<&'r ForFilter> {
        self.all_for(name).next()
    }

    /// Returns the settings for a filter: Envoy takes those of the most specific level that has some, and does not merge.
    pub(super) fn settings(&self, name: &str) -> Option<&'r PerRoute> {
        self.all_for(name).find_map(|found| match found {
            ForFilter::RateLimit(settings) => Some(settings),
            _ => None,
        })
    }

    /// Returns the settings for rate limit filters of all levels, with the filters' names.
    pub(super) fn all_settings(&self) -> impl Iterator<Item = (&'r str, &'r PerRoute)> {
        self.levels.into_iter().flatten().flat_map(|level| &level.settings).filter_map(|(name, found)| {
            match found {
                ForFilter::RateLimit(settings) => Some((name.as_str(), settings)),
                _ => None,
            }
        })
    }

    fn all_for(&self, name: &str) -> impl Iterator<Item = &'r ForFilter> {
        let levels = self.levels.into_iter().flatten();
        levels.filter_map(move |level| {
            level.settings.iter().find(|(own, _)| own == name).map(|(_, found)| found)
        })
    }
}

impl RouteConfig {
    pub(super) fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        let hosts = list(value, "virtual_hosts").iter().enumerate();
        Self {
            name: text(value, "name").map(str::to_owned),
            has_more: field(value, "vhds").is_some(),
            hosts: hosts
                .map(|(at, host)| VirtualHost::read(host, &format!("{place}.virtual_hosts[{at}]"), report))
                .collect(),
            level: Level::read(value, place, report),
        }
    }

    /// Returns a configuration with one virtual host, which came without one.
    pub(super) fn of_host(host: VirtualHost) -> Self {
        Self { hosts: vec![host], ..Self::default() }
    }

    pub(super) fn ways(&self) -> impl Iterator<Item = Way<'_>> {
        self.hosts.iter().flat_map(move |host| {
            host.routes.iter().flat_map(move |route| {
                let (own, of_host, of_config) = (Some(&route.level), Some(&host.level), Some(&self.level));
                (0..route.clusters.len().max(1)).map(move |at| {
                    let cluster = route.clusters.get(at);
                    Way { host, route, levels: [cluster, own, of_host, of_config] }
                })
            })
        })
    }
}

impl VirtualHost {
    pub(super) fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        let routes = list(value, "routes").iter().enumerate();
        let mut routes: Vec<Route> =
            routes.map(|(at, route)| Route::read(route, &format!("{place}.routes[{at}]"), report)).collect();
        if let Some(matcher) = field(value, "matcher") {
            let found = all_typed(matcher, ROUTE).into_iter();
            routes.extend(
                found.map(|(path, route)| Route::read(route, &format!("{place}.matcher{path}"), report)),
            );
        }
        if routes.is_empty() {
            // A part of a virtual host, whose routes are elsewhere.
            routes.push(Route::plain(place));
        }
        Self { limits: Limits::read(value, place, report), routes, level: Level::read(value, place, report) }
    }

    /// Returns a virtual host with one route, which came without one.
    pub(super) fn of_route(route: Route) -> Self {
        Self { limits: Limits::default(), routes: vec![route], level: Level::default() }
    }
}

impl Route {
    fn plain(place: &str) -> Self {
        Self {
            place: place.to_owned(),
            target: Target::Cluster,
            limits: Limits::default(),
            includes_host: false,
            level: Level::default(),
            clusters: Vec::new(),
        }
    }

    pub(super) fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        let responds = ["redirect", "direct_response"].iter().any(|name| field(value, name).is_some());
        let mut route = Self {
            target: if responds { Target::Response } else { Target::Cluster },
            level: Level::read(value, place, report),
            ..Self::plain(place)
        };
        if let Some(action) = field(value, "route") {
            let place = format!("{place}.route");
            route.limits = Limits::read(action, &place, report);
            route.includes_host = flag(action, "include_vh_rate_limits");
            let weighted = field(action, "weighted_clusters");
            let clusters = weighted.map(|weighted| list(weighted, "clusters")).unwrap_or_default();
            let levels = clusters.iter().enumerate().map(|(at, cluster)| {
                Level::read(cluster, &format!("{place}.weighted_clusters.clusters[{at}]"), report)
            });
            route.clusters = levels.collect();
        }
        route
    }
}

impl Limits {
    pub(super) fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        Self::read_of(value, place, Owner::Route, report)
    }

    pub(super) fn read_of(value: &Value, place: &str, owner: Owner, report: &mut Report) -> Self {
        let entries = list(value, "rate_limits");
        let templates = templates(entries, &format!("{place}.rate_limits"), owner, report);
        Self { is_set: !entries.is_empty(), has_refused: templates.len() < entries.len(), templates }
    }
}

impl Level {
    fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        let all = field(value, "typed_per_filter_config").and_then(Value::as_object);
        let settings = all.into_iter().flatten().map(|(name, found)| {
            let place = format!("{place}.typed_per_filter_config.{name}");
            (name.clone(), ForFilter::read(found, &place, report))
        });
        Self { settings: settings.collect() }
    }
}

impl ForFilter {
    fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        if let Some(config) = typed(value, FILTER_CONFIG) {
            return match field(config, "config") {
                _ if flag(config, "disabled") => Self::Disabled,
                Some(inner) if inner.as_object().is_some_and(serde_json::Map::is_empty) => Self::Enabled,
                Some(inner) => Self::read(inner, &format!("{place}.config"), report),
                None => {
                    report.problem(
                        place,
                        "Envoy refuses FilterConfig without `config` that does not disable the filter",
                        "write `config: {}` to enable the filter, or `disabled: true`",
                    );
                    Self::Enabled
                }
            };
        }
        match typed(value, PER_ROUTE) {
            Some(settings) => Self::RateLimit(PerRoute::read(settings, place, report)),
            None => Self::Other,
        }
    }
}

impl PerRoute {
    fn read(value: &Value, place: &str, report: &mut Report) -> Self {
        for unknown in unknown_fields(value, &["vh_rate_limits", "override_option", "rate_limits", "domain"])
        {
            let meant = unknown.meant.map(|meant| format!("did you mean `{meant}`?"));
            report.problem(
                place,
                format!("Envoy refuses `{}`: RateLimitPerRoute has no such field", unknown.name),
                meant.unwrap_or_else(|| "remove it".to_owned()),
            );
        }
        let host_limits = match text(value, "vh_rate_limits") {
            Some("INCLUDE") => HostLimits::Include,
            Some("IGNORE") => HostLimits::Ignore,
            _ => HostLimits::Override,
        };
        Self {
            place: place.to_owned(),
            domain: text(value, "domain").map(str::to_owned),
            limits: Limits::read_of(value, place, Owner::Filter, report),
            host_limits,
        }
    }
}
