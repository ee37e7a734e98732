//! Each warning where it is right, and silence where it would be wrong.

use crate::{Options, PermitRelease, Ruleset, Source};

fn warnings(descriptors: &str) -> Vec<String> {
    warnings_with(&format!("domain: d\ndescriptors:\n{descriptors}"), &Options::default())
}

fn warnings_with(text: &str, options: &Options) -> Vec<String> {
    let source = Source::new("t.yaml", text);
    let rules = Ruleset::load(&[source], options).unwrap_or_else(|errors| panic!("{errors}"));
    rules
        .warnings()
        .iter()
        .map(|warning| format!("{}:{} {}", warning.line, warning.column, warning.message))
        .collect()
}

#[test]
fn lints_name_the_rule_and_its_location() {
    for (descriptors, expected) in [
        // can never match
        (
            "- {key: a, value: \"x*\", limit: 1/s}\n- {key: a, value: \"xy*\", limit: 1/s}",
            "4:3 `a=xy*` can never match: the earlier `a=x*` matches all its values",
        ),
        (
            "- {key: a, value: \"*\", limit: 1/s}\n- {key: a, limit: 1/s}",
            "4:3 `a` alone can never match: `a=*` matches every value",
        ),
        // does nothing
        ("- {key: a}", "3:3 `a` has no limit and no descriptors, so it has no effect"),
        (
            "- {key: a, rate_limit: {unit: minute}}",
            "3:12 `rate_limit` has no `requests_per_unit`: it is 0, which denies every request",
        ),
        (
            "- {key: a, limit: 1/s, replaces: [{name: nobody}]}",
            "3:3 no rule of this domain has the name `nobody`, so `replaces` has no effect",
        ),
        // never bites
        (
            "- {key: a, limit: [10/second, 1000/minute]}",
            "3:31 `1000/1m` never denies: `10/1s` beside it is always reached first",
        ),
        (
            "- {key: a, algorithm: fixed_window, limit: [10/second, 600/minute]}",
            "3:56 `600/1m` never denies: `10/1s` beside it is always reached first",
        ),
        (
            "- {key: a, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
            "3:60 `20/1m` never denies a check by attributes: `10/1m` of its parent `a` is always reached first",
        ),
        (
            "- {key: a, limit: 10/s, soft: 10}",
            "3:31 the soft limit is not below the limit, so it has no effect",
        ),
        (
            "- {key: a, limit: 10/s, soft: 100%}",
            "3:31 the soft limit is not below the limit, so it has no effect",
        ),
        // limits less than it seems to
        (
            "- {key: user, limit: 5/s, descriptors: [{key: X-Request-Id, limit: 1/s}]}",
            "3:41 `X-Request-Id` differs in every request: a counter for each value never reaches a limit",
        ),
        (
            "- {key: user, class: security, algorithm: fixed_window, limit: 5/minute}",
            "3:64 a fixed window of `5/1m` admits twice as much around its boundary, on a rule of `class: security`",
        ),
        (
            "- {key: endpoint, value: x, class: security, descriptors: [{key: user, limit: 5/day in UTC}]}",
            "3:79 a fixed window of `5/calendar day in UTC` admits twice as much around its boundary, on a rule of `class: security`",
        ),
    ] {
        assert_eq!(warnings(descriptors), [expected], "{descriptors}");
    }
}

/// Which protocols serve a file decides whether its permits are released.
#[test]
fn permits_that_are_never_released_are_reported() {
    let warned = |concurrency: &str, permits| {
        let text = format!("{{domain: d, descriptors: [{{key: a, concurrency: {concurrency}}}]}}");
        warnings_with(&text, &Options { permits, ..Options::default() }).len()
    };
    for (permits, bare, with_ttl) in
        [(PermitRelease::Unknown, 1, 0), (PermitRelease::Expire, 1, 1), (PermitRelease::Released, 0, 0)]
    {
        assert_eq!((warned("20", permits), warned("{limit: 20}", permits)), (bare, bare), "{permits:?}");
        assert_eq!(warned("{limit: 20, ttl: 2s}", permits), with_ttl, "{permits:?}");
    }
}

