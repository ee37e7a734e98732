//! The gateway on real sockets, between clients and origins.

mod access_log;
mod bad_input;
mod connections;
mod endpoints;
mod fast_path;
#[path = "../harness/mod.rs"]
mod harness;
mod http2;
mod one_path;
mod overload;
mod panics;
mod permits;
mod proxy;
mod slow_clients;
#[cfg(feature = "external-tests")]
mod upstream_spellings;
