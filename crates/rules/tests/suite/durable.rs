//! `durable`: which limits' consumption is also written to the database.

use tollgate_rules::{Options, Override, Ruleset, Source};

fn load(text: &str) -> Result<Ruleset, String> {
    Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).map_err(|errors| errors.to_string())
}

/// Names of the rules with the number of durable limits of each.
fn durable(text: &str) -> Vec<(String, usize)> {
    let rules = load(text).expect("valid rules");
    let count = |rule: &tollgate_rules::Rule| rule.all_limits().filter(|one| one.scope.is_durable()).count();
    rules.rules().iter().map(|rule| (rule.name.clone(), count(rule))).collect()
}

/// A monthly quota that a restart forgets is a second month for free.
#[test]
fn months_and_costs_are_durable_by_default_and_a_setting_wins() {
    let text = "
domain: d
descriptors:
  - {key: month, limit: [10/second, 1000/month in UTC]}
  - {key: thirty, limit: 1000/month}
  - {key: day, limit: 1000/day in UTC}
  - {key: cost, class: cost, concurrency: 5, limit: 1000/day}
  - {key: off, class: cost, durable: false, limit: 1000/month in UTC}
  - {key: said, durable: true, limit: 1000/day, tiers: {pro: 5000/day}}
  - {key: local, class: cost, mode: local, limit: 1000/day}
  - key: group
    durable: true
    descriptors:
      - {key: a, limit: 1000/day}
      - {key: b, durable: false, limit: 1000/day}
";
    let expected = [
        ("month", 1),
        ("thirty", 0),
        ("day", 0),
        ("cost", 1),
        ("off", 0),
        ("said", 2),
        ("local", 0),
        ("group/a", 1),
        ("group/b", 0),
    ];
    let expected: Vec<(String, usize)> =
        expected.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    assert_eq!(durable(text), expected);
    let rules = load(text).expect("valid rules");
    assert_eq!(rules.durable_rule(), Some("said"));
    assert!(rules.may_be_durable());
    let setting = |name: &str| {
        let rule = rules.rules().iter().find(|rule| rule.name == name).expect("a rule");
        rule.settings().into_iter().find(|(key, _)| *key == "durable").map(|(_, value)| value)
    };
    assert_eq!(setting("month").as_deref(), Some("true"));
    assert_eq!(setting("off").as_deref(), Some("false"));
    assert_eq!(setting("day"), None);
    // A whole file; a counter is the same one whether it is durable or not.
    let file = durable("domain: d\ndurable: true\ndescriptors: [{key: day, limit: 1000/day in UTC}]");
    assert_eq!(file, [("day".to_owned(), 1)]);
}

/// A caller's own limit with another period must survive as the rule's does.
#[test]
fn an_override_is_as_durable_as_its_rule() {
    let rules =
        load("domain: d\ndescriptors: [{key: api_key, durable: true, limit: 1000/day}]").expect("valid");
    let own = Override::new("default", 5, "week");
    let (compiled, errors) = rules.compile_overrides("api_key", None, &[own]);
    assert!(errors.is_empty(), "{errors:?}");
    assert!(format!("{compiled:?}").contains("is_durable: true"), "{compiled:?}");
}

/// A setting that does nothing must say so.
#[test]
fn durable_where_there_is_nothing_to_keep_is_refused() {
    let of = |descriptor: &str| load(&format!("domain: d\ndescriptors: [{descriptor}]"));
    for (descriptor, message) in [
        ("{key: a, durable: true, concurrency: 5}", "`durable` on a rule without a rate has no effect"),
        ("{key: a, durable: true, mode: local, limit: 5/day}", "`durable` with `mode: local`"),
        ("{key: a, durable: often, limit: 5/day}", "durable"),
    ] {
        let error = of(descriptor).expect_err(descriptor);
        assert!(error.contains(message), "{error}");
    }
    let rules = of("{key: a, durable: true, limit: 5/second}").expect("valid");
    let warning = rules.warnings().first().expect("a warning").to_string();
    assert!(warning.contains("recover within ten seconds"), "{warning}");
    assert!(of("{key: a, durable: true, limit: 5/day}").expect("valid").warnings().is_empty());
}
