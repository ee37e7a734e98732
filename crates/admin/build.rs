//! Build script: embeds the files of the dashboard, if it was built.

use std::path::Path;

/// Writes a list of `(name, bytes)`. The folder always exists, even if it contains only a hidden file: with a missing
/// folder, cargo would rebuild this crate every time.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dist = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../../dashboard/dist");
    println!("cargo::rerun-if-changed={}", dist.display());
    let mut files = Vec::new();
    for folder in ["", "assets/"] {
        let Ok(entries) = std::fs::read_dir(dist.join(folder)) else { continue };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|_| "file name is not valid UTF-8")?;
            if entry.file_type()?.is_file() && !name.starts_with('.') {
                files.push((format!("{folder}{name}"), entry.path().canonicalize()?));
            }
        }
    }
    files.sort();
    let lines = files.iter().map(|(name, path)| format!("    ({name:?}, include_bytes!({path:?})),\n"));
    let list = format!("&[\n{}]\n", lines.collect::<String>());
    Ok(std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("dashboard.rs"), list)?)
}
