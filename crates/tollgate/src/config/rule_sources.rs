//! Rule files on disk: finding and reading them, and detecting changes.

use crate::config::Config;
use crate::config::service_files::ServiceFiles;
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

/// What a file of a directory is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Rules,
    /// Tests of `tollgate test`, which stand beside the rules that they test.
    Tests,
    /// Hidden: of a ConfigMap (`..data`) or an editor.
    Hidden,
    Other,
}

impl FileKind {
    fn from_name(name: &str) -> Self {
        let name = name.to_ascii_lowercase();
        let stem = [".yaml", ".yml", ".json"].iter().find_map(|end| name.strip_suffix(end));
        match stem {
            _ if name.starts_with('.') => Self::Hidden,
            Some(stem) if stem.ends_with(".test") => Self::Tests,
            Some(_) => Self::Rules,
            None => Self::Other,
        }
    }

    fn from_path(path: &Path) -> Self {
        match path.file_name().map(|name| Self::from_name(&name.to_string_lossy())) {
            // Not a file, whatever it is called.
            Some(Self::Rules | Self::Tests) if !path.is_file() => Self::Other,
            kind => kind.unwrap_or(Self::Hidden),
        }
    }
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
        let own = entries(path, FileKind::Rules)?;
        if own.is_empty() {
            bail!("no .yaml or .yml rule file in {}, nor a .json one", path.display());
        }
        files.extend(own);
    }
    Ok(files)
}

/// Returns the test files at these paths: of a directory, those in it and in the directories below it.
pub(crate) fn test_files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        // A file that cannot be read is reported with its cases.
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let own = tests_below(path)?;
        if own.is_empty() {
            bail!("no *.test.yaml, *.test.yml or *.test.json in {}", path.display());
        }
        files.extend(own);
    }
    Ok(files)
}

fn tests_below(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = entries(directory, FileKind::Tests)?;
    // A link may lead back to where it stands.
    let below = entries(directory, FileKind::Other)?;
    for below in below.iter().filter(|path| path.is_dir() && !path.is_symlink()) {
        files.extend(tests_below(below)?);
    }
    Ok(files)
}

/// Returns what these directories contain besides rules and their tests, and is not read: a misspelled name shows.
pub(crate) fn ignored(paths: &[PathBuf]) -> Vec<PathBuf> {
    let others = paths.iter().filter(|path| path.is_dir()).map(|path| entries(path, FileKind::Other));
    others.flat_map(Result::unwrap_or_default).collect()
}

/// Warns that a file of a directory of rules is not read.
pub(crate) fn ignored_text(path: &Path) -> String {
    let why = if path.is_dir() {
        "directories within a directory of rules are not searched"
    } else {
        "rule files are called *.yaml, *.yml or *.json"
    };
    format!("{} is not read; {why}", path.display())
}

