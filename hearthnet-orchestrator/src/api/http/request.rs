//! Parsing of OpenAI API requests, field by field. Pure.
//!
//! An unsupported field that would change the answer is refused by name, and so is an unknown one:
//! a typo must not be ignored. Fields that do not change the answer are ignored, unless the server is
//! strict. `null` is the same as a missing field.

use std::collections::BTreeMap;

use hearthnet_files::sampling::{MAX_BIASES, MAX_LOGPROBS, SamplerConfig, SamplingChoice};
use hearthnet_http::ApiError;
use serde::Deserialize;
use serde_json::{Map, Number, Value, json};

use super::fields::{NO_EFFECT, Rules};
use super::messages::message;
use crate::api::fields::{Fields, Refused, invalid, unsupported};
use crate::api::grammar::GrammarFields;
use crate::api::turn::TurnFields;
use crate::chat::{AnswerOptions, ChatRequest, MAX_CHOICES, Prompt, TurnOptions};
use crate::exact::Exact;

/// Maximum number of stop texts. OpenAI's API takes 4, and tasks of `lm_eval` have more.
const MAX_STOPS: usize = 16;

/// Maximum number of prompts of one request.
const MAX_PROMPTS: usize = 128;

/// Default `max_tokens` of `/v1/completions`, as in OpenAI's API.
const COMPLETION_TOKENS: u32 = 16;

/// Longest part of `user` that is used for fair queueing, in characters.
pub(super) const MAX_USER: usize = 64;

/// Fields that do not change the answer. A strict server refuses them.
const IGNORED: &[&str] = &[
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
];

/// Unsupported fields, accepted only with an empty value.
const REFUSED: &[&str] = &[
    "functions",
    "function_call",
    "audio",
    "verbosity",
    "web_search_options",
    "suffix",
];

/// Parsed request.
#[derive(Debug, Clone)]
pub(super) struct ApiRequest {
    pub(super) model: String,
    /// Request to the service, with the sampling parameters that do not depend on the model.
    pub(super) chat: ChatRequest,
    /// Prompts behind that of `chat`.
    pub(super) more_prompts: Vec<Prompt>,
    /// True if the answers begin with their prompts.
    pub(super) echo: bool,
    /// Other sampling parameters that the caller set.
    pub(super) chosen: SamplingChoice,
    /// True if the answer is to be streamed.
    pub(super) stream: bool,
    /// True if a stream ends with token counts.
    pub(super) include_usage: bool,
    /// User named by the client, for fair queueing only.
    pub(super) user: Option<String>,
    /// Field with the grammar of the answer.
    pub(super) grammar_field: Option<&'static str>,
}

/// Parses a request of `/v1/chat/completions`.
pub(super) fn chat(body: &[u8], rules: Rules) -> Result<ApiRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.model()?;
    let messages: Option<Vec<Value>> = fields.read(
        "messages",
        "a list that is not empty",
        |all: &Vec<Value>| !all.is_empty(),
    )?;
    let messages = messages
        .ok_or_else(|| invalid("messages", "`messages` is missing: the conversation so far"))?
        .into_iter()
        .enumerate()
        .map(|(index, value)| message(&format!("messages[{index}]"), value, rules))
        .collect::<Result<_, Refused>>()?;
    let max_completion = fields.tokens("max_completion_tokens")?;
    let max_tokens = fields.tokens("max_tokens")?;
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, MAX_LOGPROBS.into())?;
    if top.is_some() && !wanted {
        let problem = "`top_logprobs` needs `logprobs` to be true";
        return Err(invalid("top_logprobs", problem).into());
    }
    let logprobs = wanted.then(|| top.unwrap_or(0) as u8);
    fields.exactly(
        "modalities",
        |value| *value == json!(["text"]),
        "this server speaks text only",
    )?;
    let truncation = fields.read("truncation", "one of auto, disabled", |name: &String| {
        ["auto", "disabled"].contains(&name.as_str())
    })?;
    let turn = TurnFields::take(&mut fields).read()?;
    let prompt = Prompt::Messages(messages);
    // Without a limit, the answer may fill the model's context.
    let most = max_completion.or(max_tokens).flatten();
    let mut request = fields.finish(model, prompt, most, logprobs, rules, turn)?;
    request.chat.options.drop_oldest = truncation.is_some_and(|name| name == "auto");
    Ok(request)
}

