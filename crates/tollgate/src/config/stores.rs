//! Stores by name: `--store-named` and `stores` in the file of `--config`, for rules that name the store of their counters.

use super::file::ConfigFile;
use super::store::{self, StoreChoice};
use crate::cli::ServeFlags;
use anyhow::Context;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tollgate_rules::{StoreNames, is_store_name};
use tollgate_store::{MAX_STORES, RedisConfig};

/// A store of `stores`: its address, or a mapping with the file of its password.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "WrittenStore")]
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
enum WrittenStore {
    Address(String),
    Settings(Settings),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    address: String,
    password_file: Option<PathBuf>,
}

impl From<WrittenStore> for NamedStore {
    fn from(written: WrittenStore) -> Self {
        match written {
            WrittenStore::Address(address) => Self { address, password_file: None },
            WrittenStore::Settings(Settings { address, password_file }) => Self { address, password_file },
        }
    }
}

/// The named stores as they are written.
type Written = BTreeMap<String, NamedStore>;

/// Returns the named stores; a flag replaces the one of the file with the same name. Errors do not repeat addresses, which
/// may contain passwords.
pub(super) fn read(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<Vec<(String, RedisConfig)>> {
    let stores = written(flags, file)?.into_iter().map(|(name, store)| {
        let redis = settings(&name, &store, flags, file)?;
        Ok((name, redis))
    });
    stores.collect()
}

fn written(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<Written> {
    let mut all: Written = file.stores.clone();
    let mut flagged: Vec<&str> = Vec::new();
    // Not parsed with the other flags: those errors repeat what was written.
    for given in &flags.store_named {
        let named = given.split_once('=').filter(|(_, address)| address.contains("://"));
        let (name, address) = named.context(
            "--store-named: not a name and an address; write them as in eu=redis://127.0.0.1:6379",
        )?;
        anyhow::ensure!(!flagged.contains(&name), "--store-named: `{name}` is named twice");
        flagged.push(name);
        all.insert(name.to_owned(), NamedStore { address: address.to_owned(), password_file: None });
    }
    anyhow::ensure!(all.len() <= MAX_STORES, "--store-named: at most {MAX_STORES} stores can be named");
    anyhow::ensure!(
        all.is_empty() || matches!(store::read(flags, file)?, StoreChoice::Redis(_)),
        "--store-named: stores can be named beside a Redis store; set --store to the address of Redis"
    );
    Ok(all)
}

fn settings(
    name: &str,
    store: &NamedStore,
    flags: &ServeFlags,
    file: &ConfigFile,
) -> anyhow::Result<RedisConfig> {
    anyhow::ensure!(
        is_store_name(name) && name != "default",
        "--store-named: `{name}` is no name of a store; use 1 to 64 letters, digits, `-`, `_` or `.`, and not `default`"
    );
    let mut redis = RedisConfig::parse(&store.address).with_context(|| format!("--store-named {name}"))?;
    if let Some(path) = &store.password_file {
        redis = redis.with_password_file(path).with_context(|| format!("`stores.{name}.password_file`"))?;
    }
    store::with_limits(redis, flags, file)
}

/// Connects a store, and adds it to those that keep counters.
pub(crate) type AddStore = Box<dyn Fn(&str, &RedisConfig) + Send + Sync>;

/// Adds the stores that appear in the file of `--config` while the server runs. Those that it has stay as they are:
/// counters do not move, and requests in flight depend on them.
pub(crate) struct StoreReload {
    flags: ServeFlags,
    path: PathBuf,
    names: StoreNames,
    add: AddStore,
    state: Mutex<ReloadState>,
}

struct ReloadState {
    /// Content of the file when it was last read.
    text: Option<Vec<u8>>,
    active: Written,
}

/// What a reload found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReloadedStores {
    pub(crate) added: Vec<String>,
    /// Stores that are written otherwise than they were at the start.
    pub(crate) changed: Vec<String>,
    /// Stores that are no longer written.
    pub(crate) removed: Vec<String>,
}

impl StoreReload {
    /// Remembers the stores of the start; `None` without a file.
    pub(crate) fn new(flags: &ServeFlags, names: StoreNames, add: AddStore) -> anyhow::Result<Option<Self>> {
        let Some(path) = flags.config.clone() else { return Ok(None) };
        let active = written(flags, &ConfigFile::read_again(&path)?.0)?;
        // Without the content: what has changed since the start is found by the first reload.
        let state = Mutex::new(ReloadState { text: None, active });
        Ok(Some(Self { flags: flags.clone(), path, names, add, state }))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file again if it has changed, and adds the stores that are new in it; all of them or none.
    pub(crate) fn reload_if_changed(&self) -> Option<anyhow::Result<ReloadedStores>> {
        let text = std::fs::read(&self.path).ok();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.text == text {
            return None;
        }
        state.text = text;
        Some(self.reload(&mut state.active))
    }

    fn reload(&self, active: &mut Written) -> anyhow::Result<ReloadedStores> {
        let (file, _) = ConfigFile::read_again(&self.path)?;
        let now = written(&self.flags, &file)?;
        let mut found = ReloadedStores {
            removed: active.keys().filter(|name| !now.contains_key(*name)).cloned().collect(),
            ..ReloadedStores::default()
        };
        let mut new = Vec::new();
        for (name, store) in now {
            match active.get(&name) {
                Some(known) if *known == store => {}
                Some(_) => found.changed.push(name),
                None => new.push((settings(&name, &store, &self.flags, &file)?, name, store)),
            }
        }
        anyhow::ensure!(
            active.len() + new.len() <= MAX_STORES,
            "`stores`: with those that are gone from the file, which are used until a restart, there are more than \
             {MAX_STORES}"
        );
        for (redis, name, store) in new {
            (self.add)(&name, &redis);
            self.names.add(name.clone());
            active.insert(name.clone(), store);
            found.added.push(name);
        }
        Ok(found)
    }
}
