//! Dashboard: the single-page app in `dashboard/`, embedded if it was built before the server; otherwise a page with
//! build instructions. The page contains no data, so it needs no authorization; everything it shows comes from the
//! admin API.

use crate::response::typed;
use axum::Router;
use axum::response::Response;
use axum::routing::any;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY};
use http::request::Parts;
use http::{Method, StatusCode};

/// File names and contents, sorted by name.
type Files<'f> = &'f [(&'static str, &'static [u8])];

/// The files of this build, as found by `build.rs`.
static FILES: Files<'static> = include!(concat!(env!("OUT_DIR"), "/dashboard.rs"));

/// Returns whether this build has the dashboard.
#[must_use]
pub const fn is_built() -> bool {
    !FILES.is_empty()
}

static NOT_BUILT: &str = include_str!("not_built.html");

/// Loads only from this server, and never in another page's frame.
const POLICY: &str =
    "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'";

/// Returns the routes of the page and its assets.
pub(crate) fn routes() -> Router {
    let page = || any(async |head: Parts| page(FILES, &head));
    Router::new().route("/", page()).route("/assets/", page()).route("/assets/{*file}", page())
}

fn page(files: Files<'_>, head: &Parts) -> Response {
    let path = head.uri.path();
    let (name, caching) = match path {
        "/" => ("index.html", "no-cache"),
        // Asset names change with their contents.
        _ => (&path[1..], "public, max-age=31536000, immutable"),
    };
    if !matches!(head.method, Method::GET | Method::HEAD) {
        let mut rejected =
            typed(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "method not allowed; use GET\n");
        rejected.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return rejected;
    }
    let bytes = files.binary_search_by(|(known, _)| (*known).cmp(name)).ok().map(|found| files[found].1);
    let (status, kind, bytes, caching) = match bytes {
        Some(bytes) => (StatusCode::OK, kind(name), bytes, caching),
        None if path == "/" => (StatusCode::OK, kind(name), NOT_BUILT.as_bytes(), "no-store"),
        None => (StatusCode::NOT_FOUND, "text/plain; charset=utf-8", &b"no such file\n"[..], "no-store"),
    };
    let mut response = typed(status, kind, bytes);
    let mut set =
        |name: HeaderName, value| response.headers_mut().insert(name, HeaderValue::from_static(value));
    set(CACHE_CONTROL, caching);
    set(CONTENT_SECURITY_POLICY, POLICY);
    set(REFERRER_POLICY, "no-referrer");
    response
}

fn kind(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, end)| end) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::{NOT_BUILT, page};
    use axum::response::Response;
    use bytes::Bytes;
    use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName};
    use http::{Request, StatusCode};
    use http_body_util::BodyExt;

    const BUILT: &[(&str, &[u8])] = &[("assets/index-Ab12.js", b"script"), ("index.html", b"page")];

    fn get(files: &[(&'static str, &'static [u8])], method: &str, path: &str) -> Response {
        let head = Request::builder().method(method).uri(path).body(()).expect("a request").into_parts().0;
        page(files, &head)
    }

    fn header(response: &Response, name: HeaderName) -> &str {
        response.headers()[name].to_str().expect("a text")
    }

    fn body(response: Response) -> Bytes {
        pollster::block_on(response.into_body().collect()).expect("a body").to_bytes()
    }

    #[test]
    fn the_page_loads_nothing_from_elsewhere_and_its_assets_are_cached() {
        let page = get(BUILT, "GET", "/");
        assert!(header(&page, CONTENT_SECURITY_POLICY).starts_with("default-src 'self';"));
        assert_eq!(
            (header(&page, CACHE_CONTROL), header(&page, CONTENT_TYPE)),
            ("no-cache", "text/html; charset=utf-8")
        );
        assert_eq!(&body(page)[..], b"page");
        let script = get(BUILT, "HEAD", "/assets/index-Ab12.js");
        assert_eq!(header(&script, CONTENT_TYPE), "text/javascript; charset=utf-8");
        assert!(header(&script, CACHE_CONTROL).ends_with("immutable"));
    }

    #[test]
    fn other_paths_are_not_found() {
        for missing in ["/assets/", "/assets/../index.html", "/assets/index.html"] {
            let response = get(BUILT, "GET", missing);
            assert_eq!(
                (response.status(), header(&response, CACHE_CONTROL)),
                (StatusCode::NOT_FOUND, "no-store"),
                "{missing}"
            );
        }
        assert_eq!(get(BUILT, "POST", "/").status(), StatusCode::METHOD_NOT_ALLOWED);
    }

    #[test]
    fn a_server_built_without_node_reports_it() {
        let page = get(&[], "GET", "/");
        assert_eq!((page.status(), header(&page, CACHE_CONTROL)), (StatusCode::OK, "no-store"));
        assert_eq!(body(page), NOT_BUILT);
        assert!(NOT_BUILT.contains("was not built"));
    }
}
