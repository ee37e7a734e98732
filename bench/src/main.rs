//! Benchmarks of Tollgate and its peers in one run, reported as ratios: machines differ, ratios less so.
//!
//! `cargo run --profile dist -p bench -- inprocess [--short]`, `… -- observe [--short]`, `… -- observe-memory [--short]`, `… -- grpc [--short]`, `… -- resp [--short]`,
//! `… -- redis [--short]`, `… -- ratelimit [--memory] [--short]`, `… -- rlqs [--short]`, `… -- cells [--cost [PART…] | --regions] [--short]`, `… -- leases [--short]`, `… -- http [--short]`, `… -- gateway [--memory] [--short]`,
//! `… -- control [--short] [--postgres]`, `… -- overload [--short] [--subject NAME]`

#![allow(clippy::print_stdout, reason = "the tables are the program's output")]

mod cells;
mod contest;
mod contestants;
mod control;
#[path = "../../crates/control/tests/databases/mod.rs"]
mod databases;
mod floor;
mod gate;
mod gateway;
mod grpc;
mod grpc_load;
mod http;
mod http2;
mod inprocess;
mod leases;
mod limiter;
mod observe;
mod observe_memory;
mod overload;
mod process;
mod ratelimit;
mod redis;
mod report;
mod resp;
mod rlqs;
mod traffic;
mod wrk;

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // The parent process reads the output of these.
    if !arguments.first().is_some_and(|first| *first == "lease-node" || first.starts_with("bare-")) {
        print_profile();
    }
    match arguments[..] {
        ["inprocess"] => inprocess::run(inprocess::Length::Full),
        ["inprocess", "--short"] => inprocess::run(inprocess::Length::Short),
        ["inprocess", "--limiter"] => inprocess::limiter(),
        ["inprocess", "--overload"] => gate::run(),
        ["observe"] => return report::outcome(observe::run(observe::Length::Full)),
        ["observe", "--short"] => return report::outcome(observe::run(observe::Length::Short)),
        ["observe-memory", ref how @ ..] => {
            let length = match how {
                [] => observe_memory::Length::Full,
                ["--short"] => observe_memory::Length::Short,
                _ => return report::outcome(Err("usage: bench observe-memory [--short]".to_owned())),
            };
            return report::outcome(observe_memory::run(length).map_err(|error| error.to_string()));
        }
        ["grpc"] => return report::outcome(grpc::run(grpc::Length::Full)),
        ["grpc", "--short"] => return report::outcome(grpc::run(grpc::Length::Short)),
        ["resp"] => return report::outcome(resp::run(resp::Length::Full)),
        ["resp", "--short"] => return report::outcome(resp::run(resp::Length::Short)),
        ["http"] => return report::outcome(http::run(http::Length::Full)),
        ["http", "--short"] => return report::outcome(http::run(http::Length::Short)),
        ["gateway"] => return report::outcome(gateway::run(gateway::Length::Full)),
        ["gateway", "--short"] => return report::outcome(gateway::run(gateway::Length::Short)),
        ["gateway", "--memory"] => {
            return report::outcome(gateway::run(gateway::Length::Memory(gateway::MANY)));
        }
        ["gateway", "--memory", "--short"] => {
            return report::outcome(gateway::run(gateway::Length::Memory(gateway::SOME)));
        }
        ["control", ref how @ ..] => {
            use control::{Database, Length, run};
            let (length, database) = match how {
                [] => (Length::Full, Database::Sqlite),
                ["--short"] => (Length::Short, Database::Sqlite),
                ["--postgres"] => (Length::Full, Database::Postgres),
                ["--short", "--postgres"] => (Length::Short, Database::Postgres),
                _ => {
                    return report::outcome(Err("usage: bench control [--short] [--postgres]".to_owned()));
                }
            };
            return report::outcome(run(length, database));
        }
        ["overload", ref how @ ..] => {
            use overload::{Length, run};
            let (length, subject) = match *how {
                [] => (Length::Full, None),
                ["--short"] => (Length::Short, None),
                ["--subject", name] => (Length::Full, Some(name)),
                ["--short", "--subject", name] => (Length::Short, Some(name)),
                _ => {
                    let usage = "usage: bench overload [--short] [--subject NAME]";
                    return report::outcome(Err(usage.to_owned()));
                }
            };
            return report::outcome(run(length, subject));
        }
        ["redis"] => return report::outcome(redis::run(redis::Length::Full)),
        ["redis", "--short"] => return report::outcome(redis::run(redis::Length::Short)),
        ["cells"] => return report::outcome(cells::run(cells::Length::Full)),
        ["cells", "--short"] => return report::outcome(cells::run(cells::Length::Short)),
        ["cells", "--regions"] => return report::outcome(cells::run_regions(cells::Length::Full)),
        ["cells", "--regions", "--short"] => {
            return report::outcome(cells::run_regions(cells::Length::Short));
        }
        ["cells", "--cost", ref parts @ .., "--short"] => {
            return report::outcome(cells::run_cost(cells::Length::Short, parts));
        }
        ["cells", "--cost", ref parts @ ..] => {
            return report::outcome(cells::run_cost(cells::Length::Full, parts));
        }
        ["ratelimit"] => return report::outcome(ratelimit::run(ratelimit::Length::Full)),
        ["ratelimit", "--memory"] => return report::outcome(ratelimit::run(ratelimit::Length::Memory)),
        ["ratelimit", "--short"] => return report::outcome(ratelimit::run(ratelimit::Length::Short)),
        ["rlqs"] => return report::outcome(rlqs::run(rlqs::Length::Full)),
        ["rlqs", "--short"] => return report::outcome(rlqs::run(rlqs::Length::Short)),
        ["leases"] => return report::outcome(leases::run(leases::Length::Full)),
        ["leases", "--short"] => return report::outcome(leases::run(leases::Length::Short)),
        ["lease-node", ref rest @ ..] => return report::outcome(leases::node(rest)),
        ["bare-http"] => return report::outcome(http::bare().map_err(|error| error.to_string())),
        ["bare-resp"] => return report::outcome(resp::bare().map_err(|error| error.to_string())),
        ["bare-tonic"] => return report::outcome(grpc::bare_tonic().map_err(|error| error.to_string())),
        _ => {
            eprintln!(
                "usage: bench inprocess | observe | observe-memory | grpc | resp | redis | ratelimit | rlqs | leases | cells | http | gateway | control | overload, with --short for a short version"
            );
            return std::process::ExitCode::FAILURE;
        }
    }
    std::process::ExitCode::SUCCESS
}

/// Prints the build profile: results of another profile than the released one say little.
fn print_profile() {
    let myself = std::env::current_exe().unwrap_or_default();
    match process::profile(&myself) {
        "dist" => report::note("Built with profile `dist`."),
        other => {
            let note = format!(
                "Built with profile `{other}`, not `dist`: these are not the results of a release build."
            );
            report::note(&note);
        }
    }
}
