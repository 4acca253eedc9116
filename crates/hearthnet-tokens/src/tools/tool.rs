//! Tools of a request, and calls.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::grammar::close;

/// Maximum number of tools of a request, as in OpenAI's API.
pub const MAX_TOOLS: usize = 128;
/// Maximum length of a tool's name, in bytes, as in Anthropic's API. OpenAI's has half of it, but a
/// namespace beside the name.
pub const MAX_TOOL_NAME: usize = 128;
/// Maximum length of the tools of a request, in bytes of JSON without white space.
pub const MAX_TOOL_BYTES: usize = crate::grammar::MAX_GRAMMAR_BYTES;

/// Function that the caller runs for the model.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(into = "WireTool", from = "WireTool")]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct Tool {
    /// ASCII letters, digits, `_` and `-`.
    pub name: String,
    pub description: Option<String>,
    /// JSON schema of the arguments, which are an object. `None` for a tool without arguments.
    pub parameters: Option<Map<String, Value>>,
    /// True if a keyword that is not enforced is refused. Otherwise it is ignored.
    pub strict: bool,
}

/// Omits the description, so that it cannot enter a log.
impl fmt::Debug for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tool").finish_non_exhaustive()
    }
}

impl Tool {
    /// Whether a text can be the name of a tool.
    pub fn is_name(name: &str) -> bool {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        (1..=MAX_TOOL_NAME).contains(&name.len()) && name.chars().all(fits)
    }

    /// Schema of the arguments.
    pub(crate) fn schema(&self) -> Value {
        match &self.parameters {
            Some(parameters) => {
                let mut schema = parameters.clone();
                schema.insert("type".into(), "object".into());
                let mut schema = Value::Object(schema);
                close(&mut schema);
                schema
            }
            None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        }
    }
}

/// A tool in OpenAI's form.
#[derive(Serialize, Deserialize)]
struct WireTool {
    #[serde(rename = "type")]
    kind: Function,
    function: WireFunction,
}

#[derive(Serialize, Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parameters: Option<Map<String, Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

/// The only kind of tool and call.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Function {
    #[default]
    Function,
}

impl From<Tool> for WireTool {
    fn from(tool: Tool) -> Self {
        Self {
            kind: Function::Function,
            function: WireFunction {
                name: tool.name,
                description: tool.description,
                parameters: tool.parameters,
                strict: tool.strict.then_some(true),
            },
        }
    }
}

impl From<WireTool> for Tool {
    fn from(WireTool { function, .. }: WireTool) -> Self {
        Self {
            name: function.name,
            description: function.description,
            parameters: function.parameters,
            strict: function.strict.unwrap_or(false),
        }
    }
}

/// Freedom of the model to call tools (`tool_choice`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_enums)]
pub enum ToolChoice {
    /// `none`: the model answers with text only.
    None,
    /// `auto`: the model decides.
    #[default]
    Auto,
    /// `required`: the model calls at least one tool.
    Required,
    /// The model calls the tool of this name.
    Named(String),
}

/// Tools of a request.
#[derive(Debug, Clone, PartialEq, Default)]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct Tools {
    pub list: Vec<Tool>,
    pub choice: ToolChoice,
    /// True if a turn has at most one call.
    pub one_call: bool,
}

impl Tools {
    /// Tools that the turn may call.
    pub fn callable(&self) -> &[Tool] {
        match &self.choice {
            ToolChoice::None => &[],
            ToolChoice::Auto | ToolChoice::Required => &self.list,
            ToolChoice::Named(name) => {
                let named = self.list.iter().position(|tool| tool.name == *name);
                let named = named.and_then(|at| self.list.get(at..=at));
                named.unwrap_or_default()
            }
        }
    }

    /// True if a turn without a call is no answer.
    pub fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// Call of a tool by the model.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "WireCall", from = "WireCall")]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct ToolCall {
    /// Names the call in the message with its result.
    pub id: String,
    pub name: String,
    /// Text of a JSON object.
    pub arguments: String,
}

/// Omits the arguments, so that they cannot enter a log.
impl fmt::Debug for ToolCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolCall").finish_non_exhaustive()
    }
}

/// A call in OpenAI's form.
#[derive(Serialize, Deserialize)]
struct WireCall {
    #[serde(default)]
    id: String,
    #[serde(default, rename = "type")]
    kind: Function,
    function: WireCalled,
}

#[derive(Serialize, Deserialize)]
struct WireCalled {
    name: String,
    #[serde(default)]
    arguments: String,
}

impl From<ToolCall> for WireCall {
    fn from(call: ToolCall) -> Self {
        Self {
            id: call.id,
            kind: Function::Function,
            function: WireCalled {
                name: call.name,
                arguments: call.arguments,
            },
        }
    }
}

impl From<WireCall> for ToolCall {
    fn from(WireCall { id, function, .. }: WireCall) -> Self {
        Self {
            id,
            name: function.name,
            arguments: function.arguments,
        }
    }
}

/// Id of a turn's call: 9 letters and digits, the only form that all templates accept. `turn`
/// identifies the turn; equal turns have equal ids.
pub fn call_id(turn: u64, index: usize) -> String {
    // The finaliser of SplitMix64, which mixes all bits.
    let mut n = turn ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^= n >> 31;
    let digit = |place: u32| char::from_digit((n / 36_u64.pow(place) % 36) as u32, 36);
    (0..9).filter_map(digit).collect()
}
