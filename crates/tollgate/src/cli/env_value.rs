//! Parses the command line; names the environment variable behind an invalid value, because clap's error names the flag,
//! which the operator did not write.

use super::Cli;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use clap::parser::ValueSource;
use clap::{Command, CommandFactory, FromArgMatches};
use std::ffi::OsString;

/// Parses the command line, or prints what is wrong with it and ends the process.
pub(crate) fn parse() -> Cli {
    let args: Vec<OsString> = std::env::args_os().collect();
    try_parse(&args).unwrap_or_else(|mut error| {
        let is_other = is_other_servers_flag(&error, &args);
        if is_other {
            // The nearest spelling has another meaning.
            for kind in [ContextKind::SuggestedArg, ContextKind::Usage] {
                let _ = error.remove(kind);
            }
        }
        let _ = error.print();
        if let Some(variable) = variable(&error, &args) {
            eprintln!("\nThe value is from the environment variable {variable}.");
        }
        if is_other {
            eprintln!(
                "\n  tip: each protocol has an address of its own: `--http 127.0.0.1:8080`, `--grpc`, `--resp`, `--admin`"
            );
        }
        std::process::exit(error.exit_code())
    })
}

/// Returns whether the unknown flag is one by which other servers are given their address.
fn is_other_servers_flag(error: &Error, args: &[OsString]) -> bool {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return false };
    let flag = flag.split([' ', '=']).next().unwrap_or_default();
    error.kind() == ErrorKind::UnknownArgument
        && args.get(1).is_some_and(|command| command == "serve" || command == "gateway")
        && matches!(flag, "--port" | "--listen" | "--bind" | "--addr" | "--address" | "--host" | "-p")
}

/// Returns the flags of `serve` as the environment variables of Tollgate set them, without any argument.
pub(crate) fn serve_flags() -> super::ServeFlags {
    let args = ["tollgate", "serve"].map(OsString::from);
    match try_parse(&args).map(|cli| cli.command) {
        Ok(super::Command::Serve(flags)) => *flags,
        Ok(_) => unreachable!("the command is serve"),
        Err(error) => {
            let _ = error.print();
            if let Some(variable) = variable(&error, &args) {
                eprintln!("\nThe value is from the environment variable {variable}.");
            }
            std::process::exit(error.exit_code())
        }
    }
}

fn try_parse(args: &[OsString]) -> Result<Cli, Error> {
    let matches = Cli::command().try_get_matches_from(args)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let (super::Command::Explain(flags), Some(own)) =
        (&mut cli.command, matches.subcommand_matches("explain"))
    {
        // A variable names the server of all commands; only the flag says that this one is meant.
        flags.names_server = own.value_source("admin") == Some(ValueSource::CommandLine);
    }
    Ok(cli)
}

/// Returns the variable that an invalid value comes from, if it is from one.
fn variable(error: &Error, args: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let flag = flag.split([' ', '=']).next()?.to_owned();
    let is_flag = |arg: &OsString| {
        arg.to_str().is_some_and(|arg| {
            arg == flag || arg.strip_prefix(&flag).is_some_and(|rest| rest.starts_with('='))
        })
    };
    if args.iter().any(is_flag) {
        return None;
    }
    // The same flag has the same variable in every command.
    find(&Cli::command(), flag.strip_prefix("--")?)
}

fn find(command: &Command, long: &str) -> Option<String> {
    let own = command.get_arguments().find(|arg| arg.get_long() == Some(long));
    let own = own.and_then(|arg| arg.get_env()).map(|name| name.to_string_lossy().into_owned());
    own.or_else(|| command.get_subcommands().find_map(|below| find(below, long)))
}
