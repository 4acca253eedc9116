//! Tools, calls and results as variables of a template, or as texts for a template that knows none.
//! Pure.

use minijinja::Value;
use minijinja::value::Serde;
use serde_json::{Map, Value as Json, json};
use std::fmt::Write as _;

use super::message::{Chat, ChatMessage, Role};
use crate::tools::{Tool, TurnFormat};

/// Keys and types of schemas. Templates look for them, so they are not shielded.
const WORDS: &[&str] = &[
    "type",
    "function",
    "name",
    "description",
    "parameters",
    "properties",
    "required",
    "items",
    "enum",
    "strict",
    "default",
    "anyOf",
    "oneOf",
    "allOf",
    "$defs",
    "$ref",
    "additionalProperties",
    "title",
    "format",
    "minimum",
    "maximum",
    "nullable",
    "object",
    "string",
    "number",
    "integer",
    "boolean",
    "array",
    "null",
];

/// A tool, with its untrusted texts transformed.
pub(super) fn tool(tool: &Tool, transform: &dyn Fn(&str) -> String) -> Value {
    let tool = serde_json::to_value(tool).unwrap_or_default();
    let text = |text: &str| match WORDS.contains(&text) {
        true => text.to_owned(),
        false => transform(text),
    };
    Value::from(Serde(transformed(&tool, &text)))
}

/// Every text of a value, keys as well, transformed.
fn transformed(value: &Json, transform: &dyn Fn(&str) -> String) -> Json {
    match value {
        Json::String(text) => transform(text).into(),
        Json::Array(items) => items
            .iter()
            .map(|item| transformed(item, transform))
            .collect(),
        Json::Object(members) => {
            let member =
                |(key, value): (&String, &Json)| (transform(key), transformed(value, transform));
            Json::Object(members.iter().map(member).collect())
        }
        other => other.clone(),
    }
}

/// A message, with its untrusted texts transformed. `objects`: the arguments of calls are objects
/// and not texts.
pub(super) fn message(
    message: &ChatMessage,
    chat: &Chat<'_>,
    objects: bool,
    transform: &dyn Fn(&str) -> String,
) -> Value {
    let mut fields = Map::new();
    fields.insert("role".into(), message.role.into_str().into());
    fields.insert("content".into(), transform(&message.content).into());
    if let Some(reasoning) = &message.reasoning_content {
        // transformers defines the reasoning under two names.
        for name in ["reasoning_content", "thinking"] {
            fields.insert(name.into(), transform(reasoning).into());
        }
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            let object = serde_json::from_str(&call.arguments)
                .ok()
                .filter(|_| objects);
            let arguments = match object {
                Some(object) => transformed(&object, transform),
                None => transform(&call.arguments).into(),
            };
            json!({
                "id": transform(&short_id(&call.id)), "type": "function",
                "function": {"name": transform(&call.name), "arguments": arguments},
            })
        });
        fields.insert("tool_calls".into(), calls.collect());
    }
    if let Some(id) = &message.tool_call_id {
        fields.insert("tool_call_id".into(), transform(&short_id(id)).into());
        // Some templates name the tool beside its result.
        let calls = chat.messages.iter().flat_map(|other| &other.tool_calls);
        if let Some(call) = calls.rev().find(|call| call.id == *id) {
            fields.insert("name".into(), transform(&call.name).into());
        }
    }
    Value::from(Serde(Json::Object(fields)))
}

/// Id of 9 letters and digits, which all templates accept; another id becomes one.
fn short_id(id: &str) -> String {
    if id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    // FNV-1a.
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    crate::tools::call_id(hash, 0)
}

/// Messages with texts instead of the tools, calls and results that the template does not write.
pub(super) fn described(chat: &Chat<'_>, format: &TurnFormat) -> Vec<ChatMessage> {
    let mut messages = match format.writes {
        true => chat.messages.to_vec(),
        false => without_calls(chat.messages, format),
    };
    if format.describes || chat.tools.is_empty() {
        return messages;
    }
    let mut text = String::from("You may call these functions:\n<tools>\n");
    for tool in chat.tools {
        let _ = writeln!(text, "{}", serde_json::to_value(tool).unwrap_or_default());
    }
    let call = format.written("<function-name>", "<arguments-object>");
    let _ = write!(text, "</tools>\nTo call a function, write:\n{call}");
    match messages.first_mut() {
        Some(first) if first.role == Role::System => {
            let _ = write!(first.content, "\n\n{text}");
        }
        _ => messages.insert(0, ChatMessage::system(text)),
    }
    messages
}

fn without_calls(given: &[ChatMessage], format: &TurnFormat) -> Vec<ChatMessage> {
    let mut messages: Vec<ChatMessage> = Vec::new();
    for message in given {
        let mut text = message.content.clone();
        for call in &message.tool_calls {
            let break_line = if text.is_empty() { "" } else { "\n" };
            text += break_line;
            text += &format.written(&call.name, &call.arguments);
        }
        if message.role != Role::Tool {
            messages.push(ChatMessage {
                reasoning_content: message.reasoning_content.clone(),
                ..ChatMessage::new(message.role, text)
            });
            continue;
        }
        let result = format!("<tool_response>\n{text}\n</tool_response>");
        // Results of one turn are one message: some templates refuse two of one role.
        match messages.last_mut() {
            Some(last) if last.role == Role::User && last.content.ends_with("</tool_response>") => {
                let _ = write!(last.content, "\n{result}");
            }
            _ => messages.push(ChatMessage::user(result)),
        }
    }
    messages
}

/// Messages with the instructions at the beginning of the first question.
pub(super) fn without_system(mut messages: Vec<ChatMessage>) -> Vec<ChatMessage> {
    let Some(Role::System) = messages.first().map(|first| first.role) else {
        return messages;
    };
    let system = messages.remove(0);
    match messages.first_mut() {
        Some(first) if first.role == Role::User => {
            first.content = format!("{}\n\n{}", system.content, first.content);
        }
        _ => messages.insert(0, ChatMessage::user(system.content)),
    }
    messages
}
