//! Line editor of a chat, based on reedline.
//!
//! reedline submits a line at each Enter, and draws the line for each key. Here a burst of several
//! lines, which a terminal without bracketed paste makes of a paste, is one message, and drawn
//! once. So Enter and bursts end the turn of reedline ([`Keys`]), and [`Editor::next`] decides what
//! they mean, because it knows the line and what follows.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers, poll, read};
use hearthnet_platform::files;
use hearthnet_platform::terminal::{RedirectedOutput, has_input_within, suspend};
use parking_lot::Mutex;
use reedline::{
    EditCommand, EditMode, Emacs, FileBackedHistory, Prompt, PromptEditMode, PromptHistorySearch,
    Reedline, ReedlineEvent, ReedlineRawEvent, Signal,
};

use super::input::{Input, PASTED};
use crate::cli::{TerminalStyle, note};
use crate::commands::chat::command::{NAMES, goes_on, may_go_on};

/// Most lines in the history.
const HISTORY: usize = 1000;

/// Longest gap between the first two keys of a burst, such as a paste. No person types as fast.
const BURST: Duration = Duration::from_millis(1);

/// Keys that `Editor::next` has to process before others are read.
#[derive(Default)]
struct Waiting {
    /// Keys that reedline had read when its turn ended.
    batch: VecDeque<Event>,
    /// Keys read after them.
    behind: VecDeque<Event>,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.behind.is_empty()
    }

    fn front(&self) -> Option<&Event> {
        self.batch.front().or_else(|| self.behind.front())
    }

    fn pop(&mut self) -> Option<Event> {
        self.batch.pop_front().or_else(|| self.behind.pop_front())
    }

    /// Reads keys until none arrives for [`PASTED`], if the first arrives within `time`.
    fn read(&mut self, mut time: Duration) {
        while matches!(poll(time), Ok(true))
            && let Ok(event) = read()
        {
            self.behind.push_back(cleaned(event));
            time = PASTED;
        }
    }
}

pub(in super::super) struct Editor {
    editor: Reedline,
    /// Meaning of a waiting key.
    emacs: Emacs,
    waiting: Arc<Mutex<Waiting>>,
    prompt: Arrow,
    /// The last completion.
    completed: Option<Completed>,
    /// True if the history is in a file.
    stores: bool,
}

struct Completed {
    typed: String,
    shown: String,
    turn: usize,
}

impl Editor {
    pub(super) fn new(style: &TerminalStyle, file: Option<PathBuf>) -> Self {
        let waiting = Arc::<Mutex<Waiting>>::default();
        let keys = Keys {
            emacs: Emacs::default(),
            waiting: Arc::clone(&waiting),
        };
        let mut editor = Reedline::create()
            .with_edit_mode(Box::new(keys))
            .use_bracketed_paste(true)
            .with_ansi_colors(false);
        let history = file.and_then(stored_history);
        let stores = history.is_some();
        let history = history.or_else(|| FileBackedHistory::new(HISTORY).ok());
        if let Some(history) = history {
            editor = editor.with_history(Box::new(history));
        }
        Self {
            editor,
            emacs: Emacs::default(),
            waiting,
            prompt: Arrow(style.bold("> ")),
            completed: None,
            stores,
        }
    }

    /// Reads a message or a command.
    ///
    /// # Errors
    /// If the terminal does not answer.
    pub(super) fn next(&mut self) -> io::Result<Input> {
        // reedline writes some of its sequences to standard output.
        let _shown = RedirectedOutput::begin();
        // Lines that were typed before the prompt are messages of their own.
        let waits = !self.waiting.lock().is_empty() || has_input_within(Duration::ZERO);
        let ahead = waits || poll(BURST)?;
        loop {
            let event = self.waiting.lock().pop();
            let Some(event) = event else {
                match self.editor.read_line(&self.prompt)? {
                    Signal::CtrlC => return Ok(Input::Interrupted),
                    Signal::CtrlD => return Ok(Input::End),
                    // Keys wait.
                    _ => continue,
                }
            };
            match Key::of(&event) {
                Key::Enter => {
                    let text = self.editor.current_buffer_contents();
                    let quoted = goes_on(text);
                    if quoted || (!ahead && may_go_on(text) && self.text_follows()) {
                        self.edit(EditCommand::InsertNewline);
                    } else {
                        let line = self.accept()?;
                        return Ok(Input::Line(line));
                    }
                }
                Key::Text(c) => {
                    let text = self.rest_of_text(c);
                    self.edit(EditCommand::InsertString(text));
                }
                // In a burst it is the tab of an indented text.
                Key::Tab if self.is_in_message() => self.edit(EditCommand::InsertChar('\t')),
                Key::Tab => self.complete(),
                Key::Suspend => suspend()?,
                Key::Other => match translated(&mut self.emacs, event) {
                    ReedlineEvent::Edit(commands) => self.editor.run_edit_commands(&commands),
                    ReedlineEvent::CtrlC => {
                        self.edit(EditCommand::Clear);
                        self.accept()?;
                        return Ok(Input::Interrupted);
                    }
                    ReedlineEvent::CtrlD if self.editor.current_buffer_contents().is_empty() => {
                        return Ok(Input::End);
                    }
                    ReedlineEvent::CtrlD => self.edit(EditCommand::Delete),
                    _ => {}
                },
            }
        }
    }

