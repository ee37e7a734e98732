//! The processes of the regions: nodes and their stores, which can die and come back at the same addresses.

use super::super::connection::Connection;
use super::super::load::lock;
use super::links::Links;
use crate::process::Server;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

/// A process that may be dead.
pub(super) struct Site {
    pub(super) region: usize,
    /// Where it answers once it has started.
    pub(super) address: String,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    process: Mutex<Option<Server>>,
}

impl Site {
    pub(super) fn new(region: usize, address: String, program: PathBuf) -> Self {
        let (arguments, environment, process) = (Vec::new(), Vec::new(), Mutex::default());
        Self { region, address, program, arguments, environment, process }
    }

    /// Starts it, and names it to the links.
    fn start(&self, links: Option<(&Links, usize)>) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        let identify = |process| {
            if let Some((links, node)) = links {
                links.identify(process, node);
            }
        };
        let server = Server::start_anywhere_as(command, &self.program, &self.address, identify)?;
        *lock(&self.process) = Some(server);
        Ok(())
    }

    /// Kills it.
    fn kill(&self) {
        *lock(&self.process) = None;
    }

    pub(super) fn is_alive(&self) -> bool {
        lock(&self.process).is_some()
    }

    pub(super) fn connect(&self) -> Result<Connection, String> {
        Connection::open(&self.address)
    }
}

/// All processes, and the links between the nodes.
pub(super) struct Sites {
    pub(super) nodes: Vec<Site>,
    /// The store of each region, if they have one.
    pub(super) stores: Vec<Site>,
    pub(super) links: Links,
}

impl Sites {
    /// Starts all, the stores first.
    pub(super) fn start(&self) -> Result<(), String> {
        (0..super::REGIONS.len()).try_for_each(|region| self.start_store(region))?;
        (0..self.nodes.len()).try_for_each(|node| self.start_node(node))
    }

    fn start_node(&self, node: usize) -> Result<(), String> {
        self.nodes[node].start(Some((&self.links, node)))
    }

    pub(super) fn start_store(&self, region: usize) -> Result<(), String> {
        self.stores.iter().filter(|store| store.region == region).try_for_each(|store| store.start(None))
    }

    /// Kills the store of a region, with its counters.
    pub(super) fn kill_store(&self, region: usize) {
        self.stores.iter().filter(|store| store.region == region).for_each(Site::kill);
    }

    /// Kills all processes of a region.
    pub(super) fn kill_region(&self, region: usize) {
        self.nodes.iter().filter(|node| node.region == region).for_each(Site::kill);
        self.kill_store(region);
    }

    pub(super) fn start_region(&self, region: usize) -> Result<(), String> {
        self.start_store(region)?;
        (0..self.nodes.len())
            .filter(|node| self.nodes[*node].region == region)
            .try_for_each(|node| self.start_node(node))
    }

    /// Returns the values of a metric, of which `name` is the beginning of a line.
    pub(super) fn metric(&self, node: usize, name: &str) -> Vec<f64> {
        let page = self.nodes[node].connect().and_then(|mut connection| connection.get("/metrics"));
        let page = page.map_or_else(|_| String::new(), |(_, page)| page);
        values(&page, name)
    }

    /// Returns the metrics of a node as text.
    pub(super) fn metrics(&self, node: usize) -> Option<String> {
        let page = self.nodes[node].connect().and_then(|mut connection| connection.get("/metrics"));
        page.ok().map(|(_, page)| page)
    }

    /// Polls until `is_so`.
    pub(super) fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) -> Result<(), String> {
        for _ in 0..600 {
            if is_so(self) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Err(format!("timed out waiting for {what}"))
    }
}

/// Returns the values of a metric of a page, of which `name` is the beginning of a line.
pub(super) fn values(page: &str, name: &str) -> Vec<f64> {
    let own = page.lines().filter(|line| line.starts_with(name));
    own.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect()
}
