//! Compiles the protobuf messages of the discovery service and of the rules that it delivers, without `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(
        ["envoy/service/discovery/v3/ads.proto", "ratelimit/config/ratelimit/v3/rls_conf.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .include_file("xds.rs")
        .compile_fds(files)?;
    Ok(())
}
