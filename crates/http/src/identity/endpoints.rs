//! Endpoints: a path is told by the template that it matches, so that `/users/1` and `/users/2` share limits.
//!
//! A tree of segments: a lookup costs a hash for each segment, however many routes there are. Of several templates that
//! match, the one with the earliest literal segment wins. A node has its depth, so going back over alternatives visits
//! each node once at most. What matches nothing is `GET other`: a counter for each made-up path would be an
//! attacker's to fill.

use super::config::{IdentityConfigError, Unmatched};
use std::collections::HashMap;

type Map<V> = HashMap<Box<str>, V, foldhash::fast::RandomState>;

/// The methods that everyone knows; others count where a route names them.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
const OTHER: &str = "OTHER";
const MAX_SEGMENTS: usize = 64;

#[derive(Debug)]
pub(super) struct EndpointMatcher {
    root: Node,
    methods: Vec<Box<str>>,
    /// For each method, what its unmatched requests are called.
    unmatched: Map<Box<str>>,
    fallback: Unmatched,
}

#[derive(Debug, Default)]
struct Node {
    literals: Map<Node>,
    any: Option<Box<Node>>,
    /// Endpoints of templates that end here, by method.
    ends: Vec<End>,
    /// Endpoints of templates that take whatever follows.
    rest: Vec<End>,
}

/// What requests of one method are called that end at a node.
#[derive(Debug)]
struct End {
    method: Box<str>,
    endpoint: Box<str>,
    /// Whether its route names the method; one that does is more than one for all.
    names_method: bool,
}

/// One route, read.
struct Template<'t> {
    method: Option<&'t str>,
    path: &'t str,
}

impl EndpointMatcher {
    /// `named` are endpoints that rules name: those that cannot be routes, or are already, are passed over.
    pub(super) fn new<'e>(
        routes: &'e [String],
        named: impl IntoIterator<Item = &'e str>,
        fallback: Unmatched,
    ) -> Result<Self, IdentityConfigError> {
        let wrong =
            |route: &str, wrong: String| IdentityConfigError::Route { route: route.to_owned(), wrong };
        let own = routes.iter().map(|route| Template::parse(route).map_err(|text| wrong(route, text)));
        let own = own.collect::<Result<Vec<_>, _>>()?;
        let named = named.into_iter().filter_map(|endpoint| Template::parse(endpoint).ok());
        let named: Vec<_> = named.filter(|template| template.method.is_some()).collect();
        let mut methods: Vec<Box<str>> = METHODS.map(Box::from).to_vec();
        for method in own.iter().chain(&named).filter_map(|template| template.method) {
            if !methods.iter().any(|known| &**known == method) {
                methods.push(method.into());
            }
        }
        let mut root = Node::default();
        for (template, route) in own.iter().zip(routes) {
            root.add(template, &methods).map_err(|text| wrong(route, text))?;
        }
        for template in &named {
            let _ = root.add(template, &methods);
        }
        let names = methods.iter().map(|method| &**method).chain([OTHER]);
        let unmatched = names.map(|name| (name.into(), format!("{name} other").into())).collect();
        Ok(Self { root, methods, unmatched, fallback })
    }

    /// The method, as one of few.
    pub(super) fn method<'m>(&'m self, method: &'m str) -> &'m str {
        match method {
            "GET" => "GET",
            "POST" => "POST",
            _ => self.methods.iter().find(|known| &***known == method).map_or(OTHER, |known| known),
        }
    }

    /// The endpoint; nothing where it is the path itself.
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
            return Err(format!("`{method}` is no method; write GET, POST and the like in capitals"));
        }
        Ok(Self { method, path })
    }
}

impl Node {
    fn add(&mut self, template: &Template<'_>, methods: &[Box<str>]) -> Result<(), String> {
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
                    return Err(format!("`{segment}` takes all that follows, so it stands last"));
                }
                Some(name) if !name.is_empty() && !name.contains(['{', '}']) => {
                    node = node.any.get_or_insert_default();
                }
                None if !segment.contains(['{', '}', '*', '?', '#', '%', ';']) => {
                    node = node.literals.entry((*segment).into()).or_default();
                }
                _ => {
                    return Err(format!(
                        "`{segment}` is no segment; write `users`, `{{id}}`, or `{{*rest}}` at the end"
                    ));
                }
            }
        }
        let ends = if takes_rest { &mut node.rest } else { &mut node.ends };
        let all = methods.iter().map(|method| &**method).chain([OTHER]);
        for method in all.filter(|method| template.method.is_none_or(|own| own == *method)) {
            let is_own = template.method.is_some();
            let endpoint = format!("{method} {}", template.path).into();
            let end = End { method: method.into(), endpoint, names_method: is_own };
            match ends.iter_mut().find(|known| *known.method == *method) {
                None => ends.push(end),
                Some(known) if known.names_method == is_own => {
                    return Err(format!("`{}` matches the same requests", known.endpoint));
                }
                Some(known) if is_own => *known = end,
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// `rest` is what of the path is still to be matched, without its first slash.
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