/// Parses a request of `/v1/completions`.
pub(super) fn completion(body: &[u8], rules: Rules) -> Result<ApiRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.model()?;
    let must = format!(
        "a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} texts or of such lists"
    );
    let prompt = fields
        .read("prompt", &must, GivenPrompt::fits)?
        .ok_or_else(|| invalid("prompt", "`prompt` is missing: the text to continue"))?;
    let mut prompts = prompt.into_prompts().into_iter();
    // `fits` has checked that there is one.
    let first = prompts.next().unwrap_or_else(|| Prompt::Tokens(Vec::new()));
    let most = fields
        .tokens("max_tokens")?
        .unwrap_or(Some(COMPLETION_TOKENS));
    // OpenAI's limit is 5; this limit is the sampler's.
    let logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS.into())?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    let best_of = fields.take("best_of");
    let mut request = fields.finish(
        model,
        first,
        most,
        logprobs.map(|n| n as u8),
        rules,
        TurnOptions::default(),
    )?;
    let options = &mut request.chat.options;
    if best_of.is_some_and(|best_of| best_of != options.choices) {
        let problem = "`best_of` other than `n` is not supported: ask for all answers with `n`";
        return Err(unsupported("best_of", problem).into());
    }
    options.prompt_logprobs = echo && logprobs.is_some();
    request.more_prompts = prompts.collect();
    request.echo = echo;
    Ok(request)
}

/// Prompt of a completion, or input to embed: a text, tokens, or a list of either.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum GivenPrompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

impl GivenPrompt {
    fn fits(&self) -> bool {
        let has_empty = match self {
            Self::Text(_) | Self::Texts(_) => false,
            Self::Tokens(ids) => ids.is_empty(),
            Self::Lists(lists) => lists.iter().any(Vec::is_empty),
        };
        !has_empty && (1..=MAX_PROMPTS).contains(&self.count())
    }

