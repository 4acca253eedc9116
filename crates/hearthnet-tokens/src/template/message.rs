//! Messages of a chat, and what a template renders beside them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tools::{Tool, ToolCall};

/// Author of a message, under the name that templates compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", const_into_str)]
#[non_exhaustive]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    User,
    Assistant,
    /// Result of a tool.
    Tool,
}

/// Message of a conversation.
///
/// Roles are a closed set because templates build control tokens from them (`<|{{ role }}|>`).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    pub role: Role,
    /// Never trusted, whatever the role.
    pub content: String,
    /// Reasoning before the content, in a message of the assistant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls behind the content, in a message of the assistant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Call that has the content as its result, in a message of a tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// Omits the text, so that it cannot enter a log.
impl fmt::Debug for ChatMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ChatMessage({}, {} bytes)",
            self.role.into_str(),
            self.content.len()
        )
    }
}

impl ChatMessage {
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }

    /// Message with instructions for the whole conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }
}

/// Chat to render.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs)]
pub struct Chat<'a> {
    pub messages: &'a [ChatMessage],
    /// Tools that the model may call.
    pub tools: &'a [Tool],
    /// Other variables of the template, such as `enable_thinking`. Never texts of a user: they are
    /// not shielded.
    pub variables: &'a [(String, serde_json::Value)],
}

impl Chat<'_> {
    pub(super) fn has_calls(&self) -> bool {
        let calls = |message: &ChatMessage| !message.tool_calls.is_empty();
        self.messages.iter().any(calls)
    }

    /// Whether tools or their results occur.
    pub(super) fn has_tools(&self) -> bool {
        let results = |message: &ChatMessage| message.role == Role::Tool;
        !self.tools.is_empty() || self.has_calls() || self.messages.iter().any(results)
    }

    /// All untrusted texts.
    pub(super) fn texts(&self) -> Vec<String> {
        let mut texts = Vec::new();
        for message in self.messages {
            texts.push(message.content.clone());
            texts.extend(message.reasoning_content.clone());
            texts.extend(message.tool_call_id.clone());
            for call in &message.tool_calls {
                texts.extend([call.id.clone(), call.name.clone(), call.arguments.clone()]);
            }
        }
        let tools = self.tools.iter().map(serde_json::to_string);
        texts.extend(tools.filter_map(Result::ok));
        texts
    }
}
