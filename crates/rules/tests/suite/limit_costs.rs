//! Requests and tokens on one key: each limit of a list may have its own cost, and with it its own counter. Without this
//! the default of every LLM API needs two rules that match alike.

use std::sync::Arc;
use tollgate_core::Cost;
use tollgate_rules::{
    CallerOverrides, CostFrom, Descriptor, LooseningKind, Options, Override, Plan, RuleResult, Ruleset,
    Source,
};

const RULES: &str = "- {key: api_key, limit: [60/minute, {count: 100000, period: minute, cost: tokens}]}";

fn load(descriptors: &str) -> Result<Ruleset, String> {
    let text = format!("domain: d\ndescriptors:\n{descriptors}\n");
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).map_err(|errors| errors.to_string())
}

fn rules(descriptors: &str) -> Ruleset {
    load(descriptors).unwrap_or_else(|errors| panic!("{errors}"))
}

/// What a request takes from each counter.
fn charges(rules: &Ruleset, request: &[(&str, &str)], cost: Cost) -> Vec<(String, Cost)> {
    let plan = rules.domain("d").expect("a domain").plan(request, cost);
    assert_eq!(plan.malformed_cost, None);
    plan.limits.iter().map(|hit| (hit.limit.scope.label().to_owned(), hit.cost)).collect()
}

const REQUESTS: &str = "d|api_key|gcra|1m";
const TOKENS: &str = "d|api_key|gcra.cost~tokens|1m";

#[test]
fn a_request_costs_one_here_and_its_tokens_there() {
    let rules = rules(RULES);
    let request = [("api_key", "k"), ("tokens", "500")];
    let both =
        |requests: Cost, tokens: Cost| vec![(REQUESTS.to_owned(), requests), (TOKENS.to_owned(), tokens)];
    assert_eq!(charges(&rules, &request, Cost::ONE), both(Cost::ONE, Cost::new(500)));
    // A check whose cost is a number of tokens is still one request.
    assert_eq!(charges(&rules, &[("api_key", "k")], Cost::new(300)), both(Cost::ONE, Cost::new(300)));
    assert_eq!(charges(&rules, &request, Cost::PEEK), both(Cost::PEEK, Cost::PEEK));
    // A correction is about the tokens: the request was made.
    assert_eq!(charges(&rules, &request, Cost::refund(20)), both(Cost::PEEK, Cost::refund(20)));
    // The same by an RLS descriptor, whose hits are the tokens.
    let descriptors = [Descriptor { entries: &[("api_key", "k")], hits: Some(Cost::new(70)), limit: None }];
    let plan = rules.domain("d").expect("a domain").plan_descriptors(&descriptors, Cost::ONE);
    assert_eq!(plan.limits.iter().map(|hit| hit.cost).collect::<Vec<_>>(), [Cost::ONE, Cost::new(70)]);
}

#[test]
fn tokens_that_are_no_number_are_malformed_only_where_they_count() {
    let rules = rules(RULES);
    let domain = rules.domain("d").expect("a domain");
    assert_eq!(
        domain.plan(&[("api_key", "k"), ("tokens", "many")], Cost::ONE).malformed_cost,
        Some("tokens")
    );
    let shadow = self::rules("- {key: a, limit: 1/s, candidate: {count: 1, period: 1m, cost: tokens}}");
    let plan = shadow.domain("d").expect("a domain").plan(&[("a", "k"), ("tokens", "many")], Cost::ONE);
    assert_eq!(plan.malformed_cost, None, "a candidate never denies");
}

/// Usage must not start anew when a limit on tokens is added, when a number changes, or in another tier.
#[test]
fn counters_stay_where_they_are() {
    let alone = rules("- {key: api_key, limit: 60/minute}");
    assert_eq!(charges(&alone, &[("api_key", "k")], Cost::ONE)[0].0, REQUESTS);
    let tiers = "- {key: api_key, limit: 1/minute, tiers: {pro: [{count: 9k, period: minute, cost: tokens}, 5/minute]}}";
    let pro = charges(&rules(tiers), &[("api_key", "k"), ("tier", "pro")], Cost::ONE);
    assert_eq!(pro.iter().map(|(scope, _)| scope.as_str()).collect::<Vec<_>>(), [TOKENS, REQUESTS]);
    // The rule's cost is not repeated in the scope; another one is.
    let rule =
        rules("- {key: api_key, cost: tokens, limit: [100/minute, {count: 60, period: minute, cost: 1}]}");
    let both = charges(&rule, &[("api_key", "k"), ("tokens", "8")], Cost::ONE);
    let want = [(REQUESTS.to_owned(), Cost::new(8)), ("d|api_key|gcra.cost=1|1m".to_owned(), Cost::ONE)];
    assert_eq!(both, want);
}

