//! A conversation with a person: lines in, answers out, commands between them.

use std::io::BufRead as _;
use std::path::Path;
use std::time::Instant;

use hearthnet_model::{ChatMessage, Role};
use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::chat::{Done, Frame, Prompt};

use super::Chat;
use super::command::{HELP, Line, read, set};
use super::editor::{CUT, Input, Lines, unreadable, was_cut};
use super::saved::{load, save};
use crate::explain::explain;
use crate::failure::{Failure, Kind};
use crate::output::note;

impl Chat<'_> {
    /// A conversation on a terminal, until Ctrl-D.
    pub(super) fn converse(&mut self) -> Result<(), Failure> {
        self.interactive = true;
        let mut talk = Talk::new(self.system());
        let mut lines = Lines::new(&self.look, self.history_file())?;
        note(self.look.dim(&format!(
            "{} answers. /help lists commands, \"\"\" begins and ends a message of several lines, \
             Ctrl-C stops an answer, Ctrl-D leaves.",
            self.name()
        )));
        loop {
            let line = match lines.next()? {
                Input::Line(line) => line,
                Input::Interrupted => {
                    note(self.look.dim("Ctrl-D leaves"));
                    continue;
                }
                Input::Refused(why) => {
                    note(why);
                    continue;
                }
                Input::End => return Ok(()),
            };
            match read(&line) {
                Line::Leave => return Ok(()),
                Line::Message(message) => self.say(&mut talk, message)?,
                command => {
                    if let Err(failure) = self.command(&mut talk, command) {
                        self.complain(&failure);
                    }
                }
            }
            if self.interrupts.ending() {
                return Err(ChatError::Cancelled.into());
            }
        }
    }

    /// A conversation of a program: each line of standard input is a message.
    pub(super) fn lines(&mut self) -> Result<(), Failure> {
        let mut messages = self.system();
        let mut line = String::new();
        loop {
            line.clear();
            let read = std::io::stdin().lock().read_line(&mut line);
            if read.map_err(unreadable)? == 0 {
                return Ok(());
            }
            if was_cut(line.as_bytes()) {
                return Err(unreadable(CUT).hint("put it into a file or a pipe"));
            }
            let message = line.trim();
            if message.is_empty() {
                continue;
            }
            messages.push(ChatMessage::user(message));
            let prompt = Prompt::Messages(messages.clone());
            let done = self.turn(prompt, Instant::now()).end?;
            messages.push(ChatMessage::assistant(done.text));
        }
    }

    /// One turn. What goes wrong is told, and the conversation goes on as if it had not been
    /// asked; where the answer was stopped, what was said of it stays said.
    fn say(&mut self, talk: &mut Talk, message: String) -> Result<(), Failure> {
        talk.messages.push(ChatMessage::user(message));
        let prompt = Prompt::Messages(talk.messages.clone());
        let turn = self.turn(prompt, Instant::now());
        match turn.end {
            Ok(done) => {
                talk.messages
                    .push(ChatMessage::assistant(done.text.clone()));
                talk.last = Some((done, turn.moves));
            }
            Err(failure) if failure.kind == Kind::OutputClosed => return Err(failure),
            Err(failure) if failure.kind == Kind::Interrupted => {
                note(self.look.dim("[stopped]"));
                talk.last = None;
                match turn.said.is_empty() {
                    true => drop(talk.messages.pop()),
                    false => talk.messages.push(ChatMessage::assistant(turn.said)),
                }
            }
            Err(failure) => {
                talk.messages.pop();
                self.complain(&failure);
                if failure.kind == Kind::BadRequest && !talk.messages.is_empty() {
                    note(self.look.dim(
                        "[the message was left out; a shorter one may fit, and /reset begins anew]",
                    ));
                }
            }
        }
        Ok(())
    }

    fn command(&mut self, talk: &mut Talk, command: Line) -> Result<(), Failure> {
        let say = |text: &str| note(self.look.dim(text));
        match command {
            Line::Nothing | Line::Message(_) | Line::Leave => {}
            Line::Help => note(HELP),
            Line::Wrong(why) => say(&format!("{why}; /help lists what there is")),
            Line::Reset => {
                talk.messages.retain(|message| message.role == Role::System);
                talk.last = None;
                say("forgotten");
            }
            Line::System(None) => match talk.system() {
                Some(text) => note(text),
                None => say("nothing is said before the conversation"),
            },
            Line::System(Some(text)) => {
                talk.messages.retain(|message| message.role != Role::System);
                if text == "off" {
                    say("nothing is said before the conversation");
                } else {
                    talk.messages.insert(0, ChatMessage::system(text));
                    say("set");
                }
            }
            Line::Save(file) => {
                save(&file, self.name(), &talk.messages)?;
                say(&format!(
                    "{} written to {}",
                    count(&talk.messages),
                    file.display()
                ));
            }
            Line::Load(file) => {
                *talk = Talk::new(load(&file)?);
                say(&format!("{} read", count(&talk.messages)));
            }
            Line::Model(None) => say(self.name()),
            Line::Model(Some(name)) => {
                self.change_model(&name)?;
                note(self.look.dim(&format!("{} answers", self.name())));
            }
            Line::Seed(None) => match self.sampling.seed {
                Some(seed) => say(&format!("seed {seed}")),
                None => say("a seed is drawn for each answer; /explain tells the last one"),
            },
            Line::Seed(Some(text)) => match (text.as_str(), text.parse()) {
                ("off", _) => self.sampling.seed = None,
                (_, Ok(seed)) => self.sampling.seed = Some(seed),
                _ => say(&format!(
                    "a seed is a whole number from 0 to {}, or `off`",
                    u64::MAX
                )),
            },
            Line::Set(None) => note(self.settings()),
            Line::Set(Some((key, value))) => match set(&self.sampling, &key, &value) {
                Ok(sampling) => self.sampling = sampling,
                Err(why) => say(&why),
            },
            Line::Explain(Some(always)) => self.explain = always,
            Line::Explain(None) => match &talk.last {
                Some((done, moves)) => note(explain(done, moves)),
                None => say(
                    "there is no whole answer to explain: of one that was stopped nothing is kept but its words",
                ),
            },
        }
        Ok(())
    }

    /// The settings that are not the model's own.
    fn settings(&self) -> String {
        let s = &self.sampling;
        let line = |name: &str, value: Option<String>| {
            let value = value.unwrap_or_else(|| "the model's own".to_owned());
            format!("{name:<20} {value}")
        };
        let float = |value: Option<f32>| value.map(|value| value.to_string());
        let most = match s.max_tokens {
            Some(most) => most.to_string(),
            None => "as many as the model's context leaves".to_owned(),
        };
        let stop = match s.stop.as_slice() {
            [] => "only where the model ends".to_owned(),
            stops => format!("{stops:?}"),
        };
        [
            line("temperature", float(s.temperature)),
            line("top_k", s.top_k.map(|k| k.to_string())),
            line("top_p", float(s.top_p)),
            line("min_p", float(s.min_p)),
            line("repetition_penalty", float(s.repetition_penalty)),
            line("presence_penalty", float(s.presence_penalty)),
            line("frequency_penalty", float(s.frequency_penalty)),
            line("max_tokens", Some(most)),
            line("stop", Some(stop)),
        ]
        .join("\n")
    }

    fn complain(&self, failure: &Failure) {
        note(self.look.red(&format!("error: {failure}")));
        if let Some(hint) = failure.hint_text() {
            note(self.look.dim(&format!("hint: {hint}")));
        }
    }

    /// Where lines are remembered beyond this chat: nowhere, unless the owner wants it.
    fn history_file(&self) -> Option<std::path::PathBuf> {
        if !self.cx.config.chat.history {
            return None;
        }
        let dir = self.cx.global.dir().ok()?;
        Path::new(&dir).is_dir().then(|| dir.join("chat_history"))
    }
}

/// What has been said.
struct Talk {
    messages: Vec<ChatMessage>,
    /// The last answer, for `/explain`.
    last: Option<(Done, Vec<Frame>)>,
}

impl Talk {
    fn new(messages: Vec<ChatMessage>) -> Self {
        Self {
            messages,
            last: None,
        }
    }

    fn system(&self) -> Option<&str> {
        let mut system = self.messages.iter().filter(|m| m.role == Role::System);
        system.next().map(|message| message.content.as_str())
    }
}

fn count(messages: &[ChatMessage]) -> String {
    match messages.len() {
        1 => "1 message".to_owned(),
        n => format!("{n} messages"),
    }
}
