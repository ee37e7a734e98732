//! Rules whose domains change under integrations that decide by one of them: a second domain must not turn checks into errors,
//! and rules without the domain of a route must not turn its limits off.

use crate::harness::{Folder, Gateway, Node, Origin, Server, eventually, plain};
use serde_json::{Value, json};

fn rules(domain: &str) -> String {
    format!("domain: {domain}\ndescriptors:\n  - {{key: remote_address, name: all, limit: 1000/hour}}\n")
}

fn details(server: &Server) -> Value {
    server.get("/readyz?verbose").json()
}

fn publish(node: &Node, domains: &[&str]) -> crate::harness::WebResponse {
    let files: Vec<Value> = domains
        .iter()
        .map(|domain| json!({"name": format!("{domain}.yaml"), "text": rules(domain)}))
        .collect();
    let body = json!({"files": files, "reason": "test", "confirm": true});
    node.ask("POST", "/admin/v1/rules", &[], &body)
}

#[test]
fn a_second_rule_file_changes_nothing_for_forward_auth() {
    let folder = Folder::new();
    let path = folder.join("rules");
    std::fs::create_dir(&path).expect("a directory");
    folder.write("rules/shop.yaml", rules("shop"));
    let server = Server::start(&["--rules", path.to_str().expect("a plain path")]);
    assert_eq!(server.get("/check").status, 200);
    let domains = |wanted: &[&str]| {
        eventually("the rules", || {
            let found = details(&server);
            (found["rules"]["domains"] == json!(wanted)).then_some(found)
        })
    };
    folder.write("rules/other.yaml", rules("other"));
    let shown = domains(&["other", "shop"]);
    assert_eq!(shown["forward_auth"]["domain"], "shop");
    let warning = shown["forward_auth"]["warning"].as_str().expect("a warning");
    assert!(warning.contains("forward_auth: {domain: shop}"), "{warning}");
    assert_eq!(server.get("/check").header("x-ratelimit-limit"), Some("1000"));
    eventually("the warning in the log", || {
        server.log().contains("/check goes on with `shop`").then_some(())
    });
    // Without it, no other could take its place.
    folder.write("rules/third.yaml", rules("third"));
    domains(&["other", "shop", "third"]);
    std::fs::remove_file(folder.join("rules/shop.yaml")).expect("removed");
    eventually("the error", || {
        let found = details(&server);
        let error = found["rules"]["error"].as_str()?.to_owned();
        (error.contains("`shop`") && error.contains("`/check`")).then_some(())
    });
    assert_eq!(server.get("/check").status, 200);
}

/// The name of the only domain is nobody's business.
#[test]
fn the_only_domain_may_get_another_name() {
    let server = Server::with_rules(&rules("shop"));
    assert_eq!(server.get("/check").status, 200);
    std::fs::write(server.rules_path(), rules("store")).expect("written");
    eventually("the other name", || (details(&server)["forward_auth"]["domain"] == "store").then_some(()));
    assert_eq!(server.get("/check").status, 200);
    std::fs::write(server.rules_path(), rules("shop") + "# again\n").expect("written");
    eventually("the first name", || (details(&server)["forward_auth"]["domain"] == "shop").then_some(()));
}

#[test]
fn published_rules_keep_the_domains_that_are_decided_by() {
    let place = crate::databases::Place::new();
    let node = Node::start(&rules("shop"), &place.sqlite("domains"), &[]);
    assert_eq!(node.server.get("/check").status, 200);
    let made = publish(&node, &["shop", "other"]);
    assert_eq!(made.status, 201, "{}", made.text());
    assert_eq!(node.server.get("/check").status, 200);
    assert_eq!(details(&node.server)["forward_auth"]["domain"], "shop");
    let refused = publish(&node, &["other", "third"]);
    assert_eq!(refused.status, 422, "{}", refused.text());
    assert!(refused.text().contains("`shop`"), "{}", refused.text());
    assert_eq!(node.server.get("/check").status, 200);
}

/// A configured domain is required wherever rules come from.
#[test]
fn a_configured_domain_cannot_be_taken_away() {
    let folder = Folder::new();
    folder.write("rules.yaml", rules("shop"));
    let settings =
        "rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\nforward_auth: {domain: shop}\n";
    let path = folder.write("tollgate.yml", settings);
    let server = Server::start(&["--config", path.to_str().expect("a plain path")]);
    folder.write("rules.yaml", rules("store"));
    eventually("the error", || {
        details(&server)["rules"]["error"].as_str()?.contains("`forward_auth` decides by it").then_some(())
    });
    assert_eq!(server.get("/check").status, 200);
}

/// The route's requests would pass without a limit.
#[test]
fn rules_without_the_domain_of_a_route_are_refused() {
    let limited = "domain: d\ndescriptors:\n  - {key: remote_address, name: one, limit: 1 per 3650d, algorithm: fixed_window}\n";
    let origin = Origin::start();
    let folder = Folder::new();
    let file = folder.join("rules.yaml");
    let gateway = Gateway::start_in(folder, limited, "", &plain(origin.address, ""));
    assert_eq!(gateway.get("/").status, 200);
    std::fs::write(&file, rules("other")).expect("written");
    eventually("the error", || {
        gateway.details()["rules"]["error"]
            .as_str()?
            .contains("a route of the gateway decides by it")
            .then_some(())
    });
    assert_eq!(gateway.get("/").status, 429);
}
