//! Text and tokens: what turns messages into token ids, and logits into text.
//!
//! Only callers link this crate. A host computes rows and never sees text.
//!
//! | concept | where |
//! |---|---|
//! | text to tokens and back | [`tokenizer`], [`detokenize`] |
//! | messages to a prompt | [`template`] |
//! | grammars, and the tokens that they allow | [`grammar`] |
//! | tokenizer and template of a file, checked against its weights | [`text`] |
//! | tools, reasoning, and the parts of a turn | [`tools`] |
//! | sampling, and when to stop | [`sampler`], [`stop`] |
//! | description of a model file for users | [`inspect`] |

pub mod detokenize;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod grammar;
pub mod inspect;
pub mod sampler;
pub mod stop;
pub mod template;
pub mod text;
pub mod tokenizer;
pub mod tools;

pub use detokenize::Detokenizer;
pub use grammar::Grammar;
pub use sampler::{Sampled, Sampler};
pub use stop::StopMatcher;
pub use template::{ChatMessage, ChatTemplate, Role};
pub use tokenizer::{Special, Tokenizer};
