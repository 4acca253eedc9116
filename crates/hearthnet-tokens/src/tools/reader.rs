//! A turn's text, separated into reasoning, text and calls while it is written.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::arguments::{ArgumentReader, Read};
use super::format::TurnFormat;
use super::held::{Begins, begins, expect, is_space, skip_space, take_before};
use super::tool::{Tool, ToolCall, Tools, call_id};
use super::turn_grammar::Thought;

/// New part of a call.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Read by every interface.
pub struct CallPiece {
    /// Number of the call in its turn, from 0.
    pub index: usize,
    /// Id and name, in the first piece of a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Next part of the arguments' JSON.
    #[serde(default)]
    pub arguments: String,
}

/// Omits the arguments, so that they cannot enter a log.
impl fmt::Debug for CallPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallPiece")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl CallPiece {
    /// Adds the piece to the calls so far.
    pub fn add_to(&self, calls: &mut Vec<ToolCall>) {
        if let (Some(id), Some(name)) = (&self.id, &self.name) {
            calls.push(ToolCall {
                id: id.clone(),
                name: name.clone(),
                arguments: String::new(),
            });
        }
        if let Some(call) = calls.get_mut(self.index) {
            call.arguments.push_str(&self.arguments);
        }
    }
}

/// New part of a turn: first reasoning, then text, then calls.
#[derive(Clone, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_structs)] // Built by its callers.
pub struct TurnPiece {
    pub reasoning: String,
    pub text: String,
    pub calls: Vec<CallPiece>,
}

/// Omits the text, so that it cannot enter a log.
impl fmt::Debug for TurnPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnPiece").finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first text: reasoning may begin.
    Start,
    Thought,
    /// Behind reasoning: white space is dropped.
    BehindThought,
    /// At the beginning of the text.
    First,
    Text,
    /// Within the texts before a name; the next one has this number. `true` for the first call.
    Open(bool, usize),
    /// Before the arguments.
    Name,
    Arguments,
    /// Within the texts behind the arguments.
    Close(usize),
    /// Behind a call.
    Called,
    /// Behind the last call.
    Over,
}

/// Separates the text of one turn.
///
/// The pieces together do not depend on how the text is cut. Text that may become a mark is held
/// back until that is known.
#[derive(Clone)]
pub struct TurnReader {
    format: TurnFormat,
    tools: Vec<Tool>,
    /// Number that the ids of calls are made of.
    turn: u64,
    state: State,
    held: String,
    calls: Vec<ToolCall>,
    reasoning: String,
    /// Arguments of the last call.
    arguments: Option<ArgumentReader>,
}

/// Omits the text, so that it cannot enter a log.
impl fmt::Debug for TurnReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnReader").finish_non_exhaustive()
    }
}

impl TurnReader {
    /// Reader of a turn. `turn` identifies it; equal turns have equal ids of calls.
    pub fn new(format: TurnFormat, thought: Thought, tools: &Tools, turn: u64) -> Self {
        Self {
            state: match (thought, format.thought) {
                (Thought::Begun, Some(_)) => State::Thought,
                (Thought::May, Some(_)) => State::Start,
                _ => State::First,
            },
            format,
            tools: tools.callable().to_vec(),
            turn,
            held: String::new(),
            calls: Vec::new(),
            reasoning: String::new(),
            arguments: None,
        }
    }

    /// True while the text is reasoning.
    pub fn is_thinking(&self) -> bool {
        self.state == State::Thought
    }

    /// Calls of the turn so far. The last one may be incomplete.
    pub fn calls(&self) -> &[ToolCall] {
        &self.calls
    }

    /// Reasoning of the turn so far.
    pub fn reasoning(&self) -> &str {
        &self.reasoning
    }

    /// Adds a piece of the turn's text.
    pub fn push(&mut self, piece: &str) -> TurnPiece {
        self.held.push_str(piece);
        let mut out = TurnPiece::default();
        while self.step(&mut out) {}
        self.reasoning.push_str(&out.reasoning);
        out
    }

