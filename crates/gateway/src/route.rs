//! Routing: by host, then by path template and method. Paths are matched by `tollgate_http`, which also resolves the
//! `endpoint` of a request, once its route has told the domain: what the domain's rules name, as by every other
//! integration, and otherwise the route's template.

use crate::config::{GatewayConfig, RouteConfig};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::Timestamp;
use tollgate_http::headers::HeaderLookup;
use tollgate_http::identity::{
    AmbiguousIdentity, CredentialVerifier, EndpointMatcher, EndpointSettings, IdentityConfig,
    IdentityResolver, PathRules, RequestView, ResolvedCaller, canonical_host,
};
use tollgate_rules::{Domain, Ruleset};

/// A compiled route.
pub(crate) struct Route {
    /// Name in logs.
    pub(crate) name: String,
    pub(crate) config: RouteConfig,
    /// Index of the upstream's pool.
    pub(crate) pool: usize,
    paths: PathRules,
    pub(crate) host_header: Option<http::HeaderValue>,
}

impl Route {
    /// Returns the target to send to the upstream.
    pub(crate) fn target<'t>(&self, whole: &'t str) -> Cow<'t, str> {
        let stripped =
            self.config.strip_prefix.as_deref().and_then(|prefix| strip(self.paths, whole, prefix));
        match stripped {
            None => Cow::Borrowed(whole),
            Some(rest) if rest.starts_with('/') => Cow::Borrowed(rest),
            Some(rest) => Cow::Owned(format!("/{rest}")),
        }
    }
}

/// Removes `prefix` from a target, comparing canonical segments, so that `//api/x` and `/%61pi/x` lose what `/api/x` does.
/// At most one leading slash remains: with two, the next segment would be read as a host.
fn strip<'t>(paths: PathRules, target: &'t str, prefix: &str) -> Option<&'t str> {
    let path = target.find('?').map_or(target, |query| &target[..query]);
    let canonical = |segment: &str| paths.canonical(segment).ok().map(Cow::into_owned);
    let mut end = 0;
    for known in segments(prefix) {
        let segment = loop {
            let start = end + path[end..].find(|c| c != '/')?;
            end = path[start..].find('/').map_or(path.len(), |slash| start + slash);
            let segment = canonical(&path[start..end])?;
            // Parameters alone (`/;x/`) are an empty segment.
            if !segment.is_empty() {
                break segment;
            }
        };
        if !known.starts_with('{') && segment != canonical(known)? {
            return None;
        }
    }
    let slashes = path[end..].bytes().take_while(|byte| *byte == b'/').count();
    Some(&target[end + slashes.saturating_sub(1)..])
}

fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

type Map<V> = HashMap<String, V, foldhash::fast::RandomState>;

/// The routes of one host or one wildcard.
pub(crate) struct VirtualHost {
    /// Its endpoints are the routes' templates.
    identity: IdentityResolver,
    /// Routes by template: `GET /users/{id}`, or the path alone for any method.
    by_template: Map<Arc<Route>>,
    /// The endpoints of the routes' domains.
    endpoints: Map<EndpointMatcher>,
}

/// All routes.
pub(crate) struct Routes {
    exact: Map<VirtualHost>,
    /// Wildcard hosts as `.example.com`, longest first.
    families: Vec<(String, VirtualHost)>,
    any: Option<VirtualHost>,
    /// Identity of requests without a matching host, for their client address.
    fallback_site: IdentityResolver,
}

