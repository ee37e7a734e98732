//! Measures Tollgate beside its peers, in one run, and prints ratios: machines differ, ratios less so.
//!
//! `cargo run --release -p bench -- inprocess [--short]`

mod contest;
mod contestants;
mod floor;
mod inprocess;
mod report;
mod traffic;

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["inprocess"] => inprocess::run(inprocess::Length::Full),
        ["inprocess", "--short"] => inprocess::run(inprocess::Length::Short),
        _ => {
            eprintln!("usage: bench inprocess [--short]");
            return std::process::ExitCode::FAILURE;
        }
    }
    std::process::ExitCode::SUCCESS
}
