//! An axum service that limits its callers in process: by address and by endpoint.
//!
//!     cargo run -p example-axum
//!     for i in 1 2 3 4 5 6; do curl -si -X POST 127.0.0.1:3000/login | grep -iE '^HTTP|ratelimit|retry'; done
//!
//! For limits that several processes share, use a server: `Remote` instead of `InProcess` (docs/sdk/rust.md).

use axum::extract::ConnectInfo;
use axum::http::request::Parts;
use axum::routing::{get, post};
use axum::{Router, serve};
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tollgate_sdk::{CheckRequest, IdentityConfig, IdentityResolver, InProcess, TollgateLayer};

const RULES: &str = "
domain: shop
descriptors:
  - key: remote_address
    name: per-address
    limit: [20/second, 600/minute]
    descriptors:
      - {key: endpoint, value: POST /login, name: logins, limit: 5 per 15m}
  - {key: endpoint, value: 'GET /report/{id}', name: reports, concurrency: 2}
";

/// The service: two handlers and one layer.
fn app() -> Result<Router, Box<dyn Error>> {
    let who = IdentityResolver::new(&IdentityConfig::default())?;
    let limits = InProcess::from_rules(RULES, "shop")?;
    let time = Arc::clone(limits.limiter());
    // A request that servers read differently (a dot segment, two keys) is refused by the layer.
    let layer = TollgateLayer::new(limits, move |request: &Parts| {
        let peer = request.extensions.get::<ConnectInfo<SocketAddr>>();
        let peer = peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |info| info.0.ip());
        CheckRequest::identified(&who, peer, request, time.clock().now())
    });
    Ok(Router::new()
        .route("/login", post(async || "welcome\n"))
        .route("/report/{id}", get(async || "a long report\n"))
        .layer(layer))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::app;
    use axum::body::Body;
    use axum::extract::ConnectInfo;
    use axum::http::{Request, Response};
    use http_body_util::BodyExt;
    use std::net::SocketAddr;
    use tower::ServiceExt;

    async fn ask(app: &axum::Router, from: [u8; 4], method: &str, path: &str) -> Response<Body> {
        let mut request = Request::builder().method(method).uri(path).body(Body::empty()).expect("a request");
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from((from, 4711))));
        app.clone().oneshot(request).await.expect("an answer")
    }

    /// What the example promises to its readers.
    #[tokio::test]
    async fn the_sixth_log_in_is_denied_and_reports_give_their_permits_back() {
        let app = app().expect("the example's rules");
        for _ in 0..5 {
            assert_eq!(ask(&app, [192, 0, 2, 1], "POST", "/login").await.status(), 200);
        }
        let denied = ask(&app, [192, 0, 2, 1], "POST", "/login").await;
        assert_eq!(
            (denied.status().as_u16(), &denied.headers()["x-ratelimit-denied-by"]),
            (429, &"logins".parse().expect("a value"))
        );
        assert!(denied.into_body().collect().await.expect("a body").to_bytes().starts_with(b"{"));
        assert_eq!(ask(&app, [192, 0, 2, 2], "POST", "/login").await.status(), 200);

        let (first, second) = (
            ask(&app, [192, 0, 2, 3], "GET", "/report/1").await,
            ask(&app, [192, 0, 2, 4], "GET", "/report/2").await,
        );
        assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 200));
        assert_eq!(ask(&app, [192, 0, 2, 5], "GET", "/report/3").await.status(), 429, "two are being read");
        drop(first);
        assert_eq!(ask(&app, [192, 0, 2, 5], "GET", "/report/3").await.status(), 200);
    }
}
