//! `tollgate test`: users write these files beside their rules, and CI stands on the exit code and the last line.

use crate::harness::{Folder, Run, run};

const RULES: &str =
    "domain: d\ndescriptors:\n  - key: k\n    rate_limit: {name: n, unit: minute, requests_per_unit: 5}\n";

fn test(text: &str) -> Run {
    let folder = Folder::new();
    folder.write("rules.yaml", RULES);
    let path = folder.write("a.test.yaml", text);
    run(&["test", path.to_str().expect("a plain path")])
}

fn passes(text: &str) {
    let ran = test(text);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.ends_with("passed, 0 failed\n"), "{}", ran.out);
}

fn fails(text: &str, parts: &[&str]) {
    let ran = test(text);
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    let last = ran.out.lines().last().expect("a last line");
    assert!(last.ends_with(" failed") && last.contains(" passed, "), "the count is last: {}", ran.out);
    for part in parts {
        assert!(ran.out.contains(part), "`{part}` is not in\n{}", ran.out);
    }
}

/// The form that the documentation shows, every field of it.
#[test]
fn the_whole_form_is_understood() {
    passes(
        r#"
name: everything
rules: |
  domain: d
  descriptors:
    - key: key
      descriptors:
        - key: key2
          rate_limit: {name: n, unit: minute, requests_per_unit: 5}
    - key: api_key
      name: per-key
      limit: 10/minute
extra_rules:
  - |
    domain: e
    descriptors: [{key: x, rate_limit: {unit: hour, requests_per_unit: 1}}]
profile: envoy
global_shadow: false
start: 1000000
steps:
  - advance: 19s
    domain: d
    hits: 1
    descriptors:
      - {entries: [[key, value], [key2, value2]]}
    expect:
      overall: OK
      # 1000019 is 59 s into its minute.
      statuses: [{code: OK, remaining: 4, limit: 5, unit: MINUTE, reset: 1, name: n, has_limit: true}]
  - advance: 1
    domain: d
    descriptors:
      - {entries: [[key, value], [key2, value2]], hits: 0}
      - {entries: [[key, value], [key2, value2]], hits: 6, limit: {requests_per_unit: 5, unit: minute}}
    expect:
      overall: OVER_LIMIT
      statuses: [{code: OK, remaining: 5}, {code: OVER_LIMIT, limit: 5, name: ""}]
  - domain: e
    descriptors: [{entries: [[x, y]]}, {entries: [[z, y]]}]
    expect:
      overall: OK
      statuses: [{has_limit: true, remaining: 0, unit: HOUR}, {has_limit: false}]
  - domain: ""
    descriptors: [{entries: [[x, y]]}]
    expect: {overall: ERROR, error: "domain must not be empty"}
  - domain: d
    descriptors: []
    expect: {overall: ERROR, error: "descriptor list must not be empty"}
  - domain: d
    descriptors: [{entries: [[x, y]], limit: {requests_per_unit: 5, unit: fortnight}}]
    expect: {overall: ERROR, error: unit}
"#,
    );
}

/// Attributes are how HTTP callers ask; a cost is theirs too.
#[test]
fn attributes_with_a_cost_are_understood() {
    passes(
        "
rules_file: rules.yaml
steps:
  - {attributes: {k: 7}, cost: 3, expect: {overall: OK, statuses: [{remaining: 2, name: n}]}}
  - {attributes: {k: 7}, cost: 3, expect: {overall: OVER_LIMIT, denied_by: n}}
  - {advance: 12s, attributes: {k: 7}, cost: 3, expect: {overall: OK}}
  - {attributes: {k: true}, expect: {overall: OK, statuses: [{remaining: 4}]}}
",
    );
}

/// Shadow mode for everything is how a new installation is tried.
#[test]
fn global_shadow_denies_nothing_and_leaves_the_statuses() {
    passes(
        "
rules_file: rules.yaml
global_shadow: true
steps:
  - {descriptors: [{entries: [[k, v]]}], hits: 6, expect: {overall: OK, statuses: [{code: OVER_LIMIT}]}}
",
    );
}