impl Routes {
    pub(crate) fn new(
        config: &GatewayConfig,
        rules: &Ruleset,
        verifier: &Arc<CredentialVerifier>,
    ) -> Result<Self, String> {
        if config.routes.is_empty() {
            return Err(
                "`routes` is empty; add at least one, such as {path: \"/{*rest}\", upstream: api}".to_owned()
            );
        }
        let mut hosts: Vec<Option<String>> = Vec::new();
        for route in &config.routes {
            let host = route.host.as_ref().map(|host| host.to_ascii_lowercase());
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        let fallback_site = IdentityResolver::sharing(&config.identity, [], Arc::clone(verifier))
            .map_err(|error| format!("identity: {error}"))?;
        let mut routes = Self { exact: HashMap::default(), families: Vec::new(), any: None, fallback_site };
        for host in hosts {
            let site = VirtualHost::new(config, rules, host.as_deref(), verifier)?;
            match host {
                None => routes.any = Some(site),
                Some(host) => match host.strip_prefix('*') {
                    Some(family) if family.starts_with('.') && !family.contains('*') => {
                        routes.families.push((family.to_owned(), site));
                    }
                    None if !host.contains(['/', '*', ':', ' ']) => {
                        routes.exact.insert(host, site);
                    }
                    _ => {
                        return Err(format!(
                            "invalid `host: {host}`; use api.example.com or *.example.com, without a port"
                        ));
                    }
                },
            }
        }
        routes.families.sort_by_key(|(family, _)| std::cmp::Reverse(family.len()));
        Ok(routes)
    }

    /// Returns the routes of a host.
    pub(crate) fn site(&self, host: Option<&str>) -> Option<&VirtualHost> {
        if self.exact.is_empty() && self.families.is_empty() {
            return self.any.as_ref();
        }
        let host = host.map(canonical_host).unwrap_or_default();
        let family = || {
            let under =
                |(family, _): &&(String, VirtualHost)| host.len() > family.len() && host.ends_with(&**family);
            self.families.iter().find(under).map(|(_, site)| site)
        };
        self.exact.get(&*host).or_else(family).or(self.any.as_ref())
    }

    /// Returns whether a route of this domain takes requests to this endpoint, at any host.
    pub(crate) fn serve_endpoint(&self, domain: &str, endpoint: &str) -> bool {
        let families = self.families.iter().map(|(_, site)| site);
        self.exact.values().chain(families).chain(&self.any).any(|site| site.serves(domain, endpoint))
    }

    pub(crate) fn fallback_site(&self) -> &IdentityResolver {
        &self.fallback_site
    }
}

impl VirtualHost {
    fn new(
        config: &GatewayConfig,
        rules: &Ruleset,
        host: Option<&str>,
        verifier: &Arc<CredentialVerifier>,
    ) -> Result<Self, String> {
        let (mut templates, mut by_template) = (Vec::new(), Map::default());
        let own = config
            .routes
            .iter()
            .filter(|route| route.host.as_ref().map(|host| host.to_ascii_lowercase()).as_deref() == host);
        for (at, route) in own.enumerate() {
            let name = name(route);
            let wrong = |text: String| format!("route {} (`{name}`): {text}", at + 1);
            let pool = config.upstreams.keys().position(|pool| *pool == route.upstream).ok_or_else(|| {
                let known: Vec<&str> = config.upstreams.keys().map(String::as_str).collect();
                wrong(format!("unknown upstream `{}`; configured: {}", route.upstream, known.join(", ")))
            })?;
            let host_header = match route.host_header.as_deref().map(http::HeaderValue::from_str) {
                None => None,
                Some(Ok(value)) => Some(value),
                Some(Err(_)) => return Err(wrong("invalid `host_header`; use a host name".to_owned())),
            };
            check(route).map_err(wrong)?;
            let paths = PathRules::new(&config.identity);
            let shared =
                Arc::new(Route { name: name.clone(), config: route.clone(), pool, paths, host_header });
            // A route of GET serves HEAD too, because it is counted as GET.
            let counted = route.methods.iter().filter(|method| *method != "HEAD");
            let methods: Vec<String> = if route.methods.is_empty() {
                vec![String::new()]
            } else {
                counted.map(|method| format!("{method} ")).collect()
            };
            // A `{*rest}` also matches nothing.
            let without_rest = route.path.rfind("/{*").map(|rest| match &route.path[..rest] {
                "" => "/".to_owned(),
                path => path.to_owned(),
            });
            let own = methods.iter().map(|method| format!("{method}{}", route.path));
            let empty =
                methods.iter().filter_map(|method| Some(format!("{method}{}", without_rest.as_ref()?)));
            for (kind, template) in own.map(|own| (0, own)).chain(
                route.endpoints.iter().cloned().map(|own| (1, own)).chain(empty.map(|empty| (2, empty))),
            ) {
                if by_template.contains_key(&template) {
                    if kind == 0 {
                        return Err(wrong(
                            "an earlier route has the same host, method and path; remove one of them"
                                .to_owned(),
                        ));
                    }
                    continue;
                }
                by_template.insert(template.clone(), Arc::clone(&shared));
                templates.push(template);
            }
        }
        let settings = EndpointSettings::new(&config.identity);
        let all_named = || rules.domains().flat_map(Domain::endpoints);
        let wrong = |error| format!("identity: {error}");
        let unnamed =
            EndpointSettings::new(&IdentityConfig { routes: Vec::new(), ..config.identity.clone() });
        let methods = all_named().chain(config.identity.routes.iter().map(String::as_str));
        let routing = EndpointMatcher::new(&unnamed, [], &templates, methods).map_err(wrong)?;
        let mut endpoints = Map::default();
        for domain in by_template.values().filter_map(|route| route.config.domain.as_deref()) {
            if !endpoints.contains_key(domain) {
                let named = rules.domain(domain).into_iter().flat_map(Domain::endpoints);
                let matcher = EndpointMatcher::new(&settings, named, &templates, all_named());
                endpoints.insert(domain.to_owned(), matcher.map_err(wrong)?);
            }
        }
        let identity = IdentityResolver::with_matcher(&config.identity, routing, Arc::clone(verifier));
        Ok(Self { identity: identity.map_err(wrong)?, by_template, endpoints })
    }

