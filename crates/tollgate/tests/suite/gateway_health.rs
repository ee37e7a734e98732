//! Upstreams that are unwell are passed over, and the log says so.

use crate::harness::{Gateway, Origin, eventually};
use tollgate_testing::ports::free_address;

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 2 per 3650d, algorithm: fixed_window}
";

/// An upstream that fails its health check gets no callers until it is well; one that fails callers gets none for a while.
#[test]
fn unhealthy_upstreams_are_left_alone() {
    let (well, unwell) = (Origin::start(), Origin::start());
    let section = format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams:\n    api: {{addresses: [\"{}\", \"{}\"], health: {{path: /hold, every: 100ms, timeout: 2s}}}}\n    ejected: {{addresses: [\"{}\", \"{}\"], eject: {{after: 2, for: 1h}}}}\n  routes:\n    - {{path: \"/{{*rest}}\", upstream: api}}\n    - {{path: /ejected, upstream: ejected, retries: 2}}\n",
        well.address,
        unwell.address,
        well.address,
        free_address()
    );
    well.release(1_000_000);
    let gateway = Gateway::start(RULES, &section);
    let usable = |origin: &Origin| {
        gateway.figure(&format!("gateway_endpoint_usable{{upstream=\"api\",address=\"{}\"}}", origin.address))
    };
    eventually("the unwell one to be found", || (usable(&unwell) == 0).then_some(()));
    let asked = |origin: &Origin| origin.heads().iter().filter(|head| head.starts_with("GET /a ")).count();
    let before = asked(&unwell);
    for _ in 0..20 {
        assert_eq!(gateway.get("/a").status, 200);
    }
    assert_eq!(asked(&unwell), before);
    assert_eq!(asked(&well), 20);
    unwell.release(1_000_000);
    eventually("it to be well again", || (usable(&unwell) == 1).then_some(()));
    for _ in 0..20 {
        assert_eq!(gateway.get("/ejected").status, 200);
    }
    eventually("the ejection", || gateway.log().contains("backend ejected").then_some(()));
}
