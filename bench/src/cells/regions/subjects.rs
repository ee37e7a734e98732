//! Tollgate and gubernator: how their nodes are started and asked, and what they promise.

use super::super::connection::Connection;
use super::faults::{Fault, Found};
use super::links::{Content, Links};
use super::sites::{Site, Sites, values};
use super::{BURST, NODES, RATE, REGIONS, TRIP_MS};
use crate::process::{tollgate_binary, tool};
use std::path::{Path, PathBuf};
use tollgate_core::{Algorithm, Limit, LimitSpec, Rate, RegionMode, TimeDelta};
use tollgate_rules::Bound;
use tollgate_testing::ports;

/// Milliseconds after which a cell counts as silent, and between two exchanges: the defaults.
const SILENCE_MS: u64 = 2_000;
const TICK_MS: u64 = 200;
/// Milliseconds of lag above which there is an alert: more is not expected of links that work.
const EXPECTED_LAG_MS: u64 = 500;

/// Longest time that a check waits for Redis: nodes, stores and clients share the processor here.
const STORE_DEADLINE_MS: &str = "100";

/// How a limiter keeps one limit over all nodes.
pub(super) struct Mode {
    pub(super) name: &'static str,
    /// The rule's key, or gubernator's behavior.
    key: &'static str,
    /// `None` if no bound is stated.
    region: Option<RegionMode>,
    /// Whether a hash selects the owner: the attacker's key is then one that the first region owns.
    pub(super) is_by_hash: bool,
}

const MODES: [Mode; 5] = [
    Mode { name: "shared", key: "shared", region: Some(RegionMode::Shared), is_by_hash: false },
    Mode { name: "split", key: "split", region: Some(RegionMode::Split), is_by_hash: false },
    Mode { name: "owner eu", key: "owner", region: Some(RegionMode::Owner), is_by_hash: false },
    Mode { name: "owner by hash", key: "hash", region: Some(RegionMode::Owner), is_by_hash: true },
    Mode { name: "leased, owner eu", key: "leased", region: Some(RegionMode::Leased), is_by_hash: false },
];

const BEHAVIORS: [Mode; 2] = [
    Mode { name: "owner by hash", key: "BATCHING", region: None, is_by_hash: true },
    Mode { name: "GLOBAL", key: "GLOBAL", region: None, is_by_hash: true },
];

/// What may be admitted in a time.
#[derive(Clone, Copy)]
pub(super) struct Ceiling {
    burst: f64,
    rate: f64,
}

impl Ceiling {
    /// Returns what was admitted in this many seconds as a part of what may be.
    pub(super) fn part(self, units: usize, seconds: f64) -> f64 {
        units as f64 / (self.burst + self.rate * seconds)
    }
}

impl Mode {
    /// Returns the stated bound under a fault, or the limit where none is stated. What is stated of lost counters is added: one
    /// more limit for each cell that loses them, or for each move of an owner, and with `split` the part of the cell.
    pub(super) fn bound(&self, found: &Found) -> Ceiling {
        let Some(mode) = self.region else { return Ceiling { burst: BURST as f64, rate: RATE as f64 } };
        let lag = match found.fault {
            Fault::Nothing => EXPECTED_LAG_MS,
            _ => SILENCE_MS + 2 * TICK_MS + TRIP_MS.1,
        };
        let cells = REGIONS.len() as u32;
        let stated = Bound::new(&limit(), mode, cells, TimeDelta::from_millis(lag));
        let losses = match (found.fault, mode, self.is_by_hash) {
            (Fault::RegionDies(_), RegionMode::Owner, true) => 2 * BURST,
            (Fault::RegionDies(_), RegionMode::Split, _) | (Fault::StoreDies(_), RegionMode::Split, _) => {
                BURST.div_ceil(u64::from(cells))
            }
            (Fault::RegionDies(_), ..) | (Fault::StoreDies(_), RegionMode::Shared, _) => BURST,
            _ => 0,
        };
        Ceiling { burst: (stated.burst + stated.beyond + losses) as f64, rate: (RATE * stated.rates) as f64 }
    }
}

fn limit() -> Limit {
    let rate = Rate::per(RATE, TimeDelta::from_secs(1));
    let limit = LimitSpec::new(Algorithm::Gcra, rate).burst(BURST).build();
    limit.unwrap_or_else(|error| panic!("{error}"))
}

/// The answer to a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Allowed,
    Denied,
    /// The limiter could not decide.
    Undecided,
}

/// The counters of a caller.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The limit with the large burst.
    Attacked,
    /// The same rate with a burst of a second.
    Honest,
    /// The limit that never runs out.
    Ledger,
}

/// A limiter with its processes.
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) modes: &'static [Mode],
    /// Whether it has metrics of its cells, and a ledger.
    pub(super) has_metrics: bool,
    pub(super) sites: Sites,
    _folder: Folder,
}

impl Subject {
    pub(super) const fn has_stores(&self) -> bool {
        self.has_metrics
    }

