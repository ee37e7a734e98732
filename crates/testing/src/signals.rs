//! Signals to the processes that a test has started, without a process for each: a shell that a busy machine starts late
//! would make a pause of milliseconds one of seconds.

use rustix::process::{Pid, Signal, kill_process};

/// Sends a signal, by its name without `SIG`, to a child of this process.
///
/// # Panics
///
/// If the process has ended, or the name is none of those that tests use.
pub fn send(child: u32, name: &str) {
    let signal = match name {
        "CONT" => Signal::CONT,
        "HUP" => Signal::HUP,
        "INT" => Signal::INT,
        "KILL" => Signal::KILL,
        "QUIT" => Signal::QUIT,
        "STOP" => Signal::STOP,
        "TERM" => Signal::TERM,
        other => panic!("no signal {other}"),
    };
    let id = i32::try_from(child).ok().and_then(Pid::from_raw).expect("the id of a process");
    kill_process(id, signal).unwrap_or_else(|error| panic!("SIG{name} to {child}: {error}"));
}
