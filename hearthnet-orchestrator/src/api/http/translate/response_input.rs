//! Items of a request of OpenAI's Responses API, as messages. Pure.

use hearthnet_tokens::tools::ToolCall;
use serde_json::{Value, json};

use super::common::add_text;
use super::response_tools::take_name;
use crate::api::fields::{Fields, Refused, unsupported, wrong};

/// Items of earlier turns without text for the prompt: reasoning, and searches by the servers of
/// another model, whose results are in its answer.
const NO_TEXT: &[&str] = &["reasoning", "web_search_call"];

/// Reads `input` behind the messages of earlier responses. Returns the tools that it adds, each with
/// its path.
pub(super) fn input(
    fields: &mut Fields,
    messages: &mut Vec<Value>,
) -> Result<Vec<(String, Value)>, Refused> {
    let mut added = Vec::new();
    let items = match fields.take("input") {
        Some(Value::String(text)) => {
            add_text(messages, "user", &text);
            return Ok(added);
        }
        Some(Value::Array(items)) if !items.is_empty() => items,
        _ => {
            return Err(wrong(
                "input",
                "a text, or a list of items that is not empty",
            ));
        }
    };
    for (index, value) in items.into_iter().enumerate() {
        item(&format!("input[{index}]"), value, messages, &mut added)?;
    }
    Ok(added)
}

fn item(
    at: &str,
    value: Value,
    messages: &mut Vec<Value>,
    added: &mut Vec<(String, Value)>,
) -> Result<(), Refused> {
    let mut item = Fields::object(at, value)?;
    let kind = item.text("type")?;
    match kind.as_deref() {
        None | Some("message") => {
            let role = item.needed("role")?;
            let at = item.path("content");
            let content = text(&at, item.take("content").unwrap_or_default())?;
            let is_lead = messages.last().is_none_or(|last| last["role"] == "system");
            match role.as_str() {
                "system" | "developer" if is_lead => add_text(messages, "system", &content),
                // Few chat templates take a system message behind others.
                "system" | "developer" | "user" => add_text(messages, "user", &content),
                _ => messages.push(json!({"role": role, "content": content})),
            }
        }
        Some(kind @ ("function_call" | "custom_tool_call")) => {
            let name = take_name(&mut item)?;
            let arguments = match kind {
                "function_call" => item.needed("arguments")?,
                // A call of another model, in the form of its tool: any text.
                _ => json!({"input": item.needed("input")?}).to_string(),
            };
            let call = json!(ToolCall {
                id: item.needed("call_id")?,
                name,
                arguments,
            });
            // Calls of one turn are one message, with the text before them.
            match messages.last_mut() {
                Some(last) if last["role"] == "assistant" => match &mut last["tool_calls"] {
                    Value::Array(calls) => calls.push(call),
                    none => *none = json!([call]),
                },
                _ => messages.push(json!({
                    "role": "assistant", "content": "", "tool_calls": [call],
                })),
            }
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let at = item.path("output");
            let content = text(&at, item.take("output").unwrap_or_default())?;
            let id = item.needed("call_id")?;
            // The call has the same names.
            for name in ["name", "namespace"] {
                item.take(name);
            }
            messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        }
        Some("additional_tools") => {
            item.text("role")?;
            for (index, tool) in item.list("tools")?.into_iter().enumerate() {
                added.push((item.path(&format!("tools[{index}]")), tool));
            }
        }
        Some(kind) if NO_TEXT.contains(&kind) => return Ok(()),
        Some(_) => {
            let problem = "this server reads messages, and calls of functions and their results";
            return Err(unsupported(&item.path("type"), problem));
        }
    }
    item.nothing_left(&["id", "status", "phase"])
}

/// Text given as one text or in parts.
fn text(at: &str, value: Value) -> Result<String, Refused> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(wrong(at, "a text, or a list of text parts")),
    };
    let mut whole = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::object(&format!("{at}[{index}]"), part)?;
        match part.needed("type")?.as_str() {
            "input_text" | "output_text" | "text" => {}
            _ => {
                return Err(unsupported(
                    &part.path("type"),
                    "this server reads text only",
                ));
            }
        }
        whole.push_str(&part.needed("text")?);
        part.nothing_left(&["annotations", "logprobs"])?;
    }
    Ok(whole)
}
