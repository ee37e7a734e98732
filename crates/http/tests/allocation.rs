//! What an answer and a caller cost the allocator: this is on the path of every request.

use http::{HeaderMap, Method, Uri};
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::Window;
use tollgate_http::identity::{IdentityConfig, IdentityResolver, RequestView};
use tollgate_http::response::{DecisionSummary, LegacyHeaders, Policy, ResponseConfig};
use tollgate_testing::allocations::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Two fields are two values, however many limits they tell of; four legacy ones are four more.
#[test]
fn an_answer_allocates_its_values_and_nothing_for_their_parts() {
    let rules = ["global", "per-tenant", "per-key", "per-endpoint"];
    let window = Window::Rolling(TimeDelta::from_secs(60));
    let policies =
        || rules.map(|rule| Policy::new(rule, 1_000_000, window).remaining_fraction(123_456).until(42));
    let settings = ResponseConfig::default();
    let legacy = ResponseConfig { legacy: LegacyHeaders::Epoch, ..ResponseConfig::default() };
    for (settings, values) in [(&settings, 2), (&legacy, 6)] {
        let mut headers = HeaderMap::with_capacity(16);
        let now = Timestamp::from_secs(1_700_000_000);
        let made =
            allocations(|| settings.write(&DecisionSummary::from_policies(policies()), now, &mut headers));
        assert_eq!(headers.len(), usize::try_from(values).expect("few"));
        // A value is its bytes, and perhaps a count of who shares them.
        assert!(made <= 2 * values, "{made} allocations for {values} values");
    }
}

/// A caller's address is written once; its method, path, host, endpoint and key are borrowed.
#[test]
fn a_caller_allocates_its_address_alone() {
    let settings = IdentityConfig { routes: vec!["GET /users/{id}".to_owned()], ..IdentityConfig::default() };
    let who = IdentityResolver::new(&settings).expect("settings");
    let (uri, mut headers) = (Uri::from_static("/users/17?page=2"), HeaderMap::new());
    headers.insert("host", "api.example".parse().expect("a value"));
    headers.insert("x-forwarded-for", "198.51.100.7, 203.0.113.9".parse().expect("a value"));
    headers.insert("x-api-key", "sk_live_4242424242424242".parse().expect("a value"));
    let peer = "127.0.0.1".parse().expect("an address");
    let asked = RequestView::new(peer, &Method::GET, &uri, &headers);
    let made = allocations(|| {
        let caller = who.resolve_direct(&asked, Timestamp::ZERO).expect("one caller");
        assert_eq!(caller.attributes().len(), 6);
        caller
    });
    assert!(made <= 2, "{made} allocations");
}
