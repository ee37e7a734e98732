//! `region`: how cells share a rule's limits, and what is refused.

use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, CounterOwner, KeyPart, LimitSpec, Rate, RegionMode, TimeDelta};
use tollgate_rules::{CellPlace, LearnedCells, Options, Ruleset, Source};

fn place(region: &str, regions: &[(&str, u32)], rank: u32) -> CellPlace {
    let regions = regions.iter().map(|(name, cells)| ((*name).to_owned(), *cells)).collect();
    CellPlace { region: Some(region.to_owned()), regions, rank, learned: None }
}

fn load(text: &str, cells: Option<CellPlace>) -> Result<Ruleset, Vec<String>> {
    let options = Options { cells, ..Options::default() };
    Ruleset::load(&[Source::new("t.yaml", text)], &options).map_err(|errors| {
        let text = |e: &tollgate_rules::Diagnostic| {
            format!("{}:{} {} | {}", e.line, e.column, e.message, e.help.as_deref().unwrap_or(""))
        };
        errors.all().iter().map(text).collect()
    })
}

fn rule(region: &str) -> String {
    format!("{{domain: d, descriptors: [{{key: user, limit: 100/minute, region: {region}}}]}}")
}

const THREE: &[(&str, u32)] = &[("ap", 1), ("eu", 1), ("us", 1)];

/// Without it a charge is decided by the wrong cell, or by each.
#[test]
fn the_mode_and_the_owner_are_in_the_counters_label() {
    for (text, mode, owner) in [
        ("shared", RegionMode::Shared, CounterOwner::Hash),
        ("split", RegionMode::Split, CounterOwner::Hash),
        ("owner", RegionMode::Owner, CounterOwner::Hash),
        ("{mode: owner, owner: eu}", RegionMode::Owner, CounterOwner::Region("eu")),
        ("{mode: leased, home: home_region}", RegionMode::Leased, CounterOwner::Home),
    ] {
        let rules = load(&rule(text), Some(place("eu", THREE, 0))).expect("valid");
        let scope = &rules.rules()[0].limits.limits[0].scope;
        assert_eq!((scope.region_mode(), scope.owner()), (mode, owner), "{text}");
        assert_eq!(scope.sibling("|escrow").owner(), owner, "{text}");
        assert_eq!(rules.rules()[0].region_mode(), mode);
        let settings = rules.rules()[0].settings();
        assert!(settings.contains(&("region", text.to_owned())), "{settings:?}");
    }
    let plain = load("{domain: d, descriptors: [{key: user, limit: 100/minute}]}", None).expect("valid");
    let shared = load(&rule("shared"), None).expect("valid");
    assert_eq!(plain.rules()[0].limits.limits[0].scope, shared.rules()[0].limits.limits[0].scope);
}

/// Without it a group's setting is ignored, or a rule cannot differ from its file.
#[test]
fn a_rule_has_its_own_region_else_its_groups_else_the_files() {
    let text = "
domain: d
region: split
descriptors:
  - {key: a, limit: 90/minute}
  - {key: b, limit: 90/minute, region: shared}
  - key: c
    region: {mode: owner, owner: us}
    descriptors: [{key: user, limit: 90/minute}]
";
    let rules = load(text, Some(place("eu", THREE, 0))).expect("valid");
    let found: Vec<_> = rules
        .rules()
        .iter()
        .map(|rule| (rule.region_mode(), rule.limits.limits[0].limit.capacity()))
        .collect();
    assert_eq!(found, [(RegionMode::Split, 30), (RegionMode::Shared, 90), (RegionMode::Owner, 90)]);
}

/// Without it a caller's home decides for another caller, or a request without a home is charged nowhere.
#[test]
fn the_home_is_the_last_value_of_the_key() {
    let rules = load(&rule("{mode: owner, home: home_region}"), Some(place("eu", THREE, 0))).expect("valid");
    let domain = rules.domain("d").expect("a domain");
    for (request, home) in [(vec![("user", "u"), ("home_region", "us")], "us"), (vec![("user", "u")], "")] {
        let plan = domain.plan(&request, Cost::ONE);
        let charge = plan.charge(&plan.limits[0], tollgate_core::PermitId::ANONYMOUS);
        assert_eq!(charge.key.parts, [KeyPart::Text("u"), KeyPart::Text(home)]);
    }
}

