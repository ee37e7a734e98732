//! The servers on real sockets: HTTP, gRPC and the Redis protocol.

mod fleet_fairness;
mod forward_auth;
mod forward_delay;
#[path = "../harness/mod.rs"]
mod harness;
mod http;
mod http_bad_input;
mod http_connection;
mod one_path;
mod over_limit;
mod overload;
mod panics;
mod request_head;
mod resp;
mod resp_bad_input;
mod sdk;
