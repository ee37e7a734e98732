//! Which path is answered by whom. Each file of this room says its own paths as a list of [`Route`]s; a request is matched
//! against all of them, in order.

use super::Admin;
use crate::http::Answer;
use crate::http::problem::Problem;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{Actor, Role};

/// The longest that an answer may take to begin: a database that hangs must not hold operators up.
const LONGEST: Duration = Duration::from_secs(20);

/// An answer whose body may still be in the making. One that breaks off is cut, so that its reader can tell.
pub(super) type Reply = Response<UnsyncBoxBody<Bytes, std::io::Error>>;

/// What came of a request.
pub(super) type Answering = Pin<Box<dyn Future<Output = Result<Reply, Problem>> + Send>>;

/// A request that was let in.
pub(super) struct Asked {
    pub(super) admin: Arc<Admin>,
    pub(super) head: Parts,
    /// The path as its route has it.
    pub(super) template: &'static str,
    /// What stands in the path where its template has a name, in order, as it was sent.
    pub(super) named: Vec<String>,
    pub(super) body: Incoming,
    /// Who asks.
    pub(super) actor: Actor,
}

/// One path and method.
pub(super) struct Route {
    pub(super) method: Method,
    /// As in `/admin/v1/quotas/{api_key}`.
    pub(super) path: &'static str,
    /// Who may; `None`: anybody.
    pub(super) role: Option<Role>,
    pub(super) handler: fn(Asked) -> Answering,
    /// How long its answer may take to begin.
    pub(super) patience: Duration,
}

impl Route {
    pub(super) const fn new(
        method: Method,
        path: &'static str,
        role: Role,
        handler: fn(Asked) -> Answering,
    ) -> Self {
        Self { method, path, role: Some(role), handler, patience: LONGEST }
    }

    /// One whose answer may take longer to begin.
    pub(super) const fn patient(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// One that anybody may ask.
    pub(super) const fn open(path: &'static str, handler: fn(Asked) -> Answering) -> Self {
        Self::for_anybody(Method::GET, path, handler)
    }

    /// The same, by any method.
    pub(super) const fn for_anybody(
        method: Method,
        path: &'static str,
        handler: fn(Asked) -> Answering,
    ) -> Self {
        Self { method, path, role: None, handler, patience: LONGEST }
    }
}

/// The route of a request, with what its path names; else what there is instead.
pub(super) fn find<'r>(
    routes: impl Iterator<Item = &'r Route>,
    method: &Method,
    path: &str,
) -> Result<(&'r Route, Vec<String>), Problem> {
    let method = if method == Method::HEAD { &Method::GET } else { method };
    let mut others: Vec<&Route> = Vec::new();
    for route in routes {
        let Some(named) = matched(route.path, path) else { continue };
        // A path that is there as it is written does not stand for a name as well.
        if others.first().is_some_and(|first| first.path != route.path && !first.path.contains('{')) {
            continue;
        }
        if route.method == *method {
            return Ok((route, named));
        }
        if others.first().is_none_or(|first| first.path == route.path) {
            others.push(route);
        }
    }
    let methods: Vec<&str> = others.iter().map(|route| route.method.as_str()).collect();
    Err(if methods.is_empty() { super::not_found(path) } else { Problem::wrong_methods(methods.join(", ")) })
}

/// What a path has where its template has names; nothing, if it is another path.
fn matched(template: &str, path: &str) -> Option<Vec<String>> {
    let mut named = Vec::new();
    let (mut expected, mut found) = (template.split('/'), path.split('/'));
    loop {
        match (expected.next(), found.next()) {
            (None, None) => return Some(named),
            (Some(name), Some(part)) if name.starts_with('{') => named.push(part.to_owned()),
            (Some(word), Some(part)) if word == part => {}
            _ => return None,
        }
    }
}

/// An answer that says that it is done, and nothing else.
pub(super) fn done() -> Reply {
    let mut answer = Response::new(Full::new(Bytes::new()));
    *answer.status_mut() = StatusCode::NO_CONTENT;
    whole(answer)
}

/// A whole answer as one of those whose bodies may be in the making.
pub(super) fn whole(answer: Answer) -> Reply {
    answer.map(|body| body.map_err(|never: Infallible| match never {}).boxed_unsync())
}

#[cfg(test)]
mod tests {
    use super::matched;

    #[test]
    fn a_template_names_what_stands_in_its_place() {
        let quota = "/admin/v1/quotas/{api_key}";
        assert_eq!(matched(quota, "/admin/v1/quotas/a%2Fb"), Some(vec!["a%2Fb".to_owned()]));
        for other in ["/admin/v1/quotas", "/admin/v1/quotas/a/b", "/admin/v2/quotas/a"] {
            assert_eq!(matched(quota, other), None, "{other}");
        }
        assert_eq!(matched("/", "/"), Some(Vec::new()));
    }
}