/// On a cluster each slot is a call of its own; elsewhere the same rules cost nothing more.
#[test]
fn several_slots_are_reported_for_clusters_alone() {
    let four = "[{key: user, limit: 9/s}, {key: api_key, limit: 9/s}, {key: customer, limit: 9/s}, \
                {key: endpoint, limit: 9/s}]";
    let nested = "[{key: customer, limit: 99/s, descriptors: [{key: user, limit: 9/s}, {key: endpoint, value: x, limit: 8/s}]}]";
    let warned = |head: &str, rules: &str, cluster| {
        let options = Options { cluster: Some(cluster), lease_shared: true, ..Options::default() };
        warnings_with(&format!("domain: d\n{head}descriptors: {rules}"), &options)
    };
    let found = warned("", four, true);
    assert_eq!(found.len(), 1, "{found:?}");
    // What all callers share is leased, and needs no call.
    assert!(found[0].contains("need 3 slots, by `api_key`, `customer`, `user`"), "{found:?}");
    assert_eq!(warned("", four, false), Vec::<String>::new());
    assert_eq!(warned("shard_by: customer\n", four, true), Vec::<String>::new());
    assert_eq!(warned("", nested, true), Vec::<String>::new());
    // Where the store is not known, it is a note.
    let text = format!("domain: d\ndescriptors: {four}");
    let alone = Ruleset::load(&[Source::new("t", text)], &Options::default()).unwrap();
    assert!(
        alone.warnings().is_empty() && alone.notes()[0].message.contains("need 3 slots"),
        "{:?}",
        alone.notes()
    );
    assert!(
        warned("shard_by: request_id\n", nested, false)[0].starts_with("2:11 `shard_by: request_id` differs")
    );
    assert!(warned("shard_by: endpoint\n", nested, false)[0].contains("does not identify a caller"));
}

/// Requests are counted as GET where they are HEAD, so such a rule limits nothing.
#[test]
fn rules_on_head_are_reported() {
    for rule in [
        "- {key: endpoint, value: HEAD /x, limit: 1/s}",
        "- {key: endpoint, value: \"HEAD /x/*\", limit: 1/s}",
        "- {key: method, value: HEAD, limit: 1/s}",
        "- {key: api_key, limit: 9/s, descriptors: [{key: method, value: head, limit: 1/s}]}",
    ] {
        let found = warnings(rule);
        assert_eq!(found.len(), 1, "{rule}: {found:?}");
        assert!(found[0].contains("HEAD as GET"), "{found:?}");
    }
    for rule in
        ["- {key: endpoint, value: GET /HEAD, limit: 1/s}", "- {key: header, value: HEAD, limit: 1/s}"]
    {
        assert_eq!(warnings(rule), Vec::<String>::new(), "{rule}");
    }
}

#[test]
fn effective_rules_have_no_lints() {
    for descriptors in [
        // an exact value beats an earlier wildcard; a narrower wildcard before a wider one is reached
        "- {key: a, value: \"x*\", limit: 1/s}\n- {key: a, value: xy, limit: 1/s}",
        "- {key: a, value: \"xy*\", limit: 1/s}\n- {key: a, value: \"x*\", limit: 1/s}",
        "- {key: a, value: \"x*z\", limit: 1/s}\n- {key: a, value: \"x*\", limit: 1/s}\n- {key: a, limit: 1/s}",
        "- {key: a, value: \"*b*\", limit: 1/s}\n- {key: a, value: \"*ab*\", limit: 1/s}",
        // an exception
        "- {key: a, value: x}\n- {key: a, limit: 1/s}",
        // each window is reached by somebody
        "- {key: a, limit: [10/second, 200/minute, 5000/day]}",
        "- {key: a, algorithm: fixed_window, limit: [10/second, 599/minute]}",
        "- {key: a, limit: [{count: 10, period: second, burst: 700}, 601/minute]}",
        // where denied requests are counted all the same, the looser window is reached
        "- {key: a, shadow: true, limit: [10/second, 1000/minute]}",
        "- {key: a, quota_mode: true, limit: [10/second, 1000/minute]}",
        "- {key: a, action: degrade, limit: [10/second, 1000/minute]}",
        "- {key: a, limit: 10/minute, descriptors: [{key: b, shadow: true, limit: 20/minute}]}",
        // a parent that never denies, or counts other units, or is looser
        "- {key: a, shadow: true, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, action: degrade, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, cost: tokens, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, limit: 100/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, limit: 10/s, soft: 80%}",
        // a fixed window whose bursts something bounds, or that protects no secret
        "- {key: a, class: security, algorithm: fixed_window, limit: [5/minute, {count: 2, period: 1s, algorithm: gcra}]}",
        "- {key: a, class: security, algorithm: fixed_window, limit: 1/minute}",
        "- {key: a, class: security, algorithm: strict_window, limit: 5/minute}",
        "- {key: a, class: security, limit: 5/minute}",
        "- {key: a, class: security, algorithm: fixed_window, shadow: true, limit: 5/minute}",
        "- {key: a, algorithm: fixed_window, limit: 5/minute}",
        // an exact value repeats
        "- {key: request_id, value: probe, limit: 5/minute}",
        "- {key: a, limit: 1/s, replaces: [{name: n}]}\n- {key: b, limit: 1/s, name: n}",
    ] {
        assert_eq!(warnings(descriptors), Vec::<String>::new(), "{descriptors}");
    }
}

