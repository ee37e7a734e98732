//! Counters in Redis, held to real servers that the tests start and end themselves.
mod cluster;
mod cluster_faults;
mod conformance;
mod data_loss;
mod differential;
mod faults;
mod flood;
mod leases;
mod line_faults;
mod local;
mod memory;
mod proxy;
mod return_units;
mod sentinel;
mod servers;
mod tls;
mod wrong_clocks;
