//! How cells share a limit at one moment, in usage and explanations.

use serde::Serialize;
use tollgate_core::RegionStatus;
use utoipa::ToSchema;

/// How cells share a limit.
#[derive(Serialize, ToSchema)]
pub(super) struct RegionOfLimit {
    /// `shared`, `split`, `owner` or `leased`.
    mode: &'static str,
    /// Region of the cell that decides; absent if every cell decides, or none can.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    owner: Option<String>,
    /// Whether the cell of this node decides.
    decided_here: bool,
    /// How long ago everything that the other cells know of this one was consumed, in milliseconds.
    lag_ms: u64,
    /// Whether this cell decides by its part of the limit, because other cells are silent.
    regional_only: bool,
    /// The units of that part at most, in a burst; absent if this cell decides by the whole limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    part: Option<u64>,
    /// Units that other cells have reported and that still count; absent if they are not exchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    used_by_others: Option<u64>,
}

impl From<&RegionStatus> for RegionOfLimit {
    fn from(status: &RegionStatus) -> Self {
        Self {
            mode: status.mode.name(),
            owner: status.owner.clone(),
            decided_here: status.is_own,
            lag_ms: status.lag.ceil_millis(),
            regional_only: status.is_regional_only,
            part: status.part,
            used_by_others: status.others,
        }
    }
}
