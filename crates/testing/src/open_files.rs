//! Room for tests that hold thousands of connections, both ends of each, in one process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets this process open as many files as its hard limit says: a shell's own soft limit is often 1,024.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    // Where that is not allowed the test finds out by itself.
    let _ = setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit });
}