/// A request that a rule degrades or only counts is over no limit; one of several quotas that is used up is. The same by
/// attributes and by descriptors, as over RLS.
#[test]
fn statuses_say_what_a_request_is_over() {
    passes(
        "
rules: |
  domain: d
  descriptors:
    - {key: degrade, name: degrade, action: degrade, limit: 1/hour}
    - {key: shadow, name: shadow, shadow: true, limit: 1/hour}
    - {key: quota, name: quota, quota_mode: true, limit: 1/hour}
    - {key: other, name: other, quota_mode: true, limit: 9/hour}
steps:
  - {attributes: {degrade: a}, repeat: 2, expect: {overall: OK, degraded_by: degrade, statuses: [{code: OK}]}}
  - {descriptors: [{entries: [[degrade, b]]}], repeat: 2, expect: {overall: OK, degraded_by: degrade, statuses: [{code: OK}]}}
  - {attributes: {shadow: a}, repeat: 2, expect: {overall: OK, statuses: [{code: OK}]}}
  - {descriptors: [{entries: [[shadow, b]]}], repeat: 2, expect: {overall: OK, statuses: [{code: OK}]}}
  - {attributes: {quota: a, other: a}, repeat: 2, expect: {overall: OK, statuses: [{code: OVER_LIMIT}, {code: OK}]}}
  - descriptors: [{entries: [[quota, b]]}, {entries: [[other, b]]}]
    repeat: 2
    expect: {overall: OK, statuses: [{code: OVER_LIMIT}, {code: OK}]}
",
    );
}

/// Rules that must not load are worth a test as well.
#[test]
fn a_load_error_can_be_expected() {
    passes("rules: 'domain: [a]'\nerror: domain\n");
    passes("rules_file: rules.yaml\nextra_rules: ['domain: d']\nerror: duplicate domain `d`\n");
    fails("rules_file: rules.yaml\nerror: anything\n", &["expected loading to fail", "but it loaded"]);
    fails("rules: 'domain: [a]'\nerror: bananas\n", &["`bananas`", "but it failed with"]);
    fails("rules: 'domain: [a]'\nsteps: []\n", &["the rules cannot be used", "rules:1:"]);
}

/// A failure shows what was expected and what came, for each field, and does not stop the other cases.
#[test]
fn a_failing_case_shows_the_difference() {
    fails(
        "
- name: wrong
  rules_file: rules.yaml
  steps:
    - descriptors: [{entries: [[k, v]]}]
      expect:
        overall: OVER_LIMIT
        denied_by: n
        statuses: [{code: OVER_LIMIT, remaining: 3, limit: 4, unit: HOUR, reset: 7, name: m, has_limit: false}]
    - descriptors: [{entries: [[k, v]]}]
      expect: {statuses: []}
    - descriptors: []
- name: right
  rules_file: rules.yaml
  steps:
    - {descriptors: [{entries: [[k, v]]}], expect: {overall: OK}}
- rules_file: nowhere.yaml
",
        &[
            "a.test.yaml: wrong\n",
            "step 1: overall: expected OVER_LIMIT, got OK",
            "step 1: denied_by: expected n, got nothing",
            "step 1: statuses[0].code: expected OVER_LIMIT, got OK",
            "step 1: statuses[0].remaining: expected 3, got 4",
            "step 1: statuses[0].limit: expected 4, got 5",
            "step 1: statuses[0].unit: expected HOUR, got MINUTE",
            "step 1: statuses[0].reset: expected 7, got 12",
            "step 1: statuses[0].name: expected m, got n",
            "step 1: statuses[0].has_limit: expected false, got true",
            "step 2: number of statuses: expected 0, got 1",
            "step 3: error: expected none, got",
            "ok      ",
            "case 3",
            "nowhere.yaml",
            "\n1 passed, 2 failed\n",
        ],
    );
}

