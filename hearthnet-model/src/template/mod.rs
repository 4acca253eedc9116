//! Chat templates: the model file's own Jinja template turns messages into a prompt.
//!
//! Rendered as transformers and llama.cpp do (`trim_blocks` and `lstrip_blocks` on, loop
//! controls, `{% generation %}`, Python's string and dictionary methods, `raise_exception`, Python's
//! `tojson`: equal on llama.cpp's whole collection of templates, see `tests/templates.rs`), with
//! `messages`, `add_generation_prompt`, `bos_token` and `eos_token` defined; `tools` and
//! `documents` are not. `strftime_now` exists only when a clock was given: without one, templates
//! that print a date fall back to their own, or fail.
//!
//! # A message cannot end its own turn
//!
//! A person may type `<|im_end|>`. In the rendered text that is indistinguishable from the
//! template's own, and llama.cpp and transformers take it for the control token. Tokenising
//! message and template apart would be no answer either: token borders go across the seam, so
//! honest prompts would get other ids than the model was trained on, and templates trim, split
//! and compare messages as they please.
//!
//! So [`ChatTemplate::prompt_ids`] renders twice: once as everybody does, and once *shielded*,
//! with every message character that occurs in the name of any control token replaced by a
//! private stand-in. A control token found in the shielded text can only be the template's. From
//! that text the control tokens are cut out, then the stand-ins turn back into what they stand
//! for, and everything between is encoded as plain text. For messages without such names the ids
//! are exactly those of the usual way.
//!
//! Some templates look into messages (to drop a `</think>` part, say) and render the shielded
//! ones differently. Then the usual rendering is taken, if no message contains the name of a
//! control token and both renderings have the same control tokens in the same order; otherwise
//! the shielded one.
//!
//! Two limits: a control token that is nothing but white space is not shielded (templates trim),
//! and user-defined tokens are not control tokens.
//!
//! # The template is hostile
//!
//! Its size, steps, recursion and output are bounded, and so are the bytes that its steps handle
//! (see `meter.rs`). It is read and run on a thread with a stack of its own, deep enough for what
//! those bounds allow. Blocks, imports, `autoescape` and the filters `batch`, `slice`, `sum`,
//! `pprint`, `chain` and `zip` are not there: no chat template has a use for them.

mod budget;
mod guarded;
mod json;
mod meter;
mod shield;
mod time;

pub use time::TemplateTime;

use crate::gguf::{Gguf, MetadataError};
use crate::tokenizer::{EncodeError, MAX_TEXT_BYTES, Special, Tokenizer};
use hearthnet_text::tame;
use minijinja::{Environment, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};
use shield::Shield;
use std::{fmt, io};

/// The longest template that is accepted, in bytes. Real ones end at some 20 KiB.
pub const MAX_TEMPLATE_BYTES: usize = 128 << 10;
/// Steps that one rendering may take. A message takes some fifty in the usual templates.
const MAX_STEPS: u64 = 1_000_000;
/// Stack for reading and for rendering a template: minijinja recurses over long chains of
/// operators, and Rust drops a nested value recursively. What [`MAX_TEMPLATE_BYTES`] and
/// [`MAX_STEPS`] allow takes less than half. Only what is touched is ever backed by memory.
const STACK_BYTES: usize = 256 << 20;
const NAME: &str = "chat_template";
const KEY: &str = "tokenizer.chat_template";

/// Who a message is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool.
    Tool,
}

impl Role {
    /// The name that templates compare with.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a conversation.
///
/// The role is a closed set because templates build control tokens from it (`<|{{ role }}|>`).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(clippy::exhaustive_structs)] // Built by hand everywhere.
pub struct ChatMessage {
    /// Who it is from.
    pub role: Role,
    /// Its text: never trusted, whoever it is from.
    pub content: String,
}

/// Leaves the text out, so that no log can show it.
impl fmt::Debug for ChatMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ChatMessage({}, {} bytes)",
            self.role.as_str(),
            self.content.len()
        )
    }
}

