//! The counter store: memory, or a Redis with its deadline and breaker settings.

use super::file::ConfigFile;
use crate::cli::ServeFlags;
use anyhow::Context;
use std::time::Duration;
use tollgate_core::TimeDelta;
use tollgate_store::RedisConfig;

/// Choice of counter store.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in a process, and it is rarely moved")]
pub(crate) enum StoreChoice {
    Memory,
    Redis(RedisConfig),
}

/// Returns the configured store. Errors do not repeat its address, which may contain a password.
pub(super) fn read(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<StoreChoice> {
    let Some(address) = flags.store.as_ref().or(file.store.as_ref()).filter(|store| *store != "memory")
    else {
        anyhow::ensure!(
            flags.store_password_file.is_none() && file.store_password_file.is_none(),
            "--store-password-file: counters in memory have no password; set --store to the address of Redis"
        );
        return Ok(StoreChoice::Memory);
    };
    if !address.contains("://") {
        anyhow::bail!("--store: must be `memory` or an address such as redis://127.0.0.1:6379");
    }
    let mut redis = RedisConfig::parse(address).context("--store")?;
    if let Ok(password) = std::env::var("TOLLGATE_STORE_PASSWORD") {
        redis = redis.with_credentials(None, Some(password));
    }
    if let Some(path) = flags.store_password_file.as_ref().or(file.store_password_file.as_ref()) {
        redis = redis.with_password_file(path).context("--store-password-file")?;
    }
    Ok(StoreChoice::Redis(with_limits(redis, flags, file)?))
}

/// Returns a store with the deadline and the breaker settings, which all stores share.
pub(super) fn with_limits(
    mut redis: RedisConfig,
    flags: &ServeFlags,
    file: &ConfigFile,
) -> anyhow::Result<RedisConfig> {
    if let Some(deadline) = flags.store_deadline_ms.or(file.store_deadline_ms.map(|time| time.0)) {
        redis.deadline = Duration::from_millis(deadline);
    }
    if let Some(failures) = flags.store_breaker_failures.or(file.store_breaker_failures.map(|count| count.0))
    {
        redis.breaker.failures = usize::try_from(failures)?;
    }
    if let Some(window) = flags.store_breaker_window_ms.or(file.store_breaker_window_ms.map(|time| time.0)) {
        redis.breaker.window = TimeDelta::from_millis(window);
    }
    if let Some(silence) = flags.store_breaker_silence_ms.or(file.store_breaker_silence_ms.map(|time| time.0))
    {
        redis.breaker.silence = TimeDelta::from_millis(silence);
    }
    if let Some(open) = flags.store_breaker_open_ms.or(file.store_breaker_open_ms.map(|time| time.0)) {
        redis.breaker.cooldown = TimeDelta::from_millis(open);
    }
    let caution = flags.store_caution_ms.or(file.store_caution_ms);
    redis.loss_window = caution.map(|most| TimeDelta::from_micros(most.saturating_mul(1_000)));
    Ok(redis)
}
