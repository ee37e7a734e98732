//! Envoy's configuration: finds connection managers, routes, filters and clusters anywhere in a tree, so that a bootstrap
//! file, a patch and a fragment are read alike.
//!
//! What a connection manager has inline belongs together. Parts that stand alone, because they come as fragments, patches
//! or resources of xDS, are joined with each other: see [`EnvoyParts::scopes`].

use super::cluster::Clusters;
use super::filter::{HTTP_FILTER, HttpFilter, NETWORK_FILTER, NetworkFilter};
use super::finding::Report;
use super::proto::{MAX_DEPTH, field, find_typed, list, message, snake, text, typed};
use super::quota::{QUOTA_FILTER, QuotaFilter};
use super::routes::{Route, RouteConfig, VirtualHost};
use super::sending::Scope;
use serde_json::Value;

const MANAGER: &str = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const ROUTER: &str = "envoy.extensions.filters.http.router.v3.Router";
const EXT_AUTHZ: &str = "envoy.extensions.filters.http.ext_authz.v3.ExtAuthz";
/// Filters that end the chain of a connection.
const TERMINAL: [&str; 6] = [
    MANAGER,
    "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
    "envoy.extensions.filters.network.redis_proxy.v3.RedisProxy",
    "envoy.extensions.filters.network.thrift_proxy.v3.ThriftProxy",
    "envoy.extensions.filters.network.echo.v3.Echo",
    "envoy.extensions.filters.network.direct_response.v3.Config",
];

/// What rate limiting consists of.
#[derive(Debug, Default)]
pub(super) struct EnvoyParts {
    managers: Vec<Manager>,
    /// Filters and routes without a connection manager.
    loose_filters: Vec<HttpFilter>,
    loose_routes: Vec<RouteConfig>,
    pub(super) networks: Vec<NetworkFilter>,
    pub(super) quotas: Vec<QuotaFilter>,
    clusters: Clusters,
    /// Whether routes may also come from elsewhere.
    more_routes: bool,
    /// Whether filters may also come from elsewhere.
    more_filters: bool,
    has_ext_authz: bool,
}

/// An HTTP connection manager.
#[derive(Debug)]
struct Manager {
    place: String,
    filters: Vec<HttpFilter>,
    routes: Routes,
}

#[derive(Debug)]
enum Routes {
    Inline(RouteConfig),
    /// By the name of a route configuration.
    Named(String),
    /// From elsewhere.
    Unknown,
}

impl EnvoyParts {
    /// Collects the parts of a document.
    pub(super) fn collect(&mut self, value: &Value, place: &str, report: &mut Report) {
        self.walk(value, place, 0, report);
    }

    /// Marks that routes, filters or clusters may come from elsewhere.
    pub(super) fn mark_partial(&mut self) {
        self.more_routes = true;
        self.more_filters = true;
        self.clusters.is_partial = true;
    }

    fn walk(&mut self, value: &Value, place: &str, depth: usize, report: &mut Report) {
        if depth > MAX_DEPTH {
            return;
        }
        match value {
            Value::Array(items) => {
                for (number, item) in items.iter().enumerate() {
                    self.walk(item, &format!("{place}[{number}]"), depth + 1, report);
                }
            }
            Value::Object(fields) => {
                if self.object(value, place, report) {
                    return;
                }
                for (key, below) in fields {
                    let below_place = format!("{place}.{key}");
                    match (snake(key).as_str(), below) {
                        ("clusters", Value::Array(clusters)) => {
                            for (number, cluster) in clusters.iter().enumerate() {
                                self.clusters.add(cluster, &format!("{below_place}[{number}]"));
                            }
                        }
                        ("filters", Value::Array(filters)) => {
                            network_order(filters, &below_place, report);
                            self.walk(below, &below_place, depth + 1, report);
                        }
                        // Read with the manager or virtual host that has them.
                        ("http_filters" | "route_config" | "rate_limits", _) => {}
                        ("dynamic_resources", _) => self.mark_partial(),
                        _ => self.walk(below, &below_place, depth + 1, report),
                    }
                }
            }
            _ => {}
        }
    }