/// A rule that matches nothing limits nothing: what Tollgate derives from requests has one spelling.
#[test]
fn names_and_values_that_no_request_has_are_reported() {
    for (descriptor, said) in [
        ("{key: endpoint, value: /login, limit: 900/s}", "begins with its method"),
        ("{key: endpoint, value: \"/api/*\", limit: 900/s}", "begins with its method"),
        ("{key: endpoint, value: post /orders, limit: 900/s}", "the method in capitals"),
        (
            "{key: user, limit: 9/s, descriptors: [{key: endpoint, value: \"Get /a/*\", limit: 1/s}]}",
            "the method in capitals",
        ),
        ("{key: endpoint, value: \"POST  /orders\", limit: 900/s}", "a space, and the path"),
        ("{key: endpoint, value: \"POST:/orders\", limit: 900/s}", "a space, and the path"),
        ("{key: endpoint, value: POST orders, limit: 900/s}", "a space, and the path"),
        ("{key: path, value: v1/orders, limit: 900/s}", "paths begin with `/`"),
        ("{key: method, value: post, limit: 900/s}", "methods are in capitals"),
        ("{key: remote_address, value: 10.0.0.0/8, limit: 9/s}", "this is a network"),
        ("{key: remote_address, value: \"2001:db8::/32\", limit: 9/s}", "this is a network"),
        ("{key: remote_address, value: \"2001:DB8:0::1\", limit: 9/s}", "in their shortest form"),
        ("{key: apikey, limit: 9/s}", "`apikey` is nearly `api_key`"),
        ("{key: API_KEY, limit: 9/s}", "`API_KEY` is nearly `api_key`"),
        ("{key: uesr, limit: 9/s}", "`uesr` is nearly `user`"),
        ("{key: users, limit: 9/s}", "`users` is nearly `user`"),
        ("{key: tennant, limit: 9/s}", "`tennant` is nearly `tenant`"),
        ("{key: endpiont, limit: 900/s}", "`endpiont` is nearly `endpoint`"),
        ("{key: remote_adress/24, limit: 9/s}", "`remote_adress` is nearly `remote_address`"),
        ("{key: user, cost: token, limit: 9/s}", "`cost: token` reads the attribute `token`"),
        (
            "{key: user, limit: [9/s, {count: 9, period: day, cost: token}]}",
            "`cost: token` reads the attribute `token`",
        ),
        ("{key: user, cost: requests, limit: 9/s}", "`cost: requests` reads the attribute `requests`"),
        ("{key: user, limit: 9/s, burst: 0}", "`burst: 0` denies every request"),
        ("{key: user, limit: [{count: 9, period: 1s, burst: 0}]}", "`burst: 0` denies every request"),
    ] {
        let found = warnings(&format!("- {descriptor}"));
        assert!(found.len() == 1 && found[0].contains(said), "{descriptor}: {found:#?}");
    }
    for overload in [
        "{priorities: [{when: {endpoint: post /pay}, priority: critical}], workers: {limit: 9}}",
        "{priorities: [{when: {endpiont: POST /pay}, priority: critical}], workers: {limit: 9}}",
    ] {
        let found = warnings_with(&format!("domain: d\noverload: {overload}"), &Options::default());
        assert_eq!(found.len(), 1, "{overload}: {found:?}");
    }
    // A file for that service names what Envoy sends.
    let envoy = "{domain: d, profile: envoy, descriptors: [{key: apikey, rate_limit: {unit: day, requests_per_unit: 5}}, \
                 {key: endpoint, value: /login, rate_limit: {unit: day, requests_per_unit: 500}}]}";
    assert_eq!(warnings_with(envoy, &Options::default()), Vec::<String>::new());
}

