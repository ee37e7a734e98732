//! Limit on open files, for tests with thousands of connections whose both ends are in one process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises this process's limit on open files to its hard limit: a shell's soft limit is often 1,024.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    // If this is not allowed, the test fails by itself.
    let _ = setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit });
}