    /// Records an object if it is a filter, routes or a cluster. Returns whether nothing below it is to be read.
    fn object(&mut self, value: &Value, place: &str, report: &mut Report) -> bool {
        let inside = message(value);
        if let Some(settings) = typed(value, NETWORK_FILTER) {
            self.networks.push(NetworkFilter::read(settings, place));
            return true;
        }
        let config = field(value, "typed_config");
        let is_filter = |value: &Value| {
            [HTTP_FILTER, QUOTA_FILTER, EXT_AUTHZ].iter().any(|name| typed(value, name).is_some())
        };
        if is_filter(value) || config.is_some_and(is_filter) {
            let found = self.http_filter(value, place, report);
            self.loose_filters.extend(found);
            return true;
        }
        let manager = inside.filter(|(name, _)| *name == MANAGER).map_or(value, |(_, settings)| settings);
        let has = |name: &str| field(manager, name).is_some_and(Value::is_array);
        if has("http_filters") {
            self.manager(manager, place, report);
        } else if field(manager, "route_config").is_some_and(Value::is_object) {
            // As an administrative dump has it.
            let place = format!("{place}.route_config");
            self.loose_routes.push(RouteConfig::read(&manager["route_config"], &place, report));
        }
        if inside.is_some_and(|(name, _)| name == MANAGER) {
            return true;
        }
        if inside.is_some_and(|(name, _)| name.starts_with("envoy.extensions.filters.")) {
            // Another filter, whose `rate_limits` are its own business.
            return true;
        }
        if field(value, "load_assignment").is_some() {
            // A patch that adds a cluster has no list of them.
            self.clusters.add(value, place);
            return true;
        }
        if has("virtual_hosts") {
            self.loose_routes.push(RouteConfig::read(value, place, report));
            return true;
        }
        let action = field(value, "route").filter(|action| action.is_object());
        if has("routes") && has("domains") || has("rate_limits") {
            self.virtual_host(value, place, report);
            return has("routes");
        }
        if action.is_some_and(|action| field(action, "rate_limits").is_some())
            || field(value, "typed_per_filter_config").is_some()
        {
            self.route(value, place, report);
            return true;
        }
        false
    }

    fn manager(&mut self, value: &Value, place: &str, report: &mut Report) {
        let entries = list(value, "http_filters");
        let list_place = format!("{place}.http_filters");
        order(entries, &list_place, report);
        let mut filters = Vec::new();
        for (number, entry) in entries.iter().enumerate() {
            filters.extend(self.http_filter(entry, &format!("{list_place}[{number}]"), report));
        }
        let routes = if let Some(config) = field(value, "route_config") {
            Routes::Inline(RouteConfig::read(config, &format!("{place}.route_config"), report))
        } else if let Some(name) = field(value, "rds").and_then(|rds| text(rds, "route_config_name")) {
            Routes::Named(name.to_owned())
        } else {
            Routes::Unknown
        };
        if field(value, "rds").is_some() || field(value, "scoped_routes").is_some() {
            self.more_routes = true;
        }
        self.managers.push(Manager { place: place.to_owned(), filters, routes });
    }

    /// Reads an entry of `http_filters`, or the settings of a filter alone. Returns the filter if it is for rate limits.
    pub(super) fn http_filter(
        &mut self,
        value: &Value,
        place: &str,
        report: &mut Report,
    ) -> Option<HttpFilter> {
        let (config, entry, at) = match field(value, "typed_config") {
            Some(config) => (config, Some(value), format!("{place}.typed_config")),
            None => (value, None, place.to_owned()),
        };
        if field(value, "config_discovery").is_some() {
            self.more_filters = true;
        }
        self.has_ext_authz |= typed(config, EXT_AUTHZ).is_some();
        if let Some((_, settings)) = find_typed(config, QUOTA_FILTER) {
            self.quotas.push(QuotaFilter::read(settings, entry, &at, report));
        }
        // A filter may be wrapped in another one, which chooses it by matchers.
        let (below, settings) = find_typed(config, HTTP_FILTER)?;
        Some(HttpFilter::read(settings, entry, &(at + &below), report))
    }

    pub(super) fn add_filter(&mut self, value: &Value, place: &str, report: &mut Report) {
        let found = self.http_filter(value, place, report);
        self.loose_filters.extend(found);
    }

    pub(super) fn virtual_host(&mut self, value: &Value, place: &str, report: &mut Report) {
        self.loose_routes.push(RouteConfig::of_host(VirtualHost::read(value, place, report)));
    }

    pub(super) fn route(&mut self, value: &Value, place: &str, report: &mut Report) {
        let route = Route::read(value, place, report);
        self.loose_routes.push(RouteConfig::of_host(VirtualHost::of_route(route)));
    }

    pub(super) fn cluster(&mut self, value: &Value, place: &str) {
        self.clusters.add(value, place);
    }