/// Without it a caller that invents homes has a fresh counter for each of them, also where a node decides without the owner.
#[test]
fn a_home_that_is_no_region_counts_as_missing() {
    let home = |place: CellPlace, home: &str| {
        let rules = load(&rule("{mode: owner, home: home_region}"), Some(place)).expect("valid");
        let request = [("user", "u"), ("home_region", home)];
        let plan = rules.domain("d").expect("a domain").plan(&request, Cost::ONE);
        let charge = plan.charge(&plan.limits[0], tollgate_core::PermitId::ANONYMOUS);
        assert!(charge.key.parts.len() == 2, "{:?}", charge.key.parts);
        charge.key.parts[1] == KeyPart::Text(home)
    };
    let known = place("eu", THREE, 0);
    assert!(home(known.clone(), "us") && !home(known.clone(), "z1") && home(known.clone(), ""));
    let learned = CellPlace { learned: Some(LearnedCells::Any), ..known };
    assert!(home(learned, "z1"), "only the store knows the regions");
}

/// Without it a server starts whose part of a limit is nothing, or the whole.
#[test]
fn what_the_configured_cells_cannot_do_is_refused() {
    let errors = |region: &str, place| load(&rule(region), Some(place)).expect_err("refused").remove(0);
    let none = CellPlace::default();
    assert!(
        errors("split", none.clone()).contains("this server has no region | start it with `--region NAME`")
    );
    assert!(
        errors("{mode: owner, owner: mars}", place("eu", THREE, 0)).contains("the regions are ap, eu, us")
    );
    assert!(errors("{mode: owner, owner: eu}", none).contains("`--peer eu=URL`"));
    let weights = "{mode: split, weights: {us: 1}}";
    assert!(errors(weights, place("eu", THREE, 0)).contains("region `eu` has no weight"));
    assert!(load(&rule(weights), None).is_ok(), "read alone, a file says nothing about the cells");
    let rules = load(&rule(weights), Some(place("us", THREE, 0))).expect("valid");
    assert!(rules.warnings()[0].message.contains("admit nothing: ap, eu"), "{:?}", rules.warnings());
    // The part of a region that nobody serves is lost.
    let weights = "{mode: split, weights: {eu: 1, us: 1, ap: 0, mars: 2, moon: 0}}";
    let rules = load(&rule(weights), Some(place("us", THREE, 0))).expect("valid");
    let [warning] = rules.warnings() else { panic!("{:?}", rules.warnings()) };
    assert!(warning.message.ends_with("regions with a weight: mars"), "{warning:?}");
}

/// Without it each cell has all permits of a limit, or weights are written that nothing follows.
#[test]
fn weights_that_divide_nothing_or_cannot_divide_are_refused() {
    let errors = |rule: &str, region: &str| {
        let text = format!("{{domain: d, descriptors: [{{key: user, {rule}}}]}}");
        load(&text, Some(place(region, &[("eu", 2), ("us", 3)], 0))).expect_err("refused").remove(0)
    };
    let weights = "region: {mode: shared, weights: {us: 1}}";
    assert!(errors(&format!("limit: 9/minute, {weights}"), "us").contains("only permits are divided"));
    assert!(errors(&format!("concurrency: 9, {weights}"), "eu").contains("region `eu` has no weight"));
    let large = format!("limit: 9/minute, region: {{mode: split, weights: {{eu: {}, us: 1}}}}", u64::MAX);
    let message = errors(&large, "eu");
    assert!(message.contains("weight"), "{message}");
}

/// Without it permits of several cells sum to a multiple of the limit.
#[test]
fn permits_are_divided_and_other_shared_limits_are_not() {
    let text = "{domain: d, descriptors: [{key: user, limit: 90/minute, concurrency: 10}]}";
    let shares: Vec<Vec<u64>> = ["ap", "eu", "us"]
        .map(|region| {
            let rules = load(text, Some(place(region, THREE, 0))).expect("valid");
            rules.rules()[0].limits.limits.iter().map(|limit| limit.limit.capacity()).collect()
        })
        .to_vec();
    assert!(shares.iter().all(|share| share[0] == 90));
    assert_eq!(shares.iter().map(|share| share[1]).sum::<u64>(), 10);
}

/// Without it every caller of a region is denied for ever, and nothing says why.
#[test]
fn a_part_of_nothing_is_reported() {
    let warned = |text: &str, region: &str| {
        let rules = format!("{{domain: d, descriptors: [{{key: user, {text}}}]}}");
        let rules = load(&rules, Some(place(region, THREE, 0))).expect("valid");
        rules.warnings().iter().any(|found| found.message.contains("the part of this one is 0"))
    };
    let count = |text: &str| ["eu", "us", "ap"].iter().filter(|region| warned(text, region)).count();
    assert_eq!(count("limit: 1/hour, region: split"), 2);
    assert_eq!(count("concurrency: 2"), 1);
    assert_eq!(count("limit: 3/hour, region: split"), 0);
    assert_eq!(count("limit: 0/hour, region: split"), 0, "as it is written");
    assert_eq!(count("limit: 1/hour"), 0, "not divided");
    assert_eq!(
        count("limit: 9/hour, region: {mode: split, weights: {eu: 1, us: 0, ap: 0}}"),
        0,
        "as it is meant"
    );
}

