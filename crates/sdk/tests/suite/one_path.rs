//! A request through the tower layer is planned once and charged once, also with a store that has to be awaited.
#![cfg(feature = "in-process")]

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use std::sync::Arc;
use tollgate_core::conformance::RemoteStore;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::Limiter;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_sdk::{CheckRequest, InProcess, TollgateLayer};
use tollgate_store::{MemoryConfig, MemoryStore};
use tower::{Layer, ServiceExt, service_fn};

#[tokio::test(flavor = "current_thread")]
async fn requests_of_the_layer_are_planned_and_charged_once() {
    let rules = "{domain: d, descriptors: [{key: user, limit: 4/hour, split: 4}]}";
    let rules = Ruleset::load(&[Source::new("rules", rules)], &Options::default()).expect("rules");
    let clock = SystemClock::new();
    let memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("memory");
    let store = Arc::new(RemoteStore::new(memory));
    let limiter = Limiter::new(Arc::new(rules), Arc::clone(&store), Arc::new(clock) as Arc<dyn Clock>);
    let layer = TollgateLayer::new(InProcess::new(Arc::new(limiter), "d"), |_: &http::request::Parts| {
        Some(CheckRequest::attributes([("user", "u")]))
    });
    let service = layer.layer(service_fn(|_: Request<Full<Bytes>>| async {
        Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from("hello"))))
    }));
    for left in (0..4).rev() {
        let response = service.clone().oneshot(Request::new(Full::default())).await.expect("infallible");
        assert_eq!(response.status(), 200);
        let remaining = response.headers()["ratelimit"].to_str().expect("ASCII");
        assert!(remaining.contains(&format!("r={left};")), "{remaining}");
        assert_eq!(store.take_calls().len(), 1);
    }
    let response = service.oneshot(Request::new(Full::default())).await.expect("infallible");
    assert_eq!(response.status(), 429);
}
