//! Counters in Redis, held to real servers that the tests start and end themselves.
mod cluster;
mod cluster_faults;
mod conformance;
mod differential;
mod faults;
mod flood;
mod give_back;
mod leases;
mod line_faults;
mod local;
mod loss;
mod memory;
mod proxy;
mod sentinel;
mod servers;
mod tls;
mod wrong_clocks;
