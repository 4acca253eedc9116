//! The model's turn: its grammar, and its text in parts while tokens are sampled.

use std::collections::VecDeque;
use std::fmt::Display;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use hearthnet_tokens::grammar::Allowed;
use hearthnet_tokens::stop::StopMatcher;
use hearthnet_tokens::tools::{
    CallPiece, Thought, ToolCall, Tools, TurnFormat, TurnPiece, TurnReader, turn_grammar,
};
use hearthnet_tokens::{Detokenizer, Grammar, Special, Tokenizer};
use serde_json::Value;

use crate::error::ChatError;

/// Fields of a request about the model's turn, beside its text.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(clippy::exhaustive_structs)] // Built by its callers.
pub struct TurnOptions {
    pub tools: Tools,
    /// Variables of the chat template, such as `enable_thinking`.
    pub variables: Vec<(String, Value)>,
    /// Maximum number of tokens of reasoning. Then its end is forced.
    pub thinking_tokens: Option<u32>,
}

/// New parts of the text of an answer.
#[derive(Default)]
pub(super) struct NewText {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<CallPiece>,
}

impl NewText {
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }
}

/// Text of an answer while its tokens are sampled.
pub(super) struct Turn {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// `None` if the answer is text only.
    reader: Option<TurnReader>,
    /// Tokens of reasoning so far, and their maximum number.
    thought: u32,
    most: Option<u32>,
    /// Tokens that end reasoning; empty once they were forced.
    end_of_thought: Vec<u32>,
    forced: VecDeque<u32>,
}

