//! Compiles the protocol's messages, for which no `protoc` is needed; and lists the files of the dashboard, if it was built.

use prost::Message as _;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("rls.fds"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_client(false)
        .codec_path("crate::rls::codec::StrictCodec")
        .include_file("envoy.rs")
        .compile_fds(files)?;
    list_dashboard(&out)
}

/// Writes a list of `(name, bytes)`. The folder is always there, if empty but for a hidden file: a folder that is not
/// would make cargo build this crate again every time.
fn list_dashboard(out: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let dist = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../../dashboard/dist");
    println!("cargo::rerun-if-changed={}", dist.display());
    let mut files = Vec::new();
    for folder in ["", "assets/"] {
        let Ok(entries) = std::fs::read_dir(dist.join(folder)) else { continue };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|_| "a name that is no UTF-8")?;
            if entry.file_type()?.is_file() && !name.starts_with('.') {
                files.push((format!("{folder}{name}"), entry.path().canonicalize()?));
            }
        }
    }
    files.sort();
    let lines = files.iter().map(|(name, path)| format!("    ({name:?}, include_bytes!({path:?})),\n"));
    let list = format!("&[\n{}]\n", lines.collect::<String>());
    Ok(std::fs::write(out.join("dashboard.rs"), list)?)
}