/// A test file with a typo must not pass for a test.
#[test]
fn an_invalid_test_file_fails() {
    fails(
        "rules_file: rules.yaml\nstpes: []\n",
        &["a.test.yaml:2:1: unknown key `stpes`; did you mean `steps`?", "0 passed, 1 failed"],
    );
    fails("[]", &["no test case"]);
    fails("rules_file: rules.yaml\n", &["tests nothing; add `steps`"]);
    fails(
        "rules_file: nowhere.yaml\nsteps: [{attributes: {k: v}}]\n",
        &["relative to the directory of the test file"],
    );
    fails("rules_file: rules.yaml\nsteps: [{advance: soon, attributes: {k: v}}]\n", &["soon"]);
    fails(
        "rules_file: rules.yaml\nsteps: [{domain: d}]\n",
        &["step 1: no request; write `attributes` or `descriptors`"],
    );
    fails("steps: []\n", &["either `rules` or `rules_file`"]);
    fails(
        "rules_file: rules.yaml\nsteps: [{attributes: {k: v}, expect: {overall: DENIED}}]\n",
        &["unknown result `DENIED`; use OK, OVER_LIMIT or ERROR"],
    );
    fails(
        "rules_file: rules.yaml\nsteps: [{descriptors: [{entries: [[k, v]]}], repeat: 6, expect: {overall: OK}}]\n",
        &["step 1, repetition 6 of 6: overall: expected OK, got OVER_LIMIT by `n`"],
    );
    let folder = Folder::new();
    let good = folder.write(
        "good.test.yaml",
        format!("rules: |\n  {}\nsteps: [{{attributes: {{k: v}}}}]\n", RULES.replace('\n', "\n  ")),
    );
    let ran = run(&["test", "nowhere.test.yaml", good.to_str().expect("a plain path")]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.out.ends_with("\n1 passed, 1 failed\n"), "the others still run: {}{}", ran.out, ran.err);
}

/// A failure in CI shows which rule denied, what each counter held, and the step's line.
#[test]
fn a_failing_step_shows_what_each_counter_held() {
    fails(
        "
rules: |
  domain: d
  descriptors:
    - {key: k, name: by-k, limit: 5/minute}
    - {key: all, name: everyone, limit: 100/hour, algorithm: fixed_window}
    - {key: k, value: w, name: tried, limit: 1/minute, shadow: true}
steps:
  - attributes: {k: v, all: x}
    repeat: 6
    expect: {overall: OK}
  - attributes: {k: v, all: x}
    expect: {overall: OVER_LIMIT}
  - attributes: {other: x}
    expect: {overall: OVER_LIMIT}
  - attributes: {k: w}
    cost: 2
    expect: {statuses: []}
",
        &[
            "a.test.yaml:9: step 1, repetition 6 of 6: overall: expected OK, got OVER_LIMIT by `by-k`\n",
            "a.test.yaml:9: step 1, repetition 6 of 6: `by-k` held 5 of 5 (gcra 5/1m), unused again in 1m; it \
             denied, and would allow 12s later\n",
            "a.test.yaml:9: step 1, repetition 6 of 6: `everyone` held 5 of 100 (fixed_window 100/1h), unused again \
             in 1h\n",
            "a.test.yaml:14: step 3: overall: expected OVER_LIMIT, got OK\n",
            "a.test.yaml:14: step 3: no limit applies\n",
            "`tried` held 0 of 1 (gcra 1/1m), unused again in 0s; it denied, and never allows this cost (in shadow \
             mode)",
        ],
    );
    let ran = test("rules_file: rules.yaml\nsteps: [{attributes: {k: v}, expect: {overall: OK}}]\n");
    assert!(!ran.out.contains("held"), "a step that passes is silent: {}", ran.out);
}

/// A trickle is a request and a pause, again and again.
#[test]
fn a_repeated_step_advances_each_time() {
    passes(
        "
rules_file: rules.yaml
steps:
  - {attributes: {k: v}, cost: 5, expect: {overall: OK}}
  - {advance: 12s, attributes: {k: v}, repeat: 20, expect: {overall: OK, statuses: [{remaining: 0}]}}
  - {attributes: {k: v}, expect: {overall: OVER_LIMIT, retry_after_ms: 12000}}
",
    );
}