    /// Sends one request.
    pub(super) fn check(
        &self,
        connection: &mut Connection,
        mode: usize,
        kind: Kind,
        caller: &str,
    ) -> Result<Verdict, String> {
        let key = self.modes[mode].key;
        if !self.has_metrics {
            return ask_gubernator(connection, key, kind, caller, 1).map(|(verdict, _)| verdict);
        }
        let key = match kind {
            Kind::Attacked => key.to_owned(),
            Kind::Honest => format!("{key}_caller"),
            Kind::Ledger => "ledger".to_owned(),
        };
        let body = format!("{{\"domain\":\"d\",\"attributes\":{{\"{key}\":\"{caller}\"}}}}");
        connection.post("/v1/check", &body).map(|(status, _)| match status {
            200 => Verdict::Allowed,
            429 => Verdict::Denied,
            _ => Verdict::Undecided,
        })
    }

    /// Returns what a node has counted in the ledger.
    pub(super) fn ledger(&self, node: usize) -> Option<u64> {
        let body = "{\"domain\":\"d\",\"attributes\":{\"ledger\":\"all\"},\"cost\":0}";
        let (_, answer) = self.sites.nodes[node].connect().ok()?.post("/v1/check", body).ok()?;
        // What a node decides by itself is not what its cell has counted.
        let left =
            answer.contains("\"origin\":\"store\"").then(|| answer.split("\"remaining\":").nth(1))??;
        let digits: String = left.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().ok().map(|left| LEDGER.saturating_sub(left))
    }

    /// Returns a caller for an attack: where a hash selects the owner, one that the first node or its region owns.
    pub(super) fn victim(&self, mode: usize) -> Result<String, String> {
        if !self.modes[mode].is_by_hash {
            return Ok("attacker".to_owned());
        }
        let mut connection = self.sites.nodes[0].connect()?;
        let forwarded = || self.sites.metric(0, "ratelimit_region_forwarded_total");
        for number in 0..1_000 {
            // gubernator's hash gives keys that differ in their last characters to one node.
            let caller = format!("{:016x}", crate::traffic::mix(number));
            let is_own = if self.has_metrics {
                let before = forwarded();
                self.check(&mut connection, mode, Kind::Attacked, &caller)?;
                forwarded() == before
            } else {
                ask_gubernator(&mut connection, self.modes[mode].key, Kind::Attacked, &caller, 0)?.1
            };
            if is_own {
                return Ok(caller);
            }
        }
        Err(format!("{}: the first region owns no key", self.name))
    }
}

/// Units of the ledger.
const LEDGER: u64 = 10_000_000;

/// Files of the processes, deleted on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn folder() -> Result<Folder, String> {
    let path = std::env::temp_dir().join(format!("tollgate-bench-regions-{}", std::process::id()));
    std::fs::create_dir_all(&path).map_err(|error| error.to_string())?;
    Ok(Folder(path))
}

/// Returns the region of each node.
fn regions() -> Vec<usize> {
    (0..NODES).map(|node| node / 2).collect()
}

fn rules() -> String {
    let mut rules = String::from("domain: d\ndescriptors:\n");
    for Mode { key, .. } in &MODES {
        let (region, on_error) = match *key {
            "owner" | "leased" => (format!("{{mode: {key}, owner: {}}}", REGIONS[0]), "closed"),
            "hash" => ("owner".to_owned(), "closed"),
            key => (key.to_owned(), "local"),
        };
        for (name, burst) in [((*key).to_owned(), BURST), (format!("{key}_caller"), RATE)] {
            rules += &format!(
                "  - {{key: {name}, limit: {{count: {RATE}, period: 1s, burst: {burst}}}, on_error: {on_error}, region: {region}}}\n"
            );
        }
    }
    rules + &format!("  - {{key: ledger, limit: {LEDGER}/month in UTC}}\n")
}

/// Starts Tollgate: a Redis in each region, and a database for what survives them.
pub(super) fn tollgate() -> Result<Subject, String> {
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let (binary, folder) = (tollgate_binary(&myself)?, folder()?);
    let file = folder.0.join("rules.yaml");
    std::fs::write(&file, rules()).map_err(|error| error.to_string())?;
    let links = Links::new(Content::Messages, regions(), TRIP_MS);
    let cells: Vec<u16> = (0..NODES).map(|_| ports::free()).collect();
    let fronts: Vec<String> = (0..NODES)
        .map(|node| Ok(format!("http://{}", links.lead_to(node, cells[node])?)))
        .collect::<Result<_, String>>()?;
    let stores: Vec<Site> = (0..REGIONS.len()).map(|region| redis(region, &folder.0)).collect();
    let nodes = (0..NODES).map(|node| {
        let region = node / 2;
        let mut site = Site::new(region, ports::free_address().to_string(), binary.clone());
        let (store, cell) =
            (format!("redis://{}", stores[region].address), format!("127.0.0.1:{}", cells[node]));
        let (database, rules) =
            (format!("sqlite:{}", folder.0.join("cells.db").display()), file.display().to_string());
        let name = format!("n{node}");
        let flags = [
            "serve",
            "--grpc",
            "off",
            "--resp",
            "off",
            "--admin",
            "off",
            "--snapshot",
            "off",
            "--db",
            &database,
            "--rules",
            &rules,
            "--store",
            &store,
            "--http",
            &site.address,
            "--node",
            &name,
            "--region",
            REGIONS[region],
            "--cell",
            &cell,
            "--cell-url",
            &fronts[node],
            "--store-deadline-ms",
            STORE_DEADLINE_MS,
        ];
        let mut arguments: Vec<String> = flags.map(str::to_owned).to_vec();
        for (other, front) in fronts.iter().enumerate().filter(|(other, _)| other / 2 != region) {
            arguments.extend(["--peer".to_owned(), format!("{}={front}", REGIONS[other / 2])]);
        }
        site.arguments = arguments;
        site
    });
    let sites = Sites { nodes: nodes.collect(), stores, links };
    sites.start()?;
    sites.wait_until("the cells to find each other", |sites| (0..NODES).all(|node| is_whole(sites, node)))?;
    Ok(Subject { name: "Tollgate", modes: &MODES, has_metrics: true, sites, _folder: folder })
}

