//! How a command prints: for people, or for programs. One for all commands that print anything.

use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;

/// For a command's `#[command(flatten)]`; its subcommands have it too.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct FormatFlags {
    /// How it is printed: text for people, json for programs; text unless set.
    #[arg(long, global = true, value_name = "FORMAT")]
    format: Option<Format>,
    /// Short for --format json.
    #[arg(long, global = true, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl FormatFlags {
    /// Whether a program reads it.
    pub(crate) fn is_json(&self) -> bool {
        self.json || self.format == Some(Format::Json)
    }
}

/// Prints JSON, for programs.
pub(crate) fn print(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stdout().lock(), "{}", serde_json::to_string_pretty(value)?)?)
}

/// Prints a line, for people. A closed output ends the command with an error, and not with a panic.
pub(crate) fn print_line(text: impl Display) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stdout().lock(), "{text}")?)
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::{Command, CommandFactory};

    /// Commands whose output is not for scripts to choose, and why.
    const WITHOUT: [(&str, &str); 3] = [
        ("tollgate serve", "runs until it is told to end; its messages have --log-format"),
        ("tollgate gateway", "the same"),
        ("tollgate help", "is for people"),
    ];

    fn walk(command: &Command, path: &str, seen: &mut Vec<String>) {
        if WITHOUT.iter().any(|(without, _)| *without == path) || path.ends_with(" help") {
            return;
        }
        // What prints by itself must say how, and what only has commands below hands it down to them.
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

    /// Whoever scripts one command can script them all.
    #[test]
    fn every_command_prints_for_programs() {
        let mut root = Cli::command();
        root.build();
        let mut seen = Vec::new();
        walk(&root, "tollgate", &mut seen);
        for known in ["tollgate check", "tollgate token list", "tollgate audit verify", "tollgate why"] {
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
