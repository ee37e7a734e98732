//! `region`: how cells share a rule's limits, and the part of a limit that this cell has.
//!
//! A share is computed when rules are compiled, never at run time: it depends on the configured regions and weights alone,
//! so that no partition changes it, and the parts of all cells sum to the limit exactly.

use std::fmt;
use std::sync::Arc;
use tollgate_core::{Algorithm, CounterOwner, Limit, RegionMode};

/// The cells of a deployment, and which of them this server belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CellPlace {
    /// Region of this cell; `None` if the server has none.
    pub region: Option<String>,
    /// Regions with the number of cells in each, sorted by name; this cell's own is among them.
    pub regions: Vec<(String, u32)>,
    /// Index of this cell among those of its region, in an order that all of them agree on.
    pub rank: u32,
    /// Whether further cells are learned while the server runs: then no limit is divided by the number of cells, which may
    /// change, and no hash selects owners.
    pub learned: Option<LearnedCells>,
}

/// Cells that are not known when rules are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnedCells {
    /// One in each region, because the nodes of a region share a store.
    OnePerRegion,
    /// Any number in a region.
    Any,
}

impl CellPlace {
    /// Returns the number of cells.
    #[must_use]
    pub fn cells(&self) -> u32 {
        self.regions.iter().map(|(_, cells)| cells).sum()
    }

    /// Returns whether there is a region of this name.
    #[must_use]
    pub fn has_region(&self, name: &str) -> bool {
        self.regions.iter().any(|(region, _)| region == name)
    }
}

/// Owner of a rule's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OwnerSetting {
    /// The cell that a hash of the key selects.
    #[default]
    Hash,
    /// A named region.
    Region(String),
    /// The region that this attribute of the request names.
    Home(String),
}

/// `region` of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionSetting {
    /// How cells share the limits.
    pub mode: RegionMode,
    /// Owner, for modes that have one.
    pub owner: OwnerSetting,
    /// Weights of the regions, sorted by name; equal for all cells if empty.
    pub weights: Vec<(String, u64)>,
}

impl RegionSetting {
    /// Returns the owner as it is written into labels.
    #[must_use]
    pub fn counter_owner(&self) -> CounterOwner<'_> {
        match &self.owner {
            OwnerSetting::Hash => CounterOwner::Hash,
            OwnerSetting::Region(region) => CounterOwner::Region(region),
            OwnerSetting::Home(_) => CounterOwner::Home,
        }
    }

    /// Returns the attribute that names the owning region.
    #[must_use]
    pub fn home(&self) -> Option<&str> {
        match &self.owner {
            OwnerSetting::Home(attribute) => Some(attribute),
            _ => None,
        }
    }

    /// Returns the part of a limit that this cell has: of a `split` rule, and of permits that are not decided by an owner,
    /// because a permit that is held elsewhere cannot be debited.
    pub(crate) fn share(&self, limit: &Limit, place: &CellPlace) -> Option<Limit> {
        let is_divided = match self.mode {
            RegionMode::Split => true,
            RegionMode::Shared => limit.algorithm() == Algorithm::Concurrency && place.cells() > 1,
            RegionMode::Owner | RegionMode::Leased => false,
        };
        let region = place.region.as_deref().filter(|_| is_divided)?;
        // What cannot be divided is refused when rules are compiled; it never admits the whole.
        let (weights, at) = self.cell_weights(region, place).unwrap_or((vec![0, 1], 0));
        Some(limit.weighted_part(&weights, at))
    }

    /// Returns the weight of each cell, in an order that all cells agree on, and the index of this one.
    pub(crate) fn cell_weights(&self, region: &str, place: &CellPlace) -> Option<(Vec<u64>, usize)> {
        let cells_of =
            |name: &str| place.regions.iter().find(|(known, _)| known == name).map_or(1, |(_, cells)| *cells);
        let names: Vec<(&str, u64)> = if self.weights.is_empty() {
            place.regions.iter().map(|(name, cells)| (name.as_str(), u64::from(*cells))).collect()
        } else {
            self.weights.iter().map(|(name, weight)| (name.as_str(), *weight)).collect()
        };
        // A region's weight is divided among its cells: all weights are multiplied by a number that every region's number
        // of cells divides.
        let all: Vec<u64> = names.iter().map(|(name, _)| u64::from(cells_of(name)).max(1)).collect();
        let common = all
            .iter()
            .try_fold(1_u64, |common, cells| (common / divisor(common, *cells)).checked_mul(*cells))?;
        let (mut weights, mut at) = (Vec::new(), None);
        for ((name, weight), cells) in names.iter().zip(&all) {
            let each = weight.checked_mul(common / cells)?;
            for rank in 0..*cells {
                if *name == region && rank == u64::from(place.rank) {
                    at = Some(weights.len());
                }
                weights.push(each);
            }
        }
        at.map(|at| (weights, at))
    }
}

impl fmt::Display for RegionSetting {
    /// Writes the setting as in rules: the mode alone, or the mapping.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = self.mode.name();
        match (&self.owner, self.weights.is_empty()) {
            (OwnerSetting::Region(owner), _) => write!(f, "{{mode: {mode}, owner: {owner}}}"),
            (OwnerSetting::Home(attribute), _) => write!(f, "{{mode: {mode}, home: {attribute}}}"),
            (OwnerSetting::Hash, true) => f.write_str(mode),
            (OwnerSetting::Hash, false) => {
                let weights: Vec<String> =
                    self.weights.iter().map(|(region, weight)| format!("{region}: {weight}")).collect();
                write!(f, "{{mode: {mode}, weights: {{{}}}}}", weights.join(", "))
            }
        }
    }
}

/// Returns the greatest common divisor.
const fn divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { divisor(other, one % other) }
}

/// A rule's setting, shared by its overrides.
pub(crate) type SharedRegion = Arc<RegionSetting>;

/// Longest name of a region in rules.
const MAX_NAME: usize = 64;

/// Returns whether a text can be the name of a region.
///
/// ```
/// assert!(tollgate_rules::is_region_name("eu-west-1"));
/// assert!(!tollgate_rules::is_region_name("eu|west") && !tollgate_rules::is_region_name(""));
/// ```
#[must_use]
pub fn is_region_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain)
}
