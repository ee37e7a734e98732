//! Learns the other cells from the node list of the control-plane database: each node announces its cell in its heartbeat.
//!
//! For a cell without configured peers. What the list says is held to the rules of `--peer`: `http://` on loopback alone,
//! `https://` only with certificates, and nothing off loopback without the secret that API keys are hashed with.
//!
//! A cell that is left out counts for nothing: the others have its part, and what is admitted is no longer reported to it. So a
//! heartbeat that is missing is not enough. While the database cannot be read or written the cells that were known stay, and so
//! does one that answers, whatever the list says of it.

use crate::config::cells::Cells;
use crate::server::cells::CellStore;
use crate::server::store::Store;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tollgate_cells::net::{CellTls, Links, PeerUrl, run_links};
use tollgate_cells::{PeerChanges, PeerConfig};
use tollgate_control::{ControlPlane, NodeRecord};
use tollgate_engine::Limiter;
use tollgate_rules::{OwnerSetting, Rule, is_region_name};

/// Field of a heartbeat with the node's cell.
pub(crate) const CELL: &str = "cell";
/// Interval between two reads of the node list.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time that the start waits for the first.
const BEFORE_TRAFFIC: Duration = Duration::from_secs(5);
/// Maximum length of an announced name or URL.
const MAX_TEXT: usize = 256;

/// Returns what a node announces of its cell.
pub(crate) fn announcement(cells: &Cells) -> Value {
    json!({"name": cells.config.cell, "region": cells.config.region, "url": cells.url})
}

/// An announced cell: the peer, and where it is.
type Announced = (PeerConfig, PeerUrl);

/// Reads the node list, and links this cell to those that it has.
pub(crate) struct Learner {
    pub(crate) control: Arc<ControlPlane>,
    pub(crate) limiter: Arc<Limiter<Store>>,
    pub(crate) store: Arc<CellStore>,
    pub(crate) links: Arc<Links>,
    pub(crate) tls: Option<Arc<CellTls>>,
    pub(crate) ticks: watch::Receiver<u64>,
    pub(crate) cells: Cells,
    running: HashMap<usize, AbortHandle>,
    tasks: JoinSet<()>,
    /// The cells of the last reading, by address.
    known: BTreeMap<String, Announced>,
    /// Announcements that were refused, as far as the log has them.
    refused: BTreeSet<String>,
}

impl Learner {
    pub(crate) fn new(
        (control, limiter): (Arc<ControlPlane>, Arc<Limiter<Store>>),
        (store, links): (Arc<CellStore>, Arc<Links>),
        tls: Option<Arc<CellTls>>,
        ticks: watch::Receiver<u64>,
        cells: Cells,
    ) -> Self {
        let (running, tasks, refused) = (HashMap::new(), JoinSet::new(), BTreeSet::new());
        let known = BTreeMap::new();
        Self { control, limiter, store, links, tls, ticks, cells, running, tasks, known, refused }
    }

    /// Reads the list for the first time. Traffic waits for it, for a short time.
    pub(crate) async fn learn_first(&mut self) {
        if !tokio::time::timeout(BEFORE_TRAFFIC, self.learn()).await.unwrap_or(false) {
            tracing::warn!("the other cells are not learned yet; traffic is served meanwhile");
        }
    }

