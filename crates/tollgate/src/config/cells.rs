//! Cells: this one's name, the others, certificates and times; checked before anything is opened.

use crate::cli::{CellSection, ServeFlags};
use anyhow::{Context, ensure};
use std::net::SocketAddr;
use std::path::PathBuf;
use tollgate_cells::net::PeerUrl;
use tollgate_cells::{CellConfig, PeerConfig};
use tollgate_core::{StableHasher, TimeDelta};
use tollgate_rules::{CellPlace, LearnedCells, is_region_name};

/// Maximum number of other cells.
const MAX_PEERS: usize = 255;

/// Settings of a cell.
#[derive(Clone, Debug)]
pub(crate) struct Cells {
    pub(crate) listen: SocketAddr,
    pub(crate) config: CellConfig,
    pub(crate) urls: Vec<PeerUrl>,
    /// Address by which the others know this cell.
    pub(crate) url: String,
    /// Whether API keys leave this cell as hashes with a configured key.
    pub(crate) has_secret: bool,
    /// Certificate, key and authority.
    pub(crate) tls: Option<[PathBuf; 3]>,
}

impl Cells {
    /// Returns the number of cells, this one included: nodes that share a store are one.
    pub(crate) fn cells(&self) -> u32 {
        let stores: std::collections::BTreeSet<&str> =
            self.config.peers.iter().map(|peer| peer.store.as_str()).collect();
        u32::try_from(stores.len() + 1).unwrap_or(u32::MAX)
    }
}

/// Merges flags and file; `None` if neither says anything about cells.
pub(super) fn read(
    flags: &ServeFlags,
    file: &CellSection,
    region: Option<&str>,
    (has_secret, shares_store, has_db): (bool, bool, bool),
) -> anyhow::Result<Option<Cells>> {
    let given = &flags.cells;
    let peers = if given.peers.is_empty() { &file.peers } else { &given.peers };
    let Some(listen) = given.cell.or(file.listen) else {
        ensure!(
            peers.is_empty(),
            "--peer: the other cells must reach this one too; set --cell to the address that it listens on"
        );
        if let Some(setting) = without_cell(flags, file) {
            anyhow::bail!("{setting}: has no effect without --cell, the address that other cells connect to");
        }
        return Ok(None);
    };
    let region = region.context("--cell: a cell has a region; set --region")?;
    ensure!(
        is_region_name(region),
        "--region: the region of a cell has 1 to 64 letters, digits, `-`, `_` or `.`, as in eu-west-1"
    );
    let tls = tls(flags, file)?;
    let is_near = listen.ip().is_loopback();
    ensure!(
        is_near || tls.is_some(),
        "--cell: {listen} is not on loopback; set --cell-cert, --cell-key and --cell-ca"
    );
    let own = match given.cell_url.as_ref().or(file.url.as_ref()) {
        Some(url) => PeerUrl::parse(url).map_err(anyhow::Error::msg).context("--cell-url")?,
        None => {
            ensure!(
                !listen.ip().is_unspecified() && listen.port() != 0,
                "--cell: {listen} is no address that other cells can connect to; set --cell-url to the one that they use"
            );
            PeerUrl { host: listen.ip().to_string(), port: listen.port(), is_tls: tls.is_some() }
        }
    };
    ensure!(peers.len() <= MAX_PEERS, "--peer: at most {MAX_PEERS} other cells");
    let (mut configs, mut urls) = (Vec::new(), Vec::<PeerUrl>::new());
    for peer in peers {
        let named = peer.split_once('=').filter(|(region, _)| is_region_name(region));
        let (region, url) = named.with_context(|| {
            format!("--peer: `{peer}` is not a region and a URL, as in us=https://us.example.com:7400")
        })?;
        let parsed =
            PeerUrl::parse(url).map_err(anyhow::Error::msg).with_context(|| format!("--peer {peer}"))?;
        ensure!(
            !parsed.is_tls || tls.is_some(),
            "--peer {peer}: set --cell-cert, --cell-key and --cell-ca for https://"
        );
        ensure!(!urls.contains(&parsed), "--peer {peer}: named twice");
        ensure!(
            authority(&parsed) != authority(&own),
            "--peer {peer}: this is the cell itself; leave it out"
        );
        // With Redis the nodes of a region are one cell; with counters in memory each is its own.
        let mut config = PeerConfig::new(region, authority(&parsed));
        if shares_store {
            config.store = region.to_owned();
        }
        configs.push(config);
        urls.push(parsed);
    }
    let far = std::iter::once(&own).chain(&urls).find(|url| !url.is_loopback()).map(authority);
    let far = if is_near { far } else { Some(listen.to_string()) };
    if let Some(far) = far.filter(|_| !has_secret) {
        anyhow::bail!(
            "--cell: {far} is not on loopback; set `identity.api_key.secret_file` to the same secret in all cells, so that API \
             keys leave this one only as keyed hashes"
        );
    }
    let name = if shares_store { region.to_owned() } else { format!("{region}/{}", authority(&own)) };
    let mut config = CellConfig::new(name, region, configs);
    config.keeps_counters = shares_store;
    // Without peers, the nodes of the database are.
    config.learns_peers = has_db && config.peers.is_empty();
    ensure!(
        !shares_store || config.peers.iter().all(|peer| peer.region != region),
        "--peer: nodes of one region that share a Redis store are one cell; name those of other regions alone"
    );
    let times = [
        (given.cell_tick_ms, file.tick_ms.map(|time| time.0), &mut config.tick),
        (given.cell_silence_ms, file.silence_ms.map(|time| time.0), &mut config.silence),
        (given.cell_deadline_ms, file.deadline_ms.map(|time| time.0), &mut config.deadline),
    ];
    for (flag, file, setting) in times {
        if let Some(time) = flag.or(file) {
            *setting = TimeDelta::from_millis(time);
        }
    }
    ensure!(
        config.silence.as_micros() >= 2 * config.tick.as_micros(),
        "--cell-silence-ms: must be at least twice --cell-tick-ms; a cell answers once in a tick"
    );
    config.weights = weights(file, &config)?;
    let earlier = |peer: &&PeerConfig| peer.region == region && peer.address < authority(&own);
    let rank = u32::try_from(config.peers.iter().filter(earlier).count())?;
    config.rank = rank;
    if config.learns_peers {
        // Learned cells divide no limit by rank: the number only tells them apart.
        let mut hasher = StableHasher::default();
        hasher.bytes(authority(&own).as_bytes());
        config.rank = hasher.finish() as u32;
    }
    let url = format!("{}://{}", if own.is_tls { "https" } else { "http" }, authority(&own));
    Ok(Some(Cells { listen, config, urls, url, has_secret, tls }))
}

