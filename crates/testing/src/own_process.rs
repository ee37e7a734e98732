//! Tests of what is counted for a whole process. They are part of a program with other tests, because a program for one test
//! takes as long to compile and link as one for many.

use std::env;
use std::process::Command;

/// Names the test that a process was started for.
const STARTED_FOR: &str = "TOLLGATE_TEST_IN_OWN_PROCESS";

/// Runs `body` in a process where no other test runs: the test program, started again for the test of this name alone.
/// `test` is the complete name of the calling test, with its modules.
///
/// # Panics
/// If the test fails there, or if the program has no test of this name.
pub fn in_own_process(test: &str, body: impl FnOnce()) {
    if env::var(STARTED_FOR).is_ok_and(|name| name == test) {
        return body();
    }
    let program = env::current_exe().expect("the test program");
    let child =
        Command::new(program).args(["--exact", test]).env(STARTED_FOR, test).output().expect("a process");
    let output = String::from_utf8_lossy(&child.stdout);
    let passed = child.status.success() && output.contains(" 1 passed");
    assert!(passed, "{}\n{output}\n{}", child.status, String::from_utf8_lossy(&child.stderr));
}
