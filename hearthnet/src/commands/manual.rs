//! `hearthnet completions` and `hearthnet man`: generated from the command-line definition.

use std::fs;
use std::path::Path;

use clap::CommandFactory as _;

use crate::cli::args::Args;
use crate::cli::{Failure, print_bytes};

pub(crate) fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "hearthnet", &mut script);
    print_bytes(&script)
}

pub(crate) fn man(directory: &Path) -> Result<(), Failure> {
    let fail = |e: std::io::Error| {
        Failure::file("write the manual to", directory, e)
            .hint("name a directory that you may write to")
    };
    fs::create_dir_all(directory).map_err(fail)?;
    clap_mangen::generate_to(Args::command(), directory).map_err(fail)
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    /// Names of all visible commands, as `hearthnet-model-pull`.
    fn names(command: &Command, prefix: &str, found: &mut Vec<String>) {
        for inner in command.get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = format!("{prefix}-{}", inner.get_name());
            names(inner, &name, found);
            found.push(name);
        }
    }

    #[test]
    fn every_command_has_a_page_of_the_manual_that_names_its_options() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        let mut all = vec!["hearthnet".to_owned()];
        names(&Args::command(), "hearthnet", &mut all);
        assert!(all.contains(&"hearthnet-model-pull".to_owned()));
        for name in all {
            let page = directory.path().join(format!("{name}.1"));
            let text = fs::read_to_string(&page).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(
                text.contains(".SH NAME") && text.contains("data\\-dir"),
                "{name}"
            );
        }
    }

    #[test]
    fn every_shell_is_told_every_command() {
        use clap_complete::Shell;
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "hearthnet", &mut script);
            let script = String::from_utf8(script).unwrap();
            for inner in Args::command().get_subcommands() {
                assert!(
                    script.contains(inner.get_name()),
                    "{shell}: {}",
                    inner.get_name()
                );
            }
        }
    }
}
