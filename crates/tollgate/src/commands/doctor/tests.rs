//! Configurations as users write them, and what the doctor says.

mod documents;
mod patches;
mod sending;
mod snippets;

use super::*;
use tollgate_rules::Options;

const RULES: &str = "domain: edge\ndescriptors:\n  - {key: api_key, name: per-key, limit: 600/minute}\n  - key: remote_address\n    \
    name: per-address\n    limit: 100/minute\n    descriptors:\n      - {key: endpoint, value: login, name: logins, limit: 5 per 15m}\n";

fn load(text: &str) -> Ruleset {
    Ruleset::load(&[Source::new("rules.yaml", text)], &Options::default()).expect("valid rules")
}

/// The findings about a text, by level.
fn findings(text: &str, rules: Option<&str>) -> (Vec<String>, Vec<String>, Vec<String>) {
    let documents = document::parse("f.yaml", text).expect("documents");
    let mut report = Report::default();
    let rules = rules.map(load);
    check(&documents, rules.as_ref(), &mut report);
    let of = |level| {
        let all = report.findings.iter().filter(|finding| finding.level == level);
        all.map(|finding| format!("{} [{}]", finding.message, finding.place)).collect()
    };
    (of(Level::Problem), of(Level::Warning), of(Level::Note))
}

fn problems(text: &str, rules: Option<&str>) -> Vec<String> {
    findings(text, rules).0
}

/// Asserts one problem with this part.
fn only(problems: &[String], part: &str) {
    assert!(problems.len() == 1 && problems[0].contains(part), "`{part}` in {problems:#?}");
}

fn example() -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/envoy/envoy.yaml");
    std::fs::read_to_string(path).expect("the example")
}

#[test]
fn a_configuration_that_works_has_no_problems() {
    let (problems, warnings, notes) = findings(&example(), Some(RULES));
    assert_eq!((problems, warnings), (vec![], vec![]));
    for part in [
        "Envoy asks cluster `tollgate` about domain `edge` and waits 0.02s; without an answer it lets the request pass",
        "remote_address → endpoint=login: rule `logins`, gcra 5/15m",
        "api_key: rule `per-key`",
    ] {
        assert!(notes.iter().any(|note| note.contains(part)), "`{part}` in {notes:#?}");
    }
}

/// Each of these leaves requests without a limit, or fails them.
#[test]
fn each_mistake_in_an_envoy_configuration_is_found() {
    let good = example();
    let changes = [
        ("domain: edge", "domain: egde", "no rules for domain `egde`"),
        (
            "descriptor_value: login",
            "descriptor_value: signin",
            "no rule matches the descriptor remote_address → endpoint=signin",
        ),
        ("descriptor_key: api_key", "descriptor_key: apikey", "no rule matches the descriptor apikey"),
        ("cluster_name: tollgate}", "cluster_name: ratelimit}", "there is no cluster `ratelimit`"),
        ("http2_protocol_options: {}", "http_protocol_options: {}", "does not use HTTP/2"),
        ("transport_api_version: V3", "transport_api_version: V2", "is not V3"),
        ("timeout: 0.02s", "timeout: 20ms", "is no duration"),
        (
            "generic_key: {descriptor_key: endpoint, descriptor_value: login}",
            "generic_key: {}",
            "has no `descriptor_value`",
        ),
    ];
    for (from, to, part) in changes {
        assert!(good.contains(from), "{from}");
        let found = problems(&good.replacen(from, to, 1), Some(RULES));
        assert!(found.iter().any(|problem| problem.contains(part)), "{to}: {found:#?}");
    }
    let without = good.replace("rate_limits:", "other:");
    only(&problems(&without, Some(RULES)), "the filter sends nothing");
    // Virtual hosts that a management server sends may have them.
    let hosts = without.replacen(
        "virtual_hosts:",
        "vhds: {config_source: {ads: {}}}\n                  virtual_hosts:",
        1,
    );
    assert!(hosts.contains("vhds"));
    let (found, _, notes) = findings(&hosts, Some(RULES));
    assert_eq!(found, Vec::<String>::new());
    assert!(notes.iter().any(|note| note.contains("no `rate_limits` here")), "{notes:#?}");
    let staged = good.replacen("domain: edge", "domain: edge\n                      stage: 2", 1);
    only(&problems(&staged, Some(RULES)), "stage 2");
}

