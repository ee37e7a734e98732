//! Rule files as envoyproxy/ratelimit finds them: every regular file below a directory, whatever its name, in directories
//! within it too. A file is named by its path with dots instead of slashes: `config.a.yaml`.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use tollgate_rules::Source;

/// Maximum number of files, and of nested directories: a link to somewhere else must not keep a reload busy.
const MAX_FILES: usize = 10_000;
const MAX_DEPTH: usize = 32;

/// Where the files of such a service are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServiceFiles {
    /// Directory that is read.
    pub(crate) directory: PathBuf,
    /// Directory that names are relative to.
    pub(crate) base: PathBuf,
    /// Whether names that begin with a dot are left out. A ConfigMap has such links, through which each file is seen twice.
    pub(crate) ignores_hidden: bool,
}

impl ServiceFiles {
    /// Returns all files, sorted. A directory that does not exist has none.
    pub(crate) fn paths(&self) -> anyhow::Result<Vec<PathBuf>> {
        if self.directory.exists() { self.found() } else { Ok(Vec::new()) }
    }

    fn found(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        self.walk(&self.directory, 0, &mut found)?;
        found.sort();
        Ok(found)
    }

    fn walk(&self, directory: &Path, depth: usize, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
        let cannot = || format!("cannot read {}", directory.display());
        for entry in std::fs::read_dir(directory).with_context(cannot)? {
            let entry = entry.with_context(cannot)?;
            let path = entry.path();
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if is_hidden && self.ignores_hidden {
                continue;
            }
            // Links to directories are not followed, those to files are.
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_directory && depth < MAX_DEPTH {
                self.walk(&path, depth + 1, found)?;
            } else if !is_directory && path.is_file() {
                found.push(path);
            }
            if found.len() > MAX_FILES {
                bail!("more than {MAX_FILES} files in {}", self.directory.display());
            }
        }
        Ok(())
    }

    /// Reads all files. Returns `None` if the directory does not exist.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Vec<Source>>> {
        if !self.directory.exists() {
            return Ok(None);
        }
        let read = |path: PathBuf| {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("{}: error loading config file", self.name(&path)))?;
            Ok(Source { name: self.name(&path), text })
        };
        self.found()?.into_iter().map(read).collect::<Result<_, _>>().map(Some)
    }

    fn name(&self, path: &Path) -> String {
        path.strip_prefix(&self.base).unwrap_or(path).to_string_lossy().replace('/', ".")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_counts_whatever_its_name() {
        let root = std::env::temp_dir().join(format!("tollgate-service-files-{}", std::process::id()));
        let config = root.join("ratelimit/config");
        for folder in ["deep/er", ".hidden"] {
            std::fs::create_dir_all(config.join(folder)).expect("a directory");
        }
        for name in ["a.yaml", "b", "deep/er/c.txt", ".d", ".hidden/e"] {
            std::fs::write(config.join(name), "domain: x").expect("a file");
        }
        let names = |ignores_hidden| {
            let base = root.join("ratelimit");
            let files = ServiceFiles { directory: config.clone(), base, ignores_hidden };
            let read = files.read().expect("readable").unwrap_or_default();
            read.into_iter().map(|source| source.name).collect::<Vec<_>>()
        };
        assert_eq!(names(true), ["config.a.yaml", "config.b", "config.deep.er.c.txt"]);
        assert_eq!(names(false).len(), 5);
        std::fs::remove_dir_all(&root).expect("removed");
        assert!(names(true).is_empty(), "a missing directory has no rules");
    }
}
