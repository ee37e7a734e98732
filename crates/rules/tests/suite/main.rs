//! Rule files: what they say, what is refused, and how they are matched.

mod billing;
mod contract;
mod diff;
mod durable;
mod enforce;
mod extensions;
mod inheritance;
mod limit_costs;
mod load_errors;
mod match_all;
mod oracle;
mod overload;
mod overrides;
mod quota_keys;
mod refill_interval;
mod region;
mod schema;
mod security_algorithm;
mod seeds;
mod shard_by;
mod stores;
mod unnamed_tiers;
