//! What Envoy sends for a route, as a real Envoy 1.40 was seen to do.

use super::{findings, problems};
use crate::commands::doctor::{Report, check, document};
use serde_json::{Value, json};
use tollgate_rules::{Options, Ruleset, Source};

const RULES: &str = "domain: edge\ndescriptors:\n  - {key: generic_key, name: generic, limit: 1/s}\n  - {key: remote_address, name: address, limit: 1/s}\n";
const FILTER: &str = "envoy.filters.http.ratelimit";

fn type_url(name: &str) -> String {
    format!("type.googleapis.com/envoy.{name}")
}

fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().expect("an object") {
        into[key] = value.clone();
    }
}

/// A configuration with one filter and one route, with these changes of its parts.
fn config(changes: &[(&str, Value)]) -> String {
    let change = |part: &str, value: &mut Value| {
        changes.iter().filter(|(name, _)| *name == part).for_each(|(_, change)| merge(value, change));
    };
    let mut settings = json!({
        "@type": type_url("extensions.filters.http.ratelimit.v3.RateLimit"), "domain": "edge", "timeout": "0.02s",
        "enable_x_ratelimit_headers": "DRAFT_VERSION_03",
        "rate_limit_service": {"transport_api_version": "V3", "grpc_service": {"envoy_grpc": {"cluster_name": "tollgate"}}},
    });
    change("filter", &mut settings);
    let mut entry = json!({"name": FILTER, "typed_config": settings});
    change("entry", &mut entry);
    let mut action = json!({"cluster": "up"});
    change("action", &mut action);
    let mut route = json!({"match": {"prefix": "/"}, "route": action});
    change("route", &mut route);
    let mut host = json!({"name": "v", "domains": ["*"], "routes": [route]});
    change("host", &mut host);
    let router = json!({"name": "router", "typed_config": {"@type": type_url("extensions.filters.http.router.v3.Router")}});
    let mut manager = json!({
        "@type": type_url("extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "route_config": {"virtual_hosts": [host]}, "http_filters": [entry, router],
    });
    change("manager", &mut manager);
    let mut cluster = json!({"name": "tollgate", "typed_extension_protocol_options": {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": type_url("extensions.upstreams.http.v3.HttpProtocolOptions"),
            "explicit_http_config": {"http2_protocol_options": {}}}}});
    change("cluster", &mut cluster);
    let listener = json!({"filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}]});
    json!({"static_resources": {"listeners": [listener], "clusters": [{"name": "up"}, cluster]}}).to_string()
}

/// `rate_limits` that send one fixed value.
fn limits(value: &str) -> Value {
    json!([{"actions": [{"generic_key": {"descriptor_value": value}}]}])
}

fn own(value: &str) -> Value {
    json!({"rate_limits": limits(value)})
}

/// Settings for the filter, of a type.
fn settings(name: &str, kind: &str, mut fields: Value) -> Value {
    fields["@type"] = type_url(kind).into();
    json!({"typed_per_filter_config": {name: fields}})
}

fn per_route(fields: Value) -> Value {
    settings(FILTER, "extensions.filters.http.ratelimit.v3.RateLimitPerRoute", fields)
}

fn filter_config(fields: Value) -> Value {
    settings(FILTER, "config.route.v3.FilterConfig", fields)
}

/// The descriptors that are said to reach a rule.
fn sent(notes: &[String]) -> Vec<&str> {
    notes.iter().filter_map(|note| Some(note.split_once(": rule `")?.0)).collect()
}

/// Each case was observed with a recording rate limit service: the changes, what is sent, and a problem if there is one.
#[test]
fn what_is_sent_is_what_envoy_sends() {
    let staged = |stage: u64, value: &str| {
        let mut entries = limits(value);
        entries[0]["stage"] = stage.into();
        json!({"rate_limits": entries})
    };
    let part = |part: &'static str, value: Value| (part, value);
    let route = || part("action", own("route"));
    let host = || part("host", own("host"));
    let include = || part("action", json!({"include_vh_rate_limits": true}));
    let zero = json!({"filter_enabled": {"default_value": {"numerator": 0}}});
    let weighted = json!({"weighted_clusters": {"clusters": [
        {"name": "up", "typed_per_filter_config": per_route(own("weighted"))["typed_per_filter_config"]}]}});
    let ignored = "Envoy ignores the descriptor";
    let nothing = "the filter sends nothing";
    type Case<'c> = (Vec<(&'static str, Value)>, &'c [&'c str], Option<&'c str>);
    let cases: Vec<Case<'_>> = vec![
        (vec![route()], &["generic_key=route"], None),
        (vec![host()], &["generic_key=host"], None),
        (vec![route(), host()], &["generic_key=route"], Some(ignored)),
        (vec![route(), host(), include()], &["generic_key=route", "generic_key=host"], None),
        (
            vec![route(), host(), part("route", per_route(json!({"vh_rate_limits": "INCLUDE"})))],
            &["generic_key=route", "generic_key=host"],
            None,
        ),
        (vec![host(), part("route", per_route(json!({"vh_rate_limits": "IGNORE"})))], &[], Some(nothing)),
        // A route's entries of another stage hide those of the virtual host all the same.
        (vec![part("action", staged(1, "route")), host()], &[], Some(nothing)),
        (
            vec![part("action", staged(3, "route")), part("filter", json!({"stage": 3}))],
            &["generic_key=route"],
            None,
        ),
        (vec![route(), part("route", per_route(own("per")))], &["generic_key=per"], Some(ignored)),
        (
            vec![part("filter", own("own")), part("route", per_route(own("per")))],
            &["generic_key=per"],
            Some(ignored),
        ),
        (vec![part("filter", own("own"))], &["generic_key=own"], None),
        (
            vec![part(
                "host",
                json!({"routes": [], "matcher": {"on_no_match": {"action": {"typed_config": {
                "@type": type_url("config.route.v3.Route"), "route": own("matched")}}}}}),
            )],
            &["generic_key=matched"],
            None,
        ),
        (vec![part("action", weighted)], &["generic_key=weighted"], None),
        // Settings of two levels are not merged.
        (
            vec![route(), part("host", per_route(own("host"))), part("route", per_route(json!({})))],
            &["generic_key=route"],
            Some(ignored),
        ),
        (
            vec![part("host", per_route(own("host"))), part("route", filter_config(json!({"config": {}})))],
            &["generic_key=host"],
            None,
        ),
        (vec![route(), part("route", filter_config(json!({"disabled": true})))], &[], Some(nothing)),
        (
            vec![
                route(),
                part("host", filter_config(json!({"disabled": true}))),
                part("route", per_route(json!({}))),
            ],
            &["generic_key=route"],
            None,
        ),
        (vec![route(), part("entry", json!({"disabled": true}))], &[], Some("the filter is disabled")),
        (
            vec![
                route(),
                part("entry", json!({"disabled": true})),
                part("host", filter_config(json!({"config": {}}))),
            ],
            &["generic_key=route"],
            None,
        ),
        (vec![route(), part("filter", zero)], &[], Some("`filter_enabled` is 0 %")),
        (
            vec![host(), part("route", json!({"route": null, "direct_response": {"status": 200}}))],
            &[],
            Some("responds itself"),
        ),
    ];
    for (changes, expected, problem) in cases {
        let text = config(&changes);
        let (problems, _, notes) = findings(&text, Some(RULES));
        assert_eq!(sent(&notes), expected, "{changes:#?}: {problems:#?}");
        match problem {
            None => assert_eq!(problems, Vec::<String>::new(), "{changes:#?}"),
            Some(part) => {
                assert!(
                    problems.len() == 1 && problems[0].contains(part),
                    "{part}: {problems:#?} {changes:#?}"
                );
            }
        }
    }
}

