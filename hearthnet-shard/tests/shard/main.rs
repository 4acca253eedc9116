//! Hosts of the real model. `eviction.rs` has a binary of its own.

#[path = "../common/mod.rs"]
mod common;

mod changed_weights;
mod real_model;
