//! Rule files on disk: finding and reading them, and detecting changes.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tollgate_rules::Source;

/// Built-in rules that `serve` starts with when no paths are set.
pub(crate) const SAMPLE: &str = include_str!("../sample.yaml");

/// Returns the built-in sample as a source.
fn sample() -> Source {
    Source { name: "sample rules".to_owned(), text: SAMPLE.to_owned() }
}

/// Returns the rule files at these paths; those of a directory sorted by name.
pub(crate) fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        let kind = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        if !kind.is_dir() {
            files.push(path.clone());
            continue;
        }
        let before = files.len();
        let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        for entry in entries {
            let file = entry.with_context(|| format!("cannot read {}", path.display()))?.path();
            if is_rule_file(&file) {
                files.push(file);
            }
        }
        if files.len() == before {
            bail!("no .yaml or .yml rule file in {}", path.display());
        }
        files[before..].sort();
    }
    Ok(files)
}

/// Returns whether this is a regular file with a YAML name. Hidden files belong to a ConfigMap (`..data`) or an editor.
fn is_rule_file(file: &Path) -> bool {
    let hidden = file.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
    let yaml = file.extension().is_some_and(|end| end == "yaml" || end == "yml");
    yaml && !hidden && file.is_file()
}

/// Reads the rule files at these paths.
pub(crate) fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Source>> {
    let read = |file: PathBuf| {
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(Source { name: file.display().to_string(), text })
    };
    files(paths)?.into_iter().map(read).collect()
}

/// Content of the rule files, or why they cannot be read.
pub(crate) type LoadedFiles = Result<Vec<Source>, String>;

/// Reads the rule files at these paths, with the error as text.
pub(crate) fn load(paths: &[PathBuf]) -> LoadedFiles {
    read(paths).map_err(|error| format!("{error:#}"))
}

/// Reads the rule files at these paths; returns the sample if there are none.
pub(crate) fn load_or_sample(paths: &[PathBuf]) -> anyhow::Result<Vec<Source>> {
    if paths.is_empty() { Ok(vec![sample()]) } else { read(paths) }
}

/// Sizes and modification times of files: enough to detect a change without reading them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileStamps(Vec<(PathBuf, u64, Option<SystemTime>)>);

/// Returns the stamps of the rule files. Symbolic links are resolved, so a change behind one is detected too.
pub(crate) fn file_stamps(paths: &[PathBuf]) -> FileStamps {
    let look = |file: PathBuf| {
        let target = std::fs::canonicalize(&file).unwrap_or(file);
        let seen = std::fs::metadata(&target).ok();
        let (size, changed) = seen.map_or((0, None), |seen| (seen.len(), seen.modified().ok()));
        (target, size, changed)
    };
    FileStamps(files(paths).unwrap_or_default().into_iter().map(look).collect())
}