#[test]
fn settings_of_a_route_are_for_the_filter_of_their_name() {
    let per = own("per");
    let kind = "extensions.filters.http.ratelimit.v3.RateLimitPerRoute";
    let wrong = [("route", settings("ratelimit", kind, per)), ("action", own("route"))];
    let (problems, _, notes) = findings(&config(&wrong), Some(RULES));
    assert_eq!(sent(&notes), ["generic_key=route"]);
    assert!(
        problems.len() == 1 && problems[0].contains("no rate limit filter here is named `ratelimit`"),
        "{problems:#?}"
    );

    let other = [("action", own("route")), ("route", per_route(json!({"domain": "other"})))];
    let problems = problems_of(&other);
    assert!(problems.len() == 1 && problems[0].contains("no rules for domain `other`"), "{problems:#?}");
    assert!(problems[0].contains("typed_per_filter_config"), "where the domain is written: {problems:#?}");
}

fn problems_of(changes: &[(&str, Value)]) -> Vec<String> {
    problems(&config(changes), Some(RULES))
}

/// Each of these is refused by `envoy --mode validate`, or makes Envoy do something else than is written.
#[test]
fn what_envoy_refuses_or_ignores_is_a_problem() {
    let route = |entry: Value| ("action", json!({"rate_limits": [entry]}));
    let address = json!([{"remote_address": {}}]);
    let options = |fields: Value| {
        let mut fields = fields;
        fields["@type"] = type_url("extensions.upstreams.http.v3.HttpProtocolOptions").into();
        ("cluster", json!({"typed_extension_protocol_options": {"o": fields}}))
    };
    let ok = ("host", own("host"));
    for (change, part) in [
        (route(json!({"stage": 11, "actions": address})), "`stage: 11` is above 10"),
        (("filter", json!({"stage": 11})), "Envoy refuses `stage: 11`"),
        (
            ("filter", json!({"rate_limits": [{"stage": 0, "actions": address}]})),
            "only for `rate_limits` of routes",
        ),
        (
            ("route", per_route(json!({"rate_limits": [{"stage": 1, "actions": address}]}))),
            "only for `rate_limits` of routes",
        ),
        (route(json!({"actions": [{"remote_addres": {}}]})), "did you mean `remote_address`?"),
        (route(json!({"actions": [{"who": {}}]})), "there is no action `who`"),
        (
            route(json!({"actions": [{"remote_address": {}, "source_cluster": {}}]})),
            "both `remote_address` and",
        ),
        (
            route(json!({"actions": [{"generic_key": {"descriptor_value": 5}}]})),
            "has no `descriptor_value`, or not as text",
        ),
        (
            route(json!({"actions": [{"generic_key": {"descriptor_valu": "x"}}]})),
            "did you mean `descriptor_value`?",
        ),
        (route(json!({"actions": [{"masked_remote_address": {"v4_prefix_mask_len": 33}}]})), "is above 32"),
        (route(json!({"action": [], "actions": address})), "did you mean `actions`?"),
        (route(json!({"hits_addend": {"number": 5}, "actions": address})), "Envoy ignores `hits_addend`"),
        (("filter", json!({"domian": "edge"})), "Envoy refuses `domian`"),
        (("filter", json!({"request_type": "intern"})), "Envoy refuses `request_type: intern`"),
        (("route", filter_config(json!({}))), "Envoy refuses FilterConfig without `config`"),
        (
            options(json!({"use_downstream_protocol_config": {"http2_protocol_options": {}}})),
            "uses the client's version",
        ),
        (options(json!({"auto_config": {}})), "needs TLS"),
        (options(json!({"explicit_http_config": {"http_protocol_options": {}}})), "does not use HTTP/2"),
    ] {
        let found = problems_of(&[ok.clone(), change.clone()]);
        assert!(
            !found.iter().any(|problem| problem.contains("no route or virtual host has")),
            "{change:?}: {found:#?}"
        );
        assert!(found.iter().any(|problem| problem.contains(part)), "{change:?}: {found:#?}");
    }
    for change in [
        (
            "filter",
            json!({"rate_limit_service": {"grpc_service": {"envoy_grpc": {"cluster_name": "tollgate"}}}}),
        ),
        ("filter", json!({"rate_limits": [{"hits_addend": {"number": 5}, "actions": address}]})),
        ("cluster", json!({"typed_extension_protocol_options": null, "http2_protocol_options": {}})),
        ("filter", json!({"filter_enabled": {"runtime_key": "k", "default_value": {"numerator": 0}}})),
    ] {
        let host = if change.1["rate_limits"].is_null() { own("host") } else { json!({}) };
        assert_eq!(problems_of(&[("host", host), change.clone()]), Vec::<String>::new(), "{change:?}");
    }
}

