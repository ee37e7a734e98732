//! How cells share a counter's limit. A cell is a set of nodes with one counter store: a region with its Redis, or one
//! node with counters in memory.
//!
//! The mode is part of the counter's label, like the name of its store: whatever keeps a label (a lease, a reservation of
//! another node, a message between cells) knows who decides the counter. A counter of another mode is another counter.

use crate::time::TimeDelta;

/// How cells share the limit of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RegionMode {
    /// Each cell decides by its own counter, and debits what others report.
    #[default]
    Shared,
    /// Each cell has a part of the limit, and the parts sum to it.
    Split,
    /// One cell decides.
    Owner,
    /// One cell owns the counter; the others spend what it has leased to them.
    Leased,
}

impl RegionMode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Shared, Self::Split, Self::Owner, Self::Leased];

    /// Returns the name that rules use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Split => "split",
            Self::Owner => "owner",
            Self::Leased => "leased",
        }
    }

    /// Returns whether one cell decides for all.
    #[must_use]
    #[inline]
    pub const fn has_owner(self) -> bool {
        matches!(self, Self::Owner | Self::Leased)
    }
}

/// Which cell owns a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterOwner<'a> {
    /// A cell of this region.
    Region(&'a str),
    /// A cell of the region that the counter key's last value names.
    Home,
    /// The cell that a hash of the key selects among the living ones.
    Hash,
}

/// How cells share a counter at one moment, for usage and explanations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    /// How cells share its limit.
    pub mode: RegionMode,
    /// Region of the cell that decides; `None` if every cell decides, or none can.
    pub owner: Option<String>,
    /// Whether this cell decides.
    pub is_own: bool,
    /// How long ago everything that all other cells know of this one was consumed.
    pub lag: TimeDelta,
    /// Whether this cell decides by its part of the limit, because other cells are silent.
    pub is_regional_only: bool,
    /// The units of that part at most, in a burst; `None` if this cell decides by the whole limit.
    pub part: Option<u64>,
    /// Units that other cells have reported and that still count; `None` if they are not exchanged.
    pub others: Option<u64>,
}

/// What a label begins with, after the store's part, if its counters are not [`RegionMode::Shared`]: not what an escaped
/// character begins with.
const MARK: &str = "%&";

/// Returns the part of a label that states the mode; empty for [`RegionMode::Shared`].
///
/// ```
/// use tollgate_core::{CounterOwner, RegionMode, Scope, region_prefix};
/// let label = format!("{}api|user", region_prefix(RegionMode::Owner, CounterOwner::Region("eu")));
/// let scope = Scope::new(label).sibling("|escrow");
/// assert_eq!((scope.region_mode(), scope.owner()), (RegionMode::Owner, CounterOwner::Region("eu")));
/// assert_eq!(Scope::new("api|user").region_mode(), RegionMode::Shared);
/// ```
#[must_use]
pub fn region_prefix(mode: RegionMode, owner: CounterOwner<'_>) -> String {
    let name = mode.name();
    match (mode, owner) {
        (RegionMode::Shared, _) => String::new(),
        (RegionMode::Split, _) | (_, CounterOwner::Hash) => format!("{MARK}{name}|"),
        (_, CounterOwner::Region(region)) => format!("{MARK}{name}={region}|"),
        (_, CounterOwner::Home) => format!("{MARK}{name}~|"),
    }
}

/// Returns the mode of a label without its store's part, and its owner.
pub(crate) fn parse(label: &str) -> (RegionMode, CounterOwner<'_>) {
    let none = (RegionMode::Shared, CounterOwner::Hash);
    let Some((mark, _)) = label.strip_prefix(MARK).and_then(|rest| rest.split_once('|')) else { return none };
    let end = mark.find(['=', '~']).unwrap_or(mark.len());
    let (name, owner) = mark.split_at(end);
    let Some(mode) = RegionMode::ALL.into_iter().find(|mode| mode.name() == name) else { return none };
    let owner = match owner.strip_prefix('=') {
        Some(region) => CounterOwner::Region(region),
        None if owner == "~" => CounterOwner::Home,
        None => CounterOwner::Hash,
    };
    (mode, owner)
}
