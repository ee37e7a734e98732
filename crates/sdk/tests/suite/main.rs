//! The client library: the same answers in process and remote, and the tower layers.

mod conformance;
mod layer;
mod one_path;
mod paced_layer;
mod rate_limit_layer;
mod remote;
mod retry_after_layer;
mod tonic;
