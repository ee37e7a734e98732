//! Guardrails of publishing, through the real binary: what removes a protection or lets much traffic through is confirmed
//! like what denies much, and nothing changes until it is.

use crate::databases::Place;
use crate::harness::{Node, WebResponse, eventually, run};
use serde_json::{Value, json};

const LOGIN: &str = "  - {key: endpoint, value: POST /login, class: security, limit: 5/minute}\n";

fn rules(limit: &str, more: &str) -> String {
    format!("domain: d\ndescriptors:\n  - key: api_key\n    limit: {limit}\n{more}")
}

fn publish(node: &Node, text: &str, confirm: bool) -> WebResponse {
    let body = json!({"files": [{"name": "d.yaml", "text": text}], "reason": "test", "confirm": confirm});
    node.ask("POST", "/admin/v1/rules", &[], &body)
}

fn reasons(response: &WebResponse) -> Vec<Value> {
    let body = response.json();
    body["confirm"].as_array().expect("reasons").iter().map(|one| one["reason"].clone()).collect()
}

#[test]
fn a_protection_is_not_lost_without_a_question() {
    let place = Place::new();
    let start = rules("100/hour", LOGIN);
    let node = Node::start(&start, &place.sqlite("rules"), &[]);
    let weaker = LOGIN.replace("limit:", "shadow: true, limit:");
    let more = |setting: &str| rules("100/hour", &LOGIN.replace("limit:", &format!("{setting}, limit:")));
    for (text, reason, says) in [
        ("domain: other\n".to_owned(), "domain_removed", "domain `d` is removed"),
        ("domain: d\n".to_owned(), "domain_removed", "no limit left"),
        (rules("100/hour", ""), "security_rule_removed", "`d: endpoint=POST /login` is removed"),
        (rules("100/hour", &weaker), "security_rule_weakened", "no longer denies anything"),
        (rules("100/hour", &LOGIN.replace("5/", "5000/")), "security_rule_weakened", "1000 times as much"),
        (more("mode: local"), "security_rule_weakened", "counts on each node alone"),
        (more("action: delay"), "security_rule_weakened", "delays requests instead of denying"),
        (
            more("algorithm: fixed_window"),
            "security_rule_weakened",
            "3 times as much through in a short time",
        ),
        (more("on_error: open"), "security_rule_weakened", "no longer fails closed"),
    ] {
        let refused = publish(&node, &text, false);
        assert_eq!(refused.status, 409, "{text}: {}", refused.text());
        // One change may weaken a rule in several ways.
        let of_refusal = reasons(&refused);
        assert!(of_refusal.iter().all(|one| *one == reason), "{text}: {of_refusal:?}");
        let detail = refused.json()["detail"].as_str().expect("a detail").to_owned();
        assert!(detail.contains(says) && detail.contains("`confirm: true`"), "{detail}");
        let files = json!({"files": [{"name": "d.yaml", "text": text}]});
        let preview = node.ask("POST", "/admin/v1/rules/preview", &[], &files);
        assert_eq!(reasons(&preview), of_refusal, "a preview says so too");
    }
    let all = node.ask("GET", "/admin/v1/rules", &[], &Value::Null).json();
    assert_eq!(all["revisions"], json!([]), "nothing of this was done");

    // What protects more asks nothing.
    assert_eq!(publish(&node, &rules("100/hour", &LOGIN.replace("5/", "4/")), false).status, 201);
    let removed = publish(&node, &rules("100/hour", ""), true);
    assert_eq!(removed.status, 201, "{}", removed.text());
}

/// Each step is judged against the rules of a day ago as well.
#[test]
fn small_steps_do_not_add_up_unseen() {
    let place = Place::new();
    let node = Node::start(&rules("100/hour", LOGIN), &place.sqlite("rules"), &[]);
    let step = |limit: &str| rules("100/hour", &LOGIN.replace("5/minute", limit));
    assert_eq!(publish(&node, &step("40/minute"), false).status, 201);
    let refused = publish(&node, &step("90/minute"), false);
    assert_eq!(refused.status, 409, "{}", refused.text());
    assert!(refused.text().contains("allows 18 times as much as a day ago"), "{}", refused.text());
    assert_eq!(publish(&node, &step("90/minute"), true).status, 201);
    // What is confirmed is not asked again by a change of something else.
    assert_eq!(publish(&node, &step("90/minute").replace("100/hour", "101/hour"), false).status, 201);
}

