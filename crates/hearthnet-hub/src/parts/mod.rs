//! Fetches the pieces of an adopted model from several sources at the same time.
//!
//! A piece is verified by its SHA-256 before it is stored, so a source need not be trusted. A source
//! that sends other bytes is dropped. Files are preferred to neighbours, and neighbours to the hub.
//!
//! | concept | file |
//! |---|---|
//! | what a source offers; errors of a source | `source.rs` |
//! | sources: byte ranges over HTTP, files and folders | `http.rs`, `file.rs` |
//! | sources: Hugging Face directories, over HTTP or in a folder | `directory.rs` |
//! | sources: files of a split model over HTTP | `split.rs` |
//! | source that an adoption states | `stated.rs` |
//! | head, manifest and piece list of a model that is new here | `contact.rs` |
//! | choice of the next pieces of each source; pure | `queue.rs` |
//! | a fetch: threads, retries, its end | `fetch.rs`, `peer.rs` |
//! | errors of a fetch; dropped sources | `error.rs` |

mod contact;
mod directory;
mod error;
mod fetch;
mod file;
mod http;
mod peer;
mod queue;
mod source;
mod split;
mod stated;

pub use contact::first_contact;
pub use directory::DirectorySource;
pub use error::{Dropped, FetchError, Why};
pub use fetch::{FetchOptions, Progress, Report, fetch};
pub use file::{FileSource, FolderSource, LocalSource};
pub use http::HubSource;
pub use source::{Object, PieceSource, Rank, SourceError};
pub use split::SplitSource;
pub use stated::stated_source;

#[cfg(test)]
mod queue_tests;
#[cfg(test)]
mod tests;
