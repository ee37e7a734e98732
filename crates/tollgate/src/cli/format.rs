//! Output format of the commands: text for people or JSON for programs.

use crate::cli::output;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;
use tollgate_observe::escape;

/// For a command's `#[command(flatten)]`; its subcommands have it too.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct FormatFlags {
    /// Output format [default: text].
    #[arg(long, global = true, display_order = 110, value_name = "FORMAT")]
    format: Option<Format>,
    /// Same as --format json.
    #[arg(long, global = true, display_order = 111, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl FormatFlags {
    /// Returns whether a program reads the output.
    pub(crate) fn is_json(&self) -> bool {
        self.json || self.format == Some(Format::Json)
    }
}

/// Prints JSON for programs.
pub(crate) fn print(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(writeln!(output::raw(), "{}", escape::json(&serde_json::to_string_pretty(value)?))?)
}

/// Prints a line for people, with styles on a terminal.
pub(crate) fn print_line(text: impl Display) -> anyhow::Result<()> {
    Ok(writeln!(output::styled(), "{text}")?)
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::{Command, CommandFactory};

    /// Commands without an output format, and why.
    const WITHOUT: [(&str, &str); 6] = [
        ("tollgate serve", "runs until it is stopped; its log has --log-format"),
        ("tollgate gateway", "the same"),
        ("tollgate ratelimit", "the same; its log has LOG_FORMAT"),
        ("tollgate completions", "prints a script for a shell"),
        ("tollgate man", "prints roff"),
        ("tollgate help", "is for people"),
    ];

    fn walk(command: &Command, path: &str, seen: &mut Vec<String>) {
        if WITHOUT.iter().any(|(without, _)| *without == path) || path.ends_with(" help") {
            return;
        }
        // A command that prints must have the flags; one that only has subcommands leaves them to these.
        let prints = command.get_subcommands().next().is_none() || !command.is_subcommand_required_set();
        if prints && path != "tollgate" {
            for flag in ["format", "json"] {
                let found = command.get_arguments().any(|arg| arg.get_long() == Some(flag));
                assert!(found, "`{path}` has no --{flag}: flatten FormatFlags into its flags");
            }
            seen.push(path.to_owned());
        }
        for below in command.get_subcommands() {
            walk(below, &format!("{path} {}", below.get_name()), seen);
        }
    }

    /// Every command has an output format for scripts.
    #[test]
    fn every_command_prints_for_programs() {
        let mut root = Cli::command();
        root.build();
        let mut seen = Vec::new();
        walk(&root, "tollgate", &mut seen);
        for known in ["tollgate validate", "tollgate token list", "tollgate audit verify", "tollgate why"] {
            assert!(seen.iter().any(|path| path == known), "{known} of {seen:?}");
        }
        assert!(seen.len() > 25, "{seen:?}");
        for (without, _) in WITHOUT {
            let mut found = Some(&root);
            for word in without.split(' ').skip(1) {
                found = found.and_then(|command| command.find_subcommand(word));
            }
            assert!(found.is_some(), "`{without}` is no command any more");
        }
    }
}