proptest! {
    /// The parts of a limit sum to it exactly, whatever the weights and the number of cells: with more, callers that use
    /// several regions exceed the limit; with less, they cannot use it up.
    #[test]
    fn the_parts_of_all_cells_sum_to_the_limit(
        count in 0_u64..2_000_000,
        burst in 1_u64..1_000_000,
        weights in proptest::collection::vec((1_u64..1_000, 1_u32..4), 1..6),
        equal in any::<bool>(),
    ) {
        let names: Vec<String> = (0..weights.len()).map(|at| format!("r{at}")).collect();
        let regions: Vec<(&str, u32)> =
            names.iter().zip(&weights).map(|(name, (_, cells))| (name.as_str(), *cells)).collect();
        let setting: Vec<String> =
            names.iter().zip(&weights).map(|(name, (weight, _))| format!("{name}: {weight}")).collect();
        let region = match equal {
            true => "split".to_owned(),
            false => format!("{{mode: split, weights: {{{}}}}}", setting.join(", ")),
        };
        let text = format!(
            "{{domain: d, descriptors: [{{key: user, region: {region}, limit: [{{count: {count}, period: minute, burst: {burst}}}, {{count: {count}, period: hour, algorithm: fixed_window}}]}}]}}"
        );
        let mut sums = [(0, 0); 2];
        for (region, cells) in &regions {
            for rank in 0..*cells {
                let rules = load(&text, Some(place(region, &regions, rank))).expect("valid");
                for (sum, limit) in sums.iter_mut().zip(&rules.rules()[0].limits.limits) {
                    sum.0 += limit.limit.rate().count;
                    sum.1 += limit.limit.capacity();
                }
            }
        }
        prop_assert_eq!(sums, [(count, burst), (count, count)]);
    }

    /// The same of the arithmetic alone, with the largest numbers.
    #[test]
    fn weighted_parts_sum_exactly(
        count in 1_u64..Rate::MAX_COUNT,
        weights in proptest::collection::vec(0_u64..1_000_000_000, 1..40),
    ) {
        prop_assume!(weights.iter().any(|weight| *weight > 0));
        let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per(count, TimeDelta::from_secs(60)));
        let limit = limit.build().expect("valid");
        let parts = (0..weights.len()).map(|at| limit.weighted_part(&weights, at).capacity());
        prop_assert_eq!(parts.sum::<u64>(), count);
    }
}

/// Without it parts of a limit, or the owner of a counter, change with each cell that is learned.
#[test]
fn what_needs_to_know_all_cells_is_refused_where_they_are_learned() {
    let learned =
        |cells: LearnedCells| Some(CellPlace { learned: Some(cells), ..place("eu", &[("eu", 1)], 0) });
    let weighted = "{mode: split, weights: {eu: 2, us: 1}}";
    for cells in [LearnedCells::OnePerRegion, LearnedCells::Any] {
        for fits in ["shared", "{mode: owner, owner: us}", "{mode: leased, home: home_region}"] {
            load(&rule(fits), learned(cells)).unwrap_or_else(|errors| panic!("{fits}: {errors:?}"));
        }
        for (text, wrong) in [("split", "is divided among the cells"), ("owner", "without an owner")] {
            let errors = load(&rule(text), learned(cells)).expect_err("refused");
            assert!(errors.len() == 1 && errors[0].contains(wrong), "{text}: {errors:?}");
        }
        let held = "{domain: d, descriptors: [{key: user, concurrency: 5}]}";
        let errors = load(held, learned(cells)).expect_err("refused");
        assert!(errors[0].contains("`concurrency` is divided"), "{errors:?}");
    }
    // With one cell in each region, weights that name the regions are all that a part depends on.
    let rules = load(&rule(weighted), learned(LearnedCells::OnePerRegion)).expect("valid");
    assert_eq!(rules.rules()[0].limits.limits[0].limit.rate().count, 66);
    let errors = load(&rule(weighted), learned(LearnedCells::Any)).expect_err("refused");
    assert!(errors[0].contains("is divided among the cells"), "{errors:?}");
}