    /// Reads the list for as long as the process runs.
    pub(crate) async fn run(mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            self.learn().await;
        }
    }

    /// Reads the list once. Returns whether it could be read.
    async fn learn(&mut self) -> bool {
        let nodes = match self.control.nodes().await {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::debug!(%error, "cannot read the node list; the cells that are known stay");
                return false;
            }
        };
        let mut announced = self.announced(&nodes);
        let is_own_current = nodes.iter().any(|node| node.is_self && !node.stale);
        keep_known(&mut announced, &self.known, is_own_current, &self.answering());
        self.known.clone_from(&announced);
        let peers: Vec<PeerConfig> = announced.values().map(|(peer, _)| peer.clone()).collect();
        let PeerChanges { added, removed } = self.store.set_peers(&peers);
        for at in &removed {
            if let Some(task) = self.running.remove(at) {
                task.abort();
            }
            self.links.remove(*at);
        }
        for (at, peer) in &added {
            let Some((_, url)) = announced.get(&peer.address) else { continue };
            let (store, links, tls) = (Arc::clone(&self.store), Arc::clone(&self.links), self.tls.clone());
            let link = run_links(store, links, *at, url.clone(), tls, self.ticks.clone());
            self.running.insert(*at, self.tasks.spawn(link));
        }
        while self.tasks.try_join_next().is_some() {}
        if !added.is_empty() || !removed.is_empty() {
            let cells = self.store.members().other_cells() + 1;
            tracing::info!(nodes = peers.len(), cells, "cells learned from the node list");
            self.warn_of_undecided(&peers);
        }
        // For counters whose owner does not answer: each cell has its part.
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        match self.cells.config.keeps_counters {
            true => self.limiter.set_cells(count(self.store.members().other_cells() + 1)),
            false => self.limiter.set_live_nodes(count(peers.len() + 1)),
        }
        true
    }

    /// Logs that limits of a region with several cells have no owner: no hash selects one of them where cells come and go.
    fn warn_of_undecided(&self, peers: &[PeerConfig]) {
        let own = (&self.cells.config.region, &self.cells.config.cell);
        let rules = self.limiter.rules();
        for region in shared_regions(peers.iter().map(|peer| (&peer.region, &peer.store)).chain([own])) {
            let is_owned = |rule: &Rule| match rule.region.as_deref() {
                Some(setting) if setting.mode.has_owner() => match &setting.owner {
                    OwnerSetting::Region(owner) => owner == region,
                    _ => false,
                },
                _ => false,
            };
            if let Some(rule) = rules.rules().iter().find(|rule| is_owned(rule)) {
                tracing::warn!(
                    region,
                    rule = rule.name,
                    "several cells have the region that owns limits of this rule, so none decides them, but `on_error`; let the region's \
                     nodes share a Redis, or name all cells by --peer"
                );
            }
        }
    }

    /// Returns the addresses of the cells that answer.
    fn answering(&self) -> BTreeSet<String> {
        let (members, now) = (self.store.members(), self.limiter.clock().now());
        let peers = members.peers(now).into_iter().filter(|(at, _)| !members.is_silent(*at, now));
        peers.filter_map(|(at, _)| members.peer(at)).map(|peer| peer.address).collect()
    }

    /// Returns the cells that nodes announce, by address: without this one, those that are gone, and what is refused.
    fn announced(&mut self, nodes: &[NodeRecord]) -> BTreeMap<String, Announced> {
        let mut all = BTreeMap::new();
        for node in nodes.iter().filter(|node| !node.is_self && !node.stale) {
            let Some(cell) = node.report.get(CELL).filter(|cell| cell.is_object()) else { continue };
            match self.peer(cell) {
                Ok(Some((peer, url))) => _ = all.insert(peer.address.clone(), (peer, url)),
                Ok(None) => {}
                Err(why) => {
                    let (cell, why) = (cell.to_string(), why.as_str());
                    if self.refused.len() < 1_000 && self.refused.insert(cell.clone()) {
                        tracing::warn!(cell, "a cell of the node list is left out: {why}");
                    }
                }
            }
        }
        all
    }

    /// Returns the peer that an announcement describes; `None` if it is of this cell.
    fn peer(&self, cell: &Value) -> Result<Option<Announced>, String> {
        let text = |name: &str| {
            let text = cell[name].as_str().filter(|text| (1..=MAX_TEXT).contains(&text.len()));
            text.ok_or_else(|| format!("its `{name}` is missing or too long"))
        };
        let (name, region, url) = (text("name")?, text("region")?, text("url")?);
        if name == self.cells.config.cell || url == self.cells.url {
            return Ok(None);
        }
        if !is_region_name(region) {
            return Err("its region is no name of a region".to_owned());
        }
        let parsed = PeerUrl::parse(url)?;
        if parsed.is_tls && self.tls.is_none() {
            return Err("set --cell-cert, --cell-key and --cell-ca for https://".to_owned());
        }
        if !parsed.is_loopback() && !self.cells.has_secret {
            return Err(
                "it is not on loopback; set `identity.api_key.secret_file` to the same secret in all cells"
                    .to_owned(),
            );
        }
        // Nodes that share a store have the same name.
        let address = crate::config::cells::authority(&parsed);
        let peer = PeerConfig { region: region.to_owned(), address, store: name.to_owned() };
        Ok(Some((peer, parsed)))
    }
}

/// Returns the regions that several cells have, of these pairs of a region and a cell.
fn shared_regions<'a>(cells: impl Iterator<Item = (&'a String, &'a String)>) -> Vec<&'a str> {
    let cells: BTreeSet<(&String, &String)> = cells.collect();
    let regions: Vec<&str> = cells.iter().map(|(region, _)| region.as_str()).collect();
    let mut several: Vec<&str> =
        regions.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    several.dedup();
    several
}

/// Adds the cells of the last reading that stay although the list does not have them any more: those that answer, and all if this
/// node's own heartbeat is missing too, because that says something of the database and not of the cells.
fn keep_known<A: Clone>(
    announced: &mut BTreeMap<String, A>,
    known: &BTreeMap<String, A>,
    is_own_current: bool,
    answering: &BTreeSet<String>,
) {
    for (address, cell) in known {
        if !is_own_current || answering.contains(address) {
            announced.entry(address.clone()).or_insert_with(|| cell.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each cell would have the whole limit, and report to none what it admits.
    #[test]
    fn a_missing_heartbeat_drops_only_a_cell_that_does_not_answer() {
        let list = |addresses: &[&str]| -> BTreeMap<String, ()> {
            addresses.iter().map(|address| ((*address).to_owned(), ())).collect()
        };
        let kept = |fresh: &[&str], is_own_current: bool, answering: &[&str]| {
            let mut announced = list(fresh);
            let answering = answering.iter().map(|address| (*address).to_owned()).collect();
            keep_known(&mut announced, &list(&["a", "b"]), is_own_current, &answering);
            announced.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(kept(&["a", "c"], true, &["a"]), ["a", "c"], "b is gone");
        assert_eq!(kept(&["a"], true, &["a", "b"]), ["a", "b"], "b has lost the database alone");
        assert_eq!(kept(&[], false, &[]), ["a", "b"], "nothing can be written");
    }

    #[test]
    fn a_region_is_shared_by_cells_and_not_by_nodes_of_one() {
        let cells = [("eu", "a"), ("us", "b"), ("eu", "a"), ("us", "c"), ("us", "d")]
            .map(|(region, cell)| (region.to_owned(), cell.to_owned()));
        assert_eq!(shared_regions(cells.iter().map(|(region, cell)| (region, cell))), ["us"]);
    }
}
