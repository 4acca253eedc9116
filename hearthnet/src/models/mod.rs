//! Models on this machine.
//!
//! | concept | file |
//! |---|---|
//! | catalogue, and the folder of files | `catalogue.rs` |
//! | choice of the model, and search for its file | `find.rs` |
//! | opening the model of a command | `open.rs` |
//! | opening a file; errors of model files | `open_file.rs` |
//! | fetching | `pull.rs` |
//! | Hugging Face directories as model files | `import.rs` |
//! | fetched files and their states | `local_files.rs` |
//! | models that the community has adopted, and their parts | `adopted.rs` |
//! | where a model could run | `capacity.rs` |
//! | memory that a model needs; memory and disk that models may take | `memory.rs` |

pub(crate) mod adopted;
pub(crate) mod capacity;
pub(crate) mod catalogue;
pub(crate) mod find;
pub(crate) mod import;
pub(crate) mod local_files;
pub(crate) mod memory;
mod open;
pub(crate) mod open_file;
pub(crate) mod pull;

pub(crate) use self::capacity::{Availability, Capacity, other_text, text_disagreement};
pub(crate) use self::catalogue::models_dir;
pub(crate) use self::find::{here_with, pick, resolve};
pub(crate) use self::import::weight_type;
pub(crate) use self::memory::{
    disk_budget, disk_limit, given_bytes, share_of_free, weights_budget,
};
pub(crate) use self::open::{
    OpenModel, load_head, open_any_model, open_for_vectors, open_model, open_or_pull_model,
    open_part, open_resolved, refuse_encoder, text_model,
};
pub(crate) use self::open_file::load_failure;
pub(crate) use self::pull::pull_model;