    /// Takes the text that no [`next`](Self::next) has returned.
    pub(super) fn take_typed(&mut self) -> String {
        let mut text = self.editor.current_buffer_contents().to_owned();
        let mut waiting = self.waiting.lock();
        waiting.read(BURST);
        while let Some(event) = waiting.pop() {
            match (Key::of(&event), event) {
                (Key::Enter, _) => text.push('\n'),
                (Key::Tab, _) => text.push('\t'),
                (Key::Text(c), _) => text.push(c),
                (_, Event::Paste(pasted)) => text.push_str(&pasted),
                _ => {}
            }
        }
        text
    }

    pub(super) fn prompt(&self) -> &str {
        &self.prompt.0
    }

    fn edit(&mut self, command: EditCommand) {
        self.editor.run_edit_commands(&[command]);
    }

    /// True if text came with an Enter.
    fn text_follows(&self) -> bool {
        self.waiting.lock().front().is_some_and(|event| {
            matches!(event, Event::Paste(_)) || !matches!(Key::of(event), Key::Suspend | Key::Other)
        })
    }

    /// Takes the characters that wait behind this one.
    fn rest_of_text(&self, first: char) -> String {
        let mut text = String::from(first);
        let mut waiting = self.waiting.lock();
        while let Some(Key::Text(c)) = waiting.front().map(Key::of) {
            text.push(c);
            waiting.pop();
        }
        text
    }

    fn is_in_message(&self) -> bool {
        let text = self.editor.current_buffer_contents();
        !text.starts_with('/') && !self.waiting.lock().is_empty()
    }

    /// Ends the line: shows it whole, puts it into the history and returns it.
    fn accept(&mut self) -> io::Result<String> {
        // A line that begins with white space stays out of the history.
        let text = self.editor.current_buffer_contents();
        let space = text.chars().next().filter(|c| c.is_whitespace());
        let editor = std::mem::replace(&mut self.editor, Reedline::create());
        self.editor = editor
            .with_history_exclusion_prefix(space.map(String::from))
            .with_immediately_accept(true);
        let signal = self.editor.read_line(&self.prompt);
        let editor = std::mem::replace(&mut self.editor, Reedline::create());
        self.editor = editor.with_immediately_accept(false);
        let Signal::Success(line) = signal? else {
            return Ok(String::new());
        };
        if self.stores
            && let Err(error) = self.editor.sync_history()
        {
            unsaved(&error);
            self.stores = false;
        }
        Ok(line)
    }

    /// Replaces the typed text by the next name of a command that begins with it, and after the
    /// last one by itself.
    fn complete(&mut self) {
        let at = self.editor.current_insertion_point();
        let text = self.editor.current_buffer_contents();
        let before = text.get(..at).unwrap_or_default().to_owned();
        let (typed, turn) = match self.completed.take() {
            Some(last) if last.shown == before => (last.typed, last.turn + 1),
            _ => (before, 0),
        };
        let fits = |name: &&str| typed.starts_with('/') && name.starts_with(&typed);
        let names = NAMES.iter().copied().filter(fits).chain([typed.as_str()]);
        let shown = names.cycle().nth(turn).unwrap_or_default().to_owned();
        self.editor.run_edit_commands(&[
            EditCommand::MoveToPosition {
                position: 0,
                select: false,
            },
            EditCommand::MoveToPosition {
                position: at,
                select: true,
            },
            EditCommand::InsertString(shown.clone()),
        ]);
        self.completed = Some(Completed { typed, shown, turn });
    }
}

