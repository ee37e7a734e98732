//! Settings of billing: how long consumption is kept, and where it is sent.

use crate::yaml_file::Whole;
use clap::Args;
use std::path::PathBuf;
use tollgate_control::BillingRetention;

/// Bounds of the days for which hours are kept.
const MIN_HOURLY: u64 = 2;
const MAX_HOURLY: u64 = 400;
/// Bounds of the days for which months are kept.
const MIN_MONTHLY: u64 = 62;
const MAX_MONTHLY: u64 = 3_660;

#[derive(Clone, Debug, Args)]
pub(crate) struct BillingFlags {
    /// URL that consumption of billed rules is posted to, hour by hour, with --db. Requires
    /// --billing-webhook-secret-file.
    #[arg(long, env = "TOLLGATE_BILLING_WEBHOOK", hide_env_values = true, value_name = "URL")]
    pub(crate) billing_webhook: Option<String>,
    /// File containing the secret that posts are signed with.
    #[arg(long, env = "TOLLGATE_BILLING_WEBHOOK_SECRET_FILE", value_name = "FILE")]
    pub(crate) billing_webhook_secret_file: Option<PathBuf>,
    /// Days for which consumption is kept by hour [default: 35].
    #[arg(long, env = "TOLLGATE_BILLING_HOURLY_DAYS", value_name = "N", value_parser = clap::value_parser!(u64).range(MIN_HOURLY..=MAX_HOURLY))]
    billing_hourly_days: Option<u64>,
    /// Days for which consumption is kept by month [default: 400].
    #[arg(long, env = "TOLLGATE_BILLING_MONTHLY_DAYS", value_name = "N", value_parser = clap::value_parser!(u64).range(MIN_MONTHLY..=MAX_MONTHLY))]
    billing_monthly_days: Option<u64>,
}

/// The same in the file of `--config`: `billing`.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BillingSection {
    pub(crate) webhook: Option<String>,
    pub(crate) webhook_secret_file: Option<PathBuf>,
    hourly_days: Option<Whole<MIN_HOURLY, MAX_HOURLY>>,
    monthly_days: Option<Whole<MIN_MONTHLY, MAX_MONTHLY>>,
}

impl BillingFlags {
    /// Merges flags, file and defaults.
    pub(crate) fn retention(&self, file: &BillingSection) -> BillingRetention {
        let days = |flag: Option<u64>, file: Option<u64>, default: u32| {
            flag.or(file).and_then(|days| u32::try_from(days).ok()).unwrap_or(default)
        };
        let defaults = BillingRetention::default();
        BillingRetention {
            hourly_days: days(
                self.billing_hourly_days,
                file.hourly_days.map(|days| days.0),
                defaults.hourly_days,
            ),
            monthly_days: days(
                self.billing_monthly_days,
                file.monthly_days.map(|days| days.0),
                defaults.monthly_days,
            ),
        }
    }
}
