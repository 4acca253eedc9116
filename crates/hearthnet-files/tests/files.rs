//! Tests of model files. One binary; a file of this
//! folder is a module. To run one file:
//!
//! ```text
//! cargo test -p hearthnet-files --test files -- gguf::
//! ```
// Not named `main.rs`: proptest would then look for its seeds outside of this folder.

mod convert;
mod encoder_files;
mod gguf;
mod hugging_face;
mod model_refusals;
mod part;
mod real_model_file;
mod recurrent_files;
mod routed_files;
mod split;
mod weights_identity;
