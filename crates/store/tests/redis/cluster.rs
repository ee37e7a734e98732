//! A real cluster: three primaries with a replica each.

use crate::servers::{Server, patient, wait_until};
use std::time::Duration;
use tollgate_store::RedisConfig;

/// Three primaries, then their replicas.
pub(crate) struct Cluster {
    pub(crate) servers: Vec<Server>,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        Self::with_replicas(3)
    }

    pub(crate) fn with_replicas(replicas: usize) -> Self {
        let mut options = vec!["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];
        // Else the living shards would refuse to serve while one is dead.
        options.extend(["--cluster-require-full-coverage", "no"]);
        let servers: Vec<Server> = (0..3 + replicas).map(|_| Server::start(&options)).collect();
        let cluster = Self { servers };
        let ports: Vec<String> = cluster.servers.iter().map(|server| server.port.to_string()).collect();
        for (number, server) in cluster.servers.iter().enumerate() {
            let _: () = server.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
        }
        for (number, (first, last)) in [(0, 5460), (5461, 10_922), (10_923, 16_383)].iter().enumerate() {
            let (first, last) = (first.to_string(), last.to_string());
            let _: () = cluster.servers[number].command(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        }
        for (port, server) in ports.iter().zip(&cluster.servers).skip(1) {
            let bus = server.bus.to_string();
            let _: () = cluster.servers[0].command(&["CLUSTER", "MEET", "127.0.0.1", port, &bus]);
        }
        let all = ports.len().to_string();
        wait_until("everybody knows everybody", || {
            cluster.servers.iter().all(|server| server.cluster_info("cluster_known_nodes") == all)
        });
        for (number, replica) in cluster.servers[3..].iter().enumerate() {
            let primary: String = cluster.servers[number].command(&["CLUSTER", "MYID"]);
            wait_until("a replica is attached", || replica.try_words(&["CLUSTER", "REPLICATE", &primary]));
            wait_until("a replica follows", || replica.info("master_link_status").starts_with("up"));
        }
        cluster.wait_until_well();
        cluster
    }

    /// Makes a replica the primary, by hand. A server gives up after five seconds without a majority, and is asked again.
    pub(crate) fn fail_over(&self, replica: usize) {
        let (server, mut polls) = (&self.servers[replica], 0);
        wait_until("the replica is primary", || {
            if polls % 600 == 0 {
                server.try_words(&["CLUSTER", "FAILOVER"]);
            }
            polls += 1;
            server.info("role") == "master"
        });
    }

    pub(crate) fn wait_until_well(&self) {
        wait_until("the cluster is well", || {
            self.servers.iter().all(|server| server.cluster_info("cluster_state") == "ok")
        });
    }

    pub(crate) fn url(&self) -> String {
        let hosts: Vec<String> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    pub(crate) fn config(&self) -> RedisConfig {
        patient(&self.url())
    }

    pub(crate) fn flush(&self) {
        for primary in &self.servers[..3] {
            let _: () = primary.command(&["FLUSHALL"]);
        }
    }
}

/// How long a check may take beyond its deadline on a machine that is busy with everything else; less than any fault
/// lasts that would have to be waited for.
pub(crate) const SLACK: Duration = Duration::from_secs(2);