impl ChatMessage {
    /// A message.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
        }
    }

    /// Instructions for the whole conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    /// A message from the person.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// A message from the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }
}

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A metadata value has another type than expected.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// The file has no chat template, or only named ones: a base model, or an old conversion.
    #[error(
        "the model file has no default chat template (`tokenizer.chat_template`); use a model made for chat, or ask for a completion"
    )]
    Missing,

    /// The template, of so many bytes, is larger than any real one.
    #[error(
        "the model file's chat template is {0} bytes long; at most {MAX_TEMPLATE_BYTES} are accepted"
    )]
    TooLong(usize),

    /// The template is not valid Jinja, or uses what minijinja does not have.
    #[error("the model file's chat template cannot be read: {0}")]
    Syntax(String),

    /// The template itself refused the messages with `raise_exception`.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),

    /// The template used up the steps that a rendering may take.
    #[error(
        "the model file's chat template did not come to an end after {MAX_STEPS} steps; use another model file"
    )]
    TooManySteps,

    /// The template used up the bytes that all steps of a rendering together may handle.
    #[error(
        "the model file's chat template handles more than {} bytes; shorten the conversation, or use another model file",
        budget::BUDGET
    )]
    TooMuchText,

    /// The prompt is longer than any context could hold.
    #[error("the prompt is longer than {MAX_TEXT_BYTES} bytes; shorten the conversation")]
    PromptTooLong,

    /// The template failed while it ran.
    #[error(
        "the model file's chat template failed: {0}; if it always does, use another model file"
    )]
    Failed(String),

    /// The names of the control tokens have more different characters than there are stand-ins.
    #[error(
        "the model file's control tokens are made of {0} different characters, too many to shield messages from"
    )]
    CannotShield(usize),

    /// The rendered prompt could not be turned into tokens.
    #[error(transparent)]
    Encode(#[from] EncodeError),

    /// The system gave no thread to render on.
    #[error("cannot start a thread for the chat template: {0}")]
    Thread(#[source] io::Error),
}

/// A chat template, read and ready.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template in the metadata of a model file.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] when there is none; otherwise as [`ChatTemplate::new`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TemplateError> {
        // One without anything in it would leave every message out.
        let source = gguf.str(KEY)?.filter(|source| !source.trim().is_empty());
        let source = source.ok_or(TemplateError::Missing)?;
        let token = |key| -> Result<&str, MetadataError> {
            let id = gguf.u32(key)?.and_then(|id| usize::try_from(id).ok());
            let tokens = gguf.array("tokenizer.ggml.tokens")?;
            let text = tokens
                .zip(id)
                .and_then(|(tokens, id)| tokens.strings()?.nth(id));
            Ok(text.unwrap_or_default())
        };
        let bos = token("tokenizer.ggml.bos_token_id")?;
        let eos = token("tokenizer.ggml.eos_token_id")?;
        Self::new(source, bos, eos)
    }

    /// A template from its source and the texts of the beginning-of-sequence and end-of-sequence
    /// tokens (empty for none).
    ///
    /// # Errors
    /// [`TemplateError::TooLong`] and [`TemplateError::Syntax`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLong(source.len()));
        }
        let mut environment = Environment::new();
        meter::install(&mut environment);
        environment.set_fuel(Some(MAX_STEPS));
        environment.add_filter("tojson", json::to_json);
        environment.add_function("raise_exception", raise_exception);
        let source = on_deep_stack(|| meter::prepare(source))?
            .map_err(|e| TemplateError::Syntax(shown(&e.to_string())))?;
        Ok(Self {
            environment,
            source,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        })
    }

    /// Lets the template ask for the time: `strftime_now` formats what `clock` says then.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Fn() -> TemplateTime + Send + Sync + 'static) -> Self {
        let format = move |format: &str| {
            clock()
                .format(format)
                .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
        };
        self.environment.add_function("strftime_now", format);
        self
    }

    /// The prompt as text, with `add_generation_prompt` up to where the model's answer begins.
    ///
    /// For showing and comparing. Control tokens that messages name look like the template's own
    /// here: encode with [`prompt_ids`](Self::prompt_ids).
    ///
    /// # Errors
    /// [`TemplateError`] when the template refuses the messages, fails, or exceeds its bounds.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.render_with(messages, &str::to_owned, add_generation_prompt)
    }

    /// The prompt as tokens, with `add_generation_prompt` up to where the model's answer begins.
    ///
    /// Begins with the beginning-of-sequence token exactly once if the file asks for one; the
    /// end-of-sequence token is never added. No message can add a control token: see the
    /// [module's documentation](self).
    ///
    /// # Errors
    /// [`TemplateError`] when the template refuses the messages, fails, or exceeds its bounds.
    pub fn prompt_ids(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, TemplateError> {
        let usual = self.render(messages, add_generation_prompt)?;
        let alphabet = tokenizer.structure_alphabet();
        let shield = Shield::new(alphabet, &usual, messages)
            .ok_or(TemplateError::CannotShield(alphabet.len()))?;
        let shielded =
            self.render_with(messages, &|text| shield.apply(text), add_generation_prompt)?;

        let looks_into_messages = shield.undo(&shielded) != usual;
        let harmless = || {
            !messages
                .iter()
                .any(|message| tokenizer.has_structure(&message.content))
                && tokenizer.structure_in(&usual) == tokenizer.structure_in(&shielded)
        };
        let ids = if looks_into_messages && harmless() {
            tokenizer.encode(&usual, Special::Parse)?
        } else {
            tokenizer.encode_through(&shielded, &|text| shield.undo(text))?
        };
        Ok(match tokenizer.bos() {
            Some(bos) if tokenizer.adds_bos() && ids.first() != Some(&bos) => {
                std::iter::once(bos).chain(ids).collect()
            }
            _ => ids,
        })
    }

    /// Tokens, quoted, that the template puts into prompts as marks and that are encoded as plain
    /// text, because the file gives them the wrong type: prompts are then not what the model was
    /// trained on. At most five are listed, which is enough to see what is wrong.
    pub fn marks_encoded_as_text(&self, tokenizer: &Tokenizer) -> Vec<String> {
        let (system, user) = (ChatMessage::system("a"), ChatMessage::user("a"));
        // Some templates refuse instructions, or expect a question first.
        let conversations = [
            vec![system, user.clone()],
            vec![user.clone(), ChatMessage::assistant("a"), user],
        ];
        let prompts = conversations.iter();
        let prompts: String = prompts
            .filter_map(|messages| self.render(messages, true).ok())
            .collect();
        tokenizer.unreachable_marks_in(&prompts, 5)
    }

    fn render_with(
        &self,
        messages: &[ChatMessage],
        transform: &dyn Fn(&str) -> String,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                let (role, content) = (message.role.as_str(), transform(&message.content));
                context! { role, content }
            })
            .collect();
        self.render_variables(context! {
            messages,
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        })
    }

    /// What the template makes of any `variables`, a dictionary: `messages` with tool calls,
    /// `tools`, `enable_thinking` and whatever else it asks for.
    ///
    /// As [`render`](Self::render), this is for showing and comparing: nothing is shielded.
    ///
    /// # Errors
    /// [`TemplateError`] when the template refuses the variables, fails, or exceeds its bounds.
    pub fn render_variables(&self, variables: Value) -> Result<String, TemplateError> {
        on_deep_stack(|| self.run(variables))?
    }

    fn run(&self, variables: Value) -> Result<String, TemplateError> {
        let mut text = String::new();
        let rendered = meter::render(&self.environment, &self.source, variables, &mut text);
        if text.len() > MAX_TEXT_BYTES {
            return Err(TemplateError::PromptTooLong);
        }
        rendered.map_err(|error| explain(&error))?;
        Ok(text)
    }
}

/// Runs `task` on a thread with [`STACK_BYTES`] of stack, and waits for it.
fn on_deep_stack<T: Send>(task: impl FnOnce() -> T + Send) -> Result<T, TemplateError> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name(NAME.to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, task)
            .map_err(TemplateError::Thread)?
            .join()
            .map_err(|_| TemplateError::Failed("minijinja panicked".to_owned()))
    })
}

/// What a template says when it refuses the messages.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    let raised = Raised(message);
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(raised))
}

/// The cause of a failed rendering: an exception may come through calls and includes.
fn explain(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(raised) = error.downcast_ref::<Raised>() {
            return TemplateError::Refused(shown(&raised.0));
        }
        if error.is::<budget::Spent>() {
            return TemplateError::TooMuchText;
        }
        let kind = error
            .downcast_ref::<minijinja::Error>()
            .map(minijinja::Error::kind);
        if kind == Some(ErrorKind::OutOfFuel) {
            return TemplateError::TooManySteps;
        }
        cause = error.source();
    }
    TemplateError::Failed(shown(&error.to_string()))
}

/// What a file says, fit to be shown, and short.
fn shown(text: &str) -> String {
    tame(text).chars().take(500).collect()
}