    pub(super) fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::Lists(lists) => lists.len(),
        }
    }

    /// Whether the field is a list of prompts, also of a single one.
    pub(super) fn is_list(&self) -> bool {
        matches!(self, Self::Texts(_) | Self::Lists(_))
    }

    pub(super) fn into_prompts(self) -> Vec<Prompt> {
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Tokens(ids) => vec![Prompt::Tokens(ids)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::Lists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

/// A text, or a list of texts.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl Fields {
    pub(super) fn model(&mut self) -> Result<String, Refused> {
        let model = self.take("model");
        let model = model.and_then(|model| serde_json::from_value(model).ok());
        let must = "`model` must name a model; GET /v1/models lists them";
        model.ok_or_else(|| invalid("model", must))
    }

    /// Limit of tokens; the inner `None` is -1, for what the context holds.
    fn tokens(&mut self, name: &str) -> Result<Option<Option<u32>>, Refused> {
        let must = "a whole number from 0, or -1 for no limit but the context";
        let fits = |n: &Number| n.is_u64() || n.as_i64() == Some(-1);
        let most = self.read(name, must, fits)?;
        // A number above the context has the same effect as the context.
        let limit = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(most.map(|n: Number| n.as_u64().map(limit)))
    }

    /// Biases of tokens by id, in the order of ids.
    fn logit_bias(&mut self) -> Result<Vec<(u32, f32)>, Refused> {
        let must = format!(
            "an object of at most {MAX_BIASES} token ids, each with a number from -100 to 100"
        );
        let fits = |biases: &BTreeMap<String, f64>| {
            biases.len() <= MAX_BIASES
                && biases
                    .iter()
                    .all(|(id, bias)| id.parse::<u32>().is_ok() && bias.abs() <= 100.0)
        };
        let biases = self.read("logit_bias", &must, fits)?.unwrap_or_default();
        let parsed = biases
            .iter()
            .filter_map(|(id, bias)| Some((id.parse::<u32>().ok()?, *bias as f32)));
        // "7" and "07" are the same token.
        let parsed: BTreeMap<u32, f32> = parsed.collect();
        Ok(parsed.into_iter().collect())
    }

    fn number(&mut self, name: &str, min: f64, max: f64) -> Result<Option<f32>, Refused> {
        let must = format!("a number from {min} to {max}");
        let number = self.read(name, &must, |x: &f64| (min..=max).contains(x))?;
        Ok(number.map(|x| x as f32))
    }

    /// Number of most likely tokens to sample from. 0 means all, and so does vLLM's -1.
    fn top_k(&mut self) -> Result<Option<u32>, Refused> {
        let most = u32::MAX;
        let must = format!("a whole number from 1 to {most}, or 0 or -1 for all tokens");
        let top_k = self.read("top_k", &must, |k: &i64| (-1..=most.into()).contains(k))?;
        Ok(top_k.map(|k| u32::try_from(k).unwrap_or(0)))
    }

    /// Checks a field that has only one supported value.
    fn exactly(
        &mut self,
        name: &str,
        is: impl FnOnce(&Value) -> bool,
        message: &str,
    ) -> Result<(), Refused> {
        match self.take(name) {
            Some(value) if !is(&value) => Err(unsupported(name, message)),
            _ => Ok(()),
        }
    }

    /// Rule for the arithmetics.
    pub(super) fn exact(&mut self) -> Result<Option<Exact>, Refused> {
        let names = format!("one of {}", Exact::NAMES.join(", "));
        self.read("exact", &names, |_: &Exact| true)
    }

    fn stop(&mut self) -> Result<Vec<String>, Refused> {
        let must = format!("a text, or a list of at most {MAX_STOPS}, none empty");
        let fits = |stops: &OneOrMore| match stops {
            OneOrMore::One(stop) => !stop.is_empty(),
            OneOrMore::More(all) => all.len() <= MAX_STOPS && !all.iter().any(String::is_empty),
        };
        Ok(match self.read("stop", &must, fits)? {
            None => Vec::new(),
            Some(OneOrMore::One(stop)) => vec![stop],
            Some(OneOrMore::More(stops)) => stops,
        })
    }

    /// Refuses the remaining fields that are not in `ignored`.
    pub(super) fn all_read(self, ignored: &[&str]) -> Result<(), Refused> {
        self.nothing_but(ignored, "is not a field that this server reads here")
    }

    /// Parses the common fields and refuses unknown ones.
    fn finish(
        mut self,
        model: String,
        prompt: Prompt,
        max_tokens: Option<u32>,
        logprobs: Option<u8>,
        rules: Rules,
        turn: TurnOptions,
    ) -> Result<ApiRequest, Refused> {
        let choices = self.integer("n", 1, MAX_CHOICES.into())?;
        let choices = choices.map_or(1, |n| n as u32);
        let stream = self.bool("stream")?.unwrap_or(false);
        let include_usage = self.stream_options(stream, rules)?;
        let must = format!("a whole number from {} to {}", i64::MIN, u64::MAX);
        let own_seed = self.read("seed", &must, |seed: &Number| !seed.is_f64())?;
        // OpenAI's seeds are signed; only the bits matter.
        let own_seed = own_seed.and_then(|n| n.as_u64().or(n.as_i64().map(i64::cast_unsigned)));
        let user = self.text("user")?;
        let chosen = SamplingChoice {
            temperature: self.number("temperature", 0.0, 2.0)?,
            top_p: self.number("top_p", 0.0, 1.0)?,
            presence_penalty: self.number("presence_penalty", -2.0, 2.0)?,
            frequency_penalty: self.number("frequency_penalty", -2.0, 2.0)?,
            // Names as in vLLM and llama.cpp.
            top_k: self.top_k()?,
            min_p: self.number("min_p", 0.0, 1.0)?,
            repetition_penalty: self.number("repetition_penalty", 0.0625, 16.0)?,
        };
        let sampling = SamplerConfig {
            seed: Some(own_seed.unwrap_or(rules.seed)),
            logit_bias: self.logit_bias()?,
            logprobs,
            ..SamplerConfig::default()
        };
        let stop = self.stop()?;
        let exact = self.exact()?;
        let grammar = GrammarFields::take(&mut self).read()?;
        let (grammar_field, grammar) = grammar.map(|asked| (asked.field, asked.grammar)).unzip();
        // A schema that cannot be compiled is that of a tool, or of the field.
        let has_tools = !turn.tools.callable().is_empty();
        let grammar_field = grammar_field.or(has_tools.then_some("tools"));
        for name in REFUSED {
            let empty =
                |value: &Value| [json!([]), json!({}), json!(""), json!("none")].contains(value);
            self.exactly(name, empty, &format!("`{name}` is not supported here"))?;
        }
        self.all_read(rules.ignored(IGNORED))?;
        Ok(ApiRequest {
            model,
            chat: ChatRequest {
                prompt,
                sampling,
                max_tokens,
                stop,
                exact,
                grammar,
                turn,
                options: AnswerOptions {
                    choices,
                    ..AnswerOptions::default()
                },
            },
            more_prompts: Vec::new(),
            echo: false,
            chosen,
            stream,
            include_usage,
            user: user.map(|user| user.chars().take(MAX_USER).collect()),
            grammar_field,
        })
    }

    fn stream_options(&mut self, stream: bool, rules: Rules) -> Result<bool, Refused> {
        let name = "stream_options";
        let Some(options) = self.read(name, "an object", |_: &Map<String, Value>| true)? else {
            return Ok(false);
        };
        if !stream {
            return Err(invalid(name, "`stream_options` needs `stream` to be true"));
        }
        let mut options = Self::new(options);
        let usage = options.bool("include_usage")?.unwrap_or(false);
        // Padding against traffic analysis, which does not change the answer.
        let padding = "include_obfuscation";
        let padded = options.bool(padding)?.is_some();
        if padded && rules.strict {
            let at = format!("{name}.{padding}");
            return Err(unsupported(&at, format!("`{at}` {NO_EFFECT}")));
        }
        match options.is_empty() {
            true => Ok(usage),
            false => Err(invalid(name, "`stream_options` knows `include_usage` only")),
        }
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
