//! Endpoint matcher: maps a path to the template that it matches, so that `/users/1` and `/users/2` share limits.
//!
//! All integrations resolve endpoints here, from the templates of the active rules, so that a rule on `POST /login` applies
//! to the same requests by each of them. The templates form two trees, and the first with a match decides:
//!
//! 1. endpoints that rules name, and the `routes` of the identity settings;
//! 2. the routes of a gateway, which only group other requests.
//!
//! A gateway's routes come second because a route says where a request goes, not which rules apply: in one tree, a route
//! `/api/v1/{*rest}` would hide a rule on `GET /api/{*rest}`, which `/check` enforces. A rule's pattern (`GET /api/*`) is in
//! both, as `GET /api/{*rest}`: it hides what is wider, and finer templates of the second tree match it by their text.
//!
//! A tree has a node per segment: a lookup costs one hash per segment, however many templates there are. If several
//! match, the one with the earliest literal segment wins. Every node has a fixed depth, so backtracking visits each node
//! at most once. A path that matches none is `GET other`: with one counter per path, an attacker could create any number
//! of counters. `HEAD` is `GET`: servers run the same handler for both.

use super::config::{IdentityConfig, IdentityConfigError, Unmatched};
use super::path::PathRules;
use std::collections::HashMap;

type Map<V> = HashMap<Box<str>, V, foldhash::fast::RandomState>;

/// The standard methods; others are recognized if a route names them.
const METHODS: [&str; 8] = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
const OTHER: &str = "OTHER";
const MAX_SEGMENTS: usize = 64;

/// What the identity settings say of endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct EndpointSettings {
    routes: Vec<String>,
    unmatched: Unmatched,
    paths: PathRules,
}

impl EndpointSettings {
    /// Returns that part of the settings.
    #[must_use]
    pub fn new(settings: &IdentityConfig) -> Self {
        Self {
            routes: settings.routes.clone(),
            unmatched: settings.unmatched,
            paths: PathRules::new(settings),
        }
    }
}

/// Maps methods and paths to endpoints.
#[derive(Debug)]
pub struct EndpointMatcher {
    named: Node,
    /// What groups the requests that nothing names.
    wide: Node,
    methods: Vec<Box<str>>,
    /// The endpoint of unmatched requests, by method.
    unmatched: Map<Box<str>>,
    fallback: Unmatched,
}

#[derive(Debug, Default)]
struct Node {
    literals: Map<Node>,
    any: Option<Box<Node>>,
    /// Endpoints of templates that end here, by method.
    ends: Vec<End>,
    /// Endpoints of templates that end here with `{*rest}`, by method.
    rest: Vec<End>,
}

/// The endpoint of one method at a node.
#[derive(Debug)]
struct End {
    method: Box<str>,
    endpoint: Box<str>,
    /// The route names the method; it takes precedence over a route for all methods.
    names_method: bool,
    /// Finer templates match the pattern as well.
    is_pattern: bool,
}

/// A parsed route.
struct Template<'t> {
    method: Option<&'t str>,
    path: &'t str,
    is_pattern: bool,
}

impl EndpointMatcher {
    /// Builds the matcher. `named` are the endpoints of rules ([`tollgate_rules::Domain::endpoints`]), of which those that
    /// are no templates are skipped; `routes` are a gateway's, and `others` are templates whose methods are known.
    ///
    /// # Errors
    /// A route is invalid, or two routes match the same requests.
    pub fn new<'e>(
        settings: &EndpointSettings,
        named: impl IntoIterator<Item = &'e str>,
        routes: &[String],
        others: impl IntoIterator<Item = &'e str>,
    ) -> Result<Self, IdentityConfigError> {
        let wrong =
            |route: &str, wrong: String| IdentityConfigError::Route { route: route.to_owned(), wrong };
        let (patterns, exact): (Vec<&str>, Vec<&str>) =
            named.into_iter().partition(|one| one.ends_with("/*"));
        // Without a match, an endpoint may be the path itself, which patterns match as it is.
        let patterns: Vec<String> = match settings.unmatched {
            Unmatched::Path if routes.is_empty() => Vec::new(),
            _ => patterns.into_iter().filter_map(pattern_template).collect(),
        };
        let exact = with_method(exact);
        let mut patterns = with_method(patterns.iter().map(String::as_str));
        patterns.iter_mut().for_each(|template| template.is_pattern = true);
        let mut configured = Vec::new();
        for route in settings.routes.iter().chain(routes) {
            configured.push((route, Template::parse(route).map_err(|text| wrong(route, text))?));
        }
        let mut methods: Vec<Box<str>> = METHODS.map(Box::from).to_vec();
        let all = configured.iter().map(|(_, template)| template).chain(&exact).chain(&patterns);
        for method in all.chain(&with_method(others)).filter_map(|template| template.method) {
            if !methods.iter().any(|known| &**known == method) {
                methods.push(method.into());
            }
        }
        // Two routes of one shape are a mistake; a route of a rule's shape is not, and the rule's name for it counts.
        let strict = |all: &[(&String, Template<'_>)]| -> Result<Node, IdentityConfigError> {
            let mut root = Node::default();
            for (route, template) in all {
                root.add(template, &methods, settings.paths).map_err(|text| wrong(route, text))?;
            }
            Ok(root)
        };
        let (own, routed) = configured.split_at(settings.routes.len());
        strict(own)?;
        let mut wide = strict(routed)?;
        for template in &patterns {
            let _ = wide.add(template, &methods, settings.paths);
        }
        let mut root = Node::default();
        for template in exact.iter().chain(own.iter().map(|(_, template)| template)).chain(&patterns) {
            let _ = root.add(template, &methods, settings.paths);
        }
        let names = methods.iter().map(|method| &**method).chain([OTHER]);
        let unmatched = names.map(|name| (name.into(), format!("{name} other").into())).collect();
        Ok(Self { named: root, wide, methods, unmatched, fallback: settings.unmatched })
    }

    /// Returns the method, or `OTHER` for an unknown one, so that the number of values is bounded. Some frameworks
    /// convert `get` to `GET`, so case is ignored.
    #[must_use]
    pub fn method(&self, method: &str) -> &str {
        match method {
            "GET" => "GET",
            "POST" => "POST",
            _ if method.eq_ignore_ascii_case("HEAD") => "GET",
            _ => {
                let known = self.methods.iter().find(|known| known.eq_ignore_ascii_case(method));
                known.map_or(OTHER, |known| known)
            }
        }
    }

    /// Returns the template that a path matches.
    #[must_use]
    pub fn template(&self, method: &str, path: &str) -> Option<&str> {
        let path = path.strip_prefix('/').unwrap_or(path);
        let found = match self.named.find(method, path, 0) {
            Some(named) if !named.is_pattern => Some(named),
            pattern => self.wide.find(method, path, 0).or(pattern),
        };
        found.map(|end| &*end.endpoint)
    }

    /// Returns the endpoint; `None` if it is the path itself (`Unmatched::Path`).
    #[must_use]
    pub fn endpoint(&self, method: &str, path: &str) -> Option<&str> {
        self.template(method, path).or_else(|| match self.fallback {
            Unmatched::Other => self.unmatched.get(method).map(|name| &**name),
            Unmatched::Path => None,
        })
    }
}

