//! Chat templates: the model file's Jinja template turns messages into a prompt.
//!
//! Rendering follows transformers and llama.cpp: `trim_blocks` and `lstrip_blocks` on, loop
//! controls, `{% generation %}`, Python's string and dictionary methods, `raise_exception`,
//! Python's `tojson`. The output is equal on llama.cpp's whole collection of templates
//! (`tests/templates.rs`). `messages`, `add_generation_prompt`, `bos_token` and `eos_token` are
//! defined, `tools` if there are any; `documents` is not. `strftime_now` exists only if a clock was given.
//! Without it, templates that print a date use their default, or fail.
//!
//! # A message cannot end its own turn
//!
//! A user may type `<|im_end|>`. In the rendered text it is indistinguishable from the template's
//! own, and llama.cpp and transformers take it for the control token. Tokenising message and
//! template separately is no solution. Tokens cross the border, so honest prompts would get other
//! ids than in training; and templates trim, split and compare messages at will.
//!
//! So [`ChatTemplate::prompt_ids`] renders twice: once as usual, and once *shielded*. In shielded
//! messages, every character that occurs in the name of a control token is replaced by a private
//! stand-in. Any control token in the shielded text comes from the template. It is split off, the
//! stand-ins are replaced by the original characters, and the text in between is encoded as plain
//! text. For messages without such names the ids equal the usual ones.
//!
//! Some templates inspect messages (for example, to drop a `</think>` part) and render the shielded
//! ones differently. Then the usual rendering is used if no message contains the name of a control
//! token and both renderings have the same control tokens in the same order; otherwise the shielded
//! one.
//!
//! Two limits: a control token of only white space is not shielded (templates trim), and
//! user-defined tokens are not control tokens.
//!
//! # The template is hostile
//!
//! Size, steps, recursion and output of a template are bounded, and so are the bytes that its steps
//! handle (see `meter.rs`). It is parsed and rendered on a thread with a stack deep enough for
//! these bounds. Blocks, imports, `autoescape` and the filters `batch`, `slice`, `sum`, `pprint`,
//! `chain` and `zip` are disabled: no chat template needs them.

mod budget;
mod guarded;
mod json;
mod message;
mod meter;
mod shield;
mod time;
mod tool_text;

use hearthnet_files::gguf::{Gguf, MetadataError};
pub use message::{Chat, ChatMessage, Role};
pub use time::TemplateTime;

use crate::tokenizer::{EncodeError, MAX_TEXT_BYTES, Special, Tokenizer};
use crate::tools::TurnFormat;
use hearthnet_text::sanitize;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use shield::Shield;
use std::collections::BTreeMap;
use std::io;

/// Longest accepted template, in bytes. Real ones have at most about 20 KiB.
pub const MAX_TEMPLATE_BYTES: usize = 128 << 10;
/// Step limit of a rendering. A message takes about fifty in the usual templates.
const MAX_STEPS: u64 = 1_000_000;
/// Stack for parsing and rendering: minijinja recurses over long chains of operators, and Rust
/// drops a nested value recursively. [`MAX_TEMPLATE_BYTES`] and [`MAX_STEPS`] limit the use to less
/// than half. Only touched pages take memory.
const STACK_BYTES: usize = 256 << 20;
const KEY: &str = "tokenizer.chat_template";

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A metadata value has the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),

    /// The file has no chat template, or only named ones: a base model, or an old conversion.
    #[error(
        "the model file has no default chat template (`tokenizer.chat_template`); use a model made for chat, or ask for a completion"
    )]
    Missing,

    /// The template, of this many bytes, is larger than any real one.
    #[error(
        "the model file's chat template is {0} bytes long; at most {MAX_TEMPLATE_BYTES} are accepted"
    )]
    TooLong(usize),

    /// The template is not valid Jinja, or uses a feature that minijinja lacks.
    #[error("the model file's chat template cannot be read: {0}")]
    Syntax(String),

    /// The template refused the messages with `raise_exception`.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),

    /// The template exceeded the step limit.
    #[error(
        "the model file's chat template did not finish within {MAX_STEPS} steps; use another model file"
    )]
    TooManySteps,

    /// The template exceeded the budget of bytes.
    #[error(
        "the model file's chat template handles more than {} bytes; shorten the conversation, or use another model file",
        budget::BUDGET
    )]
    TooMuchText,

    /// The prompt is longer than any context.
    #[error("the prompt is longer than {MAX_TEXT_BYTES} bytes; shorten the conversation")]
    PromptTooLong,

    /// The template failed at run time.
    #[error(
        "the model file's chat template failed: {0}; if it always does, use another model file"
    )]
    Failed(String),

    /// The names of the control tokens have more distinct characters than there are stand-ins.
    #[error(
        "the model file's control tokens are made of {0} different characters, too many to shield messages from"
    )]
    CannotShield(usize),

    #[error(transparent)]
    Encode(#[from] EncodeError),

    /// The system provided no thread for rendering.
    #[error("cannot start a thread for the chat template: {0}")]
    Thread(#[source] io::Error),
}

/// Parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    format: TurnFormat,
}

