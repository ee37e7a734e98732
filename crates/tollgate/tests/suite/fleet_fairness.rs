//! Fairness in the fleet's capacity, by nodes that share a real Redis.

use crate::harness::{Folder, Redis, Server};
use serde_json::json;

/// Long, so that on a busy machine too the store decides.
const DEADLINE: &str = "10000";

/// A guarantee is one of the whole fleet: a tenant has it on a node that it alone uses, while another one has the capacity in
/// use on the other node.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn tenants_share_the_fleets_capacity_on_all_nodes() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = "
domain: d
overload:
  fleet: {capacity: 400/day}
  fairness: {by: tenant, guarantees: {pro: 10% each}}
";
    let rules = folder.write("rules.yaml", rules);
    let url = redis.url();
    let rules = rules.to_str().expect("a plain path");
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE];
    let [first, second] = [Server::start(&flags), Server::start(&flags)];
    let greedy = || first.check("d", &json!({"tenant": "greedy"})).status;
    let served = (0..1_200).filter(|_| greedy() == 200).count();
    assert!((300..=400).contains(&served), "{served}: what is leased and not spent is not lost for others");
    let own = |node: &Server| node.check("d", &json!({"tenant": "acme", "tier": "pro"})).status;
    let guaranteed: Vec<u16> = (0..40).map(|n| own(if n % 4 == 0 { &first } else { &second })).collect();
    assert_eq!(guaranteed, [200; 40]);
    assert_eq!(greedy(), 503);
}
