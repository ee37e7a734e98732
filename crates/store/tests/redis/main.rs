//! Counters in Redis, held to real servers that the tests start and end themselves.

mod conformance;
mod servers;
