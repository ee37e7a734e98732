//! Allocations of a response and of an identity lookup, both on the path of every request.

use http::{HeaderMap, Method, Uri};
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::Window;
use tollgate_http::identity::{ApiKeyConfig, IdentityConfig, IdentityResolver, KnownKeysConfig, RequestView};
use tollgate_http::response::{DecisionSummary, LegacyHeaders, Policy, ResponseConfig};
use tollgate_testing::allocations::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Two fields take two values, however many limits they list; four legacy fields take four more.
#[test]
fn a_response_allocates_its_values_and_nothing_for_their_parts() {
    let rules = ["global", "per-tenant", "per-key", "per-endpoint"];
    let window = Window::Rolling(TimeDelta::from_secs(60));
    let policies =
        || rules.map(|rule| Policy::new(rule, 1_000_000, window).with_remaining(123_456).with_reset(42));
    let settings = ResponseConfig::default();
    let standard = ResponseConfig { legacy: LegacyHeaders::None, ..ResponseConfig::default() };
    for (settings, values) in [(&standard, 2), (&settings, 6)] {
        let mut headers = HeaderMap::with_capacity(16);
        let now = Timestamp::from_secs(1_700_000_000);
        let made =
            allocations(|| settings.write(&DecisionSummary::from_policies(policies()), now, &mut headers));
        assert_eq!(headers.len(), usize::try_from(values).expect("few"));
        // A value has its bytes, and perhaps a reference count.
        assert!(made <= 2 * values, "{made} allocations for {values} values");
    }
}

/// The address is formatted once; method, path, host, endpoint and key are borrowed.
#[test]
fn a_caller_allocates_only_its_address() {
    let routes = vec!["GET /users/{id}".to_owned()];
    let list = std::env::temp_dir().join(format!("tollgate-http-allocation-{}", std::process::id()));
    std::fs::write(&list, "sk_live_4242424242424242\n").expect("a file");
    let known = KnownKeysConfig { file: Some(list.clone()), ..KnownKeysConfig::default() };
    let api_key = ApiKeyConfig { known: Some(known), ..ApiKeyConfig::default() };
    for api_key in [ApiKeyConfig::default(), api_key] {
        let settings = IdentityConfig { routes: routes.clone(), api_key, ..IdentityConfig::default() };
        allocates_its_address(&IdentityResolver::new(&settings).expect("settings"));
    }
    std::fs::remove_file(&list).expect("removed");
}

fn allocates_its_address(resolver: &IdentityResolver) {
    let (uri, mut headers) = (Uri::from_static("/users/17?page=2"), HeaderMap::new());
    headers.insert("host", "api.example".parse().expect("a value"));
    headers.insert("x-forwarded-for", "198.51.100.7, 203.0.113.9".parse().expect("a value"));
    headers.insert("x-api-key", "sk_live_4242424242424242".parse().expect("a value"));
    let peer = "127.0.0.1".parse().expect("an address");
    let request = RequestView::new(peer, &Method::GET, &uri, &headers);
    let made = allocations(|| {
        let caller = resolver.resolve_direct(&request, Timestamp::ZERO).expect("one caller");
        assert_eq!(caller.attributes().len(), 6);
        caller
    });
    assert!(made <= 2, "{made} allocations");
}
