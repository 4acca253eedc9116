//! Catalogue, names and download of models.
//!
//! | concept | where |
//! |---|---|
//! | models that can be fetched, and their expected contents | [`catalogue`] |
//! | a model as a user names it | [`reference`](mod@reference) |
//! | download, resumed and checked | [`pull`] |
//! | pieces of an adopted model from several sources | [`parts`] |
//! | results of the first pull on this machine | [`pins`] |

pub mod catalogue;
pub mod parts;
pub mod pins;
pub mod pull;
pub mod reference;
mod source;

pub use reference::ModelRef;