#[test]
fn what_may_surprise_is_a_warning() {
    let text = example()
        .replace("timeout: 0.02s\n", "timeout: 5s\n")
        .replace("failure_mode_deny: false", "failure_mode_deny: true");
    let rules = RULES.to_owned() + "  - {key: tenant, name: tenants, limit: 1/s}\n";
    let (problems, warnings, notes) = findings(&text, Some(&rules));
    assert_eq!(problems, Vec::<String>::new());
    assert!(warnings.iter().any(|warning| warning.contains("the timeout is long")), "{warnings:#?}");
    assert!(warnings.iter().any(|warning| warning.contains("reaches rule `tenants`")), "{warnings:#?}");
    assert!(notes.iter().any(|note| note.contains("responds 500")), "{notes:#?}");
}

#[test]
fn a_filter_after_the_router_never_runs() {
    let text = "http_filters:\n- typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}\n- typed_config:\n    \
        '@type': type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit\n    domain: edge\n    timeout: 0.1s\n    \
        rateLimitService: {transportApiVersion: V3, grpcService: {googleGrpc: {targetUri: 'tollgate:8081'}}}\n\
        rateLimits: [{actions: [{remoteAddress: {}}]}]\n";
    let (problems, _, notes) = findings(text, Some(RULES));
    only(&problems, "after the router");
    assert!(
        notes.iter().any(|note| note.contains("Envoy asks tollgate:8081")),
        "names of JSON are read too: {notes:#?}"
    );
}

/// Istio's sample: two patches and the rules in a ConfigMap.
const ISTIO: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: ratelimit-config}
data:
  config.yaml: |
    domain: ratelimit
    descriptors:
      - key: PATH
        value: "/productpage"
        rate_limit: {unit: minute, requests_per_unit: 1}
      - key: PATH
        rate_limit: {unit: minute, requests_per_unit: 100}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: filter-ratelimit, namespace: istio-system}
spec:
  workloadSelector: {labels: {istio: ingressgateway}}
  configPatches:
    - applyTo: HTTP_FILTER
      match: {context: GATEWAY}
      patch:
        operation: INSERT_BEFORE
        value:
          name: envoy.filters.http.ratelimit
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
            domain: ratelimit
            failure_mode_deny: true
            timeout: 10s
            rate_limit_service:
              grpc_service:
                envoy_grpc:
                  cluster_name: outbound|8081||ratelimit.default.svc.cluster.local
                  authority: ratelimit.default.svc.cluster.local
              transport_api_version: V3
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: filter-ratelimit-svc, namespace: istio-system}
spec:
  configPatches:
    - applyTo: VIRTUAL_HOST
      patch:
        operation: MERGE
        value:
          rate_limits:
            - actions:
                - request_headers: {header_name: ":path", descriptor_key: PATH}
"#;

#[test]
fn istio_s_sample_is_understood_across_documents() {
    let documents = document::parse("istio.yaml", ISTIO).expect("documents");
    let sources: Vec<Source> = documents.iter().flat_map(rule_texts).collect();
    let rules = Ruleset::load(&sources, &Options::default()).expect("valid rules");
    let mut report = Report::default();
    check(&documents, Some(&rules), &mut report);
    assert_eq!(report.count(Level::Problem), 0, "{:#?}", report.findings);
    let has = |part: &str| report.findings.iter().any(|finding| finding.message.contains(part));
    assert!(
        has("PATH: rule `") && has("its port must be named `grpc") && has("responds 500"),
        "{:#?}",
        report.findings
    );

    let wrong = ISTIO.replace("descriptor_key: PATH", "descriptor_key: path");
    let documents = document::parse("istio.yaml", &wrong).expect("documents");
    let mut report = Report::default();
    check(&documents, Some(&rules), &mut report);
    assert_eq!(report.count(Level::Problem), 1, "keys are case-sensitive: {:#?}", report.findings);
    let filter_only = ISTIO.replace(
        "kind: EnvoyFilter\nmetadata: {name: filter-ratelimit-svc",
        "kind: Other\nmetadata: {name: x",
    );
    assert!(findings(&filter_only, None).2.iter().any(|note| note.contains("no `rate_limits` here")));
}

