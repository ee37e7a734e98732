//! The two rule files of the project's own brief load as they stand and mean what was said of them.

use tollgate_core::{Algorithm, Cost, Enforcement, KeyPart};
use tollgate_rules::{Action, Domain, Options, Ruleset, Source};

/// Loads an example that has these warnings.
fn load(name: &str, warnings: &[&str]) -> Ruleset {
    let path = format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let rules =
        Ruleset::load(&[Source::new(name, text)], &Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let found: Vec<&str> = rules.warnings().iter().map(|warning| warning.message.as_str()).collect();
    assert_eq!(found, warnings);
    rules
}

/// Each limit met, with its counter's values.
fn matched(domain: &Domain, request: &[(&str, &str)]) -> Vec<String> {
    let plan = domain.plan(request, Cost::ONE);
    plan.limits
        .iter()
        .map(|hit| {
            let parts = &plan.parts[usize::from(hit.parts.0)..usize::from(hit.parts.1)];
            let render = |part: &KeyPart<'_>| match part {
                KeyPart::Secret(text) => format!("secret {text}"),
                part => part.to_string(),
            };
            let parts: Vec<String> = parts.iter().map(render).collect();
            format!("{} {} [{}]", hit.rule.unwrap().name, hit.limit.limit.rate(), parts.join(","))
        })
        .collect()
}

#[test]
fn the_platform_limits_keys_writes_addresses_and_all_traffic() {
    let rules = load("seed-api-platform.yaml", &[]);
    let domain = rules.domain("api_platform").expect("its domain");
    let order = [("api_key", "abc"), ("endpoint", "POST /api/v1/orders"), ("global", "aggregate")];
    assert_eq!(
        matched(domain, &order),
        [
            "api_key 100/1m [secret abc]",
            "api_key/endpoint=POST /api/v1/orders 20/1m [secret abc]",
            "global=aggregate 10000/1s []"
        ]
    );
    let read = [("global", "aggregate"), ("api_key", "abc"), ("endpoint", "GET /api/v1/orders")];
    assert_eq!(matched(domain, &read), ["api_key 100/1m [secret abc]", "global=aggregate 10000/1s []"]);
    let address = [("remote_address", "192.0.2.1")];
    assert_eq!(
        matched(domain, &address),
        ["remote_address 30/1m [192.0.2.1]", "global=aggregate 10000/1s []"]
    );
}

#[test]
fn the_gateway_limits_plans_apart_and_lets_search_wait() {
    let rules = load(
        "seed-api-gateway.yaml",
        &[
            "all callers share the `5/1m` of `POST /api/v1/auth/login`: one that uses them up locks out everybody",
        ],
    );
    let domain = rules.domain("api_gateway").expect("its domain");
    let request = [
        ("remote_address", "10.0.0.1"),
        ("user_id", "x"),
        ("plan", "free"),
        ("endpoint", "POST /api/v1/auth/login"),
        ("global", "aggregate"),
    ];
    assert_eq!(
        matched(domain, &request),
        [
            "global 10000/1m [aggregate]",
            "remote_address 100/1m [10.0.0.1]",
            "user_id/plan=free 60/1m [x]",
            "endpoint=POST /api/v1/auth/login 5/1m []"
        ]
    );
    let search = [("endpoint", "POST /api/v1/search")];
    let plan = domain.plan(&search, Cost::ONE);
    // The first is the total's.
    let hit = &plan.limits[1];
    assert_eq!(hit.rule.unwrap().action, Action::Delay);
    assert_eq!(hit.limit.limit.algorithm(), Algorithm::LeakyBucket);
    assert_eq!(hit.limit.limit.capacity(), 20);
    assert_eq!(hit.enforcement, Enforcement::Required);
}