/// Returns the entries of a directory that are of this kind, sorted by name.
fn entries(directory: &Path, kind: FileKind) -> anyhow::Result<Vec<PathBuf>> {
    let cannot = || format!("cannot read {}", directory.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if FileKind::from_path(&path) == kind {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the rule files at these paths.
pub(crate) fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Source>> {
    let read = |file: PathBuf| {
        let text = read_text(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(Source { name: file.display().to_string(), text })
    };
    files(paths)?.into_iter().map(read).collect()
}

/// Reads a file of YAML, which is UTF-8, or UTF-16 with a byte order mark, as editors of Windows write it.
pub(crate) fn read_text(path: &Path) -> std::io::Result<String> {
    decode(std::fs::read(path)?)
}

fn decode(bytes: Vec<u8>) -> std::io::Result<String> {
    let invalid = |what: &str| {
        let text = format!("the file is not valid {what}");
        std::io::Error::new(std::io::ErrorKind::InvalidData, text)
    };
    let unit: fn([u8; 2]) -> u16 = match bytes.first_chunk() {
        Some([0xff, 0xfe]) => u16::from_le_bytes,
        Some([0xfe, 0xff]) => u16::from_be_bytes,
        _ => return String::from_utf8(bytes).map_err(|_| invalid("UTF-8")),
    };
    let (pairs, rest) = bytes[2..].as_chunks();
    let text = String::from_utf16(&pairs.iter().map(|pair| unit(*pair)).collect::<Vec<_>>());
    text.ok().filter(|_| rest.is_empty()).ok_or_else(|| invalid("UTF-16"))
}

/// Content of the rule files, or why they cannot be read.
pub(crate) type LoadedFiles = Result<Vec<Source>, String>;

/// Reads the rule files of a configuration, with the error as text.
pub(crate) fn load(config: &Config) -> LoadedFiles {
    read_configured(config).map_err(|error| format!("{error:#}"))
}

/// Reads the rule files again, while these are in effect. A service's directory may be missing at the start; one that
/// disappears later is an error, because that is not how limits are removed on purpose.
pub(crate) fn load_again(config: &Config, active: &[Source]) -> LoadedFiles {
    let Some(files) = config.service_files.as_ref().filter(|_| !active.is_empty()) else {
        return load(config);
    };
    let missing = || format!("{} does not exist", files.directory.display());
    files.read().map_err(|error| format!("{error:#}"))?.ok_or_else(missing)
}

fn read_configured(config: &Config) -> anyhow::Result<Vec<Source>> {
    let Some(files) = &config.service_files else { return read(&config.rules) };
    let found = files.read()?;
    if found.is_none() {
        tracing::warn!("{} does not exist; there are no rules until it does", files.directory.display());
    }
    Ok(found.unwrap_or_default())
}

/// Reads the rule files of a configuration; without any, returns the sample, or nothing if rules come from xDS.
pub(crate) fn load_or_sample(config: &Config) -> anyhow::Result<Vec<Source>> {
    match (&config.rules[..], &config.xds) {
        ([], None) => Ok(vec![sample()]),
        _ => read_configured(config),
    }
}

/// Returns what the directories of a configuration contain besides rules and their tests.
pub(crate) fn ignored_in(config: &Config) -> Vec<PathBuf> {
    if config.service_files.is_some() { Vec::new() } else { ignored(&config.rules) }
}

/// Sizes and modification times of files: enough to detect a change without reading them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileStamps(Vec<(PathBuf, u64, Option<SystemTime>)>);

/// Returns the stamps of the rule files at these paths, or of a service's.
pub(crate) fn file_stamps(paths: &[PathBuf], service: Option<&ServiceFiles>) -> FileStamps {
    stamps(match service {
        Some(files) => files.paths().unwrap_or_default(),
        None => files(paths).unwrap_or_default(),
    })
}

/// Returns the stamps of files. Symbolic links are resolved, so a change behind one is detected too.
fn stamps(files: Vec<PathBuf>) -> FileStamps {
    let look = |file: PathBuf| {
        let target = std::fs::canonicalize(&file).unwrap_or(file);
        let seen = std::fs::metadata(&target).ok();
        let (size, changed) = seen.map_or((0, None), |seen| (seen.len(), seen.modified().ok()));
        (target, size, changed)
    };
    FileStamps(files.into_iter().map(look).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Such a file would be refused with all others, and nothing would be limited.
    #[test]
    fn files_in_utf_16_are_read() {
        let text = "domain: \u{e9}\u{1f6a6}\n";
        let units: Vec<u16> = text.encode_utf16().collect();
        let with_mark = |mark: [u8; 2], bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            mark.into_iter().chain(units.iter().flat_map(|unit| bytes(*unit))).collect()
        };
        let little = with_mark([0xff, 0xfe], u16::to_le_bytes);
        assert_eq!(decode(little.clone()).expect("UTF-16"), text);
        assert_eq!(decode(with_mark([0xfe, 0xff], u16::to_be_bytes)).expect("UTF-16"), text);
        assert_eq!(decode(text.into()).expect("UTF-8"), text);
        let error = |bytes: Vec<u8>| decode(bytes).expect_err("invalid").to_string();
        assert_eq!(error([&little[..], b"x"].concat()), "the file is not valid UTF-16");
        assert_eq!(error(vec![0xff, 0xfe, 0x00, 0xd8]), "the file is not valid UTF-16");
        assert_eq!(error(vec![0xff]), "the file is not valid UTF-8");
    }

    #[test]
    fn files_are_distinguished_by_their_names() {
        for (name, kind) in [
            ("a.yaml", FileKind::Rules),
            ("a.YML", FileKind::Rules),
            ("a.json", FileKind::Rules),
            ("test.yaml", FileKind::Rules),
            ("a.test.yaml", FileKind::Tests),
            ("a.test.yml", FileKind::Tests),
            ("a.test.json", FileKind::Tests),
            (".a.yaml", FileKind::Hidden),
            ("..data", FileKind::Hidden),
            ("a.yaml.bak", FileKind::Other),
            ("a.yaml~", FileKind::Other),
            ("yaml", FileKind::Other),
            ("a.toml", FileKind::Other),
        ] {
            assert_eq!(FileKind::from_name(name), kind, "{name}");
        }
    }
}