    /// Text that was held back, at the end of the turn.
    pub fn finish(&mut self) -> TurnPiece {
        let mut out = TurnPiece::default();
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Thought => out.reasoning = held,
            // An incomplete header is no text.
            State::Start | State::First if self.format.header.is_some() => {}
            State::Start | State::First | State::Text => out.text = held,
            // White space, or an incomplete mark.
            _ => {}
        }
        self.reasoning.push_str(&out.reasoning);
        out
    }

    /// Processes some of the held text. Returns false if more is needed.
    fn step(&mut self, out: &mut TurnPiece) -> bool {
        match self.state {
            State::Start => self.start(),
            State::Thought => self.think(out),
            State::BehindThought => {
                skip_space(&mut self.held);
                self.go(State::First, !self.held.is_empty())
            }
            State::First => self.first(),
            State::Text => self.text(out),
            State::Open(first, at) => self.open(first, at),
            State::Name => self.name(out),
            State::Arguments => self.arguments(out),
            State::Close(at) => match self.format.calls.close.get(at) {
                Some(part) => self.expect(part, State::Close(at + 1)),
                None => self.go(State::Called, true),
            },
            State::Called => self.called(),
            State::Over => {
                self.held.clear();
                false
            }
        }
    }

    /// Enters a state if `now`.
    fn go(&mut self, state: State, now: bool) -> bool {
        if now {
            self.state = state;
        }
        now
    }

    /// Expects a text behind white space, and enters a state behind it.
    fn expect(&mut self, part: &str, then: State) -> bool {
        match expect(&mut self.held, part) {
            Begins::With => self.go(then, true),
            Begins::May => false,
            // Only a turn without its grammar.
            Begins::No => self.go(State::Over, true),
        }
    }

    fn start(&mut self) -> bool {
        let Some((begin, _)) = self.format.thought else {
            return self.go(State::First, true);
        };
        match expect(&mut self.held, begin) {
            Begins::With => self.go(State::Thought, true),
            Begins::May => false,
            Begins::No => self.go(State::First, true),
        }
    }

    fn think(&mut self, out: &mut TurnPiece) -> bool {
        let Some((_, end)) = self.format.thought else {
            return self.go(State::First, true);
        };
        if self.reasoning.is_empty() && out.reasoning.is_empty() {
            skip_space(&mut self.held);
        }
        let ended = take_before(&mut self.held, end, &mut out.reasoning);
        self.go(State::BehindThought, ended)
    }

    /// At the beginning of the text, where the calls of some families begin.
    fn first(&mut self) -> bool {
        let calls = self.format.calls;
        let (has_calls, header) = (!self.tools.is_empty(), self.format.header);
        if header.is_none() && !(has_calls && calls.first_only) {
            return self.go(State::Text, true);
        }
        let mut text = self.held.trim_start_matches(is_space);
        if let Some(before) = calls.marks.first() {
            match begins(text, before) {
                Begins::With => text = text.get(before.len()..).unwrap_or_default(),
                Begins::May => return false,
                Begins::No => {}
            }
        }
        if let Some(header) = header {
            match begins(text, header) {
                Begins::With => {
                    let to = self.held.len() - text.len() + header.len();
                    self.held.drain(..to);
                    return self.go(State::Text, true);
                }
                Begins::May => return false,
                Begins::No if has_calls => {}
                Begins::No => return self.go(State::Text, true),
            }
        }
        match begins(text, calls.mark) {
            Begins::With => {
                let to = self.held.len() - text.len() + calls.mark.len();
                self.held.drain(..to);
                self.go(State::Open(true, 0), true)
            }
            Begins::May => false,
            Begins::No => self.go(State::Text, true),
        }
    }

    fn text(&mut self, out: &mut TurnPiece) -> bool {
        let calls = self.format.calls;
        if self.tools.is_empty() || calls.first_only {
            out.text.push_str(&std::mem::take(&mut self.held));
            return false;
        }
        let called = take_before(&mut self.held, calls.mark, &mut out.text);
        self.go(State::Open(true, 0), called)
    }

    fn open(&mut self, first: bool, at: usize) -> bool {
        let calls = self.format.calls;
        let parts = if first { calls.open } else { calls.next };
        match parts.get(at) {
            Some(part) => self.expect(part, State::Open(first, at + 1)),
            None => self.go(State::Name, true),
        }
    }

    fn name(&mut self, out: &mut TurnPiece) -> bool {
        let mut may = false;
        let mut found: Option<(&Tool, usize)> = None;
        for tool in &self.tools {
            let head = format!("{}{}", tool.name, self.format.calls.behind_name);
            match begins(&self.held, &head) {
                // The longest name, where one is the beginning of another.
                Begins::With if found.is_none_or(|(_, bytes)| bytes < head.len()) => {
                    found = Some((tool, head.len()));
                }
                Begins::With => {}
                Begins::May => may = true,
                Begins::No => {}
            }
        }
        let Some((tool, bytes)) = found.filter(|_| !may) else {
            return self.go(State::Over, !may);
        };
        let name = tool.name.clone();
        self.arguments = Some(self.format.calls.arguments.reader(tool));
        self.held.drain(..bytes);
        let index = self.calls.len();
        let id = call_id(self.turn, index);
        out.calls.push(CallPiece {
            index,
            id: Some(id.clone()),
            name: Some(name.clone()),
            arguments: String::new(),
        });
        self.calls.push(ToolCall {
            id,
            name,
            arguments: String::new(),
        });
        self.go(State::Arguments, true)
    }

    fn arguments(&mut self, out: &mut TurnPiece) -> bool {
        let Some(reader) = &mut self.arguments else {
            return self.go(State::Over, true);
        };
        let mut new = String::new();
        let read = reader.read(&mut self.held, &mut new);
        if let Some(call) = self.calls.last_mut()
            && !new.is_empty()
        {
            call.arguments.push_str(&new);
            let index = self.calls.len() - 1;
            match out.calls.last_mut() {
                Some(piece) if piece.index == index => piece.arguments.push_str(&new),
                _ => out.calls.push(CallPiece {
                    index,
                    id: None,
                    name: None,
                    arguments: new,
                }),
            }
        }
        match read {
            Read::Done => self.go(State::Close(0), true),
            Read::Broken => self.go(State::Over, true),
            Read::On | Read::More => false,
        }
    }

    /// Behind a call: another one, or the end.
    fn called(&mut self) -> bool {
        let calls = self.format.calls;
        let Some(next) = calls.next.first() else {
            return self.go(State::Over, true);
        };
        let text = self.held.trim_start_matches(is_space);
        match begins(text, next.trim_start_matches(is_space)) {
            Begins::With => self.go(State::Open(false, 0), true),
            Begins::May => false,
            Begins::No => self.go(State::Over, true),
        }
    }
}
