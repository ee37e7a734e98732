//! Last good rules: a copy of the rule files that were active, for a restart while the files are broken.
//!
//! A running server keeps its rules when a file is broken, and a restart must not be worse: machines restart by
//! themselves, and often at night. The copy lies in the state directory, under a name that belongs to the paths of the
//! files, and is only used if they cannot be. Rejected: a copy beside the files, because their directory is often
//! read-only, and a copy there would be read as a rule file.

use crate::config::Config;
use crate::config::rule_sources;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tollgate_rules::{Options, Ruleset, Source};

/// Returns the directory for state that survives a restart.
pub(crate) fn state_directory() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let user = || folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")));
    folder("STATE_DIRECTORY").or_else(|| Some(user()?.join("tollgate")))
}

/// The file with the last good rules; none without rule files or a state directory.
#[derive(Clone, Debug)]
pub(crate) struct LastGood(Option<PathBuf>);

/// A rule file in the copy.
#[derive(Serialize, Deserialize)]
struct StoredFile {
    name: String,
    text: String,
}

impl LastGood {
    pub(crate) fn of(rules: &[PathBuf]) -> Self {
        if rules.is_empty() {
            return Self(None);
        }
        let mut hasher = tollgate_core::StableHasher::default();
        for path in rules {
            // A path to a file that is gone has no canonical form.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            hasher.bytes(path.as_os_str().as_encoded_bytes());
            hasher.bytes(b"\0");
        }
        Self(state_directory().map(|folder| folder.join(format!("{:016x}.rules", hasher.finish()))))
    }

    /// Keeps a copy of rules that are valid. A failure only costs the copy.
    pub(crate) fn save(&self, sources: &[Source]) {
        let Some(path) = &self.0 else { return };
        let files: Vec<StoredFile> = sources
            .iter()
            .map(|source| StoredFile { name: source.name.clone(), text: source.text.clone() })
            .collect();
        let written = serde_json::to_vec(&files).map_err(Into::into).and_then(|text| replace(path, &text));
        if let Err(error) = written {
            tracing::info!(
                "no copy of the rules kept in {}: {error}; set STATE_DIRECTORY to a writable directory",
                path.display()
            );
        }
    }

    /// Returns the copy, if there is one and it is still valid.
    fn load(&self, options: &Options) -> Option<Vec<Source>> {
        let text = std::fs::read(self.0.as_ref()?).ok()?;
        let files: Vec<StoredFile> = serde_json::from_slice(&text).ok()?;
        let sources: Vec<Source> = files.into_iter().map(|file| Source::new(file.name, file.text)).collect();
        Ruleset::load(&sources, options).is_ok().then_some(sources)
    }
}

/// Writes a file that is either the old or the new one at any time.
pub(crate) fn replace(path: &Path, text: &[u8]) -> std::io::Result<()> {
    if std::fs::read(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let new = path.with_extension(format!("new.{}", std::process::id()));
    let write = || {
        let options = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
        let mut file = options.open(&new)?;
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&new)))
}

/// The rules that a server starts with.
pub(crate) struct StartRules {
    pub(crate) sources: Vec<Source>,
    /// Why the files could not be used, if the sources are their last good copy.
    pub(crate) error: Option<String>,
}

/// Reads the rule files, or their last good copy if they are broken; the sample without any.
pub(crate) fn start_rules(config: &Config) -> anyhow::Result<StartRules> {
    let (options, last_good) = (config.rule_options(), LastGood::of(&config.rules));
    let read = rule_sources::load_or_sample(&config.rules).and_then(|sources| {
        match Ruleset::load(&sources, &options) {
            Ok(_) => Ok(sources),
            Err(errors) => Err(anyhow::anyhow!("the rules cannot be used\n{errors}")),
        }
    });
    let error = match read {
        Ok(sources) => {
            last_good.save(&sources);
            return Ok(StartRules { sources, error: None });
        }
        Err(error) => error,
    };
    let Some(sources) = last_good.load(&options) else { return Err(error) };
    let error = format!("{error:#}");
    tracing::error!(
        "RULE FILES ARE BROKEN: starting with the last good rules instead; repair the files, and they take effect at \
         once\n{error}"
    );
    Ok(StartRules { sources, error: Some(error) })
}
