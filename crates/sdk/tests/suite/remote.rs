//! An unavailable server is logged once, not for every request.
#![cfg(feature = "remote")]

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_sdk::{CheckRequest, Decider, Remote, RemoteConfig};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Counts the warnings of the SDK.
struct Warnings(Arc<AtomicUsize>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.target().starts_with("tollgate_sdk")
    }
    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn an_unavailable_server_is_logged_once() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = free.local_addr().expect("an address");
    drop(free);
    let warnings = Arc::new(AtomicUsize::new(0));
    let _counted = tracing::subscriber::set_default(Warnings(Arc::clone(&warnings)));
    let remote = Remote::new(RemoteConfig::new(format!("http://{dead}"), "d")).expect("an address");
    for _ in 0..20 {
        assert!(remote.decide(CheckRequest::attributes([("user", "a")])).await.is_allowed);
    }
    assert_eq!(warnings.load(Ordering::SeqCst), 1);
}
