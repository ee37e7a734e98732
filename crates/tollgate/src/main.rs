//! The `tollgate` binary: parses the command line and dispatches. `serve` is assembled in `server::build`.

mod admin_client;
mod cli;
mod commands;
mod config;
mod ndjson;
mod ratelimit;
mod server;
mod xds;
mod yaml_file;

use commands::{
    access, consumption, doctor, emergency, explain, generate, health, quota, rule_files, rules, test, top,
    usage, why,
};
use server::{gateway, logging, serve};

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let _farewell = logging::FlushOnPanic;
    let command = if ratelimit::is_called() {
        cli::Command::Ratelimit(cli::RatelimitArgs::default())
    } else {
        cli::parse().command
    };
    let outcome = match command {
        cli::Command::Ratelimit(_) => ratelimit::run(),
        cli::Command::Serve(flags) => serve::run(&flags),
        cli::Command::Gateway(flags) => gateway::run(&flags),
        cli::Command::Validate(flags) => rule_files::validate(&flags),
        cli::Command::Schema(_) => rule_files::schema(),
        cli::Command::Explain(flags) => explain::run(&flags),
        cli::Command::Doctor(flags) => doctor::run(&flags),
        cli::Command::Test(flags) => test::run(&flags),
        cli::Command::Token(flags) => access::token(&flags),
        cli::Command::Audit(flags) => access::audit(&flags),
        cli::Command::Rules(flags) => rules::run(&flags),
        cli::Command::Quota(flags) => quota::quota(&flags),
        cli::Command::Usage(flags) => usage::usage(&flags),
        cli::Command::Consumption(flags) => consumption::run(&flags),
        cli::Command::Emergency(flags) => emergency::emergency(&flags),
        cli::Command::Why(flags) => why::why(&flags),
        cli::Command::Top(flags) => top::run(&flags),
        cli::Command::Health(flags) => health::run(&flags),
        cli::Command::Completions(flags) => generate::completions(&flags),
        cli::Command::Man(flags) => generate::man(&flags),
    };
    // `tollgate … | head`: the reader has closed the pipe, which is not a failure.
    let outcome = match outcome {
        Err(error) if cli::output::is_closed_output(&error) => Ok(ExitCode::SUCCESS),
        outcome => outcome,
    };
    logging::flush(outcome.as_ref().err());
    outcome.unwrap_or(ExitCode::FAILURE)
}