const POLICY: &str = r#"
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: BackendTrafficPolicy
metadata: {name: shop, namespace: default}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: shop}]
  rateLimit:
    type: Global
    global:
      rules:
        - clientSelectors:
            - headers: [{name: x-user-id, type: Distinct}, {name: x-org, value: acme}]
          limit: {requests: 10, unit: Hour}
        - clientSelectors: [{sourceCIDR: {type: Distinct, value: 0.0.0.0/0}}]
          limit: {requests: 3, unit: Second}
          shared: true
        - limit: {requests: 1000, unit: Minute}
          cost: {request: {from: Number, number: 0}, response: {from: Metadata}}
"#;

#[test]
fn a_policy_of_envoy_gateway_is_described() {
    let (problems, warnings, notes) = findings(POLICY, None);
    assert_eq!((problems, warnings), (vec![], vec![]));
    for part in [
        "rule 0: 10 per hour for each value of header x-user-id and header x-org = acme",
        "rule 1: 3 per second for each address of 0.0.0.0/0",
        "rule 2: 1000 per minute for all requests of a route together; requests cost nothing when they begin; charged when the response ends",
        "domain `default/shop`",
        "need `rateLimit.backend`",
    ] {
        assert!(notes.iter().any(|note| note.contains(part)), "`{part}` in {notes:#?}");
    }
    for (from, to, part) in [
        ("targetRefs", "targets", "has no target"),
        ("unit: Hour", "unit: Hours", "did you mean `Hour`?"),
        ("requests: 10,", "", "no whole number of `requests`"),
        ("value: acme", "valu: acme", "has no `value`"),
        ("    global:", "    globals:", "nothing is limited"),
        ("value: 0.0.0.0/0", "x: y", "`sourceCIDR` has no `value`"),
    ] {
        let documents = document::parse("f.yaml", &POLICY.replacen(from, to, 1)).expect("documents");
        let mut report = Report::default();
        check(&documents, None, &mut report);
        let text = |finding: &finding::Finding| {
            format!("{} {}", finding.message, finding.fix.clone().unwrap_or_default())
        };
        let all: Vec<String> =
            report.findings.iter().filter(|finding| finding.level == Level::Problem).map(text).collect();
        assert!(all.iter().any(|problem| problem.contains(part)), "{to}: {all:#?}");
    }
    let gateway = "apiVersion: gateway.envoyproxy.io/v1alpha1\nkind: EnvoyGateway\n";
    only(&self::problems(gateway, None), "`rateLimit` is not configured");
    let set = format!(
        "{gateway}rateLimit: {{failClosed: true, backend: {{type: Redis, redis: {{url: 'r:6379'}}}}}}\n"
    );
    assert!(findings(&set, None).2.iter().any(|note| note.contains("responds 500 (failClosed)")));
}

#[test]
fn a_configuration_without_rate_limiting_is_a_problem() {
    only(&problems("static_resources: {listeners: []}", None), "nothing about rate limiting");
    only(&problems("rate_limits: [{actions: [{remote_address: {}}]}]", None), "no rate limit filter");
}

