//! Export of a revision's rule files into a directory, from which they load again with the same rules hash.
//!
//! The names of a revision's files are paths of the machine that published them. Only their last part is used, and only
//! as far as a directory of rules reads it again: with a YAML ending and not hidden.

use anyhow::Context;
use std::collections::BTreeSet;
use std::path::Path;

/// Writes files, given by name and text, into a directory that is new or empty.
pub(crate) fn write(dir: &Path, files: impl Iterator<Item = (String, String)>) -> anyhow::Result<()> {
    let cannot = || format!("cannot write to {}", dir.display());
    std::fs::create_dir_all(dir).with_context(cannot)?;
    let is_empty = std::fs::read_dir(dir).with_context(cannot)?.next().is_none();
    anyhow::ensure!(is_empty, "{} is not empty; name a new directory", dir.display());
    let mut taken = BTreeSet::new();
    for (name, text) in files {
        let path = dir.join(file_name(&name, &mut taken));
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns a name of its own for each file.
fn file_name(name: &str, taken: &mut BTreeSet<String>) -> String {
    let last = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let plain = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let last: String = last.trim_start_matches('.').chars().take(100).map(plain).collect();
    let stem = last.strip_suffix(".yaml").or_else(|| last.strip_suffix(".yml")).unwrap_or(&last);
    // A test file beside rules is not one of them.
    let stem = stem.strip_suffix(".test").unwrap_or(stem);
    let stem = if stem.is_empty() { "rules" } else { stem };
    let mut found = format!("{stem}.yaml");
    for number in 2.. {
        if taken.insert(found.to_lowercase()) {
            break;
        }
        found = format!("{stem}-{number}.yaml");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_a_name_that_a_directory_of_rules_reads() {
        let mut taken = BTreeSet::new();
        for (name, expected) in [
            ("/etc/tollgate/api.yaml", "api.yaml"),
            ("other/api.yaml", "api-2.yaml"),
            ("API.yml", "API-3.yaml"),
            ("sample rules", "sample-rules.yaml"),
            ("../../.hidden.yaml", "hidden.yaml"),
            ("a/..", "rules.yaml"),
            ("x.test.yaml", "x.yaml"),
        ] {
            assert_eq!(file_name(name, &mut taken), expected, "{name}");
        }
    }
}
