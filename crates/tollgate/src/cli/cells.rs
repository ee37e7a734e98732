//! Settings of cells: where this one listens, who the others are, and the times of their exchange.

use crate::yaml_file::Millis;
use clap::Args;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Longest tick, in milliseconds.
const MAX_TICK: u64 = 10_000;
/// Longest silence and deadline, in milliseconds.
const MAX_TIME: u64 = 60_000;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CellFlags {
    /// Address that other cells connect to, for limits shared between regions or between nodes without Redis [default: off].
    /// Addresses other than loopback require --cell-cert, --cell-key and --cell-ca.
    #[arg(long, env = "TOLLGATE_CELL", value_name = "ADDRESS")]
    pub(crate) cell: Option<SocketAddr>,
    /// Address by which the other cells know this one [default: that of --cell].
    #[arg(long, env = "TOLLGATE_CELL_URL", value_name = "URL")]
    pub(crate) cell_url: Option<String>,
    /// Another cell: its region and address, such as us=https://us.example.com:7400, or http:// on loopback. Repeat it for
    /// each cell; separate several in the variable by spaces [default: with --db, the cells of its node list].
    #[arg(long = "peer", env = "TOLLGATE_PEER", value_name = "REGION=URL", value_delimiter = ' ')]
    pub(crate) peers: Vec<String>,
    /// Certificate of this cell (PEM), shown to other cells in both directions; reloaded when the file changes.
    #[arg(long, env = "TOLLGATE_CELL_CERT", value_name = "FILE")]
    pub(crate) cell_cert: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, env = "TOLLGATE_CELL_KEY", value_name = "FILE")]
    pub(crate) cell_key: Option<PathBuf>,
    /// Authority of all cells' certificates (PEM).
    #[arg(long, env = "TOLLGATE_CELL_CA", value_name = "FILE")]
    pub(crate) cell_ca: Option<PathBuf>,
    /// Time between two exchanges of consumption, in milliseconds [default: 200].
    #[arg(long, env = "TOLLGATE_CELL_TICK_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_TICK))]
    pub(crate) cell_tick_ms: Option<u64>,
    /// Time without an answer after which another cell counts as silent, in milliseconds [default: 2000].
    #[arg(long, env = "TOLLGATE_CELL_SILENCE_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_TIME))]
    pub(crate) cell_silence_ms: Option<u64>,
    /// Maximum time that a check waits for the cell that owns a counter, in milliseconds [default: 150].
    #[arg(long, env = "TOLLGATE_CELL_DEADLINE_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_TIME))]
    pub(crate) cell_deadline_ms: Option<u64>,
}

/// The same in the file of `--config`: `cells`.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CellSection {
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) url: Option<String>,
    #[serde(default)]
    pub(crate) peers: Vec<String>,
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) tick_ms: Option<Millis<MAX_TICK>>,
    pub(crate) silence_ms: Option<Millis<MAX_TIME>>,
    pub(crate) deadline_ms: Option<Millis<MAX_TIME>>,
    /// Weights of the regions for limits that are shared, while a cell is silent.
    #[serde(default)]
    pub(crate) weights: BTreeMap<String, u32>,
}

impl CellSection {
    /// Returns the files of the section.
    pub(crate) fn files(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        [&mut self.cert, &mut self.key, &mut self.ca].into_iter().flatten()
    }
}