/// At night there is no traffic that a typing error would deny.
#[test]
fn what_admits_far_less_is_confirmed_without_traffic() {
    let place = Place::new();
    let tiers = |pro: &str| format!("100/second\n    tiers: {{pro: {pro}}}");
    let node = Node::start(&rules(&tiers("[1000/second, 50000/hour]"), ""), &place.sqlite("rules"), &[]);
    for (text, reason, says) in [
        (rules("0/second", ""), "admits_nothing", "rule `d: api_key` admits nothing"),
        (rules(&tiers("[1000/second, 500/hour]"), ""), "limit_cut", "100 times less for tier pro"),
        (rules(&tiers("0/second"), ""), "admits_nothing", "admits nothing for tier pro"),
        (rules("100/minute", ""), "limit_cut", "60 times less"),
    ] {
        let refused = publish(&node, &text, false);
        assert_eq!(refused.status, 409, "{text}: {}", refused.text());
        assert!(reasons(&refused).contains(&json!(reason)), "{text}: {}", refused.text());
        assert!(refused.text().contains(says), "{text}: {}", refused.text());
    }
    let zero = rules("0/second", "");
    assert_eq!(publish(&node, &zero, true).status, 201, "on purpose");
    assert_eq!(
        publish(&node, &zero.replace("second", "minute"), false).status,
        201,
        "and it is not asked again"
    );
}

#[test]
fn what_would_allow_much_is_confirmed() {
    let place = Place::new();
    let node = Node::start(&rules("100/hour", ""), &place.sqlite("rules"), &[]);
    // One caller of two is denied 10 of 120 requests.
    let caller = |key: &str, times: usize| {
        for _ in 0..times {
            node.server.check("d", &json!({"api_key": key}));
        }
    };
    caller("busy", 110);
    caller("quiet", 10);
    let refused = publish(&node, &rules("200/hour", ""), false);
    assert_eq!(refused.status, 409, "{}", refused.text());
    assert_eq!(reasons(&refused), ["newly_allowed", "callers_newly_allowed"]);
    assert!(refused.text().contains("of recent requests would be newly allowed"), "{}", refused.text());
    assert_eq!(publish(&node, &rules("200/hour", ""), true).status, 201);
}

/// One busy caller outweighs the others in requests, not in number.
#[test]
fn callers_are_judged_beside_requests() {
    let place = Place::new();
    let node = Node::start(&rules("1000/hour", ""), &place.sqlite("rules"), &[]);
    for _ in 0..200 {
        node.server.check("d", &json!({"api_key": "busy"}));
    }
    for i in 0..4 {
        node.server.check("d", &json!({"api_key": format!("small-{i}"), "plan": "small"}));
    }
    let harsh = rules("1000/hour", "  - {key: plan, value: small, limit: 0/hour}\n");
    let refused = publish(&node, &harsh, false);
    assert_eq!(refused.status, 409, "{}", refused.text());
    assert_eq!(reasons(&refused), ["callers_newly_denied", "admits_nothing"], "{}", refused.text());
    assert!(refused.text().contains("80.0% of recent callers"), "{}", refused.text());
    // Callers with the same first characters are distinguished by the ids of the lists.
    let mut affected: Vec<String> = refused.json()["impact"]["top"]
        .as_array()
        .expect("callers")
        .iter()
        .map(|one| {
            let (id, masked) =
                (one["key_id"].as_str().expect("an id"), one["key_masked"].as_str().expect("a key"));
            assert!(masked.starts_with("api_key=s…") && masked.ends_with(&id[..8]), "{one}");
            id.to_owned()
        })
        .collect();
    affected.sort();
    eventually("the same ids in the list", || {
        let top = node.ask("GET", "/admin/v1/top", &[], &Value::Null).json();
        let small = top["by_rate"].as_array()?.iter();
        let small = small.filter(|one| one["key_masked"].as_str().is_some_and(|key| key.starts_with("s…")));
        let mut listed: Vec<String> =
            small.filter_map(|one| Some(one["key_id"].as_str()?.to_owned())).collect();
        listed.sort();
        (affected == listed).then_some(())
    });
}

#[test]
fn a_revision_that_waits_has_an_exit_code_and_a_number() {
    let place = Place::new();
    let node = Node::start(&rules("100/hour", LOGIN), &place.sqlite("rules"), &[]);
    for i in 0..10 {
        node.server.check("d", &json!({"api_key": format!("caller-{i}")}));
    }
    let admin = format!("http://{}", node.admin);
    let file = |text: String| node.rules.write("new.yaml", text).to_str().expect("a plain path").to_owned();
    let publish = |file: &str, more: &[&str]| {
        run(&[&["rules", "publish", file, "--reason", "test", "--admin", &admin], more].concat())
    };
    let refused = publish(&file(rules("100/hour", "")), &[]);
    assert_eq!(refused.code, Some(1), "{}{}", refused.out, refused.err);
    assert!(refused.out.contains("needs confirmation: security rule"), "{}", refused.out);
    assert!(refused.err.contains("add --confirm"), "{}", refused.err);
    let waits = publish(&file(rules("0/hour", LOGIN)), &["--confirm"]);
    assert_eq!(waits.code, Some(3), "{}{}", waits.out, waits.err);
    assert!(waits.out.contains("tollgate rules approve 2"), "{}", waits.out);
    let again = publish(&file(rules("0/hour", LOGIN)), &["--confirm"]);
    assert_eq!(again.code, Some(3), "{}{}", again.out, again.err);
    assert!(again.out.contains("tollgate rules approve 2"), "the same rules wait once: {}", again.out);
}
