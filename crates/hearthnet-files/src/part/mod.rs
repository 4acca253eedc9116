//! A part of an adopted model on the disk, and the pieces in which nodes exchange weights.
//!
//! | file | contents |
//! |---|---|
//! | `table.rs` | numbers, places and hashes of pieces |
//! | `identity.rs` | hashes of a model's file that an adoption states |
//! | `objects.rs` | head, manifest, piece list and identity of a part on the disk |
//! | `opening.rs` | opening and making a part; making it again if it was damaged |
//! | `store.rs` | an open part: writing, reading, eviction |
//! | `whole.rs` | complete part of a file on this machine |
//! | `folder.rs` | space on the disk, last use, homes that use a part, removal |
//! | `set.rs` | set of held pieces, and its file |
//! | `error.rs` | errors |
//!
//! The rules are in `specs/weights-parts.md`. A part is a folder `parts/<weights id>`:
//!
//! | file | contents | written |
//! |---|---|---|
//! | `model.gguf` | the head, the pieces at their places, holes elsewhere | in place |
//! | `manifest` | encoded manifest | once |
//! | `pieces` | piece list | once |
//! | `identity` | [`Identity`] as JSON | once, after the three above |
//! | `held` | pieces that are verified and on the disk | replaced as a whole |
//! | `used` | empty; its time of change is that of the last use | with each use |
//! | `homes/` | a file per home that uses the part | with the home's first use |
//! | `.lock` | lock of the process that writes | |

mod error;
pub mod folder;
mod identity;
mod objects;
mod opening;
mod set;
mod store;
mod table;
mod whole;

pub use crate::model_file::{PART_FILE, part_folder};
pub use error::PartError;
pub use identity::{Identity, identity_of, objects_of};
pub use objects::{stored_identity, stored_manifest};
pub use opening::open_model;
pub use store::Part;
pub use table::{Piece, PieceTable, piece_count, tensor_at};

/// Length of a piece. The last piece of a tensor may be shorter.
pub const PIECE_BYTES: u32 = 256 * 1024;

/// Most pieces of a model: weights of 1 TiB, with a piece list of 128 MiB.
pub const MAX_PIECES: u32 = 1 << 22;

/// Longest head. That of a model with 262,144 tokens takes some 10 MB.
pub const MAX_HEAD_BYTES: u64 = 64 << 20;