impl Turn {
    /// Turn behind a prompt, and its grammar. `format`: that of the model in a chat. `thinking`: the
    /// prompt ends within reasoning. `answer`: grammar of the text.
    ///
    /// # Errors
    /// [`ChatError::BadRequest`] for stop texts.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        format: Option<TurnFormat>,
        prompt: &[u32],
        thinking: bool,
        options: &TurnOptions,
        stop: Vec<String>,
        answer: Option<Grammar>,
        seed: Option<u64>,
    ) -> Result<(Self, Option<Grammar>), ChatError> {
        let stop = StopMatcher::new(stop).map_err(bad)?;
        let mut turn = Self {
            detokenizer: match format {
                Some(_) => Detokenizer::new(tokenizer),
                None => Detokenizer::continuing(tokenizer),
            },
            stop,
            reader: None,
            thought: 0,
            most: options.thinking_tokens,
            end_of_thought: Vec::new(),
            forced: VecDeque::new(),
        };
        let Some(format) = format else {
            return Ok((turn, answer));
        };
        let tools = &options.tools;
        let thought = thought_of(format, thinking, tokenizer, prompt);
        let grammar = turn_grammar(&format, thought, tools, answer);
        if thought == Thought::None && tools.list.is_empty() {
            return Ok((turn, grammar));
        }
        let marks = format.marks(!tools.callable().is_empty());
        turn.detokenizer = turn.detokenizer.showing(&marks);
        if let Some(end) = format.end_of_thought() {
            let end = tokenizer.encode(&end, Special::Parse);
            turn.end_of_thought = end.map_err(bad)?;
        }
        // Ids of calls differ from turn to turn, and do not depend on the hosts.
        let mut hasher = DefaultHasher::new();
        (prompt, seed).hash(&mut hasher);
        turn.reader = Some(TurnReader::new(format, thought, tools, hasher.finish()));
        Ok((turn, grammar))
    }

    /// Tokens that may come next: those of the grammar, or the next one that ends reasoning.
    pub(super) fn allowed(
        &mut self,
        tokenizer: &Tokenizer,
        by_grammar: Option<Allowed>,
    ) -> Option<Allowed> {
        let is_over = |most: u32| self.thought >= most && self.detokenizer.is_whole();
        if self.is_thinking() && self.most.is_some_and(is_over) && self.forced.is_empty() {
            self.forced = std::mem::take(&mut self.end_of_thought).into();
        }
        match self.forced.pop_front() {
            Some(id) => Some(Allowed::only(id, tokenizer.vocab_size())),
            None => by_grammar,
        }
    }

    fn is_thinking(&self) -> bool {
        self.reader.as_ref().is_some_and(TurnReader::is_thinking)
    }

    /// Adds a token, unless it ended the turn. Returns what it says, and whether a stop text ended
    /// the answer.
    pub(super) fn push(&mut self, id: u32) -> (NewText, bool) {
        self.thought += u32::from(self.is_thinking());
        let piece = self.detokenizer.push(id);
        let piece = match &mut self.reader {
            Some(reader) => reader.push(&piece),
            None => only_text(piece),
        };
        self.said(piece)
    }

    /// Passes text through the search for stop texts. What it holds back precedes all calls.
    fn said(&mut self, piece: TurnPiece) -> (NewText, bool) {
        let out = self.stop.push(&piece.text);
        let mut text = out.emit;
        if out.stopped {
            return (
                NewText {
                    text,
                    reasoning: piece.reasoning,
                    calls: Vec::new(),
                },
                true,
            );
        }
        if !piece.calls.is_empty() {
            text += &self.stop.finish();
        }
        let said = NewText {
            text,
            reasoning: piece.reasoning,
            calls: piece.calls,
        };
        (said, false)
    }

    /// Returns the rest of the answer, which was held back until its end. `ended`: true if the model
    /// ended its turn, false if a limit did.
    pub(super) fn finish(&mut self, ended: bool) -> NewText {
        if self.stop.matched().is_some() {
            return NewText::default();
        }
        // If a limit cuts a character, its bytes are dropped. If the model ended its turn there,
        // they become a replacement character.
        let broken = match ended {
            true => self.detokenizer.finish(),
            false => String::new(),
        };
        let mut piece = match &mut self.reader {
            Some(reader) => reader.push(&broken),
            None => only_text(broken),
        };
        if let Some(reader) = &mut self.reader {
            let rest = reader.finish();
            piece.text += &rest.text;
            piece.reasoning += &rest.reasoning;
        }
        let (mut said, stopped) = self.said(piece);
        if !stopped {
            said.text += &self.stop.finish();
        }
        said
    }

    pub(super) fn calls(&self) -> &[ToolCall] {
        // A stop text stands before the first call.
        let reader = self.reader.as_ref();
        let reader = reader.filter(|_| self.stop.matched().is_none());
        reader.map(TurnReader::calls).unwrap_or_default()
    }

    pub(super) fn reasoning(&self) -> &str {
        self.reader.as_ref().map_or("", TurnReader::reasoning)
    }

    /// Tokens of reasoning so far.
    pub(super) fn thought(&self) -> u32 {
        self.thought
    }
}

pub(super) fn bad(error: impl Display) -> ChatError {
    ChatError::BadRequest(error.to_string())
}

fn only_text(text: String) -> TurnPiece {
    TurnPiece {
        text,
        ..TurnPiece::default()
    }
}

/// Whether the model reasons in this turn.
fn thought_of(
    format: TurnFormat,
    thinking: bool,
    tokenizer: &Tokenizer,
    prompt: &[u32],
) -> Thought {
    // A prompt that ends behind reasoning has an empty one, which the template wrote.
    let end = format.end_of_thought().unwrap_or_default();
    let over = ["", "\n", "\n\n"].iter().any(|space| {
        let end = format!("{}{space}", end.trim_end());
        let end = tokenizer.encode(&end, Special::Parse);
        end.is_ok_and(|end| !end.is_empty() && prompt.ends_with(&end))
    });
    match (format.thinks(), thinking, over) {
        (false, ..) => Thought::None,
        (true, true, _) => Thought::Begun,
        (true, false, true) => Thought::None,
        (true, false, false) => Thought::May,
    }
}