/// Returns the template of a rule's pattern: `GET /api/*` matches the text of `GET /api/{*rest}`, and of every template
/// below it.
fn pattern_template(pattern: &str) -> Option<String> {
    let start = pattern.strip_suffix('*').filter(|start| !start.contains('*'))?;
    Some(format!("{start}{{*rest}}"))
}

/// Returns the templates among the endpoints of rules, which are those of one method.
fn with_method<'e>(endpoints: impl IntoIterator<Item = &'e str>) -> Vec<Template<'e>> {
    let parsed = endpoints.into_iter().filter_map(|endpoint| Template::parse(endpoint).ok());
    parsed.filter(|template| template.method.is_some()).collect()
}

impl<'t> Template<'t> {
    fn parse(route: &'t str) -> Result<Self, String> {
        let (method, path) = match route.trim().split_once(' ') {
            Some((method, path)) => (Some(method), path.trim()),
            None => (None, route.trim()),
        };
        if !path.starts_with('/') {
            return Err("write `/path`, or `GET /path`".to_owned());
        }
        if let Some(method) = method
            && (method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-'))
        {
            return Err(format!("invalid method `{method}`; write GET, POST and so on in capitals"));
        }
        if method == Some("HEAD") {
            return Err(format!("HEAD counts as GET; write `GET {path}`"));
        }
        Ok(Self { method, path, is_pattern: false })
    }
}

impl Node {
    fn add(&mut self, template: &Template<'_>, methods: &[Box<str>], paths: PathRules) -> Result<(), String> {
        let mut node = self;
        let mut takes_rest = false;
        let segments: Vec<&str> = template.path.split('/').filter(|segment| !segment.is_empty()).collect();
        if segments.len() > MAX_SEGMENTS {
            return Err(format!("a path has at most {MAX_SEGMENTS} segments"));
        }
        for (at, segment) in segments.iter().enumerate() {
            let named = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
            match named {
                Some(name) if name.starts_with('*') && at + 1 == segments.len() => takes_rest = true,
                Some(name) if name.starts_with('*') => {
                    return Err(format!(
                        "`{segment}` matches the rest of the path, so it must be the last segment"
                    ));
                }
                Some(name) if !name.is_empty() && !name.contains(['{', '}']) => {
                    node = node.any.get_or_insert_default();
                }
                None if !segment.contains(['{', '}', '*', '?', '#', '%', ';', '\\'])
                    && !matches!(*segment, "." | "..") =>
                {
                    node = node.literals.entry(paths.literal(segment).into()).or_default();
                }
                _ => {
                    return Err(format!(
                        "invalid segment `{segment}`; write `users`, `{{id}}`, or `{{*rest}}` at the end"
                    ));
                }
            }
        }
        let ends = if takes_rest { &mut node.rest } else { &mut node.ends };
        let all = methods.iter().map(|method| &**method).chain([OTHER]);
        for method in all.filter(|method| template.method.is_none_or(|own| own == *method)) {
            let names_method = template.method.is_some();
            let endpoint = format!("{method} {}", template.path).into();
            let is_pattern = template.is_pattern;
            let end = End { method: method.into(), endpoint, names_method, is_pattern };
            match ends.iter_mut().find(|known| *known.method == *method) {
                None => ends.push(end),
                Some(known) if known.names_method == names_method => {
                    return Err(format!(
                        "`{}` matches the same requests; remove one of them",
                        known.endpoint
                    ));
                }
                Some(known) if names_method => *known = end,
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Returns the endpoint of a path. `rest` is the part that is still to be matched, without its leading slash.
    fn find(&self, method: &str, rest: &str, depth: usize) -> Option<&End> {
        if rest.is_empty() {
            return named(&self.ends, method);
        }
        if depth > MAX_SEGMENTS {
            return None;
        }
        let (segment, further) = rest.split_once('/').unwrap_or((rest, ""));
        let literal = self.literals.get(segment).and_then(|node| node.find(method, further, depth + 1));
        literal
            .or_else(|| self.any.as_ref()?.find(method, further, depth + 1))
            .or_else(|| named(&self.rest, method))
    }
}

fn named<'n>(ends: &'n [End], method: &str) -> Option<&'n End> {
    ends.iter().find(|end| *end.method == *method)
}
