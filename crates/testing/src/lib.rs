//! Shared tools for the tests and benchmarks of several crates. No released code depends on it.
//!
//! | module | contents |
//! |---|---|
//! | [`allocations`] | allocation counting |
//! | [`fuzz_seeds`] | the inputs that fuzzing starts from |
//! | [`zipf`] | keys with a Zipf distribution |
//! | [`web`] | an HTTP/1.1 client that can send malformed requests |
//! | [`origin`] | an upstream for proxies |
//! | [`ports`] | ports that no other test gets |
//! | [`own_process`] | tests of what is counted for a whole process |
//! | [`open_files`] | raising the limit on open files |
//! | [`signals`] | signals to child processes |
//! | [`wait`] | waiting for observable conditions |
//!
//! Fake stores and records, and the random number generator, are in `tollgate_core::conformance`, whose suite needs them
//! itself.

pub mod allocations;
pub mod fuzz_seeds;
pub mod open_files;
pub mod origin;
pub mod own_process;
pub mod ports;
pub mod signals;
pub mod wait;
pub mod web;
pub mod zipf;
