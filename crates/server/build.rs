//! Compiles the protobuf messages of the rate limit services, without `protoc`.

use prost::Message as _;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(
        ["envoy/service/ratelimit/v3/rls.proto", "envoy/service/rate_limit_quota/v3/rlqs.proto"],
        ["proto"],
    )?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("rls.fds"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_client(false)
        .codec_path("crate::rls::codec::StrictCodec")
        .include_file("envoy.rs")
        .compile_fds(files)?;
    Ok(())
}
