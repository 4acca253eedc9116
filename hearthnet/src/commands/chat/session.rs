//! A conversation: reads lines, prints answers, and runs commands.

use std::io::BufRead as _;
use std::path::Path;
use std::time::Instant;

use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::chat::{Done, Frame, Prompt};
use hearthnet_tokens::{ChatMessage, Role};

use super::Chat;
use super::command::{HELP, Line, read, set};
use super::editor::{CUT, Input, Lines, unreadable, was_cut};
use super::saved::{load, save};
use crate::answering::timing_report::explain;
use crate::cli::{Failure, Kind, counted, note};

impl Chat<'_> {
    /// A conversation on a terminal, until Ctrl-D.
    pub(super) fn converse(&mut self) -> Result<(), Failure> {
        self.interactive = true;
        let mut transcript = Transcript::new(self.system());
        let mut lines = Lines::new(&self.style, self.history_file());
        note(self.style.dim(&format!(
            "{} answers. /help lists commands, \"\"\" begins and ends a message of several lines, \
             Ctrl-C stops an answer, Ctrl-D leaves.",
            self.name()
        )));
        loop {
            let line = match lines.next()? {
                Input::Line(line) => line,
                Input::Interrupted => {
                    note(self.style.dim("Ctrl-D leaves"));
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
                Line::Message(message) => self.say(&mut transcript, message)?,
                command => {
                    if let Err(failure) = self.command(&mut transcript, command) {
                        self.complain(&failure);
                    }
                }
            }
            if self.interrupts.ending() {
                return Err(ChatError::Cancelled.into());
            }
        }
    }

    /// Runs a conversation for a program: each line of standard input is a message.
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

    /// Runs one turn. On an error the message is removed and the conversation continues. If the
    /// answer was stopped, its text so far is kept.
    fn say(&mut self, transcript: &mut Transcript, message: String) -> Result<(), Failure> {
        transcript.messages.push(ChatMessage::user(message));
        let prompt = Prompt::Messages(transcript.messages.clone());
        let turn = self.turn(prompt, Instant::now());
        match turn.end {
            Ok(done) => {
                transcript
                    .messages
                    .push(ChatMessage::assistant(done.text.clone()));
                transcript.last = Some((done, turn.moves));
            }
            Err(failure) if failure.kind == Kind::OutputClosed => return Err(failure),
            Err(failure) if failure.kind == Kind::Interrupted => {
                note(self.style.dim("[stopped]"));
                transcript.last = None;
                match turn.said.is_empty() {
                    true => drop(transcript.messages.pop()),
                    false => transcript.messages.push(ChatMessage::assistant(turn.said)),
                }
            }
            Err(failure) => {
                transcript.messages.pop();
                self.complain(&failure);
                if failure.kind == Kind::BadRequest && !transcript.messages.is_empty() {
                    note(self.style.dim(
                        "[the message was not sent; a shorter one may fit, and /reset clears the conversation]",
                    ));
                }
            }
        }
        Ok(())
    }

    fn command(&mut self, transcript: &mut Transcript, command: Line) -> Result<(), Failure> {
        let say = |text: &str| note(self.style.dim(text));
        match command {
            Line::Nothing | Line::Message(_) | Line::Leave => {}
            Line::Help => note(HELP),
            Line::Wrong(why) => say(&format!("{why}; /help lists the commands")),
            Line::Reset => {
                transcript
                    .messages
                    .retain(|message| message.role == Role::System);
                transcript.last = None;
                say("conversation cleared");
            }
            Line::System(None) => match transcript.system() {
                Some(text) => note(text),
                None => say("there is no system message"),
            },
            Line::System(Some(text)) => {
                transcript
                    .messages
                    .retain(|message| message.role != Role::System);
                if text == "off" {
                    say("there is no system message");
                } else {
                    transcript.messages.insert(0, ChatMessage::system(text));
                    say("set");
                }
            }
            Line::Save(file) => {
                save(&file, self.name(), &transcript.messages)?;
                let written = counted(transcript.messages.len(), "message");
                say(&format!("{written} written to {}", file.display()));
            }
            Line::Load(file) => {
                *transcript = Transcript::new(load(&file)?);
                say(&format!(
                    "{} read",
                    counted(transcript.messages.len(), "message")
                ));
            }
            Line::Model(None) => say(self.name()),
            Line::Model(Some(name)) => {
                self.change_model(&name)?;
                note(self.style.dim(&format!("{} answers", self.name())));
            }
            Line::Seed(None) => match self.sampling.seed {
                Some(seed) => say(&format!("seed {seed}")),
                None => say("each answer uses a random seed; /explain shows the last one"),
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
            Line::Explain(None) => match &transcript.last {
                Some((done, moves)) => note(explain(done, moves)),
                None => {
                    say("there is no complete answer to explain: a stopped answer keeps no times");
                }
            },
        }
        Ok(())
    }

    /// Lists the sampling settings; unset ones are the model's own.
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
            [] => "none".to_owned(),
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
        note(self.style.red(&format!("error: {failure}")));
        if let Some(hint) = failure.hint_text() {
            note(self.style.dim(&format!("hint: {hint}")));
        }
    }

    /// File of the input history; `None` unless the configuration enables it.
    fn history_file(&self) -> Option<std::path::PathBuf> {
        if !self.cx.config.chat.history {
            return None;
        }
        let dir = self.cx.global.dir().ok()?;
        Path::new(&dir).is_dir().then(|| dir.join("chat_history"))
    }
}

struct Transcript {
    messages: Vec<ChatMessage>,
    /// The last answer, for `/explain`.
    last: Option<(Done, Vec<Frame>)>,
}

impl Transcript {
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
