//! Tests of the engine. One binary; a file of this
//! folder is a module. To run one file:
//!
//! ```text
//! cargo test -p hearthnet-engine --test engine -- families::
//! ```
// Not named `main.rs`: proptest would then look for its seeds outside of this folder.

mod engine_common;

mod engine_exact;
mod engine_recurrent;
mod engine_small;
mod engine_splits;
mod engine_types;
mod families;
mod hugging_face_engine;
mod parity_layers;
mod parity_text;