/// Whoever uses up a shared limit of a login shuts out all others.
#[test]
fn a_login_limit_that_all_callers_share_is_reported() {
    let is_found = |descriptors: &str| {
        let found = warnings(descriptors);
        assert!(
            found.len() < 2 && found.iter().all(|one| one.contains("locks out everybody")),
            "{descriptors}: {found:?}"
        );
        !found.is_empty()
    };
    for descriptors in [
        "- {key: endpoint, value: POST /api/v1/auth/login, limit: 5/minute}",
        "- {key: endpoint, value: \"POST /sign-in*\", limit: 5/minute}",
        "- {key: path, value: /reset_password, limit: 20/hour}",
        "- {key: endpoint, value: POST /transfer, class: security, limit: 5/minute}",
        "- {key: global, descriptors: [{key: endpoint, value: POST /login, limit: 5/minute}]}",
        "- {key: method, value: POST, descriptors: [{key: path, value: /login, limit: 5/minute}]}",
        "- {key: user, limit: 9/s}\n- {key: endpoint, value: POST /login, limit: 5/minute}",
    ] {
        assert!(is_found(descriptors), "{descriptors}");
    }
    for descriptors in [
        "- {key: remote_address, descriptors: [{key: endpoint, value: POST /login, limit: 5/minute}]}",
        "- {key: endpoint, value: POST /login, class: security, descriptors: [{key: user, limit: 5/minute}]}",
        // A second line behind a limit of each caller, and limits for all together.
        "- {key: endpoint, value: POST /login, limit: 60/minute, descriptors: [{key: user, limit: 5/minute}]}",
        "- {key: endpoint, value: POST /login, limit: 60/minute}\n- {key: user, descriptors: [{key: endpoint, value: POST /login, limit: 5/minute}]}",
        "- {key: endpoint, value: POST /login, limit: 500/second}",
        "- {key: endpoint, value: POST /login, limit: 5/minute, shadow: true}",
        "- {key: endpoint, value: POST /orders, limit: 5/minute}",
        "- {key: endpoint, value: GET /auth/status, limit: 5/minute}",
        "- {key: endpoint, value: POST /authors, limit: 5/minute}",
    ] {
        assert!(!is_found(descriptors), "{descriptors}");
    }
}

/// A day's requests in one second are no limit for what serves them.
#[test]
fn a_long_fixed_window_alone_is_reported() {
    let is_found = |descriptors: &str| {
        let found = warnings(descriptors);
        assert!(
            found.len() < 2 && found.iter().all(|one| one.contains("in a moment")),
            "{descriptors}: {found:?}"
        );
        !found.is_empty()
    };
    for descriptors in [
        "- {key: user, limit: {count: 10000, period: day, algorithm: fixed_window}}",
        "- {key: user, algorithm: fixed_window, limit: [5000/hour, 50000/day]}",
        "- {key: user, limit: 10000/day in Europe/Zurich}",
        "- {key: user, limit: 10/second, tiers: {pro: 10000/day in UTC}}",
        // Another caller's pace is none for this one.
        "- {key: user, limit: 10000/day in UTC}\n- {key: tenant, limit: 10/second}",
    ] {
        assert!(is_found(descriptors), "{descriptors}");
    }
    for descriptors in [
        "- {key: user, limit: [10/second, 10000/day in UTC]}",
        "- {key: user, limit: 10/second, descriptors: [{key: path, limit: 1000/day in UTC}]}",
        "- {key: user, limit: 10000/day in UTC}\n- {key: global, limit: 10/second}",
        "- {key: user, algorithm: fixed_window, limit: 600/minute}",
        "- {key: user, limit: 50/day in UTC}",
        "- {key: user, limit: {count: 1M, calendar: month, cost: tokens}}",
        "- {key: user, limit: 10000/day}",
    ] {
        assert!(!is_found(descriptors), "{descriptors}");
    }
}

