//! `tollgate completions` and `tollgate man`: generated from the command line definition, so they are always up to
//! date.

use crate::cli::{Cli, CompletionShell, CompletionsFlags, ManFlags, output};
use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;
use std::process::ExitCode;

/// Prints a completion script.
pub(crate) fn completions(flags: &CompletionsFlags) -> anyhow::Result<ExitCode> {
    let shell = match flags.shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    // The generator panics if it cannot write, so it writes to memory.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tollgate", &mut script);
    output::raw().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints one manual page, or writes all of them.
pub(crate) fn man(flags: &ManFlags) -> anyhow::Result<ExitCode> {
    if let Some(folder) = &flags.dir {
        let written = std::fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), folder));
        written.with_context(|| format!("cannot write manual pages to {}", folder.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let mut command = &root;
    for name in &flags.command {
        command = command
            .find_subcommand(name)
            .with_context(|| format!("no command `{}`; see tollgate --help", flags.command.join(" ")))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    output::raw().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}
