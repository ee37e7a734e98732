//! The binary: parse, dispatch, nothing else. `serve` is assembled in `build`.

mod access;
mod build;
mod cli;
mod client;
mod config;
mod emergency;
mod fronts;
mod gateway;
mod leases;
mod lines;
mod logging;
mod open_files;
mod operators;
mod otlp;
mod quota;
mod reload;
mod ruleinfo;
mod rules;
mod serve;
mod settings;
mod sources;
mod status;
mod store;
mod test;
mod top;
mod usage;
mod watching;
mod why;

use clap::Parser;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let _farewell = logging::Farewell;
    let outcome = match cli::Cli::parse().command {
        cli::Command::Serve(flags) => serve::run(&flags),
        cli::Command::Gateway(flags) => gateway::run(&flags),
        cli::Command::Check(flags) => ruleinfo::check(&flags),
        cli::Command::Schema(_) => ruleinfo::schema(),
        cli::Command::Explain(flags) => ruleinfo::explain(&flags),
        cli::Command::Test(flags) => test::run(&flags),
        cli::Command::Token(flags) => access::token(&flags),
        cli::Command::Audit(flags) => access::audit(&flags),
        cli::Command::Rules(flags) => rules::run(&flags),
        cli::Command::Quota(flags) => quota::quota(&flags),
        cli::Command::Usage(flags) => usage::usage(&flags),
        cli::Command::Emergency(flags) => emergency::emergency(&flags),
        cli::Command::Why(flags) => why::why(&flags),
        cli::Command::Top(flags) => top::run(&flags),
    };
    logging::end(outcome.as_ref().err());
    outcome.unwrap_or(ExitCode::FAILURE)
}
