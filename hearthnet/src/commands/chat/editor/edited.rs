//! Line editor of a chat, based on rustyline.

use std::fs::Permissions;
use std::io::{ErrorKind, IsTerminal as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Config, Context, Helper};

use super::input::{Input, NO_TEXT, unreadable};
use crate::cli::failure::Failure;
use crate::cli::output::{TerminalStyle, note};
use crate::commands::chat::command::{NAMES, goes_on};

/// Most lines in the history.
const HISTORY: usize = 1000;

pub(in super::super) struct Editor {
    editor: rustyline::Editor<Assistant, FileHistory>,
    prompt: (String, String),
    /// File that keeps the history beyond this chat, if configured.
    file: Option<PathBuf>,
}

impl Editor {
    pub(super) fn new(style: &TerminalStyle, file: Option<PathBuf>) -> Result<Self, Failure> {
        let broken = |e: ReadlineError| Failure::internal(format!("no lines can be read: {e}"));
        let config = Config::builder()
            .max_history_size(HISTORY)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(broken)?
            .history_ignore_space(true)
            // If standard output is a file, typed text must not end up in it.
            .behavior(match std::io::stdout().is_terminal() {
                true => Behavior::Stdio,
                false => Behavior::PreferTerm,
            })
            .build();
        let history = FileHistory::with_config(&config);
        let mut editor = rustyline::Editor::with_history(config, history).map_err(broken)?;
        editor.set_helper(Some(Assistant));
        // Opening a named pipe would block until its other end is opened.
        let file = file.filter(|file| file.is_file() || !file.exists());
        if let Some(file) = &file {
            // The history is private: restrict the permissions of an existing file, too.
            let _ = std::fs::set_permissions(file, Permissions::from_mode(0o600));
            // A missing file is an empty history.
            let _ = editor.load_history(file);
        }
        Ok(Self {
            editor,
            prompt: ("> ".to_owned(), style.bold("> ")),
            file,
        })
    }

    pub(super) fn next(&mut self) -> Result<Input, Failure> {
        match self.editor.readline(&self.prompt) {
            Ok(line) => {
                let _ = self.editor.add_history_entry(line.as_str());
                if let Some(file) = &self.file
                    && let Err(error) = self.editor.append_history(file)
                {
                    note(format!(
                        "warning: the input history cannot be saved: {error}"
                    ));
                    self.file = None;
                }
                Ok(Input::Line(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Input::Interrupted),
            Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                Ok(Input::Refused(NO_TEXT))
            }
            Err(error) => Err(unreadable(error)),
        }
    }
}

struct Assistant;

impl Validator for Assistant {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match goes_on(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

/// Completes names of commands.
impl Completer for Assistant {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = line.get(..at).unwrap_or_default();
        let fits = NAMES
            .iter()
            .filter(|name| typed.starts_with('/') && name.starts_with(typed));
        Ok((0, fits.map(|&name| name.to_owned()).collect()))
    }
}

impl Hinter for Assistant {
    type Hint = String;
}

impl Highlighter for Assistant {}

impl Helper for Assistant {}