/// Budgets by estimate and correction are rules too.
#[test]
fn reservations_are_settled_cancelled_and_expire() {
    passes(
        "
rules_file: rules.yaml
steps:
  - {reserve: a, attributes: {k: v}, cost: 4, expect: {overall: OK, statuses: [{remaining: 1}]}}
  - {attributes: {k: v}, cost: 2, expect: {overall: OVER_LIMIT, denied_by: n}}
  - {settle: a, cost: 1, expect: {overall: OK, statuses: [{remaining: 4, limit: 5, name: n}]}}
  - {settle: a, cost: 3, expect: {overall: ERROR, error: already been settled}}
  - {reserve: b, descriptors: [{entries: [[k, v]], hits: 3}], expect: {overall: OK, statuses: [{remaining: 1}]}}
  - {cancel: b, expect: {overall: OK, statuses: [{remaining: 4}]}}
  - {reserve: c, attributes: {k: v}, deadline_ms: 500, expect: {overall: OK}}
  - {advance: 1s, settle: c, cost: 0, expect: {overall: ERROR, error: has expired}}
",
    );
    let steps = |steps: &str| format!("rules_file: rules.yaml\nsteps: [{steps}]\n");
    fails(&steps("{settle: x, cost: 1}"), &["step 1: no earlier step reserves `x`; add `reserve: x` to one"]);
    fails(
        &steps("{reserve: x, attributes: {k: v}}, {settle: x}"),
        &["step 2: settling needs the actual `cost`"],
    );
    fails(&steps("{reserve: x}"), &["step 1: no request; write `attributes` or `descriptors`"]);
    fails(&steps("{reserve: x, cancel: x}"), &["write one of `reserve`, `settle` and `cancel`"]);
    fails(&steps("{cancel: x, attributes: {k: v}}"), &["`cancel` takes no request"]);
    fails(&steps("{attributes: {k: v}, deadline_ms: 5}"), &["`deadline_ms` is of a reservation"]);
    fails(
        &steps("{reserve: x, attributes: {k: v}, cost: 9}, {cancel: x}"),
        &["step 2: `x` holds nothing: its request was denied"],
    );
    fails(
        &steps("{reserve: x, attributes: {k: v}}, {cancel: x, expect: {overall: ERROR}}"),
        &["step 2: overall: expected ERROR, got OK", "step 2: `n` held 0 of 5 (gcra 5/1m)"],
    );
}

/// A directory of rules and tests is what CI has.
#[test]
fn all_tests_of_a_directory_are_run() {
    let folder = Folder::new();
    folder.write("rules.yaml", RULES);
    let case = "{rules_file: rules.yaml, steps: [{attributes: {k: v}, expect: {overall: OK}}]}";
    folder.write("b.test.yml", case);
    folder.write("a.test.yaml", case);
    folder.write("notes.txt", "no test");
    std::fs::create_dir_all(folder.join("below/empty")).expect("a folder");
    folder.write("below/c.test.yaml", case.replace("rules.yaml", "../rules.yaml"));
    let ran = run(&["test", folder.join(".").to_str().expect("a plain path")]);
    assert!(ran.code == Some(0) && ran.out.ends_with("3 passed, 0 failed\n"), "{}{}", ran.out, ran.err);
    let positions = ["a.test.yaml", "b.test.yml", "c.test.yaml"].map(|name| ran.out.find(name));
    assert!(positions.is_sorted() && positions[0].is_some(), "{}", ran.out);
    let none = run(&["test", folder.join("below/empty").to_str().expect("a plain path")]);
    assert!(none.code == Some(1) && none.err.contains("no *.test.yaml"), "{}{}", none.out, none.err);
}

/// Ten cases of one broken rule file are one mistake.
#[test]
fn each_error_is_reported_once_and_names_its_file() {
    let folder = Folder::new();
    folder.write("broken.yaml", "domain: d\ndescriptors:\n  - {key: k, limit: 5/minut}\n");
    let cases = "- {name: first, rules_file: broken.yaml, steps: [{attributes: {k: v}}]}\n\
                 - {name: second, rules_file: broken.yaml, steps: [{attributes: {k: v}}]}\n\
                 - {name: inline, rules: 'domain: [a]', steps: []}\n\
                 - {name: neither, steps: []}\n";
    let path = folder.write("a.test.yaml", cases);
    let ran = run(&["test", path.to_str().expect("a plain path")]);
    assert_eq!(ran.code, Some(1), "{}", ran.out);
    assert_eq!(ran.out.matches("is not a limit").count(), 1, "{}", ran.out);
    assert_eq!(ran.out.matches("broken.yaml:3:").count(), 1, "{}", ran.out);
    for part in [
        "see `first`, which has the same\n",
        "a.test.yaml: rules:1:",
        "a.test.yaml: write either `rules` or `rules_file`",
        "0 passed, 4 failed\n",
    ] {
        assert!(ran.out.contains(part), "`{part}` is not in\n{}", ran.out);
    }
}
