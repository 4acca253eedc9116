//! The line editor, as a chat uses it.

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

use super::{Input, NO_TEXT, unreadable};
use crate::commands::chat::command::{NAMES, goes_on};
use crate::failure::Failure;
use crate::output::{Look, note};

/// Lines that are remembered.
const HISTORY: usize = 1000;

/// Asks for lines that can be edited.
pub(in super::super) struct Editor {
    editor: rustyline::Editor<Assistant, FileHistory>,
    prompt: (String, String),
    /// Where lines are remembered beyond this chat, if its owner wants that.
    file: Option<PathBuf>,
}

impl Editor {
    pub(super) fn new(look: &Look, file: Option<PathBuf>) -> Result<Self, Failure> {
        let broken = |e: ReadlineError| Failure::internal(format!("no lines can be read: {e}"));
        let config = Config::builder()
            .max_history_size(HISTORY)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(broken)?
            .history_ignore_space(true)
            // An answer that goes to a file must not have what is typed in it.
            .behavior(match std::io::stdout().is_terminal() {
                true => Behavior::Stdio,
                false => Behavior::PreferTerm,
            })
            .build();
        let history = FileHistory::with_config(&config);
        let mut editor = rustyline::Editor::with_history(config, history).map_err(broken)?;
        editor.set_helper(Some(Assistant));
        // Opening a pipe would wait for its other end.
        let file = file.filter(|file| file.is_file() || !file.exists());
        if let Some(file) = &file {
            // It holds what was typed: for its owner's eyes only, whoever has put it there.
            let _ = std::fs::set_permissions(file, Permissions::from_mode(0o600));
            // Without one there is nothing to recall.
            let _ = editor.load_history(file);
        }
        Ok(Self {
            editor,
            prompt: ("> ".to_owned(), look.bold("> ")),
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
                        "warning: what was typed is not remembered: {error}"
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

/// What the editor asks while a line is typed.
struct Assistant;

impl Validator for Assistant {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match goes_on(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

/// Names of commands.
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
