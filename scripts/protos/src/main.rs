//! Writes the Rust code of the protobuf messages into the crates that use it, without `protoc`. The code is part of the
//! repository, so that no build compiles a protobuf compiler first; it is written anew by `make protos` when a file in
//! `proto/` changes.

use prost::Message as _;
use std::path::Path;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    // The rate limit services, which Tollgate serves.
    let server = Path::new("crates/server/proto");
    let files = protox::compile(
        ["envoy/service/ratelimit/v3/rls.proto", "envoy/service/rate_limit_quota/v3/rlqs.proto"],
        [server],
    )?;
    let generated = emptied(server)?;
    std::fs::write(generated.join("rls.fds"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .out_dir(&generated)
        .emit_rerun_if_changed(false)
        .build_client(false)
        .codec_path("crate::rls::codec::StrictCodec")
        .include_file("envoy.rs")
        .compile_fds(files)?;

    // The discovery service, which Tollgate is a client of, and the rules that it delivers.
    let tollgate = Path::new("crates/tollgate/proto");
    let files = protox::compile(
        ["envoy/service/discovery/v3/ads.proto", "ratelimit/config/ratelimit/v3/rls_conf.proto"],
        [tollgate],
    )?;
    tonic_prost_build::configure()
        .out_dir(emptied(tollgate)?)
        .emit_rerun_if_changed(false)
        .build_server(false)
        .build_transport(false)
        .include_file("xds.rs")
        .compile_fds(files)?;
    Ok(())
}

/// The folder for generated code beside the messages, without what an earlier run wrote.
fn emptied(proto: &Path) -> Result<std::path::PathBuf> {
    let generated = proto.join("generated");
    if generated.exists() {
        std::fs::remove_dir_all(&generated)?;
    }
    std::fs::create_dir(&generated)?;
    Ok(generated)
}