/// What the file asks of all limits may not have been meant for this one.
#[test]
fn a_security_rule_with_the_bucket_of_its_file_is_reported() {
    let with = |head: &str, rule: &str| {
        warnings_with(&format!("domain: d\n{head}\ndescriptors:\n{rule}"), &Options::default())
    };
    let rule = "- {key: user, class: security, limit: 5/minute}";
    let found = with("algorithm: token_bucket", rule);
    assert!(found.len() == 1 && found[0].contains("nearly twice as much in its first period"), "{found:?}");
    for (head, rule) in [
        ("algorithm: strict_window", rule),
        ("class: security", "- {key: user, limit: 5/minute}"),
        ("algorithm: gcra", "- {key: user, class: security, limit: {count: 5, period: minute, burst: 2}}"),
        ("algorithm: gcra", "- {key: user, class: security, limit: 5/minute, algorithm: gcra}"),
    ] {
        assert_eq!(with(head, rule), Vec::<String>::new(), "{head}: {rule}");
    }
}

/// The unit of a soft limit is easily mistaken for a fraction.
#[test]
fn a_fraction_as_a_soft_limit_is_explained() {
    for (soft, help) in
        [("0.8", "soft: 80%"), ("{at: 0.95}", "soft: 95%"), ("1.5", "soft: 80%"), ("80.5%", "soft: 80%")]
    {
        let text = format!("domain: d\ndescriptors: [{{key: user, limit: 9/s, soft: {soft}}}]");
        let errors =
            Ruleset::load(&[Source::new("t", text)], &Options::default()).expect_err(soft).to_string();
        assert!(errors.contains(help), "{soft}: {errors}");
    }
}

/// Callers without a key have a limit; whoever invents a key has another one, for each key that it invents.
#[test]
fn limits_that_an_invented_value_passes_are_named() {
    let replaced = "domain: d
descriptors:
  - {key: remote_address, name: anonymous, limit: 60/hour}
  - {key: api_key, limit: 5000/hour, replaces: [{name: anonymous}]}
";
    let networks = replaced.replace("remote_address,", "remote_address/24/64,");
    let nested = "domain: d
descriptors:
  - {key: remote_address, name: anonymous, limit: 60/hour}
  - {key: api_key, descriptors: [{key: endpoint, limit: 50/hour, replaces: [{name: anonymous}]}]}
";
    let quota = "domain: d
descriptors:
  - {key: remote_address, limit: 60/hour, quota_mode: true}
  - {key: api_key, limit: 5000/hour, quota_mode: true}
";
    let options = |names: &[&str]| Options {
        unverified: Some(names.iter().map(|name| (*name).to_owned()).collect()),
        ..Options::default()
    };
    for (text, place) in [(replaced, "4:5"), (&networks, "4:5"), (nested, "4:34"), (quota, "4:5")] {
        let found = warnings_with(text, &options(&["api_key"]));
        assert!(found[0].starts_with(&format!("{place} a request with an invented `api_key`")), "{found:?}");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(warnings_with(text, &options(&[])), [""; 0], "the keys are known");
        let alone = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).expect("rules");
        let noted = alone.notes().iter().filter(|note| note.message.contains("invented `api_key`")).count();
        assert_eq!((alone.warnings().len(), noted), (0, 1), "{:?}", alone.notes());
    }
    let tenant = replaced.replace("api_key", "tenant");
    assert!(warnings_with(&tenant, &options(&["tenant"]))[0].contains("invented `tenant`"));
    assert_eq!(warnings_with(&tenant, &options(&["api_key"])), [""; 0], "a proxy sets it");
    let one_key = replaced.replace("key: api_key,", "key: api_key, value: k1, name: one,");
    assert_eq!(warnings_with(&one_key, &options(&["api_key"])), [""; 0], "it must be guessed");
    let one_tenant = tenant.replace("key: tenant,", "key: tenant, value: acme,");
    assert_eq!(warnings_with(&one_tenant, &options(&["tenant"])).len(), 1, "it can be guessed");
    // Both limits apply, so an invented key gains nothing.
    let both = "domain: d
descriptors:
  - {key: remote_address, limit: 60/hour}
  - {key: api_key, limit: 5000/hour}
";
    assert_eq!(warnings_with(both, &options(&["api_key"])), [""; 0]);
    let tiers = "domain: d
descriptors:
  - {key: remote_address, limit: 60/hour, tiers: {pro: 600/hour}}
";
    assert!(warnings_with(tiers, &options(&["tier"]))[0].contains("any client chooses its tier"));
    assert_eq!(warnings_with(tiers, &options(&["api_key"])), [""; 0]);
}
