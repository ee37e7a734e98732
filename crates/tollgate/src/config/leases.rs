//! Lease settings: flags and the `leases` section of the file of `--config`.

use crate::cli::ServeFlags;
use crate::yaml_file::{Millis, Whole};
use serde::Deserialize;
use tollgate_core::TimeDelta;
use tollgate_store::LeaseConfig;

/// An hour, in milliseconds.
const HOUR: u64 = 3_600_000;
/// Maximum number of leased keys.
const MAX_LEASED_KEYS: u64 = 1 << 24;

/// `leases` in the file of `--config`; what is left out is as in `docs/leases.md`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseSection {
    share: Option<f64>,
    ttl_ms: Option<Millis<HOUR>>,
    horizon_ms: Option<Millis<HOUR>>,
    idle_ms: Option<Millis<HOUR>>,
    #[serde(alias = "most")]
    max_keys: Option<Whole<1, MAX_LEASED_KEYS>>,
    hot_per_second: Option<u64>,
    cool_ms: Option<Millis<HOUR>>,
}

/// Returns the lease settings of flags and file.
pub(super) fn read(flags: &ServeFlags, file: &LeaseSection) -> anyhow::Result<LeaseConfig> {
    let mut leases = LeaseConfig::default();
    if let Some(share) = flags.lease_share.or(file.share) {
        anyhow::ensure!(
            share > 0.0 && share <= 1.0,
            "--lease-share: must be between 0.01 and 1, got {share}"
        );
        leases.share = share;
    }
    let times = [
        (file.ttl_ms, &mut leases.ttl),
        (file.horizon_ms, &mut leases.horizon),
        (file.idle_ms, &mut leases.idle),
        (file.cool_ms, &mut leases.cool),
    ];
    for (given, setting) in times {
        if let Some(time) = given {
            *setting = TimeDelta::from_millis(time.0);
        }
    }
    if let Some(most) = file.max_keys {
        leases.max_keys = usize::try_from(most.0)?;
    }
    if let Some(hot) = flags.hot_per_second.or(file.hot_per_second) {
        leases.hot = (hot > 0).then_some(hot);
    }
    Ok(leases)
}
