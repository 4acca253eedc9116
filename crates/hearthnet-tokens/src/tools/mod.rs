//! Tools that a model may call, and the parts of its turn: reasoning, text, calls.
//!
//! ```text
//! <think> reasoning </think> text <tool_call> {"name": "f", "arguments": {...}} </tool_call>
//! ```
//!
//! | concept | where |
//! |---|---|
//! | tools, calls, limits | `tool.rs` |
//! | how each family marks reasoning and calls | [`TurnFormat`], a table |
//! | arguments in a family's own form | `arguments/` (pure) |
//! | grammar of a turn: free text, and calls by their schemas | `turn_grammar.rs` (pure) |
//! | a turn's text, separated into its parts | [`TurnReader`], `held.rs` (pure) |
//!
//! The grammar and the reader follow the same table, so each text of the grammar can be read.

mod arguments;
mod format;
mod held;
mod lark;
mod reader;
mod tool;
mod turn_grammar;

pub(crate) use format::MARKS;
pub use format::TurnFormat;
pub use reader::{CallPiece, TurnPiece, TurnReader};
pub use tool::{
    MAX_TOOL_BYTES, MAX_TOOL_NAME, MAX_TOOLS, Tool, ToolCall, ToolChoice, Tools, call_id,
};
pub use turn_grammar::{Thought, turn_grammar};
