//! Rule files as envoyproxy/ratelimit finds them: every regular file below a directory, whatever its name, in directories
//! within it too. A file is named by its path with dots instead of slashes: `config.a.yaml`. Where that service watches the
//! directory above, it takes all names that begin with `config.`, so `config.yaml` beside the directory is one of them.

use super::rule_sources::read_text;
use anyhow::{Context, bail};
use std::fs::DirEntry;
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
    /// Directory that names are relative to: that one, or the one above, in which files beside it count too.
    pub(crate) base: PathBuf,
    /// Whether names that begin with a dot are left out. A ConfigMap has such links, through which each file is seen twice.
    pub(crate) ignores_hidden: bool,
}

impl ServiceFiles {
    /// Returns all files, sorted. A directory that does not exist has none.
    pub(crate) fn paths(&self) -> anyhow::Result<Vec<PathBuf>> {
        Ok(self.found()?.unwrap_or_default())
    }

    /// Returns all files, sorted, or `None` if there is no place for them.
    fn found(&self) -> anyhow::Result<Option<Vec<PathBuf>>> {
        let mut found = Vec::new();
        if self.directory.exists() {
            self.walk(&self.directory, 0, &mut found)?;
        }
        self.beside(&mut found)?;
        found.sort();
        Ok((self.directory.exists() || !found.is_empty()).then_some(found))
    }

    /// Adds the files beside the directory whose names continue its own.
    fn beside(&self, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
        let name = self.directory.file_name().filter(|_| self.directory.parent() == Some(&self.base));
        let Some(name) = name.map(std::ffi::OsStr::as_encoded_bytes) else { return Ok(()) };
        let Ok(entries) = std::fs::read_dir(&self.base) else { return Ok(()) };
        for entry in entries.flatten() {
            let own = entry.file_name();
            if own.as_encoded_bytes().strip_prefix(name).is_some_and(|rest| rest.starts_with(b".")) {
                self.visit(&entry, 0, found)?;
            }
        }
        Ok(())
    }

    fn walk(&self, directory: &Path, depth: usize, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
        let cannot = || format!("cannot read {}", directory.display());
        for entry in std::fs::read_dir(directory).with_context(cannot)? {
            self.visit(&entry.with_context(cannot)?, depth, found)?;
        }
        Ok(())
    }

    fn visit(&self, entry: &DirEntry, depth: usize, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
        let path = entry.path();
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if is_hidden && self.ignores_hidden {
            return Ok(());
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
        Ok(())
    }

    /// Reads all files. Returns `None` if the directory does not exist.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Vec<Source>>> {
        let read = |path: PathBuf| {
            let text = read_text(&path)
                .with_context(|| format!("{}: error loading config file", self.name(&path)))?;
            Ok(Source { name: self.name(&path), text })
        };
        self.found()?.map(|found| found.into_iter().map(read).collect()).transpose()
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

    /// A ConfigMap with the key `config.yaml` at the directory above is enough there; without its files nothing is limited.
    #[test]
    fn names_that_continue_that_of_the_directory_count_where_the_one_above_is_watched() {
        let root = std::env::temp_dir().join(format!("tollgate-service-beside-{}", std::process::id()));
        std::fs::create_dir_all(root.join("config.d")).expect("a directory");
        for name in ["config.yaml", "config.d/e.yaml", "configs.yaml", "other.yaml"] {
            std::fs::write(root.join(name), "domain: x").expect("a file");
        }
        let directory = root.join("config");
        let names = |base: &Path| {
            let files =
                ServiceFiles { directory: directory.clone(), base: base.to_owned(), ignores_hidden: false };
            let read = files.read().expect("readable");
            read.map(|all| all.into_iter().map(|source| source.name).collect::<Vec<_>>())
        };
        let some = |all: &[&str]| Some(all.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&root), some(&["config.d.e.yaml", "config.yaml"]));
        assert_eq!(names(&directory), None, "the directory itself is watched, and missing");
        std::fs::create_dir(&directory).expect("a directory");
        std::fs::write(directory.join("a"), "domain: y").expect("a file");
        assert_eq!(names(&root), some(&["config.a", "config.d.e.yaml", "config.yaml"]));
        assert_eq!(names(&directory), some(&["a"]));
        std::fs::remove_dir_all(&root).expect("removed");
    }
}