#[test]
fn what_narrows_a_filter_is_said() {
    for (change, part) in [
        (json!({"timeout": "0s"}), "waits for a slow server without end"),
        (json!({"request_type": "internal"}), "only internal requests"),
        (json!({"filter_enforced": {"default_value": {"numerator": 0}}}), "lets denied requests pass"),
        (
            json!({"filter_enabled": {"runtime_key": "k", "default_value": {"numerator": 0}}}),
            "only if its runtime",
        ),
    ] {
        let (problems, warnings, _) = findings(&config(&[("filter", change), ("host", own("host"))]), None);
        assert_eq!(problems, Vec::<String>::new());
        assert!(warnings.len() == 1 && warnings[0].contains(part), "{part}: {warnings:#?}");
    }
}

/// Filters of other kinds have `rate_limits`, too.
#[test]
fn a_local_filter_s_descriptors_are_not_sent() {
    let local = json!({"name": "local", "typed_config": {
        "@type": type_url("extensions.filters.http.local_ratelimit.v3.LocalRateLimit"), "rate_limits": limits("local")}});
    let text = config(&[("host", own("host"))]);
    let mut tree: Value = serde_json::from_str(&text).expect("JSON");
    let manager =
        &mut tree["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    manager["http_filters"].as_array_mut().expect("a list").insert(0, local);
    let (problems, _, notes) = findings(&tree.to_string(), Some(RULES));
    assert_eq!((problems, sent(&notes)), (vec![], vec!["generic_key=host"]));
}

#[test]
fn nothing_that_limits_is_a_problem() {
    let text = config(&[("manager", json!({"http_filters": []}))]);
    let found = problems(&text, Some(RULES));
    assert!(found.len() == 1 && found[0].contains("no filter and no actions"), "{found:#?}");
    let authz = json!({"http_filters": [{"typed_config": {"@type": type_url("extensions.filters.http.ext_authz.v3.ExtAuthz")}}]});
    assert_eq!(problems(&config(&[("manager", authz)]), None), Vec::<String>::new());
}

/// A percent sign alone is no operator, and masked addresses have the length of the mask.
#[test]
fn values_are_those_that_envoy_sends() {
    let rules = "domain: edge\ndescriptors:\n  - {key: generic_key, value: half, limit: 1/s}\n  \
        - {key: generic_key, value: 50%, name: fifty, limit: 1/s}\n  \
        - {key: masked_remote_address, value: 10.0.0.0/8, name: inside, limit: 1/s}\n  - {key: remote_address, value: \"10.*\", limit: 1/s}\n";
    for (action, is_matched) in [
        (json!({"generic_key": {"descriptor_value": "50%"}}), true),
        (json!({"generic_key": {"descriptor_value": "60%"}}), false),
        (json!({"generic_key": {"descriptor_value": "%REQ(x)%"}}), true),
        (json!({"masked_remote_address": {}}), false),
        (json!({"masked_remote_address": {"v4_prefix_mask_len": 8}}), true),
        (json!({"masked_remote_address": {"v4_prefix_mask_len": 16}}), false),
        (json!({"remote_address": {}}), true),
    ] {
        let found =
            problems(&config(&[("host", json!({"rate_limits": [{"actions": [action]}]}))]), Some(rules));
        assert_eq!(found.is_empty(), is_matched, "{action}: {found:#?}");
    }
}

/// Two keys with many values each: every rule is found, and the time does not grow with their product.
#[test]
fn many_values_are_walked_and_not_combined() {
    let mut rules = String::from("domain: edge\ndescriptors:\n");
    for tenant in 0..300 {
        rules += &format!("  - key: tenant\n    value: t{tenant}\n    descriptors:\n");
        for plan in 0..20 {
            rules += &format!(
                "      - {{key: plan, value: p{tenant}-{plan}, name: r{tenant}-{plan}, limit: 1/s}}\n"
            );
        }
    }
    let header = |key: &str| json!({"request_headers": {"header_name": key, "descriptor_key": key}});
    let host = json!({"rate_limits": [{"actions": [header("tenant"), header("plan")]}]});
    let (problems, warnings, _) = findings(&config(&[("host", host)]), Some(&rules));
    assert_eq!((problems, warnings), (vec![], vec![]));
    // Of the first key alone, no rule is reached.
    let host = json!({"rate_limits": [{"actions": [header("tenant")]}]});
    assert_eq!(self::problems(&config(&[("host", host)]), Some(&rules)).len(), 1);
}

/// An entry that may be missing leaves a shorter descriptor, which may be the one that rules match.
#[test]
fn optional_entries_may_be_left_out() {
    let optional =
        json!({"request_headers": {"header_name": "x", "descriptor_key": "x", "skip_if_absent": true}});
    let host = json!({"rate_limits": [{"actions": [optional, {"remote_address": {}}]}]});
    let (problems, _, notes) = findings(&config(&[("host", host)]), Some(RULES));
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!(sent(&notes), ["x → remote_address"]);
}

fn network(filters: &[Value]) -> String {
    json!({"filter_chains": [{"filters": filters}]}).to_string()
}

#[test]
fn descriptors_of_connections_are_checked() {
    let limit = |value: &str| {
        json!({"typed_config": {
            "@type": type_url("extensions.filters.network.ratelimit.v3.RateLimit"), "domain": "edge", "timeout": "0.1s",
            "descriptors": [{"entries": [{"key": value, "value": "x"}]}],
            "rate_limit_service": {"grpc_service": {"google_grpc": {"target_uri": "t:1"}}}}})
    };
    let proxy =
        json!({"typed_config": {"@type": type_url("extensions.filters.network.tcp_proxy.v3.TcpProxy")}});
    let (found, _, notes) = findings(&network(&[limit("generic_key"), proxy.clone()]), Some(RULES));
    assert_eq!((found, sent(&notes)), (vec![], vec!["generic_key=x"]));
    let found = problems(&network(&[limit("other"), proxy.clone()]), Some(RULES));
    assert!(found.len() == 1 && found[0].contains("no rule matches the descriptor other=x"), "{found:#?}");
    let found = problems(&network(&[proxy, limit("generic_key")]), Some(RULES));
    assert!(found.len() == 1 && found[0].contains("after the filter that ends the chain"), "{found:#?}");
}

fn example(name: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
    std::fs::read_to_string(path).expect("the example")
}

#[test]
fn buckets_of_the_quota_filter_are_checked() {
    let (text, rules) = (example("envoy-quota/envoy.yaml"), example("envoy-quota/rules.yaml"));
    let (problems, warnings, notes) = findings(&text, Some(&rules));
    assert_eq!((problems, warnings), (vec![], vec![]), "{notes:#?}");
    for part in [
        "quota filter: Envoy reports its requests to cluster `tollgate` for domain `edge`",
        "bucket tenant: until the first assignment Envoy denies all",
        "tenant: rule `",
    ] {
        assert!(notes.iter().any(|note| note.contains(part)), "`{part}` in {notes:#?}");
    }
    for (from, to, part) in [
        ("domain: edge", "domain: egde", "no rules for domain `egde`"),
        ("tenant: {custom_value", "tenants: {custom_value", "no rule matches the descriptor tenants"),
        ("cluster_name: tollgate}", "cluster_name: other}", "there is no cluster `other`"),
        ("bucket_matchers", "bucket_matcher", "nothing is limited"),
    ] {
        assert!(text.contains(from), "{from}");
        let found = self::problems(&text.replacen(from, to, 1), Some(&rules));
        assert!(found.iter().any(|problem| problem.contains(part)), "{to}: {found:#?}");
    }
}

/// Two filters, each with settings of its own in the route.
#[test]
fn the_example_with_two_filters_has_no_problems() {
    let documents = document::parse("envoy.yaml", &example("envoy-llm/envoy.yaml")).expect("documents");
    let sources =
        ["rules.yaml", "llm.yaml"].map(|name| Source::new(name, example(&format!("envoy-llm/{name}"))));
    let rules = Ruleset::load(&sources, &Options::default()).expect("valid rules");
    let mut report = Report::default();
    check(&documents, Some(&rules), &mut report);
    let levels: Vec<_> = report.findings.iter().filter(|one| one.fix.is_some()).collect();
    assert!(levels.is_empty(), "{levels:#?}");
}
