//! Endpoint matcher: maps a path to the route template that it matches, so that `/users/1` and `/users/2` share limits.
//!
//! The routes form a tree of segments: a lookup costs one hash per segment, however many routes there are. If several
//! templates match, the one with the earliest literal segment wins. Every node has a fixed depth, so backtracking
//! visits each node at most once. A path that matches no route is `GET other`: with one counter per path, an attacker
//! could create any number of counters. `HEAD` is `GET`: servers run the same handler for both.

use super::config::{IdentityConfigError, Unmatched};
use super::path::PathRules;
use std::collections::HashMap;

type Map<V> = HashMap<Box<str>, V, foldhash::fast::RandomState>;

/// The standard methods; others are recognized if a route names them.
const METHODS: [&str; 8] = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
const OTHER: &str = "OTHER";
const MAX_SEGMENTS: usize = 64;

#[derive(Debug)]
pub(super) struct EndpointMatcher {
    root: Node,
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
}

/// A parsed route.
struct Template<'t> {
    method: Option<&'t str>,
    path: &'t str,
}

impl EndpointMatcher {
    /// Builds the matcher. `named` are endpoints that rules name; those that are not valid routes or exist already are
    /// skipped.
    pub(super) fn new<'e>(
        routes: &'e [String],
        named: impl IntoIterator<Item = &'e str>,
        fallback: Unmatched,
        paths: PathRules,
    ) -> Result<Self, IdentityConfigError> {
        let wrong =
            |route: &str, wrong: String| IdentityConfigError::Route { route: route.to_owned(), wrong };
        let configured = routes.iter().map(|route| Template::parse(route).map_err(|text| wrong(route, text)));
        let configured = configured.collect::<Result<Vec<_>, _>>()?;
        let named = named.into_iter().filter_map(|endpoint| Template::parse(endpoint).ok());
        let named: Vec<_> = named.filter(|template| template.method.is_some()).collect();
        let mut methods: Vec<Box<str>> = METHODS.map(Box::from).to_vec();
        for method in configured.iter().chain(&named).filter_map(|template| template.method) {
            if !methods.iter().any(|known| &**known == method) {
                methods.push(method.into());
            }
        }
        let mut root = Node::default();
        for (template, route) in configured.iter().zip(routes) {
            root.add(template, &methods, paths).map_err(|text| wrong(route, text))?;
        }
        for template in &named {
            let _ = root.add(template, &methods, paths);
        }
        let names = methods.iter().map(|method| &**method).chain([OTHER]);
        let unmatched = names.map(|name| (name.into(), format!("{name} other").into())).collect();
        Ok(Self { root, methods, unmatched, fallback })
    }

    /// Returns the method, or `OTHER` for an unknown one, so that the number of values is bounded. Some frameworks
    /// convert `get` to `GET`, so case is ignored.
    pub(super) fn method(&self, method: &str) -> &str {
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

    /// Returns the endpoint; `None` if it is the path itself (`Unmatched::Path`).
    pub(super) fn endpoint(&self, method: &str, path: &str) -> Option<&str> {
        let matched = self.root.find(method, path.strip_prefix('/').unwrap_or(path), 0);
        matched.or_else(|| match self.fallback {
            Unmatched::Other => self.unmatched.get(method).map(|name| &**name),
            Unmatched::Path => None,
        })
    }
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
        Ok(Self { method, path })
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
            let end = End { method: method.into(), endpoint, names_method };
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
    fn find(&self, method: &str, rest: &str, depth: usize) -> Option<&str> {
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

fn named<'n>(ends: &'n [End], method: &str) -> Option<&'n str> {
    ends.iter().find(|end| *end.method == *method).map(|end| &*end.endpoint)
}
