//! What the tests and benchmarks of several crates talk and measure with. Nothing that is released depends on it.
//!
//! | module | what |
//! |---|---|
//! | [`allocations`] | how often a piece of code asks the allocator |
//! | [`zipf`] | keys of which few are frequent and most are rare |
//! | [`web`] | HTTP/1.1 by hand, so that a test can send what no client library would |
//! | [`origin`] | an upstream for a proxy to stand before |
//! | [`open_files`] | room for thousands of connections in one process |
//! | [`wait`] | waiting for what can be observed |
//!
//! The fakes of the store's trait, and the random numbers that [`zipf`] draws with, are in `tollgate_core::conformance`, whose suite
//! needs them itself.

pub mod allocations;
pub mod open_files;
pub mod origin;
pub mod wait;
pub mod web;
pub mod zipf;