#[test]
fn mistakes_are_explained_at_their_place() {
    for (text, line) in [
        ("- {key: a, limit: [{count: 1, period: 1m, cost: t}, {count: 2, period: 1m, cost: t}]}", "3:53"),
        ("- {key: a, limit: [1/m, {count: 2, period: 1m, cost: 1}]}", "3:25"),
    ] {
        let error = load(&format!("\n{text}").replacen('\n', "", 1)).expect_err(text);
        assert!(error.contains("with the same algorithm, period and cost would share a counter"), "{error}");
        assert!(error.contains(line), "{error}");
    }
    let error = load("- {key: a, limit: [1/m, {count: 2, period: 1m, cost: ''}]}").expect_err("no cost");
    assert!(error.contains("`cost` is empty"), "{error}");
    let error = load("- {key: a, limit: {count: 2, period: 1m, costs: 1}}").expect_err("a typo");
    assert!(error.contains("did you mean `cost`?"), "{error}");
}

#[test]
fn diffs_explanations_and_loosenings_include_the_cost() {
    let (before, after) = (rules("- {key: api_key, limit: 60/minute}"), rules(RULES));
    let change = &before.diff(&after)[0];
    let expected = "gcra 60/1m cost 1 and gcra 100000 tokens/1m; on_error local";
    assert_eq!(change.after.as_deref(), Some(expected));
    let explained = after.domain("d").expect("a domain").explain(&[("api_key", "k")]);
    let RuleResult::Limited(limits) = &explained.rules[0].result else { panic!("{explained}") };
    assert_eq!(limits[1].0, "gcra 100000 tokens/1m");
    assert_eq!(after.warnings(), [], "limits of different costs do not shield each other");
    let secure = |cost: &str| {
        rules(&format!(
            "- {{key: login, class: security, limit: {{count: 5, period: 1m, cost: {cost}}}}}\n- {{key: x, limit: 1/s}}"
        ))
    };
    let both = |tokens: &str| {
        rules(&format!("- {{key: a, class: security, limit: [5/m{tokens}]}}\n- {{key: x, limit: 1/s}}"))
    };
    let loosened = both(", {count: 9, period: m, cost: tokens}").loosened(&both(""));
    assert!(loosened[0].detail.ends_with("no longer limits what `cost: tokens` counts"), "{loosened:?}");
    assert_eq!(both("").loosened(&both(", {count: 9, period: m, cost: tokens}")), []);
    let loosened = secure("1").loosened(&secure("0"));
    assert_eq!(loosened[0].kind, LooseningKind::SecurityRuleWeakened, "{loosened:?}");
}

fn compiled(rules: &Ruleset, overrides: &[(&str, u64)]) -> Arc<CallerOverrides> {
    let overrides: Vec<Override> =
        overrides.iter().map(|(descriptor, count)| Override::new(descriptor, *count, "minute")).collect();
    let (tenant, unfit) = rules.compile_overrides("api_key", None, &overrides);
    assert_eq!(unfit, []);
    Arc::new(tenant)
}

/// Twice the requests for one caller must not mean any number of tokens.
#[test]
fn an_override_of_one_cost_leaves_the_other_in_force() {
    let rules = rules(RULES);
    let request = [("api_key", "k"), ("tokens", "7")];
    let limits = |overrides: &[(&str, u64)]| -> Vec<(u64, String, Cost)> {
        let tenant = compiled(&rules, overrides);
        let mut plan = Plan { quotas: std::slice::from_ref(&tenant), ..Plan::default() };
        rules.domain("d").expect("a domain").plan_into(&request, Cost::ONE, &mut plan);
        let listed = plan
            .limits
            .iter()
            .map(|hit| (hit.limit.limit.rate().count, hit.limit.scope.label().to_owned(), hit.cost));
        let mut listed: Vec<_> = listed.collect();
        listed.sort_by(|a, b| a.1.cmp(&b.1));
        listed
    };
    let tokens = |count| (count, TOKENS.to_owned(), Cost::new(7));
    let requests = |count| (count, REQUESTS.to_owned(), Cost::ONE);
    assert_eq!(limits(&[("default", 120)]), [tokens(100_000), requests(120)]);
    assert_eq!(limits(&[("default@tokens", 5)]), [tokens(5), requests(60)]);
    assert_eq!(limits(&[("api_key@1", 120), ("api_key@tokens", 5)]), [tokens(5), requests(120)]);
    let wrong = Override::new("default@bytes", 1, "minute");
    let (_, unfit) = rules.compile_overrides("api_key", None, &[wrong]);
    assert!(unfit[0].reason.contains("has no limit with `cost: bytes`"), "{unfit:?}");
    assert_eq!(rules.rules()[0].cost, CostFrom::Request);
}