/// What is printed for rules must work with them, whatever their keys are.
#[test]
fn printed_configurations_have_no_problems() {
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut count = 0;
    for entry in std::fs::read_dir(examples).expect("the examples").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".yaml") || name.ends_with(".test.yaml") {
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).expect("a file");
        let rules = load(&text);
        let printed = snippet::envoy(&rules);
        let documents =
            document::parse(&name, &printed).unwrap_or_else(|error| panic!("{name}: {error:#}\n{printed}"));
        let mut report = Report::default();
        check(&documents, Some(&rules), &mut report);
        assert_eq!(report.count(Level::Problem), 0, "{name}: {:#?}\n{printed}", report.findings);
        // A network takes the descriptor of its addresses.
        let expected = usize::from(text.contains("key: remote_address/"));
        assert_eq!(report.count(Level::Warning), expected, "{name}: {:#?}\n{printed}", report.findings);
        count += 1;
    }
    assert!(count > 4, "{count} examples");
    let two = [
        Source::new("a", RULES),
        Source::new(
            "b",
            "domain: \"b # \\\"x\\\"\"\nmatch: all\ndescriptors: [{key: path, value: \"/a*\", limit: 1/s, descriptors: [{key: tier, value: 'x: y', limit: 1/s}]}]\n",
        ),
    ];
    let rules = Ruleset::load(&two, &Options::default()).expect("valid rules");
    let printed = snippet::envoy(&rules);
    let documents = document::parse("two", &printed).expect("valid");
    let mut report = Report::default();
    check(&documents, Some(&rules), &mut report);
    assert_eq!(
        (report.count(Level::Problem), report.count(Level::Warning)),
        (0, 0),
        "{:#?}\n{printed}",
        report.findings
    );
}

/// As it is in every cluster, and in the example.
#[test]
fn the_configuration_of_envoy_gateway_is_found_in_its_config_map() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples/envoy-gateway.yaml");
    let text = std::fs::read_to_string(path).expect("the example");
    let (problems, _, notes) = findings(&text, None);
    assert_eq!(problems, Vec::<String>::new());
    assert!(notes.iter().any(|note| note.contains("the rate limit service is the image")), "{notes:#?}");
    assert!(
        notes.iter().all(|note| !note.contains("ConfigMap") && !note.contains("add that document")),
        "{notes:#?}"
    );
    let missing = text.replace("    rateLimit:\n      backend:", "    other:\n      backend:");
    assert!(
        missing != text
            && findings(&missing, None).0.iter().any(|one| one.contains("`rateLimit` is not configured"))
    );
    let empty = "{apiVersion: v1, kind: ConfigMap, data: {a: 'b: 1', c: '['}}";
    assert!(findings(empty, None).2[0].contains("neither rule files nor"));
}

/// Limits that Envoy ignores must not pass as good.
#[test]
fn a_filter_with_its_own_rate_limits_takes_none_of_routes() {
    let good = example();
    let own = "domain: edge\n                    rate_limits: [{actions: [{request_headers: {header_name: x, descriptor_key: api_key}}]}]";
    let indented = good.lines().find(|line| line.trim() == "domain: edge").expect("the filter's domain");
    let indent = &indented[..indented.len() - "domain: edge".len()];
    let own = own.replace("                    ", indent);
    let (problems, _, notes) = findings(&good.replace("domain: edge", &own), Some(RULES));
    assert!(!problems.is_empty(), "{notes:#?}");
    assert!(problems.iter().all(|one| one.contains("Envoy ignores the descriptor")), "{problems:#?}");
    let rules: Vec<_> = notes.iter().filter(|note| note.contains(": rule `")).collect();
    assert!(rules.len() == 1 && rules[0].starts_with("api_key: rule `per-key`"), "{rules:#?}");
    // Without routes that have any, it is complete.
    let filter = "{'@type': type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit, domain: edge, timeout: 0.02s, \
        rate_limits: [{actions: [{remote_address: {}}]}], rate_limit_service: {transport_api_version: V3, grpc_service: {google_grpc: {target_uri: t}}}}";
    assert_eq!(self::problems(filter, Some(RULES)), Vec::<String>::new());
    only(&self::problems(&filter.replace("[{remote_address: {}}]", "[]"), None), "its `actions` are empty");
}