    /// Returns filters with the routes that they see. A manager's own belong together. Those of several documents are
    /// joined: loose filters see loose routes, or those of all managers if there are none; and loose routes without loose
    /// filters are seen by the filters of all managers.
    pub(super) fn scopes(&self) -> Vec<Scope<'_>> {
        let mut taken = vec![false; self.loose_routes.len()];
        let mut scopes = Vec::new();
        let mut loose = Scope { is_partial: self.more_routes, ..Scope::default() };
        loose.filters.extend(&self.loose_filters);
        for manager in &self.managers {
            let named =
                |name: &String| self.loose_routes.iter().position(|one| one.name.as_ref() == Some(name));
            let routes = match &manager.routes {
                Routes::Inline(config) => Some(config),
                Routes::Named(name) => named(name).map(|at| {
                    taken[at] = true;
                    &self.loose_routes[at]
                }),
                Routes::Unknown => None,
            };
            match routes {
                Some(config) => scopes.push(Scope {
                    place: &manager.place,
                    filters: manager.filters.iter().collect(),
                    routes: vec![config],
                    is_partial: config.has_more,
                }),
                None => loose.filters.extend(&manager.filters),
            }
        }
        let left = self.loose_routes.iter().zip(&taken).filter(|(_, taken)| !**taken);
        loose.routes.extend(left.map(|(config, _)| config));
        loose.is_partial |= loose.routes.iter().any(|config| config.has_more);
        match (loose.filters.is_empty(), loose.routes.is_empty()) {
            (true, false) if scopes.iter().any(|scope| !scope.filters.is_empty()) => {
                for scope in &mut scopes {
                    scope.routes.extend(&loose.routes);
                }
            }
            (false, true) if !scopes.is_empty() => {
                for scope in &mut scopes {
                    scope.filters.extend(&loose.filters);
                }
            }
            (true, true) => {}
            _ => scopes.push(loose),
        }
        scopes
    }

    /// Returns whether anything has descriptors that rules could match.
    pub(super) fn has_descriptors(&self) -> bool {
        let filters = self.managers.iter().flat_map(|manager| &manager.filters).chain(&self.loose_filters);
        filters.into_iter().any(|filter| filter.limits.is_set)
            || self.scopes().iter().any(Scope::has_actions)
            || !self.networks.is_empty()
            || !self.quotas.is_empty()
    }

    /// Checks each filter, and what the parts send together.
    pub(super) fn check(&self, place: &str, report: &mut Report) {
        let has_filter = !self.loose_filters.is_empty()
            || self.managers.iter().any(|manager| !manager.filters.is_empty())
            || !self.networks.is_empty()
            || !self.quotas.is_empty();
        let scopes = self.scopes();
        let has_actions = scopes.iter().any(Scope::has_actions);
        match (has_filter, has_actions) {
            _ if self.has_ext_authz && !has_filter => report.note(
                place,
                "there is an ext_authz filter and no rate limit filter; what ext_authz asks is not checked here",
            ),
            (false, _) if self.more_filters => report.note(
                place,
                "no rate limit filter here; it must come from elsewhere, or Envoy never asks Tollgate",
            ),
            (false, true) => report.problem(
                place,
                "there are `rate_limits` actions but no rate limit filter: Envoy never asks Tollgate",
                "add the filter envoy.filters.http.ratelimit before the router",
            ),
            (false, false) => report.problem(
                place,
                if self.clusters.is_empty() {
                    "nothing about rate limiting was found: no filter, no actions, no cluster"
                } else {
                    "nothing about rate limiting was found: no filter and no actions"
                },
                "add the filter envoy.filters.http.ratelimit; `tollgate doctor --rules FILE --print-envoy` prints it",
            ),
            (true, _) => {}
        }
        let filters = self.managers.iter().flat_map(|manager| &manager.filters).chain(&self.loose_filters);
        for filter in filters {
            filter.check(&self.clusters, report);
        }
        for filter in &self.networks {
            filter.check(&self.clusters, report);
        }
        for filter in &self.quotas {
            filter.check(&self.clusters, report);
        }
        for scope in &scopes {
            scope.check(report);
        }
    }
}

/// Checks that filters for rate limits come before the router, which ends the chain.
fn order(filters: &[Value], place: &str, report: &mut Report) {
    let is = |filter: &Value, name: &str| {
        field(filter, "typed_config").is_some_and(|config| find_typed(config, name).is_some())
    };
    let Some(router) = filters.iter().position(|filter| is(filter, ROUTER)) else { return };
    for (at, filter) in filters.iter().enumerate().skip(router) {
        if is(filter, HTTP_FILTER) || is(filter, QUOTA_FILTER) {
            after_router(&format!("{place}[{at}]"), report);
        }
    }
}

/// Reports a filter that follows the router.
pub(super) fn after_router(place: &str, report: &mut Report) {
    report.problem(
        place,
        "the rate limit filter comes after the router, which ends the chain: Envoy refuses the configuration",
        "move it before envoy.filters.http.router",
    );
}

/// Checks that filters for connections come before the one that ends the chain.
fn network_order(filters: &[Value], place: &str, report: &mut Report) {
    let is = |filter: &Value, name: &str| {
        field(filter, "typed_config").is_some_and(|config| typed(config, name).is_some())
    };
    let is_terminal = |filter: &Value| TERMINAL.iter().any(|name| is(filter, name));
    let Some(end) = filters.iter().position(is_terminal) else { return };
    for (at, filter) in filters.iter().enumerate().skip(end) {
        if is(filter, NETWORK_FILTER) {
            report.problem(
                &format!("{place}[{at}]"),
                "the rate limit filter comes after the filter that ends the chain: Envoy refuses the configuration",
                "move it before tcp_proxy or the filter that takes its place",
            );
        }
    }
}
