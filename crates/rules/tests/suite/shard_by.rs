//! `shard_by`: where a request's counters lie. Their first value is the hash tag of a Redis key, so equal first values share
//! a slot, and one call decides them together.

use tollgate_core::{Cost, KeyPart};
use tollgate_rules::{Descriptor, Options, Plan, Ruleset, Source, Unit};

fn load(text: &str) -> Ruleset {
    let options = Options { lease_shared: true, ..Options::default() };
    Ruleset::load(&[Source::new("t.yaml", text)], &options).unwrap_or_else(|errors| panic!("{errors}"))
}

const RULES: &str = "
domain: d
shard_by: customer
descriptors:
  - {key: user, name: user, limit: [9/s, 99/minute]}
  - {key: api_key, name: key, limit: 9/s}
  - {key: customer, name: customer, limit: 9/s, descriptors: [{key: path, name: path, limit: 8/s}]}
  - {key: customer, value: acme, name: acme, limit: 7/s}
  - {key: customer, value: \"big*\", share_threshold: true, name: group, limit: 7/s}
  - {key: endpoint, name: endpoint, limit: 9/s}
  - {key: endpoint, value: GET /x, name: x, limit: 9/s, descriptors: [{key: customer, name: deep, limit: 8/s}]}
  - {key: remote_address/24, name: network, limit: 9/s}
  - {key: busy, name: split, split: 4, limit: 40/s}
  - {key: quiet, name: shadow, shadow: true, limit: 9/s}
  - {key: either, name: quota, quota_mode: true, limit: 9/s, candidate: 5/s}
  - {key: global, name: global, limit: 999/s}
  - {key: global, value: aggregate, descriptors: [{key: endpoint, name: all, limit: 99/s}]}
";

/// Names the counters of a plan: rule and values.
fn counters(plan: &Plan<'_>) -> Vec<(String, Vec<String>)> {
    let counter = |matched| {
        let key = plan.charge(matched, Default::default()).key;
        let name = matched.rule.map_or_else(|| "inline".to_owned(), |rule| rule.name.clone());
        (name, key.parts.iter().map(ToString::to_string).collect())
    };
    plan.limits.iter().map(counter).collect()
}

const ALL: [(&str, &str); 8] = [
    ("user", "ada"),
    ("api_key", "k"),
    ("endpoint", "POST /y"),
    ("path", "/y"),
    ("remote_address", "192.0.2.1"),
    ("busy", "b"),
    ("quiet", "q"),
    ("either", "e"),
];

/// What a customer's request charges lies in the customer's slot, nested or not; only what all callers share does not.
#[test]
fn every_counter_of_a_customers_request_has_the_customer_first() {
    let rules = load(RULES);
    let domain = rules.domain("d").unwrap();
    for customer in ["acme", "umbrella", ""] {
        for endpoint in ["POST /y", "GET /x"] {
            let mut request: Vec<(&str, &str)> =
                ALL.iter().copied().filter(|(key, _)| *key != "endpoint").collect();
            request.extend([("endpoint", endpoint), ("customer", customer)]);
            let plan = domain.plan(&request, Cost::ONE);
            let found = counters(&plan);
            assert!(found.len() >= 10, "{found:?}");
            for (rule, values) in found.iter().filter(|(rule, _)| !matches!(rule.as_str(), "global" | "all"))
            {
                assert_eq!(values.first().map(String::as_str), Some(customer), "{rule}: {values:?}");
            }
            let of =
                |name: &str| found.iter().find(|(rule, _)| rule == name).map(|(_, values)| values.as_slice());
            assert_eq!(of("user"), Some(&[customer.to_owned(), "ada".to_owned()][..]));
            assert_eq!(of("split").map(<[String]>::len), Some(3), "customer, shard, value");
            match customer {
                "acme" => assert_eq!(of("acme").map(<[String]>::len), Some(1)),
                _ => assert_eq!(of("path").map(<[String]>::len), Some(2), "not twice"),
            }
        }
    }
    // What all customers of a pattern share cannot lie with each of them.
    let plan = domain.plan(&[("customer", "big one")], Cost::ONE);
    assert_eq!(counters(&plan)[0], ("group".to_owned(), vec![]));
}

/// Requests without the attribute are limited as if there were no `shard_by`.
#[test]
fn without_the_attribute_counters_are_as_without_the_setting() {
    let (sharded, plain) = (load(RULES), load(&RULES.replace("shard_by: customer\n", "")));
    let plans = [&sharded, &plain].map(|rules| {
        let plan = rules.domain("d").unwrap().plan(&ALL, Cost::ONE);
        let scopes: Vec<String> =
            plan.limits.iter().map(|matched| matched.limit.scope.label().to_owned()).collect();
        let found: Vec<_> = counters(&plan).into_iter().filter(|(rule, _)| rule != "split").collect();
        (found, scopes)
    });
    assert_eq!(plans[0], plans[1]);
}

/// One descriptor names the customer for all descriptors of an RLS request, and for limits that come with it.
#[test]
fn descriptors_share_the_customer_of_the_request() {
    let rules = load(RULES);
    let descriptors = [
        Descriptor { entries: &[("user", "ada")], ..Descriptor::default() },
        Descriptor {
            entries: &[("api_key", "k")],
            limit: Some((5, Unit::Hour.length())),
            ..Descriptor::default()
        },
        Descriptor {
            entries: &[("customer", "umbrella")],
            limit: Some((5, Unit::Hour.length())),
            ..Descriptor::default()
        },
        Descriptor { entries: &[("customer", "umbrella")], ..Descriptor::default() },
    ];
    let plan = rules.domain("d").unwrap().plan_descriptors(&descriptors, Cost::ONE);
    let found = counters(&plan);
    assert_eq!(found.len(), 5, "{found:?}");
    assert!(found.iter().all(|(_, values)| values[0] == "umbrella"), "{found:?}");
    assert_eq!(found[3].1.len(), 1, "{found:?}");
}

/// A split counter's charge moves between shards without leaving the customer's slot.
#[test]
fn a_moved_shard_stays_with_the_customer() {
    let rules = load(RULES);
    let request = [("busy", "b"), ("customer", "umbrella")];
    let mut plan = rules.domain("d").unwrap().plan(&request, Cost::ONE);
    let at =
        plan.limits.iter().position(|matched| matched.rule.is_some_and(|rule| rule.name == "split")).unwrap();
    for shard in 0..4 {
        plan.move_to_shard(at, shard);
        let key = plan.charge(&plan.limits[at], Default::default()).key;
        let name = plan.limits[at].shard_names()[usize::from(shard)];
        assert_eq!(key.parts, [KeyPart::Text("umbrella"), KeyPart::Text(name), KeyPart::Text("b")]);
    }
}

/// Where callers no longer share a counter, it is charged with the others instead of being leased on its own.
#[test]
fn counters_of_a_customer_are_not_shared_by_callers() {
    let rules = load(RULES);
    let shared = |name: &str| rules.rules().iter().find(|rule| rule.name == name).unwrap().shared_by_callers;
    assert!(!shared("endpoint") && !shared("x") && shared("all"));
    let settings = rules.rules()[0].settings();
    assert!(settings.contains(&("shard_by", "customer".to_owned())), "{settings:?}");
}

/// An API key that places counters is as secret there as anywhere.
#[test]
fn a_secret_stays_one() {
    let rules = load(
        "{domain: d, shard_by: api_key, descriptors: [{key: user, limit: 9/s}, {key: api_key, limit: 9/s}]}",
    );
    let request = [("user", "ada"), ("api_key", "sk_live_1234567890")];
    let plan = rules.domain("d").unwrap().plan(&request, Cost::ONE);
    for matched in &plan.limits {
        let first = plan.charge(matched, Default::default()).key.parts[0];
        assert_eq!(first, KeyPart::Secret("sk_live_1234567890"));
    }
}

#[test]
fn what_cannot_place_counters_is_refused() {
    for (text, message) in [
        ("{domain: d, shard_by: \"\"}", "`shard_by` must name an attribute"),
        ("{domain: d, shard_by: global}", "`shard_by` must name an attribute"),
        ("{domain: d, shard_by: [a]}", "`shard_by` must be text"),
        ("{domain: d, profile: envoy, shard_by: customer}", "`shard_by` would change the arithmetic"),
    ] {
        let errors = Ruleset::load(&[Source::new("t", text)], &Options::default()).expect_err(text);
        assert!(errors.to_string().contains(message), "{errors}");
    }
}
