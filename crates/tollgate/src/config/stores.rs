//! Stores by name: `--store-named` and `stores` in the file of `--config`, for rules that name the store of their counters.

use super::file::ConfigFile;
use super::store::{self, StoreChoice};
use crate::cli::ServeFlags;
use anyhow::Context;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use tollgate_rules::is_store_name;
use tollgate_store::RedisConfig;

/// Maximum number of named stores: each has connections of its own.
const MAX_STORES: usize = 64;

/// A store of `stores`: its address, or a mapping with the file of its password.
#[derive(Clone, Deserialize)]
#[serde(try_from = "Written")]
pub(super) struct NamedStore {
    address: String,
    pub(super) password_file: Option<PathBuf>,
}

/// The address may contain a password.
impl fmt::Debug for NamedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedStore").field("password_file", &self.password_file).finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "must be an address such as redis://127.0.0.1:6379, or {address, password_file}"
)]
enum Written {
    Address(String),
    Settings(Settings),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    address: String,
    password_file: Option<PathBuf>,
}

impl From<Written> for NamedStore {
    fn from(written: Written) -> Self {
        match written {
            Written::Address(address) => Self { address, password_file: None },
            Written::Settings(Settings { address, password_file }) => Self { address, password_file },
        }
    }
}

/// Returns the named stores; a flag replaces the one of the file with the same name. Errors do not repeat addresses, which
/// may contain passwords.
pub(super) fn read(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<Vec<(String, RedisConfig)>> {
    let mut all: BTreeMap<&str, NamedStore> =
        file.stores.iter().map(|(name, store)| (name.as_str(), store.clone())).collect();
    let mut flagged: Vec<&str> = Vec::new();
    // Not parsed with the other flags: those errors repeat what was written.
    for given in &flags.store_named {
        let named = given.split_once('=').filter(|(_, address)| address.contains("://"));
        let (name, address) = named.context(
            "--store-named: not a name and an address; write them as in eu=redis://127.0.0.1:6379",
        )?;
        anyhow::ensure!(!flagged.contains(&name), "--store-named: `{name}` is named twice");
        flagged.push(name);
        all.insert(name, NamedStore { address: address.to_owned(), password_file: None });
    }
    anyhow::ensure!(all.len() <= MAX_STORES, "--store-named: at most {MAX_STORES} stores can be named");
    anyhow::ensure!(
        all.is_empty() || matches!(store::read(flags, file)?, StoreChoice::Redis(_)),
        "--store-named: stores can be named beside a Redis store; set --store to the address of Redis"
    );
    let stores = all.into_iter().map(|(name, store)| {
        anyhow::ensure!(
            is_store_name(name) && name != "default",
            "--store-named: `{name}` is no name of a store; use 1 to 64 letters, digits, `-`, `_` or `.`, and not `default`"
        );
        let mut redis = RedisConfig::parse(&store.address).with_context(|| format!("--store-named {name}"))?;
        if let Some(path) = &store.password_file {
            redis = redis.with_password_file(path).with_context(|| format!("`stores.{name}.password_file`"))?;
        }
        Ok((name.to_owned(), store::with_limits(redis, flags, file)?))
    });
    stores.collect()
}
