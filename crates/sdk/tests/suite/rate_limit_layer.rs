//! The tower layer with one rate and no rule file.
#![cfg(feature = "in-process")]

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use std::convert::Infallible;
use std::net::SocketAddr;
use tollgate_sdk::{RateLimitLayer, nonzero};
use tower::{Layer, Service, ServiceExt, service_fn};

async fn hello(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from("hello"))))
}

/// Sends the requests in order and returns their statuses.
async fn statuses(layer: &RateLimitLayer, requests: Vec<Request<Full<Bytes>>>) -> Vec<u16> {
    let mut service = layer.layer(service_fn(hello));
    let mut statuses = Vec::new();
    for request in requests {
        let service = service.ready().await.expect("ready");
        statuses.push(service.call(request).await.expect("a response").status().as_u16());
    }
    statuses
}

fn request(path: &str, peer: Option<&str>, key: Option<&str>) -> Request<Full<Bytes>> {
    let mut request = Request::get(path);
    if let Some(key) = key {
        request = request.header("x-api-key", key);
    }
    let mut request = request.body(Full::default()).expect("a request");
    if let Some(peer) = peer {
        let peer: SocketAddr = peer.parse().expect("an address");
        request.extensions_mut().insert(peer);
    }
    request
}

#[tokio::test]
async fn each_address_has_its_own_rate() {
    let layer = RateLimitLayer::per_hour(nonzero!(1)).by_ip();
    let from = |peer| request("/", Some(peer), None);
    let requests = vec![
        from("10.0.0.1:1000"),
        from("10.0.0.1:2000"),
        from("10.0.0.2:1000"),
        from("[2001:db8::1]:1"),
        // The same /64, and another.
        from("[2001:db8::ffff]:1"),
        from("[2001:db8:0:1::1]:1"),
        // The same address, IPv4-mapped.
        from("[::ffff:10.0.0.1]:1"),
        request("/", None, None),
        request("/", None, None),
    ];
    assert_eq!(statuses(&layer, requests).await, [200, 429, 200, 200, 429, 200, 429, 200, 429]);
}

#[tokio::test]
async fn each_header_value_and_route_has_its_own_rate() {
    let layer = RateLimitLayer::per_hour(nonzero!(1)).by_header("X-API-Key").by_route();
    let by = |path, key| request(path, None, Some(key));
    let requests = vec![
        by("/a", "k1"),
        by("/a?x=1", "k1"),
        by("/b", "k1"),
        by("/a", "k2"),
        by("/a//", "k2"),
        by("/a", "k3"),
    ];
    assert_eq!(statuses(&layer, requests).await, [200, 429, 200, 200, 429, 200]);
}

/// Clones of a layer share their counters, because a router clones it for each route.
#[tokio::test]
async fn without_a_key_all_share_one_rate() {
    let layer = RateLimitLayer::per_minute(nonzero!(100)).burst(nonzero!(2));
    assert_eq!(statuses(&layer, vec![request("/a", Some("10.0.0.1:1"), None)]).await, [200]);
    let copy = layer.clone();
    let requests = vec![request("/b", None, None), request("/c", None, None)];
    assert_eq!(statuses(&copy, requests).await, [200, 429]);
}

#[tokio::test]
async fn responses_have_the_rate_limit_fields() {
    let layer = RateLimitLayer::per_minute(nonzero!(1)).by_ip();
    let service = layer.layer(service_fn(hello));
    let allowed = service.clone().oneshot(request("/", Some("10.0.0.1:1"), None)).await.expect("a response");
    assert!(allowed.headers().contains_key("ratelimit"), "{:?}", allowed.headers());
    let denied = service.oneshot(request("/", Some("10.0.0.1:1"), None)).await.expect("a response");
    assert_eq!(
        (denied.status().as_u16(), &denied.headers()["retry-after"]),
        (429, &"60".parse().expect("text"))
    );
}

/// Otherwise each spelling of a path would have a rate of its own.
#[tokio::test]
async fn a_route_has_one_spelling() {
    let layer = RateLimitLayer::per_hour(nonzero!(1)).by_route();
    let mut head = request("/login", None, None);
    *head.method_mut() = http::Method::HEAD;
    let spelled = |path| request(path, None, None);
    let requests = vec![
        spelled("/login"),
        spelled("/login//"),
        spelled("/%6Cogin"),
        head,
        spelled("/login%2F"),
        spelled("/a/../login"),
        spelled("/%256Cogin"),
        spelled("//x/login"),
    ];
    assert_eq!(statuses(&layer, requests).await, [200, 429, 429, 429, 400, 400, 400, 400]);
}