/// Returns a setting of cells, if there is one.
fn without_cell(flags: &ServeFlags, file: &CellSection) -> Option<&'static str> {
    let given = &flags.cells;
    let settings = [
        ("--cell-url", given.cell_url.is_some() || file.url.is_some()),
        ("--cell-cert", given.cell_cert.is_some() || file.cert.is_some()),
        ("--cell-key", given.cell_key.is_some() || file.key.is_some()),
        ("--cell-ca", given.cell_ca.is_some() || file.ca.is_some()),
        ("--cell-tick-ms", given.cell_tick_ms.is_some() || file.tick_ms.is_some()),
        ("--cell-silence-ms", given.cell_silence_ms.is_some() || file.silence_ms.is_some()),
        ("--cell-deadline-ms", given.cell_deadline_ms.is_some() || file.deadline_ms.is_some()),
        ("`cells.weights`", !file.weights.is_empty()),
    ];
    settings.into_iter().find(|(_, is_set)| *is_set).map(|(name, _)| name)
}

fn weights(file: &CellSection, config: &CellConfig) -> anyhow::Result<Vec<(String, u64)>> {
    if !file.weights.is_empty() {
        ensure!(
            file.weights.get(&config.region).is_some_and(|weight| *weight > 0),
            "`cells.weights`: this cell's region `{}` must have a weight above 0",
            config.region
        );
        // Learned cells come and go.
        if !config.learns_peers {
            let regions = || config.peers.iter().map(|peer| &peer.region).chain([&config.region]);
            let unknown = file.weights.keys().find(|name| regions().all(|region| region != *name));
            if let Some(unknown) = unknown {
                anyhow::bail!("`cells.weights`: no cell of a region `{unknown}` is named by --peer");
            }
            if let Some(missing) = regions().find(|region| !file.weights.contains_key(*region)) {
                anyhow::bail!(
                    "`cells.weights`: give the region `{missing}` a weight; with 0 it admits nothing of shared limits while \
                     cells are silent"
                );
            }
        }
    }
    Ok(file.weights.iter().map(|(region, weight)| (region.clone(), u64::from(*weight))).collect())
}

fn tls(flags: &ServeFlags, file: &CellSection) -> anyhow::Result<Option<[PathBuf; 3]>> {
    let given = &flags.cells;
    let files = [
        given.cell_cert.clone().or(file.cert.clone()),
        given.cell_key.clone().or(file.key.clone()),
        given.cell_ca.clone().or(file.ca.clone()),
    ];
    match files {
        [None, None, None] => Ok(None),
        [Some(certificate), Some(key), Some(authority)] => Ok(Some([certificate, key, authority])),
        _ => anyhow::bail!("--cell-cert, --cell-key and --cell-ca must be set together"),
    }
}

/// Returns the host and port of a URL.
pub(crate) fn authority(url: &PeerUrl) -> String {
    if url.host.contains(':') {
        format!("[{}]:{}", url.host, url.port)
    } else {
        format!("{}:{}", url.host, url.port)
    }
}

/// Returns the cells as rules need them.
pub(super) fn place(cells: Option<&Cells>, region: Option<&str>) -> CellPlace {
    let mut regions = std::collections::BTreeMap::<String, u32>::new();
    let peers = cells.map_or(&[][..], |cells| &cells.config.peers);
    let is_first = |at: &usize| peers[..*at].iter().all(|other| other.store != peers[*at].store);
    let others = (0..peers.len()).filter(is_first).map(|at| peers[at].region.as_str());
    for name in region.into_iter().chain(others) {
        *regions.entry(name.to_owned()).or_default() += 1;
    }
    CellPlace {
        region: region.map(str::to_owned),
        regions: regions.into_iter().collect(),
        rank: cells.filter(|cells| !cells.config.learns_peers).map_or(0, |cells| cells.config.rank),
        learned: cells.filter(|cells| cells.config.learns_peers).map(|cells| {
            match cells.config.keeps_counters {
                true => LearnedCells::OnePerRegion,
                false => LearnedCells::Any,
            }
        }),
    }
}