/// Returns whether a node decides by the whole of all limits, and as an owner.
pub(super) fn is_whole(sites: &Sites, node: usize) -> bool {
    let page = sites.metrics(node).unwrap_or_default();
    values(&page, "ratelimit_region_share ") == [1.0] && values(&page, "ratelimit_region_joined ") == [1.0]
}

fn redis(region: usize, folder: &Path) -> Site {
    let address = ports::free_address();
    let mut site = Site::new(region, address.to_string(), PathBuf::from("redis-server"));
    let (port, folder) = (address.port().to_string(), folder.display().to_string());
    let flags =
        ["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", &folder];
    site.arguments = flags.map(str::to_owned).to_vec();
    site
}

/// Starts gubernator, if it has been built. Its nodes have their counters in memory.
pub(super) fn gubernator() -> Result<Option<Subject>, String> {
    let Some(program) = tool("gubernator-node") else { return Ok(None) };
    let links = Links::new(Content::Bytes, regions(), TRIP_MS);
    let listeners: Vec<u16> = (0..NODES).map(|_| ports::free()).collect();
    let fronts: Vec<String> = (0..NODES)
        .map(|node| links.lead_to(node, listeners[node]).map(|address| address.to_string()))
        .collect::<Result<_, _>>()?;
    let nodes = (0..NODES).map(|node| {
        let mut site = Site::new(node / 2, ports::free_address().to_string(), program.clone());
        let environment = [
            ("GUBER_GRPC_ADDRESS", format!("127.0.0.1:{}", listeners[node])),
            ("GUBER_HTTP_ADDRESS", site.address.clone()),
            ("GUBER_ADVERTISE_ADDRESS", fronts[node].clone()),
            ("GUBER_PEER_DISCOVERY_TYPE", "none".to_owned()),
            ("GUBER_LOG_LEVEL", "error".to_owned()),
            ("BENCH_PEERS", fronts.join(",")),
        ];
        site.environment = environment.map(|(name, value)| (name.to_owned(), value)).to_vec();
        site
    });
    let sites = Sites { nodes: nodes.collect(), stores: Vec::new(), links };
    sites.start()?;
    sites.wait_until("gubernator's nodes to find each other", |sites| {
        sites.nodes.iter().all(|node| {
            let health = node.connect().and_then(|mut connection| connection.get("/v1/HealthCheck"));
            let health = health.map_or_else(|_| String::new(), |(_, body)| body.replace(' ', ""));
            health.contains("\"status\":\"healthy\"") && health.contains(&format!("\"peer_count\":{NODES}"))
        })
    })?;
    let folder = folder()?;
    Ok(Some(Subject { name: "gubernator", modes: &BEHAVIORS, has_metrics: false, sites, _folder: folder }))
}

/// Returns gubernator's verdict, and whether the node itself owns the key.
fn ask_gubernator(
    connection: &mut Connection,
    behavior: &str,
    kind: Kind,
    caller: &str,
    hits: u64,
) -> Result<(Verdict, bool), String> {
    let burst = if kind == Kind::Attacked { BURST } else { RATE };
    let (status, body) = connection.post(
        "/v1/GetRateLimits",
        &format!(
            "{{\"requests\":[{{\"name\":\"{behavior}-{burst}\",\"unique_key\":\"{caller}\",\"hits\":{hits},\"limit\":{RATE},\
             \"duration\":1000,\"burst\":{burst},\"algorithm\":\"LEAKY_BUCKET\",\"behavior\":\"{behavior}\"}}]}}"
        ),
    )?;
    let verdict = match () {
        () if status != 200 || super::super::gubernator::is_failed(&body) => Verdict::Undecided,
        () if body.contains("OVER_LIMIT") => Verdict::Denied,
        () => Verdict::Allowed,
    };
    Ok((verdict, !body.contains("\"owner\"")))
}
