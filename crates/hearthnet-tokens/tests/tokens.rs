//! Tests of text and tokens that do not measure memory (those are in `memory`). One binary; a file of this
//! folder is a module. To run one file:
//!
//! ```text
//! cargo test -p hearthnet-tokens --test tokens -- templates::
//! ```
// Not named `main.rs`: proptest would then look for its seeds outside of this folder.

mod call_forms;
mod chat_template;
mod grammars;
mod inspect;
mod model_text;
mod templates;
mod text_fuzz;
mod tokenizer_parity;
mod turns;
mod vocabularies;
