//! Messages of a request of `/v1/chat/completions`. Pure.

use hearthnet_tokens::tools::ToolCall;
use hearthnet_tokens::{ChatMessage, Role};
use serde_json::{Value, json};

use super::fields::{NO_EFFECT, Rules};
use crate::api::fields::{Fields, Refused, unsupported, wrong};

/// Fields of a message that do not change the answer.
const IGNORED: &[&str] = &["name", "refusal", "annotations", "id", "status"];

/// Members of a call and of its function. Others do not change the answer.
const IN_CALLS: &[&str] = &["id", "type", "function"];
const IN_FUNCTIONS: &[&str] = &["name", "arguments"];

/// Members of a part of a message's content. Others do not change the answer.
const IN_PARTS: &[&str] = &["type", "text"];

/// The message at the path `at`.
pub(super) fn message(at: &str, value: Value, rules: Rules) -> Result<ChatMessage, Refused> {
    let mut fields = Fields::object(at, value)?;
    let role = match fields.take("role").as_ref().and_then(Value::as_str) {
        // OpenAI's newer models call the system role `developer`.
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        Some("function") => {
            let problem = "`function` is not supported here: use `tool`";
            return Err(unsupported(&fields.path("role"), problem));
        }
        _ => {
            let must = "system, developer, user, assistant or tool";
            return Err(wrong(&fields.path("role"), must));
        }
    };
    let mut message = ChatMessage::new(role, "");
    if role == Role::Assistant {
        let calls = fields.take("tool_calls").unwrap_or_else(|| json!([]));
        message.tool_calls = tool_calls(&fields.path("tool_calls"), calls, rules)?;
        // The newer name is that of OpenRouter and vLLM.
        for name in ["reasoning_content", "reasoning"] {
            if let Some(thought) = fields.text(name)? {
                message.reasoning_content = Some(thought);
            }
        }
    }
    if role == Role::Tool {
        let must = "the id of the call with this result";
        message.tool_call_id = Some(fields.need("tool_call_id", must, |_| true)?);
    }
    message.content = match fields.take("content") {
        // Such as a message that has calls only.
        None if role == Role::Assistant => String::new(),
        given => content(&fields.path("content"), given.unwrap_or_default(), rules)?,
    };
    if !rules.strict {
        // An empty list, for example of tool calls, has no effect.
        fields.remove_all(&json!([]));
    }
    fields.nothing_left(rules.ignored(IGNORED))?;
    Ok(message)
}

/// With strict rules, refuses members of an object that have no effect.
fn only(names: &[&str], at: &str, object: &Value, rules: Rules) -> Result<(), Refused> {
    match rules.strict && object.is_object() {
        true => Fields::object(at, object.clone())?.nothing_but(names, NO_EFFECT),
        false => Ok(()),
    }
}

/// Calls of an earlier message.
fn tool_calls(at: &str, value: Value, rules: Rules) -> Result<Vec<ToolCall>, Refused> {
    let Value::Array(given) = value else {
        return Err(wrong(at, "a list of calls"));
    };
    let calls = given.into_iter().enumerate().map(|(index, mut call)| {
        let at = format!("{at}[{index}]");
        only(IN_CALLS, &at, &call, rules)?;
        only(IN_FUNCTIONS, &format!("{at}.function"), &call["function"], rules)?;
        // Some clients send the arguments as an object.
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && !arguments.is_string()
        {
            *arguments = arguments.to_string().into();
        }
        let read = serde_json::from_value(call);
        let must = "{\"id\": ..., \"type\": \"function\", \"function\": {\"name\": ..., \"arguments\": ...}}";
        read.map_err(|_| wrong(&at, must))
    });
    calls.collect()
}

/// Text of a message, given as one text or in parts.
fn content(at: &str, value: Value, rules: Rules) -> Result<String, Refused> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(wrong(at, "a text, or a list of text parts")),
    };
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(part)) => text.push_str(part),
            (Some("text") | None, _) => {
                return Err(wrong(&at, "{\"type\": \"text\", \"text\": ...}"));
            }
            (Some(_), _) => {
                let at = format!("{at}.type");
                return Err(unsupported(&at, "this server reads text only"));
            }
        }
        only(IN_PARTS, &at, part, rules)?;
    }
    Ok(text)
}