/// Prompt as tokens.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RenderedPrompt {
    pub ids: Vec<u32>,
    /// True if the model's turn begins within reasoning.
    pub thinking: bool,
}

impl ChatTemplate {
    /// Reads the template in the metadata of a model file.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] if there is none; otherwise as [`ChatTemplate::new`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TemplateError> {
        // An empty template would drop all messages.
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

    /// Parses a template. `bos` and `eos` are the texts of the beginning-of-sequence and
    /// end-of-sequence tokens, empty if there are none.
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
        let format = TurnFormat::of(source);
        let source = on_deep_stack(|| meter::prepare(source))?
            .map_err(|e| TemplateError::Syntax(shown(&e.to_string())))?;
        Ok(Self {
            environment,
            source,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            format,
        })
    }

    /// Defines `strftime_now`, with the time that `clock` returns when it is called.
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

    /// Renders the prompt as text; `add_generation_prompt` extends it to the start of the model's
    /// answer.
    ///
    /// Only for display and comparison. Control tokens in messages are indistinguishable from the
    /// template's own: use [`prompt_ids`](Self::prompt_ids) for encoding.
    ///
    /// # Errors
    /// [`TemplateError`] if the template refuses the messages, fails, or exceeds its bounds.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let chat = Chat {
            messages,
            ..Chat::default()
        };
        self.render_chat(&chat, true, &str::to_owned, add_generation_prompt)
    }

    /// Renders the prompt as tokens; `add_generation_prompt` extends it to the start of the model's
    /// answer.
    ///
    /// Begins with the beginning-of-sequence token exactly once if the file requires one; the
    /// end-of-sequence token is never added. No message can add a control token: see the [module's
    /// documentation](self).
    ///
    /// # Errors
    /// [`TemplateError`] if the template refuses the messages, fails, or exceeds its bounds.
    pub fn prompt_ids(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, TemplateError> {
        let chat = Chat {
            messages,
            ..Chat::default()
        };
        let prompt = self.prompt(tokenizer, &chat, add_generation_prompt)?;
        Ok(prompt.ids)
    }

    /// As [`Self::prompt_ids`], with tools and variables.
    ///
    /// # Errors
    /// [`TemplateError`] if the template refuses the chat, fails, or exceeds its bounds.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        chat: &Chat<'_>,
        add_generation_prompt: bool,
    ) -> Result<RenderedPrompt, TemplateError> {
        let format = &self.format;
        if (format.describes && format.writes) || !chat.has_tools() {
            return self.prompt_of(tokenizer, chat, add_generation_prompt);
        }
        let render = |messages: &[ChatMessage]| {
            let chat = Chat {
                messages,
                tools: if format.describes { chat.tools } else { &[] },
                variables: chat.variables,
            };
            self.prompt_of(tokenizer, &chat, add_generation_prompt)
        };
        let messages = tool_text::described(chat, format);
        match render(&messages) {
            // Some templates refuse instructions.
            Err(TemplateError::Refused(_)) => render(&tool_text::without_system(messages)),
            result => result,
        }
    }

    fn prompt_of(
        &self,
        tokenizer: &Tokenizer,
        chat: &Chat<'_>,
        add_generation_prompt: bool,
    ) -> Result<RenderedPrompt, TemplateError> {
        // Most templates take the arguments of calls as objects, some as texts.
        match self.prompt_with(tokenizer, chat, true, add_generation_prompt) {
            Err(TemplateError::Failed(_)) if chat.has_calls() => {
                self.prompt_with(tokenizer, chat, false, add_generation_prompt)
            }
            result => result,
        }
    }

    fn prompt_with(
        &self,
        tokenizer: &Tokenizer,
        chat: &Chat<'_>,
        objects: bool,
        add_generation_prompt: bool,
    ) -> Result<RenderedPrompt, TemplateError> {
        let render = |transform: &dyn Fn(&str) -> String| {
            self.render_chat(chat, objects, transform, add_generation_prompt)
        };
        let usual = render(&str::to_owned)?;
        let alphabet = tokenizer.structure_alphabet();
        let contents = chat.texts();
        let texts = std::iter::once(&usual).chain(&contents);
        let shield = Shield::new(alphabet, texts.map(String::as_str))
            .ok_or(TemplateError::CannotShield(alphabet.len()))?;
        let shielded = render(&|text: &str| shield.apply(text))?;

        let looks_into_messages = shield.undo(&shielded) != usual;
        let harmless = || {
            !contents.iter().any(|text| tokenizer.has_structure(text))
                && tokenizer.structure_in(&usual) == tokenizer.structure_in(&shielded)
        };
        let ids = if looks_into_messages && harmless() {
            tokenizer.encode(&usual, Special::Parse)?
        } else {
            tokenizer.encode_through(&shielded, &|text| shield.undo(text))?
        };
        let ids = match tokenizer.bos() {
            Some(bos) if tokenizer.adds_bos() && ids.first() != Some(&bos) => {
                std::iter::once(bos).chain(ids).collect()
            }
            _ => ids,
        };
        Ok(RenderedPrompt {
            ids,
            // A message cannot begin reasoning: its marks are shielded, or were harmless.
            thinking: add_generation_prompt && self.format.is_thinking(&usual),
        })
    }

    /// Format of tool calls and reasoning in a turn of the model.
    pub fn turn_format(&self) -> TurnFormat {
        self.format
    }

    /// Up to five tokens, quoted, that the template uses as marks but that are encoded as plain
    /// text, because the file gives them the wrong type. Prompts then differ from the model's
    /// training.
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

    fn render_chat(
        &self,
        chat: &Chat<'_>,
        objects: bool,
        transform: &dyn Fn(&str) -> String,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let mut variables = BTreeMap::new();
        for (name, value) in chat.variables {
            variables.insert(name.as_str(), Value::from(Serde(value)));
        }
        if !chat.tools.is_empty() {
            let tools = chat
                .tools
                .iter()
                .map(|tool| tool_text::tool(tool, transform));
            variables.insert("tools", tools.collect());
        }
        let messages = chat.messages.iter();
        let messages =
            messages.map(|message| tool_text::message(message, chat, objects, transform));
        variables.insert("messages", messages.collect());
        variables.insert("add_generation_prompt", add_generation_prompt.into());
        variables.insert("bos_token", self.bos.as_str().into());
        variables.insert("eos_token", self.eos.as_str().into());
        self.render_variables(Value::from_pairs(variables))
    }

    /// Renders any `variables`, a dictionary: `messages` with tool calls, `tools`,
    /// `enable_thinking` and so on.
    ///
    /// Like [`render`](Self::render), only for display and comparison: messages are not shielded.
    ///
    /// # Errors
    /// [`TemplateError`] if the template refuses the variables, fails, or exceeds its bounds.
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
            .name(meter::NAME.to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, task)
            .map_err(TemplateError::Thread)?
            .join()
            .map_err(|_| TemplateError::Failed("minijinja panicked".to_owned()))
    })
}

/// Message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    let raised = Raised(message);
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(raised))
}

/// Finds the cause of a failed rendering: an exception may pass through calls and includes.
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

/// Text of a file, sanitised and shortened for display.
fn shown(text: &str) -> String {
    sanitize(text).chars().take(500).collect()
}
