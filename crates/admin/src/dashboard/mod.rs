//! The dashboard: the page in `dashboard/`, embedded when it was built before the server, else a page that says how to.
//! The page itself knows nothing, so anybody may have it; all that it shows it asks of the admin API.

use crate::response::typed;
use axum::Router;
use axum::response::Response;
use axum::routing::any;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY};
use http::request::Parts;
use http::{Method, StatusCode};

/// Names and bytes, sorted.
type Files<'f> = &'f [(&'static str, &'static [u8])];

/// Those of this build, as `build.rs` found them.
static FILES: Files<'static> = include!(concat!(env!("OUT_DIR"), "/dashboard.rs"));

/// Returns whether this build has the dashboard.
#[must_use]
pub const fn is_built() -> bool {
    !FILES.is_empty()
}

static NOT_BUILT: &str = include_str!("not_built.html");

/// Nothing but what this server sends, and in no other page's frame.
const POLICY: &str =
    "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'";

/// The page and its parts.
pub(crate) fn routes() -> Router {
    let page = || any(async |head: Parts| page(FILES, &head));
    Router::new().route("/", page()).route("/assets/", page()).route("/assets/{*file}", page())
}

fn page(files: Files<'_>, head: &Parts) -> Response {
    let path = head.uri.path();
    let (name, kept) = match path {
        "/" => ("index.html", "no-cache"),
        // Their names change with their bytes.
        _ => (&path[1..], "public, max-age=31536000, immutable"),
    };
    if !matches!(head.method, Method::GET | Method::HEAD) {
        let mut refused = typed(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "use GET here\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return refused;
    }
    let bytes = files.binary_search_by(|(known, _)| (*known).cmp(name)).ok().map(|found| files[found].1);
    let (status, kind, bytes, kept) = match bytes {
        Some(bytes) => (StatusCode::OK, kind(name), bytes, kept),
        None if path == "/" => (StatusCode::OK, kind(name), NOT_BUILT.as_bytes(), "no-store"),
        None => {
            (StatusCode::NOT_FOUND, "text/plain; charset=utf-8", &b"there is no such file\n"[..], "no-store")
        }
    };
    let mut answer = typed(status, kind, bytes);
    let mut set =
        |name: HeaderName, value| answer.headers_mut().insert(name, HeaderValue::from_static(value));
    set(CACHE_CONTROL, kept);
    set(CONTENT_SECURITY_POLICY, POLICY);
    set(REFERRER_POLICY, "no-referrer");
    answer
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

    fn header(answer: &Response, name: HeaderName) -> &str {
        answer.headers()[name].to_str().expect("a text")
    }

    fn body(answer: Response) -> Bytes {
        pollster::block_on(answer.into_body().collect()).expect("a body").to_bytes()
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
            let answer = get(BUILT, "GET", missing);
            assert_eq!(
                (answer.status(), header(&answer, CACHE_CONTROL)),
                (StatusCode::NOT_FOUND, "no-store"),
                "{missing}"
            );
        }
        assert_eq!(get(BUILT, "POST", "/").status(), StatusCode::METHOD_NOT_ALLOWED);
    }

    #[test]
    fn a_server_built_without_node_says_so() {
        let page = get(&[], "GET", "/");
        assert_eq!((page.status(), header(&page, CACHE_CONTROL)), (StatusCode::OK, "no-store"));
        assert_eq!(body(page), NOT_BUILT);
        assert!(NOT_BUILT.contains("was not built"));
    }
}
