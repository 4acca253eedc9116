//! Tests of models that do not measure memory (those are in `memory`). One binary; a file of this
//! folder is a module. To run one file:
//!
//! ```text
//! cargo test -p hearthnet-model --test model -- families::
//! ```
// Not named `main.rs`: proptest would then look for its seeds outside of this folder.

mod engine_common;

mod chat_template;
mod convert;
mod engine_exact;
mod engine_small;
mod engine_splits;
mod engine_types;
mod families;
mod gguf;
mod hugging_face;
mod hugging_face_engine;
mod inspect;
mod model_refusals;
mod model_text;
mod parity_layers;
mod parity_text;
mod pull;
mod real_model_file;
mod templates;
mod text_fuzz;
mod tokenizer_parity;
mod vocabularies;
mod weights_identity;
