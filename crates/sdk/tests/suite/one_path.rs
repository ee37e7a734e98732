//! A request through the tower layer is identified, planned and charged exactly once, also with a store that has to be
//! awaited. Each plan advances a split counter to its next shard, so a request that is planned twice skips one.
#![cfg(feature = "in-process")]

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body_util::Full;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::conformance::RemoteStore;
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_engine::Limiter;
use tollgate_http::identity::IDENTIFICATIONS;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_sdk::{CheckRequest, Extracted, IdentityConfig, IdentityResolver, InProcess, TollgateLayer};
use tollgate_store::{MemoryConfig, MemoryStore};
use tollgate_testing::own_process::in_own_process;
use tower::{Layer, ServiceExt, service_fn};

const RULES: &str = "{domain: d, descriptors: [{key: user, limit: 8/hour, split: 8}, {key: api_key, limit: 8/hour, split: 8}]}";

/// Identifications are counted per process.
#[test]
fn requests_of_the_layer_are_decided_once() {
    in_own_process("one_path::requests_of_the_layer_are_decided_once", || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(every_request_once());
    });
}

async fn every_request_once() {
    let rules = Ruleset::load(&[Source::new("rules", RULES)], &Options::default()).expect("rules");
    let clock = SystemClock::new();
    let memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("memory");
    let store = Arc::new(RemoteStore::new(memory));
    let limiter = Limiter::new(Arc::new(rules), Arc::clone(&store), Arc::new(clock) as Arc<dyn Clock>);
    let identity = IdentityResolver::new(&IdentityConfig::default()).expect("settings");
    let layer = TollgateLayer::new(InProcess::new(Arc::new(limiter), "d"), move |head: &Parts| {
        match head.headers.contains_key("x-api-key") {
            true => {
                CheckRequest::identified(&identity, Ipv4Addr::LOCALHOST.into(), head, Timestamp::ZERO).into()
            }
            false => Extracted::Check(CheckRequest::attributes([("user", "u")])),
        }
    });
    let service = layer.layer(service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello"))))
    }));
    for (field, identified) in [("x-other", 0), ("x-api-key", 1)] {
        let respond = async || {
            let request = Request::get("/").header(field, "key-of-a-caller").body(Full::default());
            service.clone().oneshot(request.expect("a request")).await.expect("infallible")
        };
        let before = IDENTIFICATIONS.load(Ordering::Relaxed);
        for left in (0..8).rev() {
            let response = respond().await;
            assert_eq!(response.status(), 200);
            let remaining = response.headers()["ratelimit"].to_str().expect("ASCII");
            assert!(remaining.contains(&format!("r={left};")), "{remaining}");
        }
        assert_eq!(store.take_rounds(8), Ok(8), "{field}");
        assert_eq!(IDENTIFICATIONS.load(Ordering::Relaxed) - before, 8 * identified, "{field}");
        assert_eq!(respond().await.status(), 429);
        store.take_calls();
    }
}