    /// Identifies the caller of a request and finds its route.
    pub(crate) fn resolve<'s>(
        &'s self,
        request: &RequestView<'s, impl HeaderLookup>,
        now: Timestamp,
    ) -> Result<(ResolvedCaller<'s>, Option<&'s Arc<Route>>), AmbiguousIdentity> {
        let mut route = None;
        let endpoint = |method: &'s str, path: &str| {
            let template = self.identity.endpoints().template(method, path)?;
            let taken = self.find(template)?;
            route = Some(taken);
            let domain = taken.config.domain.as_deref().and_then(|domain| self.endpoints.get(domain));
            domain.map_or(Some(template), |endpoints| endpoints.endpoint(method, path))
        };
        let caller = self.identity.resolve_routed(request, endpoint, now)?;
        Ok((caller, route))
    }

    /// Returns whether a route of this domain takes requests to an endpoint. Where the endpoint stands for many paths, one
    /// of them is enough.
    fn serves(&self, domain: &str, endpoint: &str) -> bool {
        let Some((method, path)) = endpoint.split_once(' ').filter(|(_, path)| path.starts_with('/')) else {
            // A pattern such as `POST *`.
            return endpoint.contains('*');
        };
        let is_own = |route: &Arc<Route>| route.config.domain.as_deref() == Some(domain);
        if !path.contains(['{', '*']) {
            let template = self.identity.endpoints().template(method, path);
            return template.and_then(|template| self.find(template)).is_some_and(is_own);
        }
        let overlap = |template: &str| {
            let (own, template) = template.split_once(' ').unwrap_or((method, template));
            (own == method || method.contains('*')) && have_common_path(path, template)
        };
        self.by_template.iter().any(|(template, route)| is_own(route) && overlap(template))
    }

    fn find(&self, template: &str) -> Option<&Arc<Route>> {
        self.by_template
            .get(template)
            .or_else(|| self.by_template.get(template.split_once(' ').map_or(template, |(_, path)| path)))
    }
}

/// Returns whether some path matches both templates.
fn have_common_path(one: &str, other: &str) -> bool {
    let (mut one, mut other) = (segments(one), segments(other));
    loop {
        match (one.next(), other.next()) {
            (None, None) => return true,
            (Some(rest), _) | (_, Some(rest)) if rest.starts_with("{*") || rest.contains('*') => return true,
            (Some(a), Some(b)) if a == b || a.starts_with('{') || b.starts_with('{') => {}
            _ => return false,
        }
    }
}

fn name(route: &RouteConfig) -> String {
    let methods = if route.methods.is_empty() { String::new() } else { route.methods.join(",") + " " };
    format!("{methods}{}{}", route.host.as_deref().unwrap_or(""), route.path)
}

fn check(route: &RouteConfig) -> Result<(), String> {
    if !route.path.starts_with('/') {
        return Err(format!("`path: {}` does not start with a slash; write /{}", route.path, route.path));
    }
    let begins = |prefix: &str| {
        let rest = route.path.strip_prefix(prefix);
        rest.is_some_and(|rest| (rest.is_empty() || rest.starts_with('/')) && !prefix.contains("{*"))
    };
    if let Some(prefix) = &route.strip_prefix
        && (!prefix.starts_with('/') || prefix.ends_with('/') || !begins(prefix))
    {
        return Err(format!(
            "`strip_prefix: {prefix}` is not a prefix of `path`; use whole segments without a trailing slash, such as /api for /api/{{*rest}}"
        ));
    }
    if route.methods.iter().any(|method| method == "HEAD")
        && !route.methods.iter().any(|method| method == "GET")
    {
        return Err("`methods` has HEAD without GET; write GET, whose route serves both".to_owned());
    }
    if route.upgrades.iter().any(|name| name.eq_ignore_ascii_case("h2c")) {
        return Err("upgrade to `h2c` is not allowed, because requests in the tunnel would bypass all rules; remove it from `upgrades`".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::strip;
    use tollgate_http::identity::PathRules;

    /// Whatever spelling matched the route, the upstream gets the path without the prefix.
    #[test]
    fn every_spelling_loses_the_prefix() {
        for (target, prefix, rest) in [
            ("/api/x", "/api", Some("/x")),
            ("//api/x", "/api", Some("/x")),
            ("/%61pi/x", "/api", Some("/x")),
            ("/%61p%69", "/api", Some("")),
            ("/api?q=/api/y", "/api", Some("?q=/api/y")),
            ("/api/?q", "/api", Some("/?q")),
            ("/api//evil.test/x", "/api", Some("/evil.test/x")),
            ("/a//b/%2Fc", "/a/b", Some("/%2Fc")),
            ("/api;v=1/x", "/api", Some("/x")),
            ("/users/17/x", "/users/{id}", Some("/x")),
            ("/a%2Fb/c", "/a/b", None),
            ("/apix", "/api", None),
            ("/a", "/a/b", None),
            ("/", "/a", None),
            ("*", "/a", None),
        ] {
            assert_eq!(strip(PathRules::default(), target, prefix), rest, "{target} {prefix}");
        }
    }
}