/// Opens the history file. Returns `None` if it cannot be read.
fn stored_history(file: PathBuf) -> Option<FileBackedHistory> {
    // Opening a named pipe would block until its other end is opened.
    if file.exists() && !file.is_file() {
        return None;
    }
    // The history is private: restrict the permissions of an existing file, too.
    let _ = files::private(OpenOptions::new().create(true).append(true)).open(&file);
    let _ = files::close_file_to_others(&file);
    match FileBackedHistory::with_file(HISTORY, file) {
        Ok(history) => Some(history),
        Err(error) => {
            unsaved(&error);
            None
        }
    }
}

fn unsaved(error: &dyn std::fmt::Display) {
    note(format!(
        "warning: the input history cannot be saved: {error}"
    ));
}

/// Keys as in Emacs. Enter, Tab, Ctrl-Z and the first character of a burst end the turn of
/// reedline, which then drops the rest of its batch: all of them wait.
struct Keys {
    emacs: Emacs,
    waiting: Arc<Mutex<Waiting>>,
}

impl EditMode for Keys {
    fn parse_event(&mut self, event: ReedlineRawEvent) -> ReedlineEvent {
        let event = cleaned(event.into());
        let mut waiting = self.waiting.lock();
        if !waiting.is_empty() {
            waiting.batch.push_back(event);
            return ReedlineEvent::None;
        }
        let key = Key::of(&event);
        // The rest of a burst is read here, because the terminal leaves raw mode after the turn.
        match key {
            Key::Enter => waiting.read(PASTED),
            Key::Text(_) | Key::Tab => waiting.read(BURST),
            Key::Suspend | Key::Other => {}
        }
        if key == Key::Other || (matches!(key, Key::Text(_)) && waiting.is_empty()) {
            return translated(&mut self.emacs, event);
        }
        waiting.batch.push_back(event);
        ReedlineEvent::ExecuteHostCommand(String::new())
    }

    fn edit_mode(&self) -> PromptEditMode {
        self.emacs.edit_mode()
    }
}

/// Meaning of a key to a chat.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    /// Carriage return, or line feed, which is Ctrl-J in raw mode.
    Enter,
    Tab,
    Text(char),
    /// Ctrl-Z.
    Suspend,
    Other,
}

impl Key {
    fn of(event: &Event) -> Self {
        let Event::Key(key) = event else {
            return Self::Other;
        };
        match (key.code, key.modifiers) {
            (KeyCode::Enter, KeyModifiers::NONE) | (KeyCode::Char('j'), KeyModifiers::CONTROL) => {
                Self::Enter
            }
            (KeyCode::Char('z'), KeyModifiers::CONTROL) => Self::Suspend,
            (KeyCode::Tab, KeyModifiers::NONE) => Self::Tab,
            (KeyCode::Char(c), KeyModifiers::NONE | KeyModifiers::SHIFT) => Self::Text(c),
            _ => Self::Other,
        }
    }
}

fn translated(emacs: &mut Emacs, event: Event) -> ReedlineEvent {
    match ReedlineRawEvent::try_from(event) {
        Ok(event) => emacs.parse_event(event),
        Err(()) => ReedlineEvent::None,
    }
}

/// Removes control characters, which the terminal would execute when the line is shown, and Shift
/// from keys like arrows: it would select text, and no selection is shown.
fn cleaned(event: Event) -> Event {
    match event {
        Event::Paste(text) => {
            let text = text.replace("\r\n", "\n").replace('\r', "\n");
            let acts = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
            Event::Paste(text.replace(acts, ""))
        }
        Event::Key(key) => Event::Key(match key.code {
            KeyCode::Char(c) if c.is_control() => KeyEvent::new(KeyCode::Null, KeyModifiers::NONE),
            KeyCode::Char(_) => key,
            code => KeyEvent {
                code,
                modifiers: key.modifiers.difference(KeyModifiers::SHIFT),
                ..key
            },
        }),
        event => event,
    }
}

struct Arrow(String);

impl Prompt for Arrow {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_indicator(&self, _: PromptEditMode) -> Cow<'_, str> {
        Cow::Borrowed(&self.0)
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        Cow::Borrowed("  ")
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        Cow::Owned(format!("(reverse-i-search)`{}': ", search.term))
    }
}
